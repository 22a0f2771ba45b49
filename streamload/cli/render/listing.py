"""A checkpoint's catalog as JSON and as a table; nothing but headers is looked at."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from streamload.cli.render.folding import Row, fold
from streamload.cli.render.tables import columns, heading
from streamload.core.errors import printable
from streamload.core.report import format_bytes
from streamload.core.specs import Shape, TensorSpec, numel

if TYPE_CHECKING:
    from streamload.sources.base import Source

__all__ = ["as_dict", "as_text"]

_MOST_METADATA = 8


class _Facts(NamedTuple):
    dtype: str
    shape: Shape
    nbytes: int


def as_dict(source: Source) -> dict[str, Any]:
    """Every tensor, totals, files, metadata."""
    catalog = source.catalog
    return {
        "ok": True,
        "path": printable(source.path),
        "tensors": [
            {
                "name": spec.name,
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "nbytes": spec.nbytes,
                "file": printable(spec.file),
            }
            for spec in catalog.values()
        ],
        "totals": {
            "tensors": len(catalog),
            "elements": sum(numel(spec.shape) for spec in catalog.values()),
            "nbytes": catalog.nbytes,
            "nbytes_by_dtype": dict(_by_dtype(source)),
        },
        "files": {printable(file): nbytes for file, nbytes in _by_file(source).items()},
        "metadata": dict(catalog.metadata),
        "notices": list(catalog.notices),
    }


def as_text(source: Source, *, show_all: bool) -> list[str]:
    """The lines of a listing; with ``show_all`` every tensor has its own."""
    catalog, files = source.catalog, _by_file(source)
    parameters = sum(numel(spec.shape) for spec in catalog.values())
    lines = [
        heading(printable(source.path)),
        f"{len(catalog)} tensors, {parameters:,} elements, {format_bytes(catalog.nbytes)} "
        f"in {len(files)} file{'' if len(files) == 1 else 's'}",
    ]
    if len(files) > 1:
        lines += [f"  {printable(file)}  {format_bytes(size)}" for file, size in files.items()]
    shown = list(catalog.metadata.items())[:_MOST_METADATA]
    if shown:
        more = ", …" if len(catalog.metadata) > len(shown) else ""
        pairs = ", ".join(f"{printable(k)}={printable(v)[:60]}" for k, v in shown)
        lines.append(f"metadata: {pairs}{more}")
    lines += ["", *_tensor_lines(list(catalog.values()), show_all=show_all), ""]
    for dtype, nbytes in _by_dtype(source).most_common():
        lines.append(f"{dtype}: {format_bytes(nbytes)}")
    return [*lines, *(f"notice: {notice}" for notice in catalog.notices)]


def _tensor_lines(specs: list[TensorSpec], *, show_all: bool) -> list[str]:
    """A table of tensors: one row for each, or blocks that repeat folded under a heading."""
    details = [(printable(s.name), _Facts(s.dtype, s.shape, s.nbytes)) for s in specs]
    rows = [Row((name,), detail) for name, detail in details] if show_all else fold(details)
    block_nbytes: Counter[object] = Counter()
    for row in rows:
        block_nbytes[row.block] += row.detail.nbytes * row.count
    cells: list[tuple[str, ...]] = []
    block: tuple[object, ...] = ()
    for row in rows:
        if row.block and row.block != block:
            cells.append((row.block_text(), "", "", format_bytes(block_nbytes[row.block])))
        block = row.block
        dtype, shape, nbytes = row.detail
        name = "  " + row.name_text(len(block)) if block else row.name_text()
        cells.append((name, dtype, str(list(shape)), format_bytes(nbytes)))
    return columns(cells, right=frozenset({3}))


def _by_dtype(source: Source) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for spec in source.catalog.values():
        sizes[spec.dtype] += spec.nbytes
    return sizes


def _by_file(source: Source) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for spec in source.catalog.values():
        sizes[spec.file] += spec.nbytes
    return dict(sizes)
