"""safetensors' own call: maps the file, every tensor becomes a tensor of torch."""

from typing import Any

LABEL = "safetensors load_file"
DELIVERS = "tensors, stored layout"
IMPORTS = ("torch", "safetensors.torch")


def load(job: Any) -> Any:
    from safetensors.torch import load_file

    found = {}
    for file in job.files:
        found.update(load_file(file))
    for name in found:  # one by one, so that the old one can go
        found[name] = job.cast(found[name])
    return found
