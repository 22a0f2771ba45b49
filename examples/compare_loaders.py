"""Seconds and peak memory of three ways to load the same model of transformers in bfloat16.

    python examples/compare_loaders.py [PATH]

PATH is the folder of a GPT-2; without it, one of 25 MB is made. On so small a model all you see is
what each way costs anyway: `streamload synth gpt2-xl DIR` makes one of 6 GB.

`python -m bench compare` does this with care for ten libraries and checks values: bench/README.md.
Needs the extra "transformers".
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import psutil

if len(sys.argv) > 2:  # a process that measures; the one that watches it needs none of these
    import torch
    from safetensors.torch import load_file
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM

    import streamload


def empty(path: str) -> "nn.Module":
    with streamload.empty_weights():
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))


def with_load_file(path: str) -> "nn.Module":
    """The usual recipe: the whole file, cast, then into a module built without memory."""
    model = empty(path)
    stored = load_file(os.path.join(path, "model.safetensors"))
    cast = {name: tensor.to(torch.bfloat16) for name, tensor in stored.items()}
    own = {name: cast.get(name.removeprefix("transformer.")) for name in model.state_dict()}
    model.load_state_dict(
        {n: t for n, t in own.items() if t is not None}, strict=False, assign=True
    )
    model.tie_weights()
    return model.eval()


def with_from_pretrained(path: str) -> "nn.Module":
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)


def with_streamload(path: str) -> "nn.Module":
    return streamload.load_transformers(path, cls=AutoModelForCausalLM, dtype="bfloat16").model


WAYS: dict[str, Callable[[str], "nn.Module"]] = {
    "load_file": with_load_file,
    "from_pretrained": with_from_pretrained,
    "streamload": with_streamload,
}


def load(way: str, path: str) -> None:
    """In a process of its own: load, use the model once, say when it begins and ends."""
    ids = torch.arange(1, 9).unsqueeze(0)
    empty(path)  # imports what all ways need
    print("ready", flush=True)
    begin = time.perf_counter()
    model = WAYS[way](path)
    loaded_s = time.perf_counter() - begin
    with torch.inference_mode():
        model(ids)  # who maps the file reads it here
    print(loaded_s, time.perf_counter() - begin, flush=True)
    sys.stdin.readline()


def measure(way: str, path: str) -> tuple[float, float, int]:
    """Seconds to load, seconds with the first pass, and the peak over the start in bytes."""
    command = [sys.executable, __file__, path, way]
    with subprocess.Popen(
        command, stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, text=True
    ) as child:
        watched = psutil.Process(child.pid)
        assert child.stdout.readline() == "ready\n", f"{way} failed"
        start = peak = watched.memory_info().rss
        os.set_blocking(child.stdout.fileno(), False)
        while not (line := child.stdout.readline()):
            peak = max(peak, watched.memory_info().rss)
            time.sleep(0.002)
        child.stdin.write("\n")
        load_s, used_s = map(float, line.split())
        return load_s, used_s, max(peak, watched.memory_info().rss) - start


def main(path: str) -> None:
    print(f"{'':16} {'load s':>8} {'+ first pass':>13} {'peak MiB':>9}")
    for way in WAYS:
        load_s, used_s, peak = measure(way, path)
        print(f"{way:16} {load_s:8.2f} {used_s:13.2f} {peak / 2**20:9.1f}")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        load(sys.argv[2], sys.argv[1])
    elif len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "streamload", "synth", "gpt2-stub", folder]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            main(folder)
