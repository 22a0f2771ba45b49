"""What is not read (yet), told by its first bytes or by what its folder holds, and the way out."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

# First bytes enough for every entry: a tar archive has its mark at byte 257.
SNIFFED_BYTES = 512
_UNPACK = "unpack it, and pass the checkpoint in it"
# Offset, bytes, what it is.
_MAGIC = (
    (0, b"version https://git-lfs", "is a git-lfs pointer, not the checkpoint itself: fetch "
     "the file with `git lfs pull`"),
    (0, b"GGUF", "is a GGUF file (llama.cpp), which is read by itself, not among others"),
    (0, b"lmgg", "is a GGML file (llama.cpp), which is not read"),
    (0, b"tjgg", "is a GGML file (llama.cpp), which is not read"),
    (0, b"\x89HDF\r\n\x1a\n", "is an HDF5 file (Keras or TensorFlow weights), which is not read"),
    (0, b"\x93NUMPY", "is a numpy array (.npy), not a checkpoint of named tensors"),
    (4, b"TFL3", "is a TensorFlow Lite model, which is not read"),
    (0, b"\x1f\x8b", f"is a gzip-compressed file or archive: {_UNPACK}"),
    (0, b"BZh", f"is a bzip2-compressed file or archive: {_UNPACK}"),
    (0, b"\xfd7zXZ\0", f"is an xz-compressed file or archive: {_UNPACK}"),
    (0, b"\x28\xb5\x2f\xfd", f"is a zstd-compressed file or archive: {_UNPACK}"),
    (0, b"7z\xbc\xaf\x27\x1c", f"is a 7z archive: {_UNPACK}"),
    (0, b"Rar!", f"is a rar archive: {_UNPACK}"),
    (257, b"ustar", f"is a tar archive: {_UNPACK}"),
)  # fmt: skip
_PAGE = re.compile(rb"\s*(<!doctype|<html|<\?xml)", re.IGNORECASE)
# A protobuf message: the version of its representation, then the producer or an operator set.
_ONNX = re.compile(rb"\x08[\x01-\x1f](\x12[\x01-\x40][\w.+ -]|:)")
_JSON = re.compile(rb'\{\s*("[^"\x00-\x1f]+"\s*:|\})')
_PATH = re.compile(rb"(\.{1,2}/|/|~/|[A-Za-z]:\\)[\x20-\x7e]{1,500}\s*")

_OF_ONE_RANK = re.compile(r"__\d+\.metadata")
_ZERO = re.compile(r"(bf16_|fp16_)?zero_pp_rank_\d+_mp_rank_\d+_(optim|model)_states\.pt")
_WEIGHTS = re.compile(r"(layer_\d+-model_\d+|mp_rank_\d+)[-_]model_states\.pt")
_RANK = re.compile(r".*(^|[_.-])rank[_-]?\d+([_.-].*)?\.(pt|pth|bin|safetensors)|mp_rank_\d+.*\.pt")


def describe_start(start: bytes) -> str | None:
    """What a file that begins with ``start`` is, if it is known and none of ours."""
    if _PAGE.match(start):
        return "is a web page, not a checkpoint: the download was refused or redirected"
    if _PATH.fullmatch(start):
        return (
            f"is a text that holds a path ({start.decode('ascii').strip()[:100]!r}): a link that "
            "was copied as text; fetch the file itself"
        )
    if start[8:9] == b"{":  # a safetensors header: its length may begin with any bytes
        return None
    # As a length of a header, these bytes are more than one may have.
    if _JSON.match(start):
        return "is a JSON file, which may lie beside a checkpoint's weights: pass their folder"
    for offset, magic, meaning in _MAGIC:
        if start[offset:].startswith(magic):
            return meaning
    return "is an ONNX model, which is not read" if _ONNX.match(start) else None


def describe_folder(folder: str, names: Sequence[str]) -> str | None:
    """What a folder that holds ``names`` is, if it is known and none of ours."""
    if any(name.endswith(".distcp") for name in names):
        alone = any(map(_OF_ONE_RANK.fullmatch, names))
        why = "that each rank of a run saved for itself; save them together" if alone else (
            "without the .metadata that says what is in them: the save did not come to its end, "
            "or that file was left behind"
        )  # fmt: skip
        return f"holds .distcp files of torch.distributed.checkpoint {why}"
    inner = [name for name in names if re.fullmatch(r"global_step\d+", name)]
    below = [n for step in inner for n in _names(os.path.join(folder, step))]
    zero = [match[2] for name in (*names, *below) if (match := _ZERO.fullmatch(name))]
    # Up to its second stage only the optimizer's state is cut up; the weights are in other files.
    if zero and ("model" in zero or not any(map(_WEIGHTS.fullmatch, (*names, *below)))):
        return (
            "is a DeepSpeed ZeRO checkpoint: its weights are cut up between the ranks' files; put "
            "them together with the zero_to_fp32.py beside them: python zero_to_fp32.py . OUT"
        )
    other = [n for n in names if n.lower().endswith((".h5", ".onnx", ".msgpack", ".npz", ".nemo"))]
    return f"holds {other[0]}, which is of a kind that is not read" if other else None


def describe_parts(names: Sequence[str]) -> str | None:
    """What several files without an index are, if they are parts of one model."""
    if all(map(_RANK.fullmatch, names)):
        return "what each rank of a run saved of one model; put them together where they were made"
    return None


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
