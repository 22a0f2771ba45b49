"""transformers: the published model class, ready to run."""

from typing import Any

LABEL = "transformers"
DELIVERS = "module, stored layout"
PUBLISHED = True
IMPORTS = (
    "torch", "transformers.models.auto.modeling_auto", "transformers.models.gpt2.modeling_gpt2"
)  # fmt: skip


def load(job: Any) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(job.path, dtype=job.torch_dtype() or "auto")
    return model.eval()
