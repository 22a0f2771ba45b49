"""Mutated files: bytes flipped, cut and put in, or changed by what the format means."""

from __future__ import annotations

import io
import pickletools
import struct
import zipfile
from random import Random

from tests.fuzz import texts

__all__ = [
    "mutated_distcp",
    "mutated_index",
    "mutated_legacy",
    "mutated_safetensors",
    "mutated_zip",
]

_BYTES = [0, 1, 0x7F, 0x80, 0xFF, 0x20, 0x22, 0x2C, 0x30, 0x5B, 0x7B, 0x7D]


def mutated_bytes(data: bytes, rng: Random, *, stop: int | None = None) -> bytes:
    """One to three changes before byte ``stop``, without regard for any meaning."""
    raw = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        end = min(len(raw), len(raw) if stop is None else stop)
        if not end:
            break
        at = rng.randrange(end)
        match rng.randrange(7):
            case 0 | 1:
                raw[at] ^= 1 << rng.randrange(8)
            case 2:
                raw[at] = rng.choice(_BYTES)
            case 3:
                raw[at:at] = bytes(rng.choice(_BYTES) for _ in range(rng.randint(1, 9)))
            case 4:
                del raw[at : at + rng.randint(1, 12)]
            case 5:
                size = rng.choice([2, 4, 8])
                number = rng.choice([0, 1, 2**15, 2**31 - 1, 2**32 - 1, 2**63, 2**64 - 1])
                raw[at : at + size] = (number & (2 ** (8 * size) - 1)).to_bytes(size, "little")
            case _:
                del raw[at:]
    return bytes(raw)


def mutated_safetensors(seed: bytes, rng: Random) -> bytes:
    """A safetensors file; most of the changes are in its header."""
    length = struct.unpack_from("<Q", seed)[0]
    if rng.random() < 0.25:
        return mutated_bytes(seed, rng, stop=rng.choice([8, 8 + length, len(seed)]))
    header = texts.parsed(seed[8 : 8 + length])
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        header = texts.mutated(header, rng)
    text = texts.written(header).encode("utf-8", "surrogatepass")
    pad = rng.choice([b"", b" ", b"\n\t ", b" " * 7, b"\0", b" \0"]) if rng.random() < 0.3 else b""
    text = (rng.choice([b"\xef\xbb\xbf", b" ", b""]) if rng.random() < 0.05 else b"") + text + pad
    stated = len(text) + (rng.choice([-1, 1, 8, 2**63, -len(text)]) if rng.random() < 0.05 else 0)
    body = seed[8 + length :] + (b"12345678"[: rng.randrange(9)] if rng.random() < 0.1 else b"")
    return struct.pack("<Q", stated & (2**64 - 1)) + text + body


def mutated_index(seed: str, rng: Random) -> bytes:
    """The text of an index."""
    if rng.random() < 0.25:
        return mutated_bytes(seed.encode(), rng)
    index = texts.parsed(seed)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        index = texts.mutated(index, rng)
    text = texts.written(index).encode("utf-8", "surrogatepass")
    return (rng.choice([b"\xef\xbb\xbf", b" \n", b""]) if rng.random() < 0.1 else b"") + text


_GLOBALS = [
    b"torch\nFloatStorage\n", b"torch\nHalfStorage\n", b"torch\nLongStorage\n", b"os\nsystem\n",
    b"torch._utils\n_rebuild_tensor_v2\n", b"collections\nOrderedDict\n", b"builtins\nset\n",
    b"torch._utils\n_rebuild_parameter\n", b"builtins\neval\n", b"torch\nSize\n",
    b"torch._utils\n_rebuild_sparse_tensor\n", b"torch\nfloat16\n", b"builtins\ngetattr\n",
    b"torch._tensor\n_rebuild_from_type_v2\n", b"torch.storage\nUntypedStorage\n",
    b"torch\ndevice\n", b"_codecs\nencode\n", b"collections\ndefaultdict\n", b"torch\nload\n",
    b"torch.serialization\n_get_layout\n", b"torch.nn.parameter\nParameter\n", b"x\ny\n",
]  # fmt: skip
_NO_ARGUMENT = [
    bytes([c]) for c in b"(.0128NQRabd}el]oqstu)\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x93\x94"
]
_VALUES = [
    b"K\0", b"K\1", b"K\xff", b"M\xff\xff", b"J\xff\xff\xff\xff", b"J\0\0\0\x80", b"N", b"\x88",
    b"\x89", b"]", b"}", b")", b"\x8a\x08" + b"\xff" * 7 + b"\x7f", b"\x8a\x09" + b"\0" * 8 + b"\1",
    b"\x8a\0", b"X\0\0\0\0", b"X\1\0\0\0a", b"X\xff\xff\xff\xff", b"X\3\0\0\0\xed\xa0\x80",
    b"X\7\0\0\0storage", b"h\0", b"h\xff", b"j\xff\xff\xff\xff", b"G" + struct.pack(">d", 1e308),
    b"K\2\x85", b"K\0K\1\x86", b"\x95" + b"\xff" * 8, b"\x8b\xff\xff\xff\x7f", b"\x8c\x01b",
    b"I5\n", b"S'a'\n", b"L5L\n", b"F1.5\n", b"g0\n", b"p0\n", b"B\1\0\0\0x", b"C\1x",
    b"\x96" + b"\0" * 8,
]  # fmt: skip


