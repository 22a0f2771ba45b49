"""Options common to all calls that move data, documented once."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from typing_extensions import TypedDict

from streamload.core.dtypes import DType, parse_dtype
from streamload.core.habits import unknown_options
from streamload.core.wording import suggestion

if TYPE_CHECKING:
    import torch

# progress(done_bytes, total_bytes, stored_name), from the thread that called the load.
Progress: TypeAlias = Callable[[int, int, str], object]
Device: TypeAlias = "str | torch.device | Mapping[str, str | torch.device]"
Mode: TypeAlias = Literal["auto", "stream", "map"]
Layout: TypeAlias = Literal["contiguous", "stored"]
Ties: TypeAlias = Literal["refuse", "keep"]
Overflow: TypeAlias = Literal["report", "refuse"]
Replicas: TypeAlias = Literal["refuse", "average"]
Quantize: TypeAlias = Literal["int8"]


class LoadOptions(TypedDict, total=False):
    """Keyword arguments of ``load``, ``load_into``, ``load_state_dict``, ``plan`` and others.

    Attributes:
        dtype: cast floating-point tensors to it: a torch dtype or its name (``"bfloat16"``,
            ``"bf16"``). None and ``"auto"``: as stored for a meta parameter, the parameter's own
            where it holds data.
        device: one device, or a dict of module prefix → device. ``"auto"``: CUDA if torch sees
            such a device, else MPS, else the CPU.
        mode: ``"stream"`` copies into memory of its own; ``"map"`` gives views of the mapped
            file where dtype and alignment allow: ready in milliseconds. The file must then not
            be cut while the model lives. ``"auto"``, the default of ``load``: as ``"map"`` where
            that is known to be safe and no slower, else as ``"stream"``. The other calls stream.
        layout: ``"contiguous"`` (default when streaming) or ``"stored"`` (default when mapping):
            transposed weights as strided views in the file's order of bytes. ``mode="auto"``
            without it leaves transposed what is wider than 16 bits.
        workers: threads that read and cast; default: the cores there are, at most 8, to a device
            at most 16.
        chunk_bytes: how much one read brings; default 4 MiB, to a device 16 MiB.
        ring_bytes: host memory that a load to a device goes through, for each device; default
            192 MiB, or four buffers of 16 MiB more than there are workers.
        strict: refuse if anything is missing, unexpected or of another shape.
        layers: only these block indices (from 0) take part.
        prefix: only stored names under it, taken off.
        check_memory: refuse before allocating what does not fit.
        ties: ``"refuse"`` or ``"keep"``, if a file holds both names of a tie and they differ.
        overflow: ``"report"`` or ``"refuse"`` finite values that become infinite by the cast.
        replicas: ``"refuse"`` or ``"average"``, if partitions that must agree do not.
        cache: keep a converted copy in the user's cache folder and map it next time.
        progress: True shows a bar (in a terminal or a notebook), or a function called as
            progress(done_bytes, total_bytes, stored_name) now and then.
        on_layer: called as on_layer(layer, tensors) with each block's complete tensors by local
            name (layer None: those outside of blocks); may return replacements by name: tensors
            of the same shape, dtype and device, or modules, which may be anything with data.
        quantize: ``"int8"``, weight only, while streaming (extra ``int8``).
        adapter: a folder with a LoRA adapter of PEFT, or several, merged one after the other into
            the weights as these are read: computed in float32 and rounded once.
        timeout_s: how long to wait for what a server was asked for (2 MiB at most), all attempts
            included (default 60), and for a sign of another rank (default 300).
        download: False streams ``hf:ORG/NAME`` from the hub if it is not in the local cache.
    """

    dtype: torch.dtype | str | None
    device: Device
    mode: Mode | None
    layout: Layout | None
    workers: int | None
    chunk_bytes: int | None
    ring_bytes: int | None
    strict: bool
    layers: Collection[int] | None
    prefix: str | None
    check_memory: bool
    ties: Ties
    overflow: Overflow
    replicas: Replicas
    cache: bool
    progress: Progress | bool | None
    on_layer: Callable[[int | None, dict[str, torch.Tensor]], object] | None
    quantize: Quantize | None
    adapter: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None
    timeout_s: float | None
    download: bool | None


# What each option is where it is not given, as signatures show it. ``mode`` is the call's own.
DEFAULTS: Mapping[str, object] = dict.fromkeys(LoadOptions.__annotations__) | {
    "device": "cpu",
    "strict": True,
    "check_memory": True,
    "ties": "refuse",
    "overflow": "report",
    "replicas": "refuse",
    "cache": False,
}


@dataclass(frozen=True, slots=True)
class Reach:
    """How far to go for a checkpoint: see ``timeout_s`` and ``download`` of LoadOptions."""

    timeout_s: float | None = None
    download: bool | None = None


AT_HAND = Reach()


# Gaps between what a rank holds that are read through where they are shorter: a read of its own
# costs as much: some calls, or, far away, an answer.
GAP_BYTES, FAR_GAP_BYTES = 16 << 10, 256 << 10


@dataclass(frozen=True)
class Settings:
    """LoadOptions, checked and with defaults filled in."""

    dtype: DType | None = None
    device: str | Mapping[str, str] = "cpu"
    mode: str = "stream"
    layout: str | None = None
    workers: int = 2
    chunk_bytes: int = 4 << 20
    ring_bytes: int = 192 << 20
    strict: bool = True
    layers: frozenset[int] | None = None
    prefix: str | None = None
    check_memory: bool = True
    ties: str = "refuse"
    overflow: str = "report"
    replicas: str = "refuse"
    cache: bool = False
    progress: Progress | Literal[True] | None = None
    on_layer: Callable[[int | None, dict[str, torch.Tensor]], object] | None = None
    quantize: str | None = None
    adapter: tuple[str, ...] = ()
    timeout_s: float | None = None
    download: bool | None = None
    renumber: bool = False
    expected_layers: int | None = None

    staging_bytes: int = 32 << 20
    chunk_is_given: bool = True
    gap_bytes: int = GAP_BYTES

    @property
    def reach(self) -> Reach:
        return Reach(self.timeout_s, self.download)

    @property
    def maps(self) -> bool:
        """True if tensors become views of the file where they can."""
        return self.mode in ("map", "auto")

    @property
    def leaves_layout(self) -> bool:
        """True if each tensor's layout is chosen by what is fastest."""
        return self.mode == "auto" and self.layout is None

    @property
    def stored_order(self) -> bool:
        """True if transposed weights stay strided, in the file's order of bytes."""
        return self.layout == "stored" or (self.layout is None and self.mode == "map")


