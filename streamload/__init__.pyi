"""Made by ``python -m tests.support.stub``; a test holds it to the package."""

# ruff: noqa: I001

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from streamload.core.errors import CheckpointError as CheckpointError
from streamload.core.errors import CheckpointNotFoundError as CheckpointNotFoundError
from streamload.core.errors import DownloadError as DownloadError
from streamload.core.errors import MemoryBudgetError as MemoryBudgetError
from streamload.core.errors import MissingExtraError as MissingExtraError
from streamload.core.errors import PlanError as PlanError
from streamload.core.errors import RankError as RankError
from streamload.core.errors import ReadError as ReadError
from streamload.core.errors import StreamloadError as StreamloadError
from streamload.core.errors import WriteError as WriteError
from streamload.core.options import Device
from streamload.core.options import Layout
from streamload.core.options import LoadOptions as LoadOptions
from streamload.core.options import Mode
from streamload.core.options import Overflow
from streamload.core.options import Progress
from streamload.core.options import Quantize
from streamload.core.options import Replicas
from streamload.core.options import Ties
from streamload.core.report import ExportReport as ExportReport
from streamload.core.report import LoadReport as LoadReport
from streamload.generation.sampling import generate as generate
from streamload.loading.calls import Loaded as Loaded
from streamload.mapping.binding import Mapper
from streamload.mapping.chaining import Chain as Chain
from streamload.mapping.combining import Concat as Concat
from streamload.mapping.combining import HeadSplit as HeadSplit
from streamload.mapping.combining import Mean as Mean
from streamload.mapping.combining import Split as Split
from streamload.mapping.combining import Stack as Stack
from streamload.mapping.combining import Sum as Sum
from streamload.mapping.combining import Unstack as Unstack
from streamload.mapping.rules import NameMap as NameMap
from streamload.mapping.rules import Rule as Rule
from streamload.mapping.tables.registry import mapping_for as mapping_for
from streamload.mapping.transforms import Flatten as Flatten
from streamload.mapping.transforms import Identity as Identity
from streamload.mapping.transforms import Interleaved as Interleaved
from streamload.mapping.transforms import Permute as Permute
from streamload.mapping.transforms import Transpose as Transpose
from streamload.mapping.transforms import Unflatten as Unflatten
from streamload.module.commit import OnAssign
from streamload.module.empty_weights import empty_weights as empty_weights
from streamload.planning.records import Plan as Plan
from streamload.saving.converting import convert as convert
from streamload.saving.exporting import export as export
from streamload.sources.base import Source as Source
from streamload.sources.detect import open_checkpoint as open_checkpoint
from streamload.sources.in_memory import MemorySource as MemorySource

__version__: str
__all__: list[str]

