"""A GGUF file's tensors as those of a published checkpoint: names, shapes, encodings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from streamload.core.dtypes import BY_NAME
from streamload.core.errors import refuse
from streamload.core.specs import TensorSpec, numel
from streamload.core.wording import listed, plural
from streamload.decoding.blocks import DECODED, Blocks
from streamload.decoding.pairs import Pairs
from streamload.sources.gguf.header import StoredTensor
from streamload.sources.gguf.metadata import Metadata
from streamload.sources.gguf.names import ARCHITECTURES, published_name

# LLaMA 3's rotary scaling as factors: they become fields of the configuration.
ROTARY_FACTORS = "rope_freqs.weight"


def published_specs(
    metadata: Metadata, tensors: Mapping[str, StoredTensor]
) -> dict[str, TensorSpec]:
    """The tensors by published name, in the file's order.

    Raises:
        CheckpointError: rows are not whole heads, or two tensors have one name. All are listed.
    """
    specs: dict[str, TensorSpec] = {}
    problems: list[str] = []
    for name, tensor in tensors.items():
        if name == ROTARY_FACTORS and metadata.architecture in ARCHITECTURES:
            continue
        published = published_name(metadata.architecture, name)
        spec = replace(_stored(tensor), name=published.name)
        if published.pairs:
            head = _head_rows(metadata, published.pairs, tensor, problems)
            if head is None:
                continue
            spec = _in_halves(spec, name, head)
        if published.is_turned and len(spec.shape) == 2:
            rows, columns = spec.shape
            spec = replace(spec, shape=(columns, rows), strides=(1, columns))
        if spec.name in specs:
            problems.append(f"tensor {name!r} is there under {spec.name!r} too")
        specs[spec.name] = spec
    refuse(problems, path=metadata.path)
    return specs


def default_dtype(tensors: Mapping[str, StoredTensor]) -> str:
    """What a whole model is in that nobody asks a dtype for: such files have norms and biases in
    float32 beside matrices that are not, and a model computes in one dtype.
    """
    counts: dict[str, int] = {}
    for tensor in tensors.values():
        kind = tensor.type.plain or "BF16"
        if BY_NAME[kind].is_floating:
            counts[kind] = counts.get(kind, 0) + numel(tensor.shape)
    if any(not tensor.type.plain for tensor in tensors.values()):
        return "BF16"
    return max(counts, key=counts.__getitem__) if len(counts) > 1 else ""


def not_decoded(tensors: Mapping[str, StoredTensor]) -> tuple[str, ...]:
    """Tensors of types that can only be listed, type by type; the refusals of a load."""
    by_type: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        if not tensor.type.plain and tensor.type.name not in DECODED:
            by_type.setdefault(tensor.type.name, []).append(name)
    known = ", ".join(sorted(DECODED))
    return tuple(
        f"{plural(len(names), 'tensor')} of GGUF's type {kind}, which is not decoded "
        f"({listed(map(repr, names), 4)}); decoded are {known}"
        for kind, names in by_type.items()
    )


def _stored(tensor: StoredTensor) -> TensorSpec:
    kind, extent = tensor.type, tensor.extent
    if kind.plain:
        return TensorSpec(tensor.name, kind.plain, tensor.shape, extent.file, extent)
    raw = TensorSpec(tensor.name, "U8", (extent.nbytes,), extent.file, extent)
    encoding = Blocks(
        (raw,), kind.name, "", type=kind.name, elements=kind.elements, nbytes=kind.nbytes
    )
    return TensorSpec(tensor.name, "F32", tensor.shape, extent.file, encoding=encoding)


def _in_halves(spec: TensorSpec, stored_name: str, head: int) -> TensorSpec:
    """The tensor with the rows of each head in published order."""
    inner = replace(spec, name=stored_name)
    columns = spec.shape[1] if len(spec.shape) > 1 else 1
    encoding = Pairs((inner,), spec.stored_dtype, "", head=head, columns=columns)
    return replace(spec, extent=None, encoding=encoding)


def _head_rows(
    metadata: Metadata, side: str, tensor: StoredTensor, problems: list[str]
) -> int | None:
    """Rows of one head of queries or keys; None, and a problem, if they do not go round."""
    kind = metadata.architecture
    heads = metadata.needed(f"{kind}.attention.head_count")
    if side == "k":
        heads = metadata.whole(f"{kind}.attention.head_count_kv", least=1) or heads
    if len(tensor.shape) in (1, 2) and tensor.shape[0] % (2 * heads) == 0 and numel(tensor.shape):
        return tensor.shape[0] // heads
    problems.append(
        f"tensor {tensor.name!r}: shape {list(tensor.shape)} is not {heads} heads of pairs of rows"
    )
    return None
