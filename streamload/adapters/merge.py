"""What an adapter makes of its base's tensors: stored tensors with encodings, and what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from streamload.adapters.renaming import Renaming
from streamload.adapters.settings import AdapterSettings
from streamload.adapters.tensors import Adapted
from streamload.core.dtypes import BY_NAME
from streamload.core.specs import Catalog, Shape, TensorSpec, numel
from streamload.decoding.low_rank import LowRank


@dataclass
class Merge:
    """One adapter on one base, while it is worked out.

    Attributes:
        label: what its tensors' names begin with, as parts.
        settings: of the adapter.
        stored: its own catalog.
        base: the base's catalog.
        config: the base's, as in ``config.json``.
        rename: from names of the module to stored names.
        made: base tensors that it changes, or adds.
        parts: part name → the adapter's own name of it.
        steps: names, as parts, of tensors that this adapter changes more than once.
        norms: part name → the matrix whose columns' norms it has.
        counts: what is done → to how many tensors.
        notices, problems: what is to be said.
    """

    label: str
    settings: AdapterSettings
    stored: Catalog
    base: Catalog
    config: Mapping[str, Any]
    rename: Renaming
    made: dict[str, TensorSpec] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    steps: set[str] = field(default_factory=set)
    norms: dict[str, TensorSpec] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    notices: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def part(self, name: str, shape: Shape | None = None) -> TensorSpec:
        """A tensor of the adapter as a part: row-major, or else read as a whole."""
        spec = self.stored[name]
        new = f"{self.label}: {name}"
        self.parts[new] = name
        if spec.strides is not None:
            spec = replace(spec, extent=None, strides=None)
        return replace(spec, name=new, shape=shape or spec.shape)

    def base_part(self, spec: TensorSpec) -> TensorSpec:
        """A tensor of the base as a part, as it is by now."""
        if spec.name not in self.made:
            return spec
        self.steps.add(new := f"{self.label}: {spec.name}")
        return replace(spec, name=new)

    def of_base(self, name: str) -> TensorSpec:
        """A stored tensor as it is by now."""
        return self.made.get(name) or self.base[name]

    def keep(self, spec: TensorSpec, words: str) -> None:
        self.made[spec.name] = spec
        self.counts[words] += 1

    def are_numbers(self, *specs: TensorSpec) -> bool:
        """True if all can be calculated with; else that is a problem."""
        others = [spec for spec in specs if BY_NAME[spec.dtype].kind != "float"]
        for spec in others:
            dtype = BY_NAME[spec.dtype].torch_name or spec.dtype
            self.problems.append(f"{spec.name!r} is stored as {dtype}: nothing can be added to it")
        return not others


def values_dtype(spec: TensorSpec) -> str:
    """The dtype that merged values are made in, before they are rounded once."""
    return "F64" if spec.dtype == "F64" else "F32"


def merge_low_rank(merge: Merge, one: Adapted, spec: TensorSpec, by_inputs: bool | None) -> None:
    """Add an adapter's product to a matrix, and give outputs their magnitude.

    Args:
        merge: is added to.
        one: what the adapter has for it.
        spec: the matrix, as it is by now.
        by_inputs: what it is where it is square.
    """
    a, b = merge.stored[one.parts["A"]], merge.stored[one.parts["B"]]
    if not merge.are_numbers(spec, a, b):
        return
    rank, inputs = a.shape[0], numel(a.shape[1:])
    outputs = b.shape[0]
    weight, rows, columns, is_turned = _matrix(spec)
    orientation = orientation_of(rows, columns, outputs, inputs)
    if orientation is None and by_inputs is not None:
        orientation = by_inputs is not is_turned
    assert orientation is not None, "shapes were checked"
    encoding = LowRank(
        (merge.base_part(weight), merge.part(one.parts["A"]), merge.part(one.parts["B"])),
        spec.stored_dtype,
        spec.made_dtype,
        rows=rows,
        columns=columns,
        rank=rank,
        scale=merge.settings.scale_of(one.module),
        by_inputs=orientation,
    )
    made = replace(weight, dtype=values_dtype(spec), extent=None, encoding=encoding)
    if "magnitude" in one.parts:
        made = _with_magnitude(merge, one, made, encoding)
    merge.keep(made, told(made))


def fits(merge: Merge, one: Adapted, spec: TensorSpec) -> bool:
    """True if an adapter's factors have the shapes of a matrix; else that is a problem."""
    a, b = merge.stored[one.parts["A"]], merge.stored[one.parts["B"]]
    _, rows, columns, is_turned = _matrix(spec)
    outputs, inputs = b.shape[0], numel(a.shape[1:])
    is_matrix = len(spec.shape) == 2 == len(a.shape) or (
        len(spec.shape) == len(a.shape) > 2 and a.shape[1:] == spec.shape[1:]
    )
    if is_matrix and {(rows, columns)} & {(outputs, inputs), (inputs, outputs)}:
        is_embedding = (columns if is_turned else rows, rows if is_turned else columns)
        if not one.is_embedding or is_embedding == (inputs, outputs):
            return True
    text = f"{one.parts['A']!r} {list(a.shape)} and {one.parts['B']!r} {list(b.shape)}"
    merge.problems.append(f"{text} do not fit {spec.name!r} {list(spec.shape)} of the base")
    return False


def orientation_of(rows: int, columns: int, outputs: int, inputs: int) -> bool | None:
    """True if rows are inputs, False if they are outputs, None if they may be either."""
    if inputs == outputs:
        return None
    return (rows, columns) == (inputs, outputs)


def _matrix(spec: TensorSpec) -> tuple[TensorSpec, int, int, bool]:
    """The tensor as a part; rows and columns as they lie in memory; True if these are turned."""
    if spec.strides is None:
        return spec, spec.shape[0], numel(spec.shape[1:]), False
    if len(spec.shape) == 2:
        return spec, spec.shape[1], spec.shape[0], True
    whole = replace(spec, extent=None, strides=None)
    return whole, spec.shape[0], numel(spec.shape[1:]), False


def _with_magnitude(
    merge: Merge, one: Adapted, undirected: TensorSpec, encoding: LowRank
) -> TensorSpec:
    """DoRA: where columns are outputs, their norms take a pass of their own over all rows."""
    parts = (*encoding.parts, merge.part(one.parts["magnitude"]))
    if encoding.by_inputs:
        name = f"{merge.label}: norms of {undirected.name}"
        merge.norms[name] = undirected
        shape = (encoding.columns,)
        parts += (TensorSpec(name, undirected.dtype, shape, undirected.file),)
    return replace(undirected, encoding=replace(encoding, parts=parts))


def told(spec: TensorSpec) -> str:
    """The last thing that was done, as reports have it."""
    assert spec.encoding is not None
    return spec.encoding.words.rpartition("+")[2]
