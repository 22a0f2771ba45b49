"""Adapters of parameters (``target_parameters``): of stacks of experts, stored as such or apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from streamload.adapters.merge import Merge, told, values_dtype
from streamload.adapters.tensors import Adapted
from streamload.core.specs import TensorSpec
from streamload.decoding.low_rank import LowRank

# Parameters in the order in which the library's modules have them, and what files call the
# matrices that one expert's part of each is put together from.
_STACKS: dict[str, tuple[tuple[str, ...], ...]] = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
# Model types whose stacks are [experts, inputs, outputs]; those of all others end with the inputs.
_BY_INPUTS = frozenset(("gpt_oss", "llama4", "llama4_text"))


@dataclass(frozen=True)
class Stack:
    """The stored tensors that a parameter is made of.

    Attributes:
        parameter: its full name.
        tensors: of each expert the matrices that follow each other; or the stack alone.
        is_whole: the stack is one tensor.
    """

    parameter: str
    tensors: tuple[tuple[TensorSpec, ...], ...]
    is_whole: bool

    @property
    def experts(self) -> int:
        return self.tensors[0][0].shape[0] if self.is_whole else len(self.tensors)

    def sizes(self, *, by_inputs: bool) -> tuple[int, int]:
        """Outputs and inputs of one expert."""
        first = self.tensors[0]
        if self.is_whole:
            _, outputs, inputs = first[0].shape
            return (inputs, outputs) if by_inputs else (outputs, inputs)
        return sum(spec.shape[0] for spec in first), first[0].shape[1]


def expert_names(module: str) -> Iterator[str]:
    """What the tensors of a module's first expert may be called, and of its stacks."""
    for parameter, choices in _STACKS.items():
        yield f"{module}.{parameter}"
        for leaves in choices:
            yield from (f"{module}.0.{leaf}.weight" for leaf in leaves)


def merge_parameters(merge: Merge, module: str, nested: Sequence[Adapted]) -> None:
    """Merge what an adapter has for the parameters of one module.

    Which parameter a nest is for, the names do not say: the shapes do, else the order of the
    library's own modules, of which the last is the outermost.

    Args:
        merge: is added to.
        module: the base model's name.
        nested: the outermost first.
    """
    targets = {p.rpartition(".")[2] for p in merge.settings.target_parameters}
    stacks = [stack for p in _in_order(targets) if (stack := _stack(merge, module, p))]
    for chosen in permutations(reversed(stacks), len(nested)):
        if all(_fits(merge, one, stack) for one, stack in zip(nested, chosen, strict=True)):
            for one, stack in zip(nested, chosen, strict=True):
                _merge_stack(merge, one, stack)
            return
    names = " and ".join(repr(name) for one in nested for name in one.parts.values())
    found = [f"{s.parameter!r} ({s.experts} x {list(s.tensors[0][0].shape)})" for s in stacks]
    of_base = f"do not fit {' and '.join(found)}" if found else "are for no tensor of the base"
    merge.problems.append(f"{names} {of_base}")


def _in_order(parameters: set[str]) -> list[str]:
    known = [p for p in _STACKS if p in parameters]
    return [*known, *sorted(parameters.difference(known))]


def _stack(merge: Merge, module: str, parameter: str) -> Stack | None:
    """The stored tensors of a parameter, if it is one of the module."""
    name = f"{module}.{parameter}"
    if not any(f".{name}".endswith(f".{p}") for p in merge.settings.target_parameters):
        return None
    stored = merge.rename(name)
    if stored is not None:
        spec = merge.of_base(stored)
        return Stack(name, ((spec,),), is_whole=True) if len(spec.shape) == 3 else None
    for leaves in _STACKS.get(parameter, ()):
        experts: list[tuple[TensorSpec, ...]] = []
        while True:
            names = [merge.rename(f"{module}.{len(experts)}.{leaf}.weight") for leaf in leaves]
            if None in names:
                break
            experts.append(tuple(merge.of_base(found) for found in names if found))
        if experts:
            return Stack(name, tuple(experts), is_whole=False)
    return None


def _by_inputs(merge: Merge, stack: Stack) -> bool:
    return stack.is_whole and merge.config.get("model_type") in _BY_INPUTS


def _fits(merge: Merge, one: Adapted, stack: Stack) -> bool:
    a, b = merge.stored[one.parts["A"]], merge.stored[one.parts["B"]]
    outputs, inputs = stack.sizes(by_inputs=_by_inputs(merge, stack))
    shapes = {spec.shape for expert in stack.tensors for spec in expert}
    first = {spec.shape for spec in stack.tensors[0]}
    width = merge.settings.rank_of(stack.parameter) * stack.experts
    return (
        shapes == first
        and all(len(shape) == (3 if stack.is_whole else 2) for shape in shapes)
        and a.shape == (width, inputs)
        and b.shape == (outputs, width)
    )


def _merge_stack(merge: Merge, one: Adapted, stack: Stack) -> None:
    factors = [merge.stored[one.parts[letter]] for letter in "AB"]
    for expert, specs in enumerate(stack.tensors):
        output = 0
        for spec in specs:
            if not merge.are_numbers(spec, *factors):
                return
            weight = replace(spec, extent=None, strides=None) if spec.strides else spec
            rows, columns = spec.shape[-2:]
            encoding = LowRank(
                (merge.base_part(weight), merge.part(one.parts["A"]), merge.part(one.parts["B"])),
                spec.stored_dtype,
                spec.made_dtype,
                rows=rows,
                columns=columns,
                matrices=stack.experts if stack.is_whole else 1,
                rank=merge.settings.rank_of(stack.parameter),
                experts=stack.experts,
                scale=merge.settings.scale_of(stack.parameter),
                by_inputs=_by_inputs(merge, stack),
                expert=expert,
                first_output=output,
            )
            made = replace(weight, dtype=values_dtype(spec), extent=None, encoding=encoding)
            merge.keep(made, told(made))
            output += rows
