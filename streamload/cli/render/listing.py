"""A checkpoint's catalog as JSON and as a table, from its headers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from streamload.cli.render.tables import columns, heading
from streamload.core.display.folding import Row, by_block, fold
from streamload.core.specs import Shape, TensorSpec, numel, stored_bytes, stored_parts
from streamload.core.wording import format_bytes, listed, plural, printable

if TYPE_CHECKING:
    from streamload.sources.base import Source


class _Facts(NamedTuple):
    dtype: str
    shape: Shape
    nbytes: int


def as_dict(source: Source, notices: Sequence[str] = ()) -> dict[str, Any]:
    """Every tensor, totals, files, metadata; ``notices`` beside the catalog's."""
    catalog = source.catalog
    return {
        "ok": True,
        "path": printable(source.path),
        "tensors": [
            {
                "name": spec.name,
                "dtype": spec.stored_dtype,
                "shape": list(spec.shape),
                "nbytes": stored_bytes((spec,)),
                "file": printable(spec.file),
            }
            for spec in catalog.values()
        ],
        "totals": {
            "tensors": len(catalog),
            "elements": sum(numel(spec.shape) for spec in catalog.values()),
            "nbytes": catalog.nbytes,
            "nbytes_by_dtype": dict(_nbytes_by(source, "stored_dtype")),
        },
        "files": {printable(file): nbytes for file, nbytes in _nbytes_by(source, "file").items()},
        "metadata": dict(catalog.metadata),
        "notices": [*catalog.notices, *notices],
        "problems": list(catalog.problems),
        "received_bytes": source.received()[0],
    }


def as_text(source: Source, *, show_all: bool, notices: Sequence[str] = ()) -> str:
    """The lines of a listing; with ``show_all`` each tensor has its own."""
    catalog, files = source.catalog, _nbytes_by(source, "file")
    parameters = sum(numel(spec.shape) for spec in catalog.values())
    lines = [
        heading(printable(source.path)),
        f"{plural(len(catalog), 'tensor')}, {parameters:,} elements, "
        f"{format_bytes(catalog.nbytes)} in {plural(len(files), 'file')}",
    ]
    if len(files) > 1:
        rows = [(f"  {printable(file)}", format_bytes(size)) for file, size in files.items()]
        lines += columns(rows, right=frozenset({1}), least={0: 16})
    if catalog.metadata:
        pairs = (
            f"{printable(k[:60])}={printable(v[:60])[:60]}" for k, v in catalog.metadata.items()
        )
        lines.append(f"metadata: {listed(pairs, more=', …')}")
    lines += ["", *_tensor_lines(list(catalog.values()), show_all=show_all), ""]
    by_dtype = _nbytes_by(source, "stored_dtype")
    lines += [f"{dtype}: {format_bytes(nbytes)}" for dtype, nbytes in by_dtype.most_common()]
    lines += [f"notice: {notice}" for notice in (*catalog.notices, *notices)]
    lines += [f"not to be loaded: {problem}" for problem in catalog.problems]
    if source.is_remote:
        nbytes, answers = source.received()
        lines.append(f"received: {format_bytes(nbytes)} in {plural(answers, 'answer')}")
    return "\n".join(lines)


def _tensor_lines(specs: list[TensorSpec], *, show_all: bool) -> list[str]:
    """A table of tensors: one row for each, or blocks that repeat folded under a heading."""
    details = [
        (printable(s.name), _Facts(s.stored_dtype, s.shape, stored_bytes((s,)))) for s in specs
    ]
    rows = [Row((name,), detail) for name, detail in details] if show_all else fold(details)
    block_nbytes: Counter[object] = Counter()
    for row in rows:
        block_nbytes[row.block] += row.detail.nbytes * row.count

    def heading_of(row: Row[_Facts]) -> tuple[str, ...]:
        return row.block_text(), "", "", format_bytes(block_nbytes[row.block])

    def cells(facts: _Facts) -> tuple[str, ...]:
        return facts.dtype, str(list(facts.shape)), format_bytes(facts.nbytes)

    table = list(by_block(rows, heading_of, cells))
    left_out = {1: "dtypes", 2: "shapes"}
    return columns(table, right=frozenset({3}), least={0: 16}, drop=left_out)


def _nbytes_by(source: Source, attribute: str) -> Counter[str]:
    """Bytes in the files of the tensors that share their ``stored_dtype`` or ``file``."""
    sizes: Counter[str] = Counter()
    for spec in source.catalog.values():
        # What a tensor is made of may lie in several files.
        for part in stored_parts(spec) if attribute == "file" else (spec,):
            sizes[getattr(part, attribute)] += stored_bytes((part,))
    return sizes
