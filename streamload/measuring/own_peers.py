"""Streamload's ways to load, and the machine's floor, as peers like others."""

from __future__ import annotations

from typing import Any

from streamload.core.errors import MemoryBudgetError
from streamload.measuring import floor
from streamload.measuring.peers import Job, Peer
from streamload.system.memory import available_memory


def import_for_loads() -> None:
    """Import torch and all that loads use, so that imports are not timed as loading."""
    import streamload.loading.calls
    import streamload.sources.neox.partitions
    import streamload.sources.torch.torch_files  # noqa: F401
    from streamload.mapping.tables.registry import known_model_types, model_class

    for model_type in known_model_types(with_model=True):
        model_class(model_type)


class _Mode(Peer):
    """One of streamload's modes, and the options that ask for it."""

    imported = ("torch", "streamload")

    def __init__(self, name: str, delivers: str, **options: str) -> None:
        super().__init__(f"streamload_{name}", f"streamload {name}", delivers)
        self._options = options

    def imports(self) -> None:
        import_for_loads()

    def unfit(self, job: Job) -> str | None:
        if self._options["mode"] != "map" or job.dtype is None:
            return None
        floats = {piece.dtype for piece in job.pieces if "float" in piece.dtype}
        if job.dtype in floats or not floats:
            return None
        return "every tensor is cast, so none can be mapped"

    def load(self, job: Job) -> Any:
        import streamload

        options: dict[str, Any] = {"workers": job.workers, "dtype": job.dtype, **self._options}
        if job.chunk_bytes is not None:
            options["chunk_bytes"] = job.chunk_bytes
        if job.tensors:
            return streamload.load_state_dict(job.path, mapping=lambda name: name, **options)
        return streamload.load(job.path, **options)

    def stored(self, result: Any, job: Job) -> dict[str, Any]:
        """The model's tensors under the file's names, as the report says where each one went."""
        tensors, report = dict(result.model.state_dict()), result.report.to_dict()
        shapes, found = {piece.name: piece.shape for piece in job.pieces}, {}
        for row in report["loaded"]:
            tensor = tensors[row["name"]]
            if "transpose" in str(row["transform"]):
                tensor = tensor.t()
            start = 0
            for source in row["sources"]:  # several were joined along their first dimension
                rows = shapes[source][0] if shapes[source] else 1
                found[source] = tensor[start : start + rows] if len(row["sources"]) > 1 else tensor
                start += rows
        for group in report["tied"]:
            # Of a tie that is in the file twice the report lists the name that was read; the
            # other one was compared with it, and is the same tensor of the model now.
            found.update({name: tensors[name] for name in group if name not in found})
        return found


class _FloorRead(Peer):
    """What the model needs of the files, read and dropped."""

    def get_ready(self, job: Job) -> None:
        super().get_ready(job)
        _ = job.pieces  # found before the clock starts

    def load(self, job: Job) -> dict[str, Any]:
        floor.read_only(job.pieces, workers=job.workers)
        return {}


class _FloorCast(_FloorRead):
    """The same reading, and every block cast into memory never used before."""

    def get_ready(self, job: Job) -> None:
        super().get_ready(job)
        needed, room = floor.bytes_as(job.pieces, job.torch_dtype()), available_memory()
        if needed > room.bytes:
            raise MemoryBudgetError(
                f"{needed} bytes are needed, {room.bytes} are available ({room.limit})",
                needed_bytes=needed,
                available_bytes=room.bytes,
                limit=room.limit,
            )

    def load(self, job: Job) -> dict[str, Any]:
        return floor.read_and_cast(job.pieces, job.torch_dtype(), workers=job.workers)


class _Copy(Peer):
    """No loader: how many bytes a second copying moves through memory."""

    def load(self, job: Job) -> float:
        return floor.copy_rate(workers=job.workers)


MODES: dict[str, Peer] = {
    "stream": _Mode("stream", "module, contiguous", mode="stream"),
    "stored": _Mode("stored", "module, stored layout", mode="stream", layout="stored"),
    "map": _Mode("map", "module, views of the file where it can", mode="map"),
}
FLOORS: dict[str, Peer] = {
    "read": _FloorRead("floor_read", "floor: read", "nothing"),
    "read + cast": _FloorCast("floor_cast", "floor: read + cast", "tensors, stored layout"),
}
COPY: Peer = _Copy("copy", "copy", "nothing")
PEERS = {peer.name: peer for peer in (*MODES.values(), *FLOORS.values(), COPY)}
