"""``iter_tensors``: one stored tensor after the other, without a plan or a module."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence

import torch
from typing_extensions import Unpack

from streamload.core.dtypes import BY_NAME, DType
from streamload.core.errors import CheckpointError, PlanError
from streamload.core.options import LoadOptions, Settings, settings_from
from streamload.core.wording import printable
from streamload.engine.lanes.choice import unusable
from streamload.engine.lanes.cpu import refuse_odd_bools
from streamload.planning.dtype_rules import DtypeError, target_dtype
from streamload.planning.explaining import scale_notices
from streamload.sources.base import Source
from streamload.sources.blocks import torch_dtype
from streamload.sources.detect import open_layers


def iter_tensors(
    path: str | os.PathLike[str],
    *,
    names: Sequence[str] | None = None,
    **options: Unpack[LoadOptions],
) -> Iterator[tuple[str, torch.Tensor]]:
    """One tensor after the other in the file's order, under stored names.

    Only the tensor at hand is in memory; each is the caller's own. Opened through
    ``safetensors.safe_open`` where the file is of that kind.

    Args:
        path: see ``load``.
        names: only these; each must be there.
        **options: ``dtype``, ``device`` (one for all) and ``prefix`` are used.

    Raises:
        PlanError: a name is not in the checkpoint, a dtype has no counterpart in torch, or the
            device is not there.
        CheckpointError, ReadError: as ``load``; the tensors given out before are whole.

    Warns:
        UserWarning: a weight is FP8 (or narrower) and has a scale, which is not applied.
    """
    settings = settings_from(options)
    if not isinstance(settings.device, str):
        raise TypeError("iter_tensors takes one device, not a dict")
    source = open_layers(path, None, settings.prefix, settings.reach)
    try:
        seen = _chosen(source, settings, names)
        dtypes = _dtypes(source, settings, seen)
        chosen = {stored: source.catalog[stored] for stored in seen.values()}
        for text in scale_notices(source.catalog, chosen):
            warnings.warn(f"{printable(source.path)}: {text}", stacklevel=2)
    except BaseException:
        source.close()
        raise
    return _iterate(source, seen, dtypes, settings.device)


def _chosen(source: Source, settings: Settings, names: Sequence[str] | None) -> dict[str, str]:
    """Seen name (prefix taken off) → stored name."""
    start = settings.prefix or ""
    start += "." if start and not start.endswith(".") else ""
    seen = {n[len(start) :]: n for n in source.catalog if n.startswith(start)}
    lost = [] if names is None else [name for name in names if name not in seen]
    why = unusable(str(settings.device))
    if lost or why:
        text = why or f"not in the checkpoint: {', '.join(map(repr, lost))}"
        raise PlanError(f"{printable(source.path)}: {text}")
    wanted = seen.keys() if names is None else set(names)
    return {name: stored for name, stored in seen.items() if name in wanted}


def _dtypes(source: Source, settings: Settings, seen: Mapping[str, str]) -> dict[str, DType]:
    """The dtype that each tensor is given out as, by the rule that holds for loads too."""
    made: dict[str, DType] = {}
    faults: list[str] = []
    for name, stored in seen.items():
        try:
            made[name] = target_dtype(
                name, (BY_NAME[source.catalog[stored].dtype],), None, settings.dtype
            )
        except DtypeError as error:
            faults.append(f"{stored!r}: {error}")
    if faults:
        raise PlanError(f"{printable(source.path)}: {'; '.join(faults)}")
    return made


def _iterate(
    source: Source, seen: Mapping[str, str], dtypes: Mapping[str, DType], device: str
) -> Iterator[tuple[str, torch.Tensor]]:
    with source:
        for name, stored in seen.items():
            yield name, _tensor(source, stored, dtypes[name], device)


def _tensor(source: Source, stored: str, dtype: DType, device: str) -> torch.Tensor:
    # Only while the tensor is made: a generator must not leave modes on between two steps.
    with torch.inference_mode(mode=False), torch.no_grad(), torch.device("cpu"):
        tensor = source.tensor(stored)
        if tensor.dtype == torch.bool:
            try:
                refuse_odd_bools(tensor)
            except CheckpointError as error:
                raise CheckpointError(
                    str(error), path=source.catalog[stored].file, tensor=stored
                ) from error
        return tensor.to(device=device, dtype=torch_dtype(dtype.name))
