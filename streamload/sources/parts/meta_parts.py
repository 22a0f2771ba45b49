"""Meta's ``consolidated.00.pth``, ``consolidated.01.pth`` …: one model, cut for several devices.

Cut as their model parallelism does it (fairscale's layers in Meta's published LLaMA code): what
comes out of a layer is cut by rows (wq, wk, wv, w1, w3, output), what goes into one by columns (wo,
w2); norms are whole in every part. The embedding is cut by columns in LLaMA 1 and 2, by rows in
LLaMA 3, which its shape tells. With more parts than key and value heads, neighbours have the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from streamload.core.errors import naming, refuse
from streamload.core.pieces import Box
from streamload.core.specs import Shape
from streamload.core.wording import printable
from streamload.sources.block_source import read_each
from streamload.sources.config.beside import params_beside
from streamload.sources.parts.assembled import Assembled, AssembledSource, assemble
from streamload.sources.torch.stored_tensors import StoredTensor
from streamload.sources.torch.torch_files import TorchFile, read_torch_file

PART = re.compile(r"consolidated\.(?P<number>\d+)\.(pth|pt)")
_ROWS = ("wq", "wk", "wv", "w1", "w3", "output")
_COLUMNS = ("wo", "w2")
_WHOLE = ("attention_norm", "ffn_norm", "norm", "q_norm", "k_norm")
_KEYS_AND_VALUES = ("wk", "wv")
_EMBEDDING = "tok_embeddings"


def are_meta_parts(names: Sequence[str]) -> bool:
    """True for files that are by their names parts of one of Meta's models."""
    return len(names) > 1 and all(map(PART.fullmatch, names))


def open_meta_parts(paths: Sequence[str], *, given: str, folder: str) -> AssembledSource:
    """Open all parts as one checkpoint of Meta's names; only headers are read.

    Args:
        paths: the parts, in the order of their numbers.
        given: the path the user named, for messages.
        folder: where they and ``params.json`` lie.

    Raises:
        CheckpointError: a part is absent or damaged, lacks a tensor, or its shapes do not fit the
            others'; or a name that Meta's LLaMA does not have. All problems are listed.
    """
    with naming(folder), ExitStack() as opened:
        numbers = [int(match["number"]) for path in paths if (match := PART.search(path))]
        absent = sorted({*range(max(numbers) + 1)} - {*numbers})
        refuse(f"consolidated.{number:02d}.pth is absent" for number in absent)
        parts = read_each(paths, read_torch_file, opened, given=given)
        params = params_beside(given) or {}
        tensors = _merged(parts, params)
        notices = [notice for part in parts for notice in part.notices]
        files = [part.file for part in parts]
        notices.append(f"{len(parts)} parts of one model, put together as Meta cuts them")
        source = AssembledSource(given, files, tensors, tuple(notices))
        opened.pop_all()
    return source


def _merged(parts: Sequence[TorchFile], params: Mapping[str, Any]) -> dict[str, Assembled]:
    found: dict[str, Assembled] = {}
    problems: list[str] = []
    for name in dict.fromkeys(name for part in parts for name in part.tensors):
        holders = [part.tensors.get(name) for part in parts]
        try:
            found[name] = _whole(name, [p for p in holders if p is not None], parts, params)
        except ValueError as error:
            problems.append(f"tensor {name!r}: {error}")
    refuse(problems)
    return found


def _whole(
    name: str,
    stored: Sequence[StoredTensor],
    parts: Sequence[TorchFile],
    params: Mapping[str, Any],
) -> Assembled:
    """One tensor of its parts.

    Raises:
        ValueError: a part lacks it, or the shapes are those of no cut that is known.
    """
    if len(stored) < len(parts):
        holding = {piece.spec.file for piece in stored}
        lacking = [part.file.path for part in parts if part.file.path not in holding]
        raise ValueError(f"is not in {', '.join(map(printable, lacking[:4]))}")
    shapes = list(dict.fromkeys(piece.spec.shape for piece in stored))
    dtypes = list(dict.fromkeys(piece.spec.dtype for piece in stored))
    if len(shapes) > 1 or len(dtypes) > 1:
        said = " and ".join(str(list(shape)) for shape in shapes) if len(shapes) > 1 else ""
        raise ValueError(f"its parts differ: {said or ' and '.join(dtypes)}")
    shape, kind = shapes[0], _kind(name)
    if kind in _WHOLE or name.endswith("rope.freqs"):
        return assemble(name, dtypes[0], shape, {Box((0,) * len(shape), shape): stored})
    if len(shape) != 2:
        raise ValueError(f"has shape {list(shape)} in each part; how that was cut is not known")
    dim = _cut_along(kind, shape, len(parts), parts[0])
    if kind == "wo" and "head_dim" not in params and shape[1] * len(parts) != shape[0]:
        raise ValueError(
            f"{len(parts)} parts of shape {list(shape)} make no square: is a part missing?"
        )
    copies = _copies(kind, shape, len(parts), params)
    pieces = {}
    for at in range(0, len(stored), copies):
        offset = at // copies * shape[dim]
        offsets = (offset, 0) if dim == 0 else (0, offset)
        pieces[Box(offsets, shape)] = stored[at : at + copies]
    size = len(pieces) * shape[dim]
    whole = (size, shape[1]) if dim == 0 else (shape[0], size)
    return assemble(name, dtypes[0], whole, pieces)


def _kind(name: str) -> str:
    """The layer a tensor is of: the last word but ``weight``."""
    words = name.split(".")
    return words[-2] if len(words) > 1 and words[-1] == "weight" else ""


def _cut_along(kind: str, shape: Shape, count: int, part: TorchFile) -> int:
    if kind in _ROWS:
        return 0
    if kind in _COLUMNS:
        return 1
    norm = part.tensors.get("norm.weight")
    if kind == _EMBEDDING and norm is not None and len(norm.spec.shape) == 1:
        (width,) = norm.spec.shape
        if shape[1] == width:
            return 0
        if shape[1] * count == width:
            return 1
        raise ValueError(f"{count} parts of shape {list(shape)} make no embedding of width {width}")
    raise ValueError("is of no layer of Meta's LLaMA; how it was cut is not known")


def _copies(kind: str, shape: Shape, count: int, params: Mapping[str, Any]) -> int:
    """How many neighbouring parts hold the same."""
    heads, width, shared = (_count(params.get(key)) for key in ("n_heads", "dim", "n_kv_heads"))
    if kind not in _KEYS_AND_VALUES or not (heads and width and shared):
        return 1
    expected = shared * (_count(params.get("head_dim")) or width // heads)
    total = count * shape[0]
    if total % expected or count % (total // expected):
        raise ValueError(
            f"{count} parts of {shape[0]} rows are {total}, but params.json means {expected}"
        )
    return total // expected


def _count(value: object) -> int:
    return value if type(value) is int and value > 0 else 0
