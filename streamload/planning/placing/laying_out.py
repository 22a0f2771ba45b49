"""The plan of one target whose shape fits: its dtype, its strides, and whether it is mapped."""

from __future__ import annotations

from collections.abc import Sequence

from streamload.core.dtypes import BY_NAME
from streamload.core.specs import TensorSpec, is_row_major, numel
from streamload.mapping.binding import Assignment
from streamload.mapping.chaining import alike
from streamload.mapping.combining import Mean
from streamload.mapping.layout import Layout
from streamload.planning.devices import device_of
from streamload.planning.dtype_rules import DtypeError, refuse_mixed, target_dtype
from streamload.planning.placing.builder import PlanBuilder
from streamload.planning.placing.geometry import Geometry
from streamload.planning.records import MappedView, PlannedTensor, TargetSpec


def laid_out(
    builder: PlanBuilder,
    assignment: Assignment,
    target: str,
    spec: TargetSpec | None,
    geometry: Geometry,
) -> PlannedTensor:
    """The plan of one target whose shape fits."""
    options = builder.options
    names = assignment.sources
    if len(names) > 1:
        names = tuple(names[i] for i in geometry.used) or names
    # What the values are is settled by the whole tensor, so that ranks agree on it.
    shard = None if spec is None else spec.shard
    whole_shape = geometry.layout.shape
    geometry = geometry.part(shard)
    layout = geometry.layout
    specs = [builder.stored[name] for name in names]
    stored = tuple([BY_NAME[spec.made_dtype] for spec in specs])
    transform = assignment.transform
    for run in alike(transform, len(assignment.sources)):
        stack = assignment.sources[run.start : run.stop]
        refuse_mixed(stack, [builder.stored[n].made_dtype for n in stack], spec, options.dtype)
    reduces = transform.reduces if len(names) > 1 else ""
    dtype = target_dtype(target, stored, spec, options.dtype, reduces=reduces)
    is_new = spec is None or spec.is_meta or (spec.kind == "buffer" and _is_built(builder))
    device = options.device
    device = device if isinstance(device, str) else device_of(target, device)
    view = _mapped(builder, names, layout, dtype.name, device) if is_new and options.maps else None
    if shard is not None and view is not None and not is_row_major(layout.shape, view.strides):
        view = None  # what shards a module wants contiguous parts
    in_stored_order = is_new and (view is not None or options.stored_order) and shard is None
    strides = geometry.strides(stored_order=in_stored_order and not transform.reduces)
    if spec is not None and not is_new:
        _refuse_in_place(builder, target, spec)
        strides, device = spec.strides or strides, spec.device
    return PlannedTensor(
        name=spec.names[0] if spec else target,
        aliases=spec.names[1:] if spec else (),
        sources=names,
        shape=layout.shape,
        strides=strides,
        dtype=dtype.name,
        stored_dtype="+".join(dict.fromkeys([d.name for d in stored])),
        copies=geometry.copies(assignment.sources, strides),
        transform=_label(transform.label, specs),
        reduces=reduces,
        tolerance=transform.tolerance if isinstance(transform, Mean) else 0.0,
        layer=assignment.layer,
        device=device,
        is_new=is_new,
        mapped=view,
        shard=shard,
        whole_shape=whole_shape if shard is not None else (),
    )


def _label(label: str, specs: Sequence[TensorSpec]) -> str:
    """What is done to the sources, decoding first."""
    words = dict.fromkeys(spec.encoding.words for spec in specs if spec.encoding is not None)
    return "+".join([*words, label] if label else words) if words else label


def _is_built(builder: PlanBuilder) -> bool:
    return builder.targets is not None and builder.targets.any_meta


def _refuse_in_place(builder: PlanBuilder, target: str, spec: TargetSpec) -> None:
    options = builder.options
    asked = [
        text
        for text, is_asked in (
            ("mode='map'", options.mode == "map"),
            ("layout='stored'", options.layout == "stored"),
        )
        if is_asked
    ]
    device = device_of(target, options.device)
    if device not in (spec.device, spec.device.partition(":")[0], "cpu"):
        asked.append(f"device={device!r}")
    if asked:
        raise DtypeError(
            f"holds data and is overwritten in place, so {' and '.join(asked)} cannot be honoured: "
            "leave it out, or build the module under streamload.empty_weights()"
        )


def _mapped(
    builder: PlanBuilder, names: tuple[str, ...], layout: Layout, dtype: str, device: str
) -> MappedView | None:
    """The view of the mapped file, if the target can be one as it is stored."""
    options, itemsize = builder.options, BY_NAME[dtype].itemsize
    if len(names) != 1 or not numel(layout.shape):
        return None
    spec = builder.stored[names[0]]
    view = layout.source_strides()
    if view is None or spec.extent is None or spec.dtype != dtype or device != "cpu":
        return None
    # Products with a transposed matrix of 16 bits are many times slower on most CPUs; those with
    # one of float32 are not.
    may_be_strided = options.stored_order or (options.leaves_layout and itemsize > 2)
    if not may_be_strided and not is_row_major(layout.shape, view[1]):
        return None
    if spec.extent.offset % itemsize:
        return None
    return MappedView(names[0], *view)
