"""The stack machine of a pickle: what the opcodes do to, and the bounds of what they make."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypeAlias

from streamload.sources.torch.denied_globals import is_denied
from streamload.sources.torch.pickle_globals import is_known, rebuild, storage_of
from streamload.sources.torch.pickle_records import (
    MAX_NAME_CHARS,
    Call,
    Entries,
    Global,
    Malformed,
    Placeholder,
    RefusedGlobal,
    StorageRef,
    TensorRef,
    UnusableTensor,
    is_key,
    shown,
)

# Steps of about 0.2 µs, and bytes of what is built; and how many more for each byte of the file.
# A tensor takes about 160 and 3000, and 350 bytes of a zip file at the very least.
_STEPS, _STEPS_PER_BYTE = 1_200_000, 0.2
_BUILT_BYTES, _BUILT_PER_BYTE = 24 << 20, 8
_MAX_GLOBAL_CHARS = 1000


class Truncated(Malformed):
    """The bytes end before the pickle does."""


class Machine:
    """A stack, a memo, and what was found so far.

    Args:
        data: the pickle, from ``start``.
        file_bytes: the size of the whole file.
        legacy: of the format before the zip one.
        inert: of a format that is records alone: names that are data there, whatever else they can
            do. Its objects have attributes, and no items.
    """

    def __init__(
        self,
        data: bytes,
        start: int,
        file_bytes: int,
        legacy: bool,
        inert: Collection[Global] = (),
    ) -> None:
        self.legacy = legacy
        self.inert = inert
        self.steps = _STEPS + int(_STEPS_PER_BYTE * file_bytes)
        self.built_bytes = _BUILT_BYTES + _BUILT_PER_BYTE * file_bytes
        self.data = data
        self.position = start
        self.stack: list[object] = []
        # Stacks below the marks: nothing reaches through a mark.
        self.marks: list[list[object]] = []
        self.memo: dict[int, object] = {}
        self.storages: dict[str, StorageRef] = {}
        self.tensors: list[TensorRef] = []
        self.unknown: dict[Global, Placeholder] = {}

    def run(self, actions: Mapping[int, Action]) -> object:
        """Carry out the opcodes up to the end of the pickle; returns the object."""
        data, stop, count = self.data, len(self.data), 0
        while self.position < stop:
            opcode = data[self.position]
            self.position += 1
            if opcode == 0x2E:  # STOP
                if len(self.stack) != 1 or self.marks:
                    raise Malformed("it ends with more or less than one object")
                return self.stack[0]
            action = actions.get(opcode)
            if action is None:
                raise Malformed(f"the pickle opcode {opcode:#04x}, which torch.save does not write")
            action(self)
            count += 1
            if count > self.steps:
                raise Malformed("it takes more steps than a file of this size should need")
        raise Truncated("it ends early")

    def spend(self, built_bytes: int, steps: int = 1) -> None:
        """Count what an opcode has built, about, and the steps it took beside its own."""
        self.steps -= steps
        self.built_bytes -= built_bytes
        if self.built_bytes < 0:
            raise Malformed("it builds more objects than a file of this size should hold")

    def mark(self) -> None:
        self.spend(88)
        self.marks.append(self.stack)
        self.stack = []

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self.data):
            raise Truncated("it ends early")
        part = self.data[self.position : end]
        self.position = end
        return part

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")

    def line(self) -> str:
        end = self.data.find(b"\n", self.position)
        if end < 0:
            raise Truncated("it ends early")
        return self.take(end + 1 - self.position)[:-1].decode("utf-8")

    def items(self) -> list[object]:
        part, self.stack = self.stack, self.marks.pop()
        return part

    def push(self, value: object) -> None:
        # ``m.stack.append(m.items())`` would append to the stack that ``items`` takes away.
        self.stack.append(value)

    def push_global(self, module: object, name: object) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise Malformed("a global without a name")
        if (length := len(module) + len(name)) > _MAX_GLOBAL_CHARS:
            raise Malformed(f"it names {shown(Global(module, name))}, of {length} characters")
        self.spend(200, 60)
        # Protocol 2 writes the module names of Python 2.
        found = Global("builtins" if module == "__builtin__" else module, name)
        if is_known(found):
            self.stack.append(found)
        elif found not in self.inert and is_denied(found.module, found.name):
            raise RefusedGlobal(f"it names {shown(found)}")
        else:
            self.stack.append(self.unknown.setdefault(found, Placeholder(found)))

    def extend(self, values: list[object]) -> None:
        target = self.stack[-1]
        if isinstance(target, Placeholder | Call) and not self.inert:
            target = target.parts
        if not isinstance(target, list):
            raise Malformed("items for something that is no list")
        target.extend(values)

    def update(self, values: list[object]) -> None:
        target = self.stack[-1]
        if isinstance(target, Placeholder) and not self.inert:
            target.parts.extend(values)
            return
        if not isinstance(target, dict) or len(values) % 2:
            raise Malformed("items for something that is no dictionary")
        self.spend(50 * len(values), len(values))
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not is_key(key):
                raise Malformed(
                    "a dictionary key that is neither text nor a number, or longer than "
                    f"{MAX_NAME_CHARS} characters"
                )
            target[key] = value

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Placeholder | Call):
            target.parts.append(state)
        elif isinstance(target, Entries):
            target.state = state
        elif not isinstance(target, dict | UnusableTensor):
            raise Malformed("attributes for something that is no dictionary")

    def load_storage(self) -> None:
        pid = self.stack.pop()
        if self.legacy and isinstance(pid, tuple) and pid[:1] == ("module",) and len(pid) == 4:
            # ("module", class, file, source): a class of a whole pickled model.
            if not isinstance(pid[1], Placeholder):
                raise Malformed("a module without a class")
            self.stack.append(pid[1])
            return
        self.spend(300, 30)
        ref = storage_of(pid, legacy=self.legacy)
        first = self.storages.setdefault(ref.key, ref)
        if (first.dtype, first.numel) != (ref.dtype, ref.numel):
            raise Malformed(f"two descriptions of the storage {ref.key!r}")
        self.stack.append(ref)

    def call(self) -> None:
        self.spend(400, 40)
        args = self.stack.pop()
        record = rebuild(self.stack[-1], args)
        if isinstance(record, TensorRef):
            self.spend(0, 4 * len(record.shape))
            self.tensors.append(record)
        self.stack[-1] = record


Action: TypeAlias = Callable[[Machine], object]