def _operations(data: bytes, start: int = 0) -> list[tuple[int, bytes]]:
    """(opcode, its bytes) of the pickle at ``start``."""
    stream = io.BytesIO(data)
    stream.seek(start)
    places = [(ord(op.code), at) for op, _, at in pickletools.genops(stream)]
    stops = [at for _, at in places[1:]] + [stream.tell()]
    return [(code, data[at:stop]) for (code, at), stop in zip(places, stops, strict=True)]


def mutated_pickle(data: bytes, rng: Random, start: int = 0) -> tuple[bytes, int]:
    """The pickle at ``start`` with other opcodes; and where it ended."""
    parts = _operations(data, start)
    end = start + sum(len(part) for _, part in parts)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at = rng.randrange(1, len(parts))
        code, part = parts[at]
        match rng.randrange(8):
            case 0:
                parts.insert(at, (0, rng.choice(_NO_ARGUMENT)))
            case 1:
                parts.insert(at, (0, rng.choice(_VALUES)))
            case 2:
                del parts[at]
            case 3:
                parts.insert(rng.randrange(1, len(parts)), parts[at])
            case 4:
                parts[at] = (code, rng.choice(_NO_ARGUMENT))
            case 5 | 6:
                numbers = [i for i, (c, _) in enumerate(parts) if chr(c) in "JKMN\x8a\x88\x89"]
                named = [i for i, (c, _) in enumerate(parts) if chr(c) == "c"]
                if named and rng.random() < 0.3:
                    parts[rng.choice(named)] = (99, b"c" + rng.choice(_GLOBALS))
                elif numbers:
                    parts[rng.choice(numbers)] = (0, rng.choice(_VALUES))
            case _:
                if len(part) > 1:
                    raw = bytearray(part)
                    raw[rng.randrange(1, len(raw))] = rng.choice(_BYTES)
                    parts[at] = (code, bytes(raw))
        if len(parts) < 2:
            break
    return b"".join(part for _, part in parts), end


def mutated_zip(seed: bytes, rng: Random) -> bytes:
    """A torch zip file: bytes anywhere, or another pickle or other records in a whole archive."""
    if rng.random() < 0.3:
        # The directory at the end, and the headers, are more telling than the padding.
        stop = rng.choice([None, 600, None])
        if rng.random() < 0.5:
            tail = rng.randrange(30, min(len(seed), 900))
            return seed[:-tail] + mutated_bytes(seed[-tail:], rng)
        return mutated_bytes(seed, rng, stop=stop)
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(seed)) as old, zipfile.ZipFile(made, "w") as new:
        for info in old.infolist():
            data, name = old.read(info), info.filename
            if name.endswith("/data.pkl"):
                if rng.random() < 0.8:
                    data, _ = mutated_pickle(data, rng)
                elif rng.random() < 0.5:
                    data = mutated_bytes(data, rng)
            elif "/data/" in name and rng.random() < 0.1:
                data = rng.choice([b"", data[:-1], data + b"1234", data * 2])
            elif rng.random() < 0.03:
                data = rng.choice([b"", b"big", b"little", b"3\n", b"\xff"])
            if rng.random() < 0.02:
                continue
            method = zipfile.ZIP_DEFLATED if rng.random() < 0.02 else zipfile.ZIP_STORED
            new.writestr(name, data, method)
    return made.getvalue()


def mutated_legacy(seed: bytes, rng: Random) -> bytes:
    """A file of the format before zip: five pickles in a row, then the storages."""
    if rng.random() < 0.3:
        return mutated_bytes(seed, rng)
    starts = [0]
    for _ in range(5):
        stream = io.BytesIO(seed)
        stream.seek(starts[-1])
        list(pickletools.genops(stream))
        starts.append(stream.tell())
    which = rng.choice([1, 2, 3, 3, 3, 3, 4])
    changed, end = mutated_pickle(seed, rng, starts[which])
    return seed[: starts[which]] + changed + seed[end:]


def mutated_distcp(seed: bytes, rng: Random) -> bytes:
    """The ``.metadata`` of torch.distributed.checkpoint: a bare pickle."""
    return mutated_bytes(seed, rng) if rng.random() < 0.3 else mutated_pickle(seed, rng)[0]
