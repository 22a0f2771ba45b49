"""accelerate: an empty transformers model, filled by load_checkpoint_and_dispatch."""

from typing import Any

LABEL = "accelerate"
DELIVERS = "module without head, stored layout"
PUBLISHED = True
IMPORTS = (
    "torch", "accelerate",
    "transformers.models.auto.modeling_auto", "transformers.models.gpt2.modeling_gpt2",
)  # fmt: skip


def load(job: Any) -> Any:
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch
    from transformers import AutoConfig, AutoModel

    auto: Any = AutoModel  # its calls have no types
    with init_empty_weights():
        model = auto.from_config(AutoConfig.from_pretrained(job.path))
    return load_checkpoint_and_dispatch(
        model, job.path, device_map={"": "cpu"}, dtype=job.torch_dtype()
    ).eval()
