"""A reader of safetensors headers that shares no code with what is measured.

Values are checked against it, so it stays apart from streamload's and from the safetensors
package's own.
"""

import json
from collections.abc import Iterable

from streamload.measuring.floor import Piece

TORCH_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip


def read_headers(files: Iterable[str]) -> dict[str, Piece]:
    """Name to place of every tensor in ``files``, in file order."""
    found: dict[str, Piece] = {}
    for path in files:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        here = {}
        for name, item in header.items():
            begin, end = item["data_offsets"]
            dtype, shape = TORCH_NAMES[item["dtype"]], tuple(item["shape"])
            here[name] = Piece(name, path, 8 + length + begin, end - begin, dtype, shape)
        found.update(sorted(here.items(), key=lambda pair: pair[1].offset))
    return found
