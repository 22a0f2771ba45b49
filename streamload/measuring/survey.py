"""What a load of a checkpoint will read, found without reading it."""

from __future__ import annotations

from dataclasses import dataclass

from streamload.core.dtypes import BY_NAME
from streamload.core.errors import CheckpointError
from streamload.core.specs import TensorSpec
from streamload.loading.building import find_config
from streamload.loading.calls import plan_checkpoint
from streamload.measuring.floor import Piece
from streamload.sources.detect import open_checkpoint


@dataclass(frozen=True)
class Survey:
    """What is to be measured.

    Attributes:
        pieces: stored tensors that a load reads, in file order, as far as files hold them in
            one run of bytes.
        left_out: names of those that are not (legacy pickles, strided slices).
        why_no_model: None if the model can be built; else why tensors alone are loaded.
    """

    pieces: tuple[Piece, ...]
    left_out: tuple[str, ...]
    why_no_model: str | None

    @property
    def read_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(piece.file for piece in self.pieces))


def survey(path: str, *, dtype: str | None = None) -> Survey:
    """Plan the load of ``path``; where no model can be built, of all its tensors.

    Raises:
        CheckpointError, PlanError: as ``streamload.load``.
    """
    with open_checkpoint(path) as source:
        if source.is_remote:
            raise CheckpointError("bench measures checkpoints on this machine", path=source.path)
        source.config()  # raises for a damaged configuration
        why = None
        try:
            find_config(source)
        except CheckpointError as error:
            why = str(error)
        specs = list(source.catalog.values())
    if why is None:
        plan = plan_checkpoint(path, dtype=dtype, check_memory=False)
        plan.raise_if_refused()
        read = {name for tensor in plan.tensors for name in tensor.sources}
        specs = [spec for name, spec in plan.stored.items() if name in read]
    pieces = tuple(piece for spec in specs if (piece := _piece(spec)) is not None)
    kept = {piece.name for piece in pieces}
    left_out = tuple(spec.name for spec in specs if spec.name not in kept)
    return Survey(pieces, left_out, why)


def _piece(spec: TensorSpec) -> Piece | None:
    name = BY_NAME[spec.dtype].torch_name
    if spec.extent is None or name is None:
        return None
    extent = spec.extent
    return Piece(spec.name, extent.file, extent.offset, extent.nbytes, name, spec.shape)
