"""transformers: the published model class, ready to run."""

from typing import Any

LABEL = "transformers"
DELIVERS = "module, stored layout"
IMPORTS = ("torch", "transformers")


def imports() -> None:
    import torch  # noqa: F401
    from transformers import AutoModelForCausalLM, GPT2LMHeadModel  # noqa: F401


def load(job: Any) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(job.path, dtype=job.torch_dtype() or "auto")
    return model.eval()
