"""One transform after another, over a rule's names and over its experts.

What a rule's tensors are is a table: a row for each of its names, and in it one tensor for each
expert (one altogether where the rule has no ``{expert}``, or where they are stacked). A step joins
or cuts along one side of the table, or re-lays each tensor by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias, TypeVar

from streamload.core.specs import Shape
from streamload.mapping.combining import Concat, HeadSplit, Reduction, Split, Stack, Unstack
from streamload.mapping.layout import Layout, LayoutError, axis_of
from streamload.mapping.transforms import UNSTATED, Relayout, Transform, check_transform

_T = TypeVar("_T")
_Table: TypeAlias = "list[list[_T]]"  # [name][expert]

_JOINS = (Concat, Stack, Reduction)
_CUTS = (Split, HeadSplit, Unstack)


@dataclass(frozen=True, slots=True)
class _Stage:
    """A step, and the table it is given.

    Attributes:
        does: what it does along ``across``; ``"each"`` for a tensor by itself.
        names: rows of the table.
        apart: the table has a column for each expert.
    """

    step: Transform
    does: Literal["join", "cut", "each"]
    across: Literal["names", "experts"]
    names: int
    apart: bool


@lru_cache(maxsize=1024)
def _stages(
    steps: tuple[Transform, ...], sources: int, targets: int, apart: bool, opens: bool
) -> tuple[tuple[_Stage, ...], int, bool]:
    """All stages, how many names come out of them, and whether experts are apart then.

    ``sources`` and ``targets`` are how many names the rule has; ``apart`` says that its sources
    are experts apart, ``opens`` that its targets are.
    """
    stages = []
    names = sources
    for step in steps:
        before = names, apart
        if isinstance(step, _JOINS):
            by_expert = apart and (isinstance(step, Stack) or names == 1)
            names, apart = (names, False) if by_expert else (1, apart)
            does: Literal["join", "cut", "each"] = "join"
        elif isinstance(step, _CUTS):
            by_expert = isinstance(step, Unstack) and opens and not apart
            more = 1 if by_expert else _parts(step, names, targets)
            names, apart = names * more, apart or by_expert
            does = "cut"
        else:
            by_expert, does = False, "each"
        stages.append(_Stage(step, does, "experts" if by_expert else "names", *before))
    return tuple(stages), names, apart


def _parts(step: Transform, names: int, targets: int) -> int:
    """How many names a cut makes of one; where it does not say so, what the rule needs."""
    if isinstance(step, HeadSplit):
        return step.parts
    sizes = step.sizes if isinstance(step, Split) else None
    return len(sizes) if sizes is not None else max(targets // names, 1)


def _forward(
    stages: Sequence[_Stage], table: _Table[Layout], wanted: _Table[Shape | None]
) -> _Table[Layout]:
    for at, stage in enumerate(stages):
        seen = _seen(stages[at + 1 :], wanted) if stage.does == "cut" else wanted
        is_last = at == len(stages) - 1
        if stage.does == "each":
            table = _each(stage.step, table, wanted if is_last else None)
        elif stage.does == "join" and stage.across == "experts":
            table = [stage.step.forward(row, [None]) for row in table]
        elif stage.does == "join":
            table = _turned([stage.step.forward(list(c), [None]) for c in _turned(table)])
        elif stage.across == "experts":
            shapes = seen or [[None] * len(wanted[0]) for _ in table]
            table = [stage.step.forward(row, s) for row, s in zip(table, shapes, strict=True)]
        else:
            table = _cut_names(stage, table, seen, len(wanted))
    return table


def _each(
    step: Transform, table: _Table[Layout], wanted: _Table[Shape | None] | None
) -> _Table[Layout]:
    if len(table) == len(table[0]) == 1:  # one's own transform may make several of one
        targets = [None] if wanted is None else [shape for row in wanted for shape in row]
        return [[out] for out in step.forward(table[0], targets)]
    made = [[step.forward([cell], [None]) for cell in row] for row in table]
    if any(len(outs) != 1 for row in made for outs in row):
        raise LayoutError(f"{step.label} does not make one tensor of one")
    return [[outs[0] for outs in row] for row in made]


def _cut_names(
    stage: _Stage, table: _Table[Layout], seen: _Table[Shape | None] | None, targets: int
) -> _Table[Layout]:
    """Each name's cut, expert by expert; what comes of one name stays together."""
    parts = _parts(stage.step, len(table), targets)
    rows: _Table[Layout] = []
    for at, row in enumerate(table):
        shapes = seen[at * parts : (at + 1) * parts] if seen else [[None] * len(row)] * parts
        columns = _turned(shapes) if shapes else [[]] * len(row)
        rows += _turned([stage.step.forward([one], c) for one, c in zip(row, columns, strict=True)])
    return rows