_CHOICES: Mapping[str, tuple[str | None, ...]] = {
    "mode": (*get_args(Mode), None),
    "layout": (*get_args(Layout), None),
    "ties": get_args(Ties),
    "overflow": get_args(Overflow),
    "replicas": get_args(Replicas),
    "quantize": (*get_args(Quantize), None),
}
_SWITCHES = ("strict", "check_memory", "cache", "download")
MOST_WORKERS = 8
# The bus to a device is faster than eight readers.
_MOST_DEVICE_WORKERS = 16
# A device's ring: the bus likes pieces of this size, and several of them under way.
SLOT_BYTES = 16 << 20
_LEAST_SLOTS = 12
_SLOTS_BESIDE_WORKERS = 4
_LONGEST_S = 1_000_000


def settings_from(options: Mapping[str, Any], mode: str = "stream") -> Settings:
    """Check options and fill in defaults; ``mode`` is the call's own.

    Raises:
        TypeError: an unknown option, or one of the wrong type.
        ValueError: a value that is not among the choices or not positive.
    """
    values = dict(options)
    unknown = values.keys() - DEFAULTS.keys()
    if unknown:
        raise TypeError(unknown_options(sorted(unknown), DEFAULTS))
    for name, choices in _CHOICES.items():
        if name in values:
            _check_choice(name, values[name], choices)
    for name in _SWITCHES:
        if isinstance(values.get(name), str):  # which would be true whatever it says
            raise TypeError(f"{name} must be True or False, not {values[name]!r}")
    if not isinstance(values.get("prefix"), str | None):
        raise TypeError(f"prefix must be the start of names, not {values['prefix']!r}")
    values["progress"] = _progress(values.get("progress"))
    values["mode"] = values.get("mode") or mode
    values["dtype"] = _dtype(values.get("dtype"))
    values["device"] = _device(values.get("device", "cpu"))
    values["layers"] = _layers(values.get("layers"))
    is_host = _is_host(values["device"])
    threads = min(usable_cpus(), MOST_WORKERS if is_host else _MOST_DEVICE_WORKERS)
    workers = values["workers"] = _positive("workers", values.get("workers"), threads)
    values["chunk_is_given"] = values.get("chunk_bytes") is not None
    default = 4 << 20 if is_host else SLOT_BYTES
    values["adapter"] = _paths("adapter", values.get("adapter"))
    values["chunk_bytes"] = _positive("chunk_bytes", values.get("chunk_bytes"), default)
    default = SLOT_BYTES * slots_for(workers)
    values["ring_bytes"] = _positive("ring_bytes", values.get("ring_bytes"), default)
    values["timeout_s"] = seconds("timeout_s", values.get("timeout_s"))
    return Settings(**values)


