"""A pickle reader that cannot run anything: opcodes to plain containers and inert records.

The opcodes are those of Python's ``pickletools`` for the binary protocols, as ``torch.save``
writes them. There is no import, no attribute access and no call in here, whatever the file says;
every size is bounded by the bytes that are really there, and so are all of them together: what a
pickle builds, and the work that takes, may grow with the size of its file and no faster.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from streamload.sources.torch.pickle_machine import Machine, Truncated
from streamload.sources.torch.pickle_opcodes import ACTIONS
from streamload.sources.torch.pickle_records import Global, Malformed, StorageRef, TensorRef

__all__ = ["MAX_PICKLE_BYTES", "Pickled", "Truncated", "read_pickle"]

# A tensor takes about 150 bytes and 40 opcodes: room for several hundred thousand tensors.
MAX_PICKLE_BYTES = 64 << 20


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


def read_pickle(
    data: bytes,
    start: int = 0,
    *,
    file_bytes: int,
    legacy: bool = False,
    inert: Collection[Global] = (),
) -> Pickled:
    """The object pickled at ``data[start:]``; ``legacy`` of the format before the zip one.

    ``file_bytes`` is the size of the whole file, with the values: what may be built grows with it.
    ``inert`` are names that are not refused: placeholders stand for them, as for any class.

    Raises:
        Malformed: damaged (Truncated: too short), or it names what may not be read
            (RefusedGlobal).
    """
    machine = Machine(data, start, file_bytes, legacy, inert)
    try:
        result = machine.run(ACTIONS)
    except (IndexError, KeyError) as error:
        raise Malformed("an opcode finds nothing on the stack or in the memo") from error
    except UnicodeDecodeError as error:
        raise Malformed("text that is not UTF-8") from error
    return Pickled(
        result, machine.position, machine.storages, machine.tensors, tuple(machine.unknown)
    )