def _seen(later: Sequence[_Stage], wanted: _Table[Shape | None]) -> _Table[Shape | None] | None:
    """The shapes that a step before ``later`` has to make, where they are known."""
    if not later:
        return wanted
    if any(shape is None for row in wanted for shape in row):
        return None
    known = [[shape for shape in row if shape is not None] for row in wanted]
    try:
        return [list(row) for row in _back(later, known)]
    except LayoutError:
        return None


def _back(stages: Sequence[_Stage], table: _Table[Shape]) -> _Table[Shape]:
    """The table of shapes from which ``stages`` make this one."""
    for stage in reversed(stages):
        step = stage.step
        if stage.does == "each":
            if len(table) == len(table[0]) == 1:
                table = [[shape] for shape in step.source_shapes(table[0])]
            else:
                table = [[_single(step.source_shapes([s]), step) for s in row] for row in table]
        elif stage.across == "experts":
            table = [step.source_shapes(row) for row in table]
        elif stage.does == "join":
            table = _turned([step.source_shapes(list(c)) for c in _turned(table)])
        else:
            parts = max(len(table) // stage.names, 1)
            groups = [table[at : at + parts] for at in range(0, len(table), parts)]
            table = [
                [_single(step.source_shapes(list(c)), step) for c in _turned(group)]
                for group in groups
            ]
    return table


def _single(shapes: Sequence[Shape], step: Transform) -> Shape:
    if len(shapes) != 1:
        raise LayoutError(f"{step.label} goes back to {len(shapes)} tensors, not 1")
    return shapes[0]


def _turned(table: Sequence[Sequence[_T]]) -> _Table[_T]:
    """Rows as columns.

    Raises:
        LayoutError: the rows are not equally long.
    """
    if any(len(row) != len(table[0]) for row in table):
        raise LayoutError("the experts do not have equally many tensors")
    return [list(column) for column in zip(*table, strict=True)]


def _steps(transform: Transform) -> tuple[Transform, ...]:
    return transform.steps if isinstance(transform, Chain) else (transform,)


@dataclass(frozen=True, slots=True)
class Chain(Transform):
    """One transform after another: ``Chain(Transpose(), Split(dim=0))``.

    A step that takes one tensor is applied to each of several.
    """

    steps: tuple[Transform, ...]

    def __init__(self, *steps: Transform) -> None:
        for step in steps:
            check_transform(step, "a step of a Chain")
        steps = tuple(step for one in steps for step in _steps(one))
        if not steps:
            raise ValueError("a Chain needs at least one step")
        if any(step.reduces for step in steps[1:]):
            raise ValueError("Chain: Sum and Mean must be the first step")
        if steps[0].reduces and not all(isinstance(step, Relayout) for step in steps[1:]):
            raise ValueError("Chain: after Sum or Mean only re-layouts of one tensor may come")
        object.__setattr__(self, "steps", steps)

    @property
    def label(self) -> str:
        return "+".join(step.label for step in self.steps if step.label)

    @property
    def reduces(self) -> str:
        return next((step.reduces for step in self.steps if step.reduces), "")

    def forward(self, layouts: Sequence[Layout], targets: Sequence[Shape | None]) -> list[Layout]:
        stages, _, _ = _stages(self.steps, len(layouts), len(targets), False, False)
        table = _forward(stages, [[one] for one in layouts], [[shape] for shape in targets])
        return [one for row in table for one in row]

    def source_shapes(self, targets: Sequence[Shape]) -> list[Shape]:
        stages, _, _ = _stages(self.steps, 1, len(targets), False, False)
        return [shape for row in _back(stages, [[shape] for shape in targets]) for shape in row]


@dataclass(frozen=True, slots=True)
class ByExpert(Transform):
    """A transform between experts apart and experts stacked, however many there are.

    Sources and targets are those of the first name, expert by expert, then those of the next one.
    Stack and Unstack are of experts here; Concat and Split are of an expert's names, or of the
    experts where there is but one name.

    Attributes:
        transform: from ``{expert}`` on one side to none on the other.
        sources, targets: how many names there are on each side.
        unstacks: the experts are apart in the targets, not in the sources.
    """

    transform: Transform
    sources: int = 1
    targets: int = 1
    unstacks: bool = False

    def __post_init__(self) -> None:
        if self.transform.reduces:
            raise ValueError("{expert} on one side does not go with Sum and Mean")
        _, names, apart = self._stages()
        kind = type(self.transform).__name__
        if apart != self.unstacks:
            side, need = ("targets", "Unstack") if self.unstacks else ("sources", "Stack")
            found = "no transform" if self.transform is UNSTATED else kind
            raise ValueError(f"{{expert}} is in the {side} only: that needs {need}, not {found}")
        if names != self.targets:
            raise ValueError(f"{kind} makes {names} of {self.sources} names, not {self.targets}")

    @property
    def label(self) -> str:
        return self.transform.label

    def _stages(self) -> tuple[tuple[_Stage, ...], int, bool]:
        steps = _steps(self.transform)
        return _stages(steps, self.sources, self.targets, not self.unstacks, self.unstacks)

    def experts(self, shapes: Sequence[Shape]) -> int:
        """How many experts are in the side where they are stacked, if that has these shapes.

        Raises:
            LayoutError: the shapes do not fit, or do not say it.
        """
        stages, _, _ = self._stages()
        turn = next(at for at, stage in enumerate(stages) if stage.across == "experts")
        step = stages[turn].step
        if self.unstacks:
            table = [[Layout.whole(at, shape)] for at, shape in enumerate(shapes)]
            before = _forward(stages[:turn], table, [[None]] * self.targets)
            stacked = [row[0].shape for row in before]
        else:
            stacked = [row[0] for row in _back(stages[turn + 1 :], [[s] for s in shapes])]
        if not isinstance(step, (Stack, Unstack)):
            raise LayoutError(f"{step.label} does not say how many experts there are")
        counts = {shape[axis_of(step.dim, shape)] for shape in stacked}
        if len(counts) != 1:
            raise LayoutError(f"they have {' and '.join(map(str, sorted(counts)))} experts")
        return counts.pop()

    def forward(self, layouts: Sequence[Layout], targets: Sequence[Shape | None]) -> list[Layout]:
        stages, _, _ = self._stages()
        table = _forward(stages, _rows(layouts, self.sources), _rows(targets, self.targets))
        return [one for row in table for one in row]

    def source_shapes(self, targets: Sequence[Shape]) -> list[Shape]:
        stages, _, _ = self._stages()
        table = _turned(_turned(_back(stages, _rows(targets, self.targets))))
        return [shape for row in table for shape in row]


def _rows(values: Sequence[_T], names: int) -> _Table[_T]:
    """A row for each name."""
    experts, left = divmod(len(values), names)
    if left or not experts:
        raise LayoutError(f"{len(values)} tensors are not {names} for each expert")
    return [list(values[at : at + experts]) for at in range(0, len(values), experts)]


def alike(transform: Transform, count: int) -> list[range]:
    """Runs of the ``count`` sources that are stacked: all of a run are of one shape and dtype."""
    if isinstance(transform, ByExpert):
        size = 0 if transform.unstacks else count // transform.sources
        return [range(at, at + size) for at in range(0, count, size)] if size else []
    joins = [step for step in _steps(transform) if isinstance(step, _JOINS)]
    return [range(count)] if joins and isinstance(joins[0], Stack) else []
