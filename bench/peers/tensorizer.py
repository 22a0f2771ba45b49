"""tensorizer, from its own format."""

import os
from typing import Any

from bench.own_files import make_once

LABEL = "tensorizer"
DELIVERS = "tensors, stored layout (own format)"
IMPORTS = ("torch", "tensorizer")


def _path(job: Any) -> str:
    return os.path.join(job.own_dir, "model.tensors")


def prepare(job: Any) -> None:
    make_once(_path(job), job, _write)


def _write(tensors: dict[str, Any], path: str) -> None:
    from tensorizer import TensorSerializer

    serializer = TensorSerializer(path)
    serializer.write_state_dict(tensors)
    serializer.close()


def load(job: Any) -> Any:
    from tensorizer import TensorDeserializer

    names = set(job.entries)
    wanted = TensorDeserializer(
        _path(job), device="cpu", dtype=job.torch_dtype(), filter_func=names.__contains__
    )
    with wanted as found:
        return {name: found[name].data for name in names}
