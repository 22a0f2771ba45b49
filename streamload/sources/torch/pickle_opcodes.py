"""What each opcode of a pickle does, by the numbers of Python's ``pickletools``."""

from __future__ import annotations

import struct

from streamload.sources.torch.pickle_machine import Action, Machine, Truncated
from streamload.sources.torch.pickle_records import Call, Global, Malformed, Placeholder


def _push(value: object) -> Action:
    return lambda m: m.stack.append(value)


def _int(count: int, *, signed: bool = False) -> Action:
    def action(m: Machine) -> None:
        m.spend(40)
        m.stack.append(int.from_bytes(m.take(count), "little", signed=signed))

    return action


def _long(count: int) -> Action:
    def action(m: Machine) -> None:
        data = m.take(m.number(count))
        m.spend(40 + 2 * len(data), 4)
        m.stack.append(int.from_bytes(data, "little", signed=True))

    return action


def _text(count: int) -> Action:
    def action(m: Machine) -> None:
        data = m.take(m.number(count))
        # Text with one character outside of the first plane takes four bytes for each.
        m.spend(72 + len(data) * (1 if data.isascii() else 4), 3)
        m.stack.append(data.decode("utf-8", "surrogatepass"))

    return action


def _bytes(count: int) -> Action:
    def action(m: Machine) -> None:
        data = m.take(m.number(count))
        m.spend(56 + len(data), 3)
        m.stack.append(data)

    return action


def _put(count: int) -> Action:
    def action(m: Machine) -> None:
        m.spend(110)
        m.memo[m.number(count)] = m.stack[-1]

    return action


def _get(count: int) -> Action:
    return lambda m: m.stack.append(m.memo[m.number(count)])


def _tuple(count: int) -> Action:
    def action(m: Machine) -> None:
        if len(m.stack) < count:
            raise Malformed("an opcode finds nothing on the stack")
        m.spend(56 + 8 * count)
        m.stack[-count:] = [tuple(m.stack[-count:])]

    return action


def _tuple_from_mark(m: Machine) -> None:
    values = m.items()
    m.spend(64 + 8 * len(values))
    m.push(tuple(values))


def _dict_from_mark(m: Machine) -> None:
    values = m.items()
    _new_dict(m)
    m.update(values)


def _new_dict(m: Machine) -> None:
    m.spend(88)
    m.stack.append({})


def _new_list(m: Machine) -> None:
    m.spend(80)
    m.stack.append([])


def _empty_set(m: Machine) -> None:
    m.spend(200)
    m.push(Call(Global("builtins", "set"), [()]))


def _frozen_set(m: Machine) -> None:
    values = m.items()
    m.spend(200 + 8 * len(values))
    m.push(Call(Global("builtins", "frozenset"), [(values,)]))


def _byte_array(m: Machine) -> None:
    data = m.take(m.number(8))
    m.spend(200 + len(data))
    m.push(Call(Global("builtins", "bytearray"), [(data,)]))


def _memoize(m: Machine) -> None:
    m.spend(110)
    m.memo[len(m.memo)] = m.stack[-1]


def _set_item(m: Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    m.update([key, value])


def _stack_global(m: Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    m.push_global(module, name)


def _frame(m: Machine) -> None:
    if m.number(8) > len(m.data) - m.position:
        raise Truncated("it ends early")


def _new_object(m: Machine) -> None:
    # NEWOBJ_EX: class, arguments, named arguments.
    named, args = m.stack.pop(), m.stack.pop()
    if not isinstance(args, tuple) or not isinstance(m.stack[-1], Placeholder):
        raise Malformed("named arguments of something that takes none")
    m.push(args)
    m.call()
    if isinstance(m.stack[-1], Placeholder):  # not copied into one tuple, which may be long
        m.stack[-1].parts.append(named)


def _old_object(m: Machine, *, named: bool) -> None:
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


ACTIONS: dict[int, Action] = {
    ord("("): Machine.mark,
    ord("0"): lambda m: m.stack.pop(),
    ord("1"): lambda m: m.items(),
    ord("2"): lambda m: m.stack.append(m.stack[-1]),
    ord("J"): _int(4, signed=True),
    ord("K"): _int(1),
    ord("M"): _int(2),
    ord("N"): _push(None),
    ord("Q"): Machine.load_storage,
    ord("R"): Machine.call,
    ord("T"): _text(4),
    ord("U"): _text(1),
    ord("X"): _text(4),
    ord("a"): lambda m: m.extend([m.stack.pop()]),
    ord("b"): Machine.build,
    ord("c"): lambda m: m.push_global(m.line(), m.line()),
    ord("d"): _dict_from_mark,
    ord("}"): _new_dict,
    ord("e"): lambda m: m.extend(m.items()),
    ord("h"): _get(1),
    ord("i"): lambda m: _old_object(m, named=True),
    ord("j"): _get(4),
    ord("l"): lambda m: m.push(m.items()),
    ord("]"): _new_list,
    ord("o"): lambda m: _old_object(m, named=False),
    ord("q"): _put(1),
    ord("r"): _put(4),
    ord("s"): _set_item,
    ord("t"): _tuple_from_mark,
    ord(")"): _push(()),
    ord("u"): lambda m: m.update(m.items()),
    ord("G"): lambda m: m.stack.append(struct.unpack(">d", m.take(8))[0]),
    ord("B"): _bytes(4),
    ord("C"): _bytes(1),
    0x80: lambda m: m.take(1),  # PROTO
    0x81: Machine.call,  # NEWOBJ, cls.__new__(cls, *args): the same record as cls(*args)
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
    0x8F: _empty_set,
    0x90: lambda m: m.extend(m.items()),  # ADDITEMS
    0x91: _frozen_set,
    0x92: _new_object,
    0x93: _stack_global,
    0x94: _memoize,
    0x95: _frame,
    0x96: _byte_array,
}
