"""Merge a LoRA adapter into a checkpoint, in bounded memory and without PEFT.

    python examples/merge_adapter.py

Makes a small LLaMA and an adapter as PEFT writes them, converts the two into one bfloat16
checkpoint, and checks it by arithmetic of its own: W + scale x B A, in float32, rounded once.

The same on the command line: streamload convert BASE MERGED --adapter ADAPTER --dtype bfloat16
"""

import json
import os
import tempfile

import torch
from safetensors.torch import load_file, save_file

import streamload
from streamload.synthesis import synthesize

RANK, ALPHA = 8, 16
TARGETS = ("q_proj", "v_proj")


def write_adapter(folder: str, base: dict[str, torch.Tensor]) -> None:
    """What PEFT saves for a LoRA of some linear layers."""
    adapter = {}
    for name, weight in base.items():
        if name.split(".")[-2] in TARGETS:
            rows, columns = weight.shape
            start = f"base_model.model.{name.removesuffix('.weight')}"
            adapter[f"{start}.lora_A.weight"] = torch.randn(RANK, columns) / columns**0.5
            adapter[f"{start}.lora_B.weight"] = torch.randn(rows, RANK) / 10
    os.makedirs(folder)
    save_file(adapter, os.path.join(folder, "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(TARGETS)}
    with open(os.path.join(folder, "adapter_config.json"), "w") as file:
        json.dump(config, file)


def main(folder: str) -> None:
    base, adapter, merged = (os.path.join(folder, name) for name in ("base", "adapter", "merged"))
    synthesize("llama-tiny", base)
    stored = dict(streamload.iter_tensors(base))
    write_adapter(adapter, stored)

    report = streamload.convert(base, merged, adapter=adapter, dtype="bfloat16")
    print(report.summary())
    print(f"peak over the start: {report.memory.peak_rss_bytes / 2**20:.1f} MiB")

    added = load_file(os.path.join(adapter, "adapter_model.safetensors"))
    changed = 0
    for name, tensor in streamload.iter_tensors(merged):
        expected = stored[name].float()
        start = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{start}.lora_A.weight" in added:
            a, b = (added[f"{start}.lora_{part}.weight"] for part in "AB")
            expected = expected + ALPHA / RANK * (b @ a)
            changed += 1
        # Sums in another order may round the other way: one step of bfloat16 at most.
        torch.testing.assert_close(tensor, expected.bfloat16(), rtol=2**-7, atol=1e-6)
    print(f"{changed} of {len(stored)} tensors were merged, and all are what they must be")

    model = streamload.load(merged).model
    print(list(streamload.generate(model, [1, 2, 3], max_new_tokens=8)))


if __name__ == "__main__":
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
