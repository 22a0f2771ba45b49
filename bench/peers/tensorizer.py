"""tensorizer, from its own format."""

from __future__ import annotations

import os
from typing import Any

from bench.own_files import all_tensors

LABEL = "tensorizer"
DELIVERS = "tensors, stored layout (own format)"
IMPORTS = ("torch", "tensorizer")


def _path(job: Any) -> str:
    return os.path.join(job.own_dir, "model.tensors")


def prepare(job: Any) -> None:
    from tensorizer import TensorSerializer

    path = _path(job)
    if os.path.exists(path):
        return
    os.makedirs(job.own_dir, exist_ok=True)
    serializer = TensorSerializer(path + ".part")
    serializer.write_state_dict(all_tensors(job))
    serializer.close()
    os.replace(path + ".part", path)


def load(job: Any) -> Any:
    from tensorizer import TensorDeserializer

    names = set(job.entries)
    wanted = TensorDeserializer(
        _path(job), device="cpu", dtype=job.torch_dtype(), filter_func=names.__contains__
    )
    with wanted as found:
        return {name: found[name].data for name in names}
