"""``open_checkpoint``: the only place that decides what a path is."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType

from streamload.core.errors import CheckpointError, CheckpointNotFoundError, naming
from streamload.core.options import AT_HAND, Reach
from streamload.core.signatures import answers_unknown
from streamload.core.wording import printable
from streamload.sources.base import Source
from streamload.sources.config.beside import adapter_beside
from streamload.sources.files import OpenFile, open_file
from streamload.sources.folders import (
    DISTCP_ENDING,
    DISTCP_METADATA,
    TORCH_ENDINGS,
    choose_files,
    is_distcp,
    names_in,
)
from streamload.sources.hub import find_in_hub_cache, hint, is_hub_name, meant_as_hub_name
from streamload.sources.index import check_against_shards, read_index, shard_paths
from streamload.sources.recognise import SNIFFED_BYTES, describe_folder, describe_start
from streamload.sources.remote.urls import is_file_address, is_url, join, parent
from streamload.sources.safetensors.safetensors_files import open_safetensors

_LOOKED_FOR = (
    "model.safetensors.index.json, one .safetensors file, pytorch_model.bin(.index.json), "
    "one .bin/.pt/.pth/.ckpt/.gguf file, or layer_NN-model_PP-model_states.pt files"
)

_GGUF = b"GGUF"


@answers_unknown
def open_checkpoint(
    path: str | os.PathLike[str], *, timeout_s: float | None = None, download: bool | None = None
) -> Source:
    """Open a checkpoint: headers are read, no tensor is.

    Args:
        path: a safetensors, .pt, .bin or GGUF file, an ``*.index.json``, a folder that holds one of
            these, a folder of raw GPT-NeoX partitions, ``hf:ORG/NAME[@REVISION]`` in the local
            hub cache, or the address of a file or folder: ``https://``, ``http://``, ``s3://``,
            ``gs://``, ``az://``.
        timeout_s: how long to wait for a server; see LoadOptions.
        download: False streams from the hub what its cache has not; see LoadOptions.

    Returns:
        A source; use it as a context manager, or call ``close()``.

    Raises:
        CheckpointNotFoundError: there is nothing at the path, or no checkpoint in the folder.
        CheckpointError: a file is damaged, incomplete or of an unknown kind.
    """
    return open_layers(path, None, reach=Reach(timeout_s, download))


def open_layers(
    path: str | os.PathLike[str],
    layers: frozenset[int] | None,
    prefix: str | None = None,
    reach: Reach = AT_HAND,
) -> Source:
    """As ``open_checkpoint``; of raw partitions only the files of these blocks are opened, and of
    several state dicts in a torch file the one that ``prefix`` names.
    """
    if isinstance(path, Source):
        raise TypeError("the path is that of a file or folder, not an open source: its .path")
    if isinstance(path, Mapping):
        raise TypeError(
            "the path is that of a file or folder; tensors in memory need none: "
            "module.load_state_dict(tensors, assign=True)"
        )
    given = os.fsdecode(path)
    if is_url(given):
        return _open_remote(given, layers, prefix, reach)
    if not is_hub_name(given):
        return _open_path(given, given, layers, prefix)
    try:
        return _open_path(find_in_hub_cache(given), given, layers, prefix)
    except CheckpointError as error:
        if isinstance(error, CheckpointNotFoundError) and reach.download is False:
            return _open_remote(given, layers, prefix, reach)
        if isinstance(error, CheckpointNotFoundError) and (more := hint(given)):
            error.extend(more)
        if error.path == given:
            raise
        raise CheckpointError(
            str(error), path=given, tensor=error.tensor, problems=error.problems
        ) from error


def may_hold_companions(path: str | os.PathLike[str]) -> bool:
    """False where small files can only lie beside a checkpoint's own; by names and first bytes."""
    given = os.fsdecode(path)
    if is_url(given):
        return given.lower().endswith(".gguf")
    try:
        real = find_in_hub_cache(given) if is_hub_name(given) else given
        if os.path.isdir(real):
            return any(name.lower().endswith(".gguf") for name in names_in(real))
        with OpenFile(real) as file:
            return file.size_bytes >= len(_GGUF) and file.read(0, len(_GGUF)) == _GGUF
    except CheckpointError:
        return False  # who opens it is told why


def _open_remote(
    given: str, layers: frozenset[int] | None, prefix: str | None, reach: Reach
) -> Source:
    from streamload.sources.remote.registry import using
    from streamload.sources.remote.remote_folder import is_folder_at, site_for

    if is_url(given) and (name := meant_as_hub_name(given)):
        raise CheckpointNotFoundError(
            f"is a page of the hub; the model is {name}: `streamload download {name} DIR` fetches "
            "it, and with download=False it is streamed",
            path=given,
        )
    with using(site_for(given, reach)) as site:
        address = site.address
        if not is_file_address(address) and is_folder_at(address):
            return _open_folder(address, address, layers, prefix)
        return _open_path(address, address, layers, prefix)


def _open_path(real: str, given: str, layers: frozenset[int] | None, prefix: str | None) -> Source:
    try:
        if os.path.isdir(real):
            return _open_folder(real, given, layers, prefix)
        if real.lower().endswith(".index.json"):
            return _open_indexed(real, given, prefix)
        if is_url(real):
            if real.endswith((DISTCP_METADATA, DISTCP_ENDING)):
                raise _only_here(given)
            return _open_files([real], given, prefix)
        inside = os.path.dirname(real) or os.curdir
        is_metadata = os.path.basename(real) == DISTCP_METADATA and os.path.isfile(real)
        if is_metadata and is_distcp(inside):
            return _open_folder(inside, given, layers, prefix)
        if real.endswith(DISTCP_ENDING) and os.path.isfile(real):
            raise CheckpointError(
                "is one file of torch.distributed.checkpoint; pass its folder", path=given
            )
        if not os.path.lexists(real) and (name := meant_as_hub_name(real)):
            raise CheckpointNotFoundError(
                f"no such file or folder; the model of that name in the hub cache is {name}, and "
                f"`streamload download {name} DIR` fetches it",
                path=given,
            )
    except ValueError as error:  # os.path refuses NUL bytes
        raise CheckpointError(str(error), path=given) from error
    return _open_files([real], given, prefix)


