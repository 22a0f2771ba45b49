"""The cards of what is stored: sources and their catalogs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from streamload.core.display.cards import Card, Section
from streamload.core.display.folding import by_block, fold
from streamload.core.display.reports import dtype_counts
from streamload.core.dtypes import BY_NAME
from streamload.core.wording import format_bytes, plural, printable

if TYPE_CHECKING:
    from streamload.core.specs import Catalog, TensorSpec

_FOLDED = 20_000


def catalog_card(
    catalog: Catalog, title: str = "Catalog", facts: Sequence[tuple[str, str]] = (), hint: str = ""
) -> Card:
    """How many tensors of which kind and size, and the names folded."""
    metadata = [f"{key}: {value}" for key, value in catalog.metadata.items()]
    dtypes = dtype_counts(_dtype(s) for s in catalog.tensors.values())
    return Card(
        f"{title}: {plural(len(catalog), 'tensor')}, {format_bytes(catalog.nbytes)}",
        facts=(*((("dtypes", dtypes),) if dtypes else ()), *facts),
        problems=catalog.problems,
        notices=catalog.notices,
        sections=(
            Section("tensors", len(catalog), lambda: _folded(catalog)),
            Section("metadata", len(metadata), lambda: ((pair,) for pair in metadata)),
        ),
        hint=hint or "a mapping of stored names to specs: [name].shape, .dtype, .nbytes",
    )


def _dtype(spec: TensorSpec) -> str:
    """As torch calls it; encodings have names of their own."""
    known = BY_NAME.get(spec.stored_dtype)
    return (known and known.torch_name) or spec.stored_dtype


def _folded(catalog: Catalog) -> Iterator[tuple[str, ...]]:
    entries = (
        (printable(name), (_dtype(spec), str(list(spec.shape))))
        for name, spec in islice(catalog.items(), _FOLDED)
    )
    yield from by_block(fold(entries), lambda row: (row.block_text(),), lambda detail: detail)
