"""fastsafetensors without GPUDirect Storage."""

from typing import Any

LABEL = "fastsafetensors"
DELIVERS = "tensors, stored layout"
IMPORTS = ("torch", "fastsafetensors")


def load(job: Any) -> Any:
    from fastsafetensors import fastsafe_open

    with fastsafe_open(filenames=job.files, nogds=True, device="cpu", debug_log=False) as file:
        # The tensors lie in one buffer that goes with the file: each is copied or cast out.
        return {name: job.cast(file.get_tensor(name), copy=True) for name in job.entries}