def _open_folder(
    folder: str, given: str, layers: frozenset[int] | None, prefix: str | None
) -> Source:
    from streamload.sources.distributed.distcp_folder import open_distcp
    from streamload.sources.neox.partitions import find_partitions, open_neox
    from streamload.sources.neox.rank_files import find_rank_files, open_rank_files
    from streamload.sources.parts.meta_parts import are_meta_parts, open_meta_parts
    from streamload.sources.parts.rank_shards import are_rank_shards, open_rank_shards

    names = [name for name in names_in(folder) if not name.startswith(".")]
    files = [name for name in names if is_url(folder) or not os.path.isdir(join(folder, name))]
    for endings in ((".safetensors",), TORCH_ENDINGS, (".ckpt",), (".gguf",)):
        if endings == TORCH_ENDINGS and is_distcp(folder):  # a .pt beside it holds no weights
            if is_url(folder):
                raise _only_here(given)
            return open_distcp(folder, given=given, prefix=prefix)
        with naming(folder):
            chosen = choose_files(files, endings)
        if chosen is not None and chosen[0].lower().endswith(".index.json"):
            return _open_indexed(join(folder, chosen[0]), given, prefix)
        if chosen and are_meta_parts(chosen):
            paths = [join(folder, name) for name in chosen]
            return open_meta_parts(paths, given=given, folder=folder)
        if chosen and are_rank_shards(chosen):
            paths = [join(folder, name) for name in chosen]
            return open_rank_shards(paths, given=given)
        if chosen:
            return _open_files([join(folder, name) for name in chosen], given, prefix)
    if kind := describe_folder(folder, names):
        raise CheckpointNotFoundError(f"no checkpoint that can be read: {kind}", path=given)
    if not is_url(folder):
        if (partitions := find_partitions(folder)) is not None:
            return open_neox(partitions, layers=layers)
        if (ranks := find_rank_files(folder)) is not None:
            return open_rank_files(ranks, layers=layers, prefix=prefix)
    is_adapter = any(name.startswith("adapter_") for name in files)
    lead = _adapter_alone(folder) if is_adapter else ""
    none = "a web server does not list a folder" if folder.startswith("http") else "it is empty"
    seen = f"it holds {', '.join(map(printable, names[:6]))}" if names else none
    raise CheckpointNotFoundError(
        f"{lead}no checkpoint in this folder: looked for {_LOOKED_FOR}; {seen}", path=given
    )


def _only_here(given: str) -> CheckpointError:
    return CheckpointError(
        "folders of torch.distributed.checkpoint are read on this machine only: copy it here first",
        path=given,
    )


def _adapter_alone(folder: str) -> str:
    found = adapter_beside(folder) or {}
    kind, base = found.get("peft_type") or "LORA", found.get("base_model_name_or_path")
    of_base = f" {str(base)!r}" if base else ""
    return (
        f"this is a PEFT adapter ({kind}) without its base model{of_base}: "
        "load that with adapter= (--adapter) and this folder, which merges the two; "
    )


def _open_indexed(index_path: str, given: str, prefix: str | None) -> Source:
    weight_map = read_index(index_path)
    with naming(index_path), ExitStack() as opened:
        shards = shard_paths(index_path, weight_map)
        owners = {n: join(parent(index_path), s) for n, s in weight_map.items()}
        source = opened.enter_context(_open_files(shards, given, prefix, owners))
        source.catalog = check_against_shards(index_path, weight_map, source.catalog)
        opened.pop_all()
    return source


def _open_files(
    paths: Sequence[str],
    given: str,
    prefix: str | None,
    owners: Mapping[str, str] = MappingProxyType({}),
) -> Source:
    """Content decides, not the name's ending."""
    path = paths[0]
    with open_file(path) as file:
        start = file.read(0, min(SNIFFED_BYTES, file.size_bytes))
    # The length before a safetensors header may begin with any byte, a pickle's 0x80 included.
    looks_safe = start[8:9] == b"{"
    # A pickle's second byte is its protocol; 8 bytes and less are a header's length, cut short.
    is_pickle = start[:1] == b"\x80" and start[1:2] in (b"\1", b"\2", b"\3", b"\4", b"\5")
    is_torch = not looks_safe and (
        start.startswith(b"PK\x03\x04") or (is_pickle and len(start) > 8)
    )
    claims_gguf = path.lower().endswith(".gguf") and not (looks_safe or is_torch)
    # As a length of a header, its mark is more than one may have.
    if start.startswith(_GGUF) or (claims_gguf and not describe_start(start)):
        from streamload.sources.gguf.gguf_files import open_gguf

        return open_gguf(paths, given=given)
    if is_torch and path.lower().endswith(".safetensors"):
        raise CheckpointError(
            "is a pickle-based torch file under a .safetensors name; it is not opened", path=path
        )
    claims_torch = path.lower().endswith(TORCH_ENDINGS)
    if is_torch or (claims_torch and not looks_safe and not describe_start(start)):
        from streamload.sources.torch.torch_files import open_torch

        return open_torch(paths, given=given, prefix=prefix, owners=owners)
    return open_safetensors(paths, given=given, owners=owners)
