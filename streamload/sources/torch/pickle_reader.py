"""A pickle reader that cannot run anything: opcodes to plain containers and inert records.

The opcodes are those of Python's ``pickletools`` for the binary protocols, as ``torch.save``
writes them. There is no import, no attribute access and no call in here, whatever the file says;
every size is bounded by the bytes that are really there.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from streamload.sources.torch.denied_globals import is_denied
from streamload.sources.torch.pickle_globals import is_known, rebuild, storage_of
from streamload.sources.torch.pickle_records import (
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

# A tensor takes about 150 bytes and 40 opcodes: room for several hundred thousand tensors.
MAX_PICKLE_BYTES = 64 << 20
_MAX_OPCODES = 16_000_000


class Truncated(Malformed):
    """The bytes end before the pickle does."""


@dataclass(frozen=True, slots=True)
class Pickled:
    """What a pickle holds.

    Attributes:
        value: the object, of plain containers and inert records.
        end: position after the pickle.
        storages: every storage it names, by key.
        tensors: every strided tensor it describes, wherever it is.
        unknown: the classes and functions that placeholders stand for.
    """

    value: object
    end: int
    storages: Mapping[str, StorageRef]
    tensors: Sequence[TensorRef]
    unknown: Collection[Global]


def read_pickle(data: bytes, start: int = 0, *, legacy: bool = False) -> Pickled:
    """The object pickled at ``data[start:]``; ``legacy`` of the format before the zip one.

    Raises:
        Malformed: damaged (Truncated: too short), or it names what may not be read
            (RefusedGlobal).
    """
    machine = _Machine(data, start, legacy)
    try:
        result = machine.run()
    except (IndexError, KeyError) as error:
        raise Malformed("an opcode finds nothing on the stack or in the memo") from error
    except UnicodeDecodeError as error:
        raise Malformed("text that is not UTF-8") from error
    return Pickled(
        result, machine.position, machine.storages, machine.tensors, tuple(machine.unknown)
    )


class _Machine:
    def __init__(self, data: bytes, start: int, legacy: bool) -> None:
        self.legacy = legacy
        self.data = data
        self.position = start
        self.stack: list[object] = []
        # Stacks below the marks: nothing reaches through a mark.
        self.marks: list[list[object]] = []
        self.memo: dict[int, object] = {}
        self.storages: dict[str, StorageRef] = {}
        self.tensors: list[TensorRef] = []
        self.unknown: dict[Global, Placeholder] = {}

    def run(self) -> object:
        data, stop, count = self.data, len(self.data), 0
        while self.position < stop:
            opcode = data[self.position]
            self.position += 1
            if opcode == 0x2E:  # STOP
                if len(self.stack) != 1 or self.marks:
                    raise Malformed("it ends with more or less than one object")
                return self.stack[0]
            action = _ACTIONS.get(opcode)
            if action is None:
                raise Malformed(f"the pickle opcode {opcode:#04x}, which torch.save does not write")
            action(self)
            count += 1
            if count > _MAX_OPCODES:
                raise Malformed(f"more than {_MAX_OPCODES} opcodes")
        raise Truncated("it ends early")

    def mark(self) -> None:
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
        # Protocol 2 writes the module names of Python 2.
        found = Global("builtins" if module == "__builtin__" else module, name)
        if is_known(found):
            self.stack.append(found)
        elif is_denied(found.module, found.name):
            raise RefusedGlobal(f"it names {shown(found)}")
        else:
            self.stack.append(self.unknown.setdefault(found, Placeholder(found)))

    def extend(self, values: list[object]) -> None:
        target = self.stack[-1]
        if isinstance(target, Placeholder | Call):
            target = target.parts
        if not isinstance(target, list):
            raise Malformed("items for something that is no list")
        target.extend(values)

    def update(self, values: list[object]) -> None:
        target = self.stack[-1]
        if isinstance(target, Placeholder):
            target.parts.extend(values)
            return
        if not isinstance(target, dict) or len(values) % 2:
            raise Malformed("items for something that is no dictionary")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not is_key(key):
                raise Malformed("a dictionary key that is neither text nor a number")
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
        ref = storage_of(pid, legacy=self.legacy)
        first = self.storages.setdefault(ref.key, ref)
        if (first.dtype, first.numel) != (ref.dtype, ref.numel):
            raise Malformed(f"two descriptions of the storage {ref.key!r}")
        self.stack.append(ref)

    def call(self) -> None:
        args = self.stack.pop()
        record = rebuild(self.stack[-1], args)
        if isinstance(record, TensorRef):
            self.tensors.append(record)
        self.stack[-1] = record


Action = Callable[[_Machine], object]


def _push(value: object) -> Action:
    return lambda m: m.stack.append(value)


def _int(count: int, *, signed: bool = False) -> Action:
    return lambda m: m.stack.append(int.from_bytes(m.take(count), "little", signed=signed))


def _long(count: int) -> Action:
    return lambda m: m.stack.append(int.from_bytes(m.take(m.number(count)), "little", signed=True))


def _text(count: int) -> Action:
    return lambda m: m.stack.append(m.take(m.number(count)).decode("utf-8", "surrogatepass"))


def _bytes(count: int) -> Action:
    return lambda m: m.stack.append(m.take(m.number(count)))


def _put(count: int) -> Action:
    return lambda m: m.memo.__setitem__(m.number(count), m.stack[-1])


def _get(count: int) -> Action:
    return lambda m: m.stack.append(m.memo[m.number(count)])


def _tuple(count: int) -> Action:
    def action(m: _Machine) -> None:
        if len(m.stack) < count:
            raise Malformed("an opcode finds nothing on the stack")
        m.stack[-count:] = [tuple(m.stack[-count:])]

    return action


def _dict_from_mark(m: _Machine) -> None:
    values = m.items()
    m.stack.append({})
    m.update(values)


def _set_item(m: _Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    m.update([key, value])


def _stack_global(m: _Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    m.push_global(module, name)


def _frame(m: _Machine) -> None:
    if m.number(8) > len(m.data) - m.position:
        raise Truncated("it ends early")


def _new_object(m: _Machine) -> None:
    # NEWOBJ_EX: class, arguments, named arguments.
    named, args = m.stack.pop(), m.stack.pop()
    if not isinstance(args, tuple) or not isinstance(m.stack[-1], Placeholder):
        raise Malformed("named arguments of something that takes none")
    m.push((*args, named))
    m.call()


def _old_object(m: _Machine, *, named: bool) -> None:
    # INST names the class in its own bytes, OBJ has it below the arguments.
    if named:
        m.push_global(m.line(), m.line())
        made = m.stack.pop()
        args = m.items()
    else:
        args = m.items()
        made = args.pop(0)
    if not isinstance(made, Placeholder):
        raise Malformed("an object of the oldest pickle protocol")
    m.push(made)
    m.push(tuple(args))
    m.call()


_ACTIONS: dict[int, Action] = {
    ord("("): _Machine.mark,
    ord("0"): lambda m: m.stack.pop(),
    ord("1"): lambda m: m.items(),
    ord("2"): lambda m: m.stack.append(m.stack[-1]),
    ord("J"): _int(4, signed=True),
    ord("K"): _int(1),
    ord("M"): _int(2),
    ord("N"): _push(None),
    ord("Q"): _Machine.load_storage,
    ord("R"): _Machine.call,
    ord("T"): _text(4),
    ord("U"): _text(1),
    ord("X"): _text(4),
    ord("a"): lambda m: m.extend([m.stack.pop()]),
    ord("b"): _Machine.build,
    ord("c"): lambda m: m.push_global(m.line(), m.line()),
    ord("d"): _dict_from_mark,
    ord("}"): lambda m: m.stack.append({}),
    ord("e"): lambda m: m.extend(m.items()),
    ord("h"): _get(1),
    ord("i"): lambda m: _old_object(m, named=True),
    ord("j"): _get(4),
    ord("l"): lambda m: m.push(m.items()),
    ord("]"): lambda m: m.stack.append([]),
    ord("o"): lambda m: _old_object(m, named=False),
    ord("q"): _put(1),
    ord("r"): _put(4),
    ord("s"): _set_item,
    ord("t"): lambda m: m.push(tuple(m.items())),
    ord(")"): _push(()),
    ord("u"): lambda m: m.update(m.items()),
    ord("G"): lambda m: m.stack.append(struct.unpack(">d", m.take(8))[0]),
    ord("B"): _bytes(4),
    ord("C"): _bytes(1),
    0x80: lambda m: m.take(1),  # PROTO
    0x81: _Machine.call,  # NEWOBJ, cls.__new__(cls, *args): the same record as cls(*args)
    0x85: _tuple(1),
    0x86: _tuple(2),
    0x87: _tuple(3),
    0x88: _push(True),
    0x89: _push(False),
    0x8A: _long(1),
    0x8B: _long(4),
    0x8C: _text(1),
    0x8D: _text(8),
    0x8E: _bytes(8),
    0x8F: lambda m: m.stack.append(Call(Global("builtins", "set"), [()])),  # EMPTY_SET
    0x90: lambda m: m.extend(m.items()),  # ADDITEMS
    0x91: lambda m: m.push(Call(Global("builtins", "frozenset"), [(m.items(),)])),
    0x92: _new_object,
    0x93: _stack_global,
    0x94: lambda m: m.memo.__setitem__(len(m.memo), m.stack[-1]),
    0x95: _frame,
    0x96: lambda m: m.push(Call(Global("builtins", "bytearray"), [(m.take(m.number(8)),)])),
}
