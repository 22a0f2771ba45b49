"""Load a model of transformers in bfloat16, and show that it is what `from_pretrained` makes.

    python examples/transformers_bfloat16.py [PATH]

PATH is a folder with safetensors and a config.json; without it, a small GPT-2 of random weights is
made. Needs the extra "transformers".
"""

import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM

import streamload
from streamload.synthesis import synthesize


def main(path: str) -> None:
    # What would it take? Only headers are read, and a refusal would list everything that is wrong.
    plan = streamload.plan(_empty(path), path, dtype="bfloat16")
    print(f"needs {plan.memory.needed_bytes / 2**20:.1f} MiB, ok: {plan.ok}")

    loaded = streamload.load_transformers(path, cls=AutoModelForCausalLM, dtype="bfloat16")
    print(loaded.report.to_text())

    ids = torch.arange(1, 9).unsqueeze(0)
    with torch.inference_mode():
        print(
            loaded.model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[
                0
            ].tolist()
        )

    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).state_dict()
    ours = loaded.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    print(f"{len(ours)} tensors equal from_pretrained's, bit for bit")


def _empty(path: str) -> torch.nn.Module:
    """The class of the checkpoint, without memory."""
    from transformers import AutoConfig

    with streamload.empty_weights():
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            synthesize("gpt2-stub", folder)
            main(folder)
