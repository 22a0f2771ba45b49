"""What a hand-written GPT-2 loader does: safe_open, and a transposing copy for each matrix."""

from typing import Any

LABEL = "safe_open, copy_(t.t())"
DELIVERS = "tensors, transposed to contiguous"
IMPORTS = ("torch", "safetensors")
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def load(job: Any) -> Any:
    import torch
    from safetensors import safe_open

    names = set(job.entries)
    found = {}
    for path in job.files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                if name not in names:
                    continue
                tensor = file.get_tensor(name)
                shown = tensor.t() if name.endswith(CONV1D) else tensor
                target = torch.empty(shown.shape, dtype=job.torch_dtype() or tensor.dtype)
                found[name] = target.copy_(shown)
    return found


def stored(result: Any, job: Any) -> dict[str, Any]:
    return {n: result[n].t() if n.endswith(CONV1D) else result[n] for n in job.entries}