def slots_for(workers: int) -> int:
    """Buffers of a ring: one for each reader, and some that are being copied meanwhile."""
    return max(_LEAST_SLOTS, workers + _SLOTS_BESIDE_WORKERS)


def bound_of_shards(value: Any) -> int | None:
    """``max_shard_bytes`` as given, or None.

    Raises:
        TypeError: not a whole number.
        ValueError: not positive.
    """
    return None if value is None else _positive("max_shard_bytes", value, 1)


def _check_choice(name: str, value: object, choices: tuple[str | None, ...]) -> None:
    if (value is None or isinstance(value, str)) and value in choices:
        return
    *most, last = map(repr, choices)
    listed = f"{', '.join(most)} or {last}" if most else last
    near = suggestion(value, filter(None, choices)) if isinstance(value, str) else ""
    raise ValueError(f"{name} must be {listed}, not {value!r}{near}")


def _progress(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value or None
    if not callable(value):
        raise TypeError(f"progress must be True or a function, not {value!r}")
    return value


def _dtype(value: object) -> DType | None:
    if isinstance(value, str) and value == "auto":
        return None
    dtype = parse_dtype(value)
    if dtype is not None and (not dtype.is_floating or dtype.torch_name is None):
        raise ValueError(f"dtype must be a floating-point type, not {value!r}")
    return dtype


def _device(value: Any) -> str | Mapping[str, str]:
    if isinstance(value, Mapping):
        return {str(k).rstrip("."): _device_name(v) for k, v in value.items()}
    return _device_name(value)


def _device_name(value: Any) -> str:
    """As given; ``cpu`` without a number. Whether there is such a device is told by the plan."""
    if isinstance(value, int):
        raise TypeError(f"device must be a name like 'cuda:{value:d}', not {value!r}")
    name = "cpu" if value is None else str(value)
    if name == "auto":
        return _best_device()
    if name.partition(":")[0].lower() == "gpu":
        raise ValueError(f"device {name!r} is called {name.lower().replace('gpu', 'cuda')!r} here")
    return "cpu" if name.partition(":")[0] == "cpu" and name[4:].isdigit() else name


def _best_device() -> str:
    import torch  # whoever asks is about to load

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _is_host(device: str | Mapping[str, str]) -> bool:
    return all(d == "cpu" for d in ([device] if isinstance(device, str) else device.values()))


def _layers(value: Collection[int] | None) -> frozenset[int] | None:
    if value is None:
        return None
    if isinstance(value, int):
        raise TypeError(f"layers must be a collection of block indices, like [{value}]")
    found = frozenset(value)
    if not found or any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in found):
        raise ValueError(f"layers must be block indices from 0, not {sorted(found)!r}")
    return found


def _paths(name: str, value: Any) -> tuple[str, ...]:
    if value is None or isinstance(value, (str, os.PathLike)):
        return () if value is None else (os.fsdecode(value),)
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name} must be a path or a list of paths, not {value!r}")
    return tuple(os.fsdecode(path) for path in value)


def seconds(name: str, value: Any) -> float | None:
    """A number of seconds as given, or None.

    Raises:
        TypeError: not a number.
        ValueError: not positive, or without end.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of seconds, not {value!r}")
    if not 0 < value < _LONGEST_S:
        raise ValueError(f"{name} must be more than 0 and less than {_LONGEST_S}, not {value}")
    return float(value)


def _positive(name: str, value: Any, default: int) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")
    return value


def usable_cpus() -> int:
    """CPUs this process may run on."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return cpus or 1
