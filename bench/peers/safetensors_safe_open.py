"""safe_open, one tensor after the other, leaving out what the model does not need."""

from typing import Any

LABEL = "safe_open per tensor"
DELIVERS = "tensors, stored layout"
IMPORTS = ("torch", "safetensors")


def load(job: Any) -> Any:
    from safetensors import safe_open

    names = set(job.entries)
    found = {}
    for path in job.files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                if name in names:
                    found[name] = job.cast(file.get_tensor(name))
    return found
