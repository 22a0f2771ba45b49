"""One mutated file against an independent reading: exact values, or an error of ours, in time."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import gguf
import numpy as np
import torch
from safetensors import SafetensorError, safe_open

import streamload
from tests.fuzz.reference import by_pickle, by_torch_distributed
from tests.fuzz.seeds import tensors_of, torch_objects

__all__ = ["LIMIT_S", "Verdict", "at_most", "judged", "limit_bytes", "limit_s"]

LIMIT_S = 0.5
LIMIT_BYTES = 64 << 20
_S_PER_BYTE, _BYTES_PER_BYTE = 50e-9, 20
# The references allocate what the file asks for; the machine must not suffer for it.
_REFERENCE_BYTES = 256 << 20


def limit_s(size: int) -> float:
    """How long the answer to a file of ``size`` bytes may take, in seconds of processor time."""
    return LIMIT_S + _S_PER_BYTE * size


def limit_bytes(size: int) -> int:
    """How much memory it may take."""
    return LIMIT_BYTES + _BYTES_PER_BYTE * size


@dataclass(frozen=True)
class Verdict:
    """What became of one file.

    Attributes:
        kind: ``"same"``, ``"both refuse"``, ``"stricter"`` (only we refuse), ``"beside"`` (the
            reference stops at what is beside the weights, which are a seed's), or a failure:
            ``"laxer"``, ``"values"``, ``"foreign error"``, ``"slow"``.
        text: our message, or what is wrong.
        elapsed_s: our reading, in seconds of processor time: others may be computing too.
    """

    kind: str
    text: str
    elapsed_s: float

    @property
    def is_failure(self) -> bool:
        return self.kind not in ("same", "both refuse", "stricter", "beside")


def judged(path: str, kind: str, *, mode: str = "stream") -> Verdict:
    """Read ``path`` both ways; ``kind`` names the reference: a key of ``_REFERENCES``."""
    size = os.path.getsize(path)
    start_s = time.process_time()
    found: Mapping[str, torch.Tensor] | None = None
    text = ""
    try:
        with at_most(limit_bytes(size)):
            found = streamload.load_state_dict(path, mode=mode, workers=1)  # type: ignore[arg-type]
    except streamload.StreamloadError as error:
        text = str(error)
        text.encode("utf-8")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return Verdict("foreign error", f"{type(error).__name__}: {error}"[:500], 0.0)
    elapsed_s = time.process_time() - start_s
    if elapsed_s > limit_s(size):
        return Verdict("slow", f"{elapsed_s:.2f} s; {text}", elapsed_s)
    with at_most(_REFERENCE_BYTES):
        expected = _REFERENCES[kind](path)
    if found is None:
        return Verdict("both refuse" if expected is None else "stricter", text, elapsed_s)
    if expected is None:
        return Verdict("beside" if _is_unharmed(found) else "laxer", f"{list(found)}", elapsed_s)
    # Which not-a-number a scale that is none gives is nobody's to say.
    wrong = _difference(
        found, expected, exact=kind not in ("torch", "distributed"), nans=kind == "gguf"
    )
    return Verdict("values" if wrong else "same", wrong, elapsed_s)


def _is_unharmed(found: Mapping[str, torch.Tensor]) -> bool:
    """True if each tensor is, bit for bit, what a seed of torch files has under its name."""
    seeds = [tensors_of(tree) for tree in torch_objects()]
    return all(
        any(not _difference({name: tensor}, seed, exact=False) for seed in seeds)
        for name, tensor in found.items()
    )


@contextlib.contextmanager
def at_most(nbytes: int) -> Iterator[None]:
    """Inside, this process can have no more than ``nbytes`` of new memory of its own (Linux)."""
    if sys.platform != "linux":
        yield
        return
    with open("/proc/self/status") as file:
        held = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData:"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (held + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _difference(
    found: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    *,
    exact: bool,
    nans: bool = False,
) -> str:
    if exact and found.keys() != expected.keys():
        return f"names {sorted(found)} instead of {sorted(expected)}"
    for name, tensor in found.items():
        # Of a torch file only the state dict is taken, under the names it has inside.
        suitable = [t for path, t in expected.items() if path == name or path.endswith(f".{name}")]
        if not any(_equal(tensor, other, nans=nans) for other in suitable):
            return f"{name!r} is {tensor!r}, expected {suitable!r}"
    return ""


def _equal(one: torch.Tensor, two: torch.Tensor, *, nans: bool) -> bool:
    """Bit for bit; with ``nans`` all numbers that are none are equal."""
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    flat = [t.detach().resolve_conj().resolve_neg().contiguous().view(-1) for t in (one, two)]
    if nans and one.dtype == torch.float32:
        flat = [t.where(~t.isnan(), torch.nan) for t in flat]
    return torch.equal(*(t.view(torch.uint8) if t.numel() else t for t in flat))


# Why torch.load refuses files of which we take the weights, their values being those of the
# reading by zipfile and pickle: opcodes of later protocols (torch writes, but does not read them),
# records that nobody needs, calls with wrong arguments beside the weights, which we do not carry
# out, and archives that miniz and zipfile understand differently.
_BESIDE = (
    "Unsupported operand",
    "invalid literal for int()",
    "codec can't decode byte",
    "Couldn't parse the version",
    "Unknown endianness type",
    "has no attribute 'dtype'",
    "Unsupported global",
    "_get_layout()",
    "device() received",
    "set expected at most",
    "_rebuild_sparse_tensor()",
)


def _by_safetensors(path: str) -> dict[str, torch.Tensor] | None:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError, TypeError, IndexError):
        return None


def _by_index(path: str) -> dict[str, torch.Tensor] | None:
    """Every tensor of every shard the map names, if all that it promises is there."""
    folder = os.path.dirname(path)
    try:
        with open(path, encoding="utf-8-sig") as file:
            weight_map = json.load(file)["weight_map"]
        if not weight_map:
            return None
        found: dict[str, torch.Tensor] = {}
        for shard in set(weight_map.values()):
            if os.path.basename(shard) != shard:
                return None
            tensors = _by_safetensors(os.path.join(folder, shard))
            if tensors is None:
                return None
            found.update(tensors)
        return found if weight_map.keys() <= found.keys() else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, AttributeError):
        return None


def _by_torch(path: str) -> dict[str, torch.Tensor] | None:
    try:
        # torch reads the zip format from the start of the file, whatever follows it.
        tree = torch.load(path, map_location="cpu", weights_only=True)
        found = dict(tensors_of(tree))
        # A tensor that reaches out of its storage fails here, not in a later access.
        return {name: t.clone() if t.layout == torch.strided else t for name, t in found.items()}
    except Exception as error:  # torch.load raises of every kind on damaged files
        if not any(words in str(error) for words in _BESIDE):
            return None
    try:
        return dict(tensors_of(by_pickle(path)))
    except Exception:  # so does pickle
        return None


def _by_torch_distributed(path: str) -> dict[str, torch.Tensor] | None:
    try:
        return dict(tensors_of(by_torch_distributed(os.path.dirname(path))))
    except Exception:  # torch raises of every kind here
        return None


# The reference reads a length as it stands, and loops as often.
_REFERENCE_S = 2.0


def _by_gguf(path: str) -> dict[str, torch.Tensor] | None:
    """Values in float32 where they are quantised; None for what the library does not take."""

    def give_up(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, _REFERENCE_S)
    try:
        reader = gguf.GGUFReader(path)
        return {t.name: _gguf_values(t) for t in reader.tensors}
    except Exception:  # of every kind, as nothing is checked
        return None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _gguf_values(tensor: gguf.ReaderTensor) -> torch.Tensor:
    shape = [int(size) for size in tensor.shape[::-1]]
    kind, data = tensor.tensor_type, np.array(tensor.data)
    if kind == gguf.GGMLQuantizationType.BF16:
        return torch.from_numpy(data.view(np.int16)).view(torch.bfloat16).reshape(shape)
    if data.dtype != np.uint8:
        return torch.from_numpy(data).reshape(shape)
    if kind.name not in _DECODED:
        raise ValueError(kind.name)
    if not data.size:  # not for the library
        return torch.empty(shape)
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.quants.dequantize(data, kind)).reshape(shape)


_DECODED = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
)
_REFERENCES = {
    "safetensors": _by_safetensors,
    "index": _by_index,
    "torch": _by_torch,
    "distributed": _by_torch_distributed,
    "gguf": _by_gguf,
}
