"""The globals a torch pickle may name, and the records that stand for calls of them.

The table lists what ``torch.save`` writes for tensors and the plain containers around them. A
function of the table builds a record of ours from the arguments; nothing of the file is ever
imported or called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeGuard

from streamload.core.dtypes import BY_TORCH_NAME
from streamload.core.specs import Shape
from streamload.sources.torch.pickle_records import (
    Call,
    Entries,
    Global,
    Malformed,
    Placeholder,
    Size,
    StorageRef,
    TensorRef,
    UnusableTensor,
    is_key,
    shown,
)

_MAX_DIMS = 64

Args: TypeAlias = tuple[object, ...]

_STORAGE_DTYPES = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "uint8",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
}
_STORAGE_MODULES = frozenset({"torch", "torch.storage", "torch.cuda"})
# Types torch has and safetensors' table lacks: tensors of them are listed as unusable, not unknown.
_OTHER_DTYPES = frozenset(
    {"complex32", "qint8", "quint8", "qint32", "quint4x2", "quint2x4", "float4_e2m1fn_x2"}
    | {f"bits{n}" for n in ("1x8", "2x4", "4x2", "8", "16")}
    | {f"{sign}int{n}" for sign in ("", "u") for n in range(1, 8)}
)
_QSCHEMES = frozenset(
    {f"per_{of}_{kind}" for of in ("tensor", "channel") for kind in ("affine", "symmetric")}
    | {"per_channel_affine_float_qparams"}
)
_TENSOR_TYPES = frozenset(
    {("torch", "Tensor"), ("torch.nn.parameter", "Parameter"), ("torch.nn.parameter", "Buffer")}
)


def storage_of(pid: object, *, legacy: bool = False) -> StorageRef:
    """The storage a persistent id stands for.

    ``("storage", type, key, location, numel)``, and before the zip format a sixth part:
    None or ``(view key, first element, elements)``.
    """
    if not (isinstance(pid, tuple) and len(pid) == 5 + legacy and pid[0] == "storage"):
        raise Malformed("a persistent id that is no storage")
    kind, key, numel = pid[1], pid[2], pid[4]
    if not isinstance(kind, Global) or kind.module not in _STORAGE_MODULES:
        raise Malformed("a storage without a storage type")
    dtype = _STORAGE_DTYPES.get(kind.name)
    if dtype is None or not _is_name(key) or not _is_size(numel):
        raise Malformed("a storage record of the wrong form")
    start = 0
    view = pid[5] if legacy else None
    if view is not None:
        if not (isinstance(view, tuple) and len(view) == 3 and _is_size(view[1])):
            raise Malformed("a storage view of the wrong form")
        start = view[1]
    return StorageRef(key, dtype, numel, start)


def is_known(name: Global) -> bool:
    """True for the globals of the table; a Placeholder stands for any other."""
    key = (name.module, name.name)
    if key in _REBUILDERS or key in _TENSOR_TYPES or key in _KEPT:
        return True
    if name.module in _STORAGE_MODULES and name.name in _STORAGE_DTYPES:
        return True
    return name.module == "torch" and (
        name.name in BY_TORCH_NAME or name.name in _OTHER_DTYPES or name.name in _QSCHEMES
    )


def rebuild(name: object, args: object) -> object:
    """The record for ``name(*args)``; nothing is called.

    Raises:
        Malformed: the name is not one that may stand there, or the arguments do not fit it.
    """
    if not isinstance(name, Global | Placeholder) or not isinstance(args, tuple):
        raise Malformed("a call of something that is no global")
    if isinstance(name, Placeholder):
        if name.name.name.startswith("_rebuild") and name.name.module.split(".")[0] == "torch":
            return UnusableTensor(f"made by {shown(name)}")
        return Placeholder(name.name, [name, args])
    key = (name.module, name.name)
    if key in _KEPT:
        return Call(name, [args])
    builder = _REBUILDERS.get(key)
    if builder is None:
        raise Malformed(f"a call of {name}")
    return builder(args)


def _is_name(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and is_key(value)


def _is_size(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 63


def _sizes(value: object) -> Shape:
    if not isinstance(value, tuple) or len(value) > _MAX_DIMS or not all(map(_is_size, value)):
        raise Malformed("a shape that is no list of sizes")
    return value


def _tensor(args: Args, dtype: object, bits: object = None) -> object:
    for part in (*args[:6], dtype):
        if isinstance(part, Placeholder):
            return UnusableTensor(f"made with an object of {shown(part)}")
    if not isinstance(args[0], StorageRef) or not _is_size(args[1]):
        raise Malformed("a tensor record of the wrong form")
    storage, offset = args[0], args[1]
    shape, strides = _sizes(args[2]), _sizes(args[3])
    if len(shape) != len(strides):
        raise Malformed("a tensor with more sizes than strides, or fewer")
    if dtype is None:
        dtype = storage.dtype
    elif isinstance(dtype, Global) and dtype.module == "torch":
        dtype = dtype.name
    if not isinstance(dtype, str):
        raise Malformed("a tensor without an element type")
    if dtype not in BY_TORCH_NAME:
        return UnusableTensor(f"of element type torch.{dtype}")
    if args[4:5] == (True,) and BY_TORCH_NAME[dtype].kind not in ("float", "float8", "complex"):
        raise Malformed(f"a tensor of {dtype} with gradients")
    if bits is not None and not isinstance(bits, dict):
        raise Malformed("a tensor record of the wrong form")
    conj, neg = ((bits or {}).get(flag) is True for flag in ("conj", "neg"))
    return TensorRef(storage, dtype, offset, shape, strides, conj, neg)


def _tensor_v1(args: Args) -> object:
    if len(args) != 4:
        raise Malformed("a tensor record of the wrong form")
    return _tensor(args, None)


def _tensor_v2(args: Args, *, typed: bool = False) -> object:
    # (storage, offset, sizes, strides, requires_grad, hooks[, element type][, bits])
    if len(args) - typed not in (6, 7) or type(args[4]) is not bool:
        raise Malformed("a tensor record of the wrong form")
    return _tensor(args, args[6] if typed else None, *args[6 + typed :])


def _parameter(args: Args) -> object:
    if args and isinstance(args[0], Placeholder):
        return UnusableTensor(f"made with an object of {shown(args[0])}")
    if len(args) not in (3, 4) or not isinstance(args[0], TensorRef | UnusableTensor):
        raise Malformed("a parameter without a tensor")
    if type(args[1]) is not bool:
        raise Malformed("a parameter record of the wrong form")
    return args[0]


def _from_type(args: Args) -> object:
    # (function, type, its arguments, attributes): a tensor with attributes of its own.
    if len(args) == 4 and isinstance(args[1], Placeholder):
        return UnusableTensor(f"of the class {shown(args[1])}")
    if len(args) != 4 or not isinstance(args[1], Global):
        raise Malformed("a tensor record of the wrong form")
    if (args[1].module, args[1].name) not in _TENSOR_TYPES:
        raise Malformed(f"a tensor of type {args[1]}")
    if not isinstance(args[0], Global) or args[0].module != "torch._utils":
        raise Malformed("a tensor record within a tensor record")
    return rebuild(args[0], args[2])


def _unusable(kind: str) -> Callable[[Args], object]:
    return lambda _args: UnusableTensor(kind)


def _dictionary(args: Args) -> Entries:
    # Python 2 wrote ordered dictionaries as one list of pairs. The list is used up, so that a
    # small file cannot have it copied a million times.
    pairs = args[0] if args else []
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 and is_key(pair[0]) for pair in pairs
    ):
        raise Malformed("a dictionary of something else than pairs")
    result = Entries((pair[0], pair[1]) for pair in pairs)
    result.call = Call(Global("collections", "OrderedDict"), [()])
    pairs.clear()
    return result


def _default_dictionary(args: Args) -> Entries:
    result = Entries()
    result.call = Call(Global("collections", "defaultdict"), [args])
    return result


def _list(args: Args) -> object:
    return args[0] if args and isinstance(args[0], list) else []


_REBUILDERS: dict[tuple[str, str], Callable[[Args], object]] = {
    ("torch._utils", "_rebuild_tensor"): _tensor_v1,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): lambda args: _tensor_v2(args, typed=True),
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
    ("torch._utils", "_rebuild_sparse_tensor"): _unusable("sparse"),
    ("torch._utils", "_rebuild_sparse_csr_tensor"): _unusable("sparse"),
    ("torch._utils", "_rebuild_qtensor"): _unusable("quantised"),
    ("torch._utils", "_rebuild_nested_tensor"): _unusable("nested"),
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): _unusable("without values (meta)"),
    ("torch", "Size"): lambda args: Size(_sizes(args[0]) if args else ()),
    ("collections", "OrderedDict"): _dictionary,
    ("collections", "defaultdict"): _default_dictionary,
    ("builtins", "list"): _list,
    ("builtins", "dict"): lambda _args: {},
}
# Harmless names that no weights are made of.
_KEPT = frozenset(
    {("builtins", name) for name in ("bytearray", "complex", "float", "frozenset", "int", "set")}
    | {("collections", "Counter"), ("_io", "BytesIO")}
    | {("torch", "device"), ("torch.serialization", "_get_layout"), ("_codecs", "encode")}
)