def iter_tensors(
    path: str | os.PathLike[str],
    *,
    names: Sequence[str] | None = None,
    dtype: torch.dtype | str | None = None,
    device: Device = "cpu",
    workers: int | None = None,
    chunk_bytes: int | None = None,
    ring_bytes: int | None = None,
    prefix: str | None = None,
    timeout_s: float | None = None,
    download: bool | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """One tensor after the other in the file's order, under stored names.

    Only the tensor at hand is in memory; each is the caller's own. Opened through
    ``safetensors.safe_open`` where the file is of that kind. With a ``dtype`` quantised tensors
    are decoded; without, they are given out as they are stored. ``device`` is one for all.

    Args:
        path: see ``load``.
        names: only these; each must be there.
        dtype: cast floating-point tensors to it: a torch dtype or its name (``"bfloat16"``,
            ``"bf16"``). None and ``"auto"``: as stored for a meta parameter, the parameter's own
            where it holds data.
        device: one device, or a dict of module prefix → device. ``"auto"``: CUDA if torch sees
            such a device, else MPS, else the CPU.
        workers: threads that read and cast; default: the cores there are, at most 8, to a device
            at most 16.
        chunk_bytes: how much one read brings; default 4 MiB, to a device 16 MiB.
        ring_bytes: host memory that a load to a device goes through, for each device; default
            192 MiB, or four buffers of 16 MiB more than there are workers.
        prefix: only stored names under it, taken off.
        timeout_s: how long to wait for what a server was asked for (2 MiB at most), all attempts
            included (default 60), and for a sign of another rank (default 300).
        download: False streams ``hf:ORG/NAME`` from the hub if it is not in the local cache.

    Raises:
        PlanError: a name is not in the checkpoint, a dtype has no counterpart in torch, or the
            device is not there.
        CheckpointError, ReadError: as ``load``; the tensors given out before are whole.

    Warns:
        UserWarning: a weight is FP8 (or narrower) and has a scale, which is not applied.
    """

def load(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    device: Device = "cpu",
    mode: Mode | None = "auto",
    layout: Layout | None = None,
    workers: int | None = None,
    chunk_bytes: int | None = None,
    ring_bytes: int | None = None,
    strict: bool = True,
    layers: Collection[int] | None = None,
    prefix: str | None = None,
    check_memory: bool = True,
    ties: Ties = "refuse",
    overflow: Overflow = "report",
    replicas: Replicas = "refuse",
    cache: bool = False,
    progress: Progress | bool | None = None,
    on_layer: Callable[[int | None, dict[str, torch.Tensor]], object] | None = None,
    quantize: Quantize | None = None,
    adapter: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    timeout_s: float | None = None,
    download: bool | None = None,
) -> Loaded:
    """Build the reference model for a checkpoint's ``config.json`` and stream the weights in.

    For a model of your own see ``load_into``, for a class of transformers ``load_transformers``.

    Args:
        path: a file, an index, a folder, raw GPT-NeoX partitions, or ``hf:ORG/NAME[@REVISION]``
            in the local hub cache.
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

    Returns:
        ``.model`` (eval mode; called as ``model(ids)`` with a LongTensor [batch, n], returns
        logits [batch, n, vocabulary]), ``.report``, ``.config``, ``.generation_config``.

    Raises:
        CheckpointError: the files cannot be used.
        PlanError: the weights do not fit the configuration; ``.report`` lists everything.
        MemoryBudgetError: it would not fit in memory.
        ReadError: reading failed midway.
    """

def load_into(
    module: nn.Module,
    path: str | os.PathLike[str],
    *,
    mapping: str | Mapper = "auto",
    expected_layers: int | None = None,
    on_assign: OnAssign | None = None,
    dtype: torch.dtype | str | None = None,
    device: Device = "cpu",
    mode: Mode | None = "stream",
    layout: Layout | None = None,
    workers: int | None = None,
    chunk_bytes: int | None = None,
    ring_bytes: int | None = None,
    strict: bool = True,
    layers: Collection[int] | None = None,
    prefix: str | None = None,
    check_memory: bool = True,
    ties: Ties = "refuse",
    overflow: Overflow = "report",
    replicas: Replicas = "refuse",
    cache: bool = False,
    progress: Progress | bool | None = None,
    on_layer: Callable[[int | None, dict[str, torch.Tensor]], object] | None = None,
    quantize: Quantize | None = None,
    adapter: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    timeout_s: float | None = None,
    download: bool | None = None,
) -> LoadReport:
    """Stream a checkpoint into your own module.

    Parameters on the meta device get new tensors, all committed together after the last byte
    has arrived; on any exception the module is exactly as it was. Parameters that hold data are
    overwritten in place, keeping dtype and device.

    A module whose parameters are DTensors (``fully_shard``, ``parallelize_module``) is loaded by
    all of its ranks together: each calls this, reads its own parts, and gets them, or none does.

    Args:
        module: build it under ``streamload.empty_weights()`` to start without memory.
        path: see ``load``.
        mapping: ``"auto"`` (the table of the config's architecture if its names fit the module,
            else equal names, with or without known wrappers), a NameMap, a dict stored name →
            module name, or a function of the stored name (None: ignored).
        expected_layers: refuse a file whose block indices are not 0 … expected_layers - 1.
        on_assign: called with (stored name, module name) before each assignment.
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

    Raises:
        RankError: another rank failed, is gone, or has another file, module or options.
        StreamloadError: as ``load``.
    """

def load_state_dict(
    path: str | os.PathLike[str],
    *,
    mapping: str | Mapper = "auto",
    dtype: torch.dtype | str | None = None,
    device: Device = "cpu",
    mode: Mode | None = "stream",
    layout: Layout | None = None,
    workers: int | None = None,
    chunk_bytes: int | None = None,
    ring_bytes: int | None = None,
    strict: bool = True,
    layers: Collection[int] | None = None,
    prefix: str | None = None,
    check_memory: bool = True,
    ties: Ties = "refuse",
    overflow: Overflow = "report",
    replicas: Replicas = "refuse",
    cache: bool = False,
    progress: Progress | bool | None = None,
    on_layer: Callable[[int | None, dict[str, torch.Tensor]], object] | None = None,
    quantize: Quantize | None = None,
    adapter: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    timeout_s: float | None = None,
    download: bool | None = None,
) -> dict[str, torch.Tensor]:
    """All tensors under their mapped names, without a module; tied names share one tensor.

    Args:
        path: see ``load``.
        mapping: see ``load_into``; ``"auto"`` gives local names where the config's architecture
            has a table, else stored names.
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

def load_transformers(
    path: str | os.PathLike[str],
    *,
    cls: Any = None,
    dtype: torch.dtype | str | None = None,
    device: Device = "cpu",
    mode: Mode | None = "auto",
    layout: Layout | None = None,
    workers: int | None = None,
    chunk_bytes: int | None = None,
    ring_bytes: int | None = None,
    strict: bool = True,
    layers: Collection[int] | None = None,
    prefix: str | None = None,
    check_memory: bool = True,
    ties: Ties = "refuse",
    overflow: Overflow = "report",
    replicas: Replicas = "refuse",
    cache: bool = False,
    progress: Progress | bool | None = None,
    on_layer: Callable[[int | None, dict[str, torch.Tensor]], object] | None = None,
    quantize: Quantize | None = None,
    adapter: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    timeout_s: float | None = None,
    download: bool | None = None,
    key_mapping: Mapping[str, str] | None = None,
    distributed_config: Any = None,
) -> Loaded:
    """Build the transformers class for a checkpoint, and stream the weights in.

    The model is as ``from_pretrained`` leaves it (ties, buffers, dtypes, what is kept in
    float32, ``generation_config``, eval mode), at the cost of one model in memory. ``dtype=None``
    is the configuration's dtype, or else that of the first stored tensor. With ``strict=False``
    what is missing is initialised as that library does it, and listed.

    Args:
        path: see ``load``.
        cls: an Auto class or a model class; by default the one that ``architectures`` of
            ``config.json`` names.
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
        key_mapping: regular expressions of stored names → what they become, before the
            library's own renames; as ``from_pretrained`` takes it.
        distributed_config: the library's DistributedConfig, or a dict of its fields: the model is
            laid out over all ranks as that library does, and loaded by all of them together.

    Returns:
        ``.model``, ``.report``, ``.config`` and ``.generation_config`` as dicts.

    Raises:
        MissingExtraError: transformers is not installed.
        StreamloadError: as ``load``.
    """

def plan(
    module: nn.Module | str | os.PathLike[str] | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    mapping: str | Mapper = "auto",
    expected_layers: int | None = None,
    dtype: torch.dtype | str | None = None,
    device: Device = "cpu",
    mode: Mode | None = None,
    layout: Layout | None = None,
    workers: int | None = None,
    chunk_bytes: int | None = None,
    ring_bytes: int | None = None,
    strict: bool = True,
    layers: Collection[int] | None = None,
    prefix: str | None = None,
    check_memory: bool = True,
    ties: Ties = "refuse",
    overflow: Overflow = "report",
    replicas: Replicas = "refuse",
    cache: bool = False,
    progress: Progress | bool | None = None,
    on_layer: Callable[[int | None, dict[str, torch.Tensor]], object] | None = None,
    quantize: Quantize | None = None,
    adapter: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    timeout_s: float | None = None,
    download: bool | None = None,
) -> Plan:
    """What a load would do; reads headers only, touches nothing.

    ``plan(path)`` plans ``load``, ``plan(module, path)`` plans ``load_into``, each with its own
    default ``mode``.

    Args:
        module: your own module; left out, the reference model that ``load`` would build.
        path: see ``load``.
        mapping: see ``load_into``; with a module only.
        expected_layers: see ``load_into``; with a module only.
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

    Returns:
        ``.ok``, ``.problems``, ``.report`` (all lists) and ``.memory`` (needed, available).
    """
