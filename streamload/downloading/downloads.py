"""``download``: checkpoints from the Hugging Face hub, and GPT-NeoX-20B from a base address."""

from __future__ import annotations

import glob
import importlib
import os
import time
import urllib.parse
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from streamload.core.errors import CheckpointError, DownloadError, MissingExtraError
from streamload.core.wording import format_bytes, printable, without_secrets
from streamload.downloading.fetching import Fetched, Progress, fetch
from streamload.downloading.picking import pick_files
from streamload.sources.hub import HUB_NAME
from streamload.sources.index import read_index
from streamload.system.quiet_logs import quiet_logs

_NEOX = "neox-20b"
_NEOX_LAYERS = 44
_NEOX_RANKS = 2
_STEP = "global_step150000"
_BASE_URL_VARIABLE = "STREAMLOAD_NEOX_URL"
_DATA_VARIABLE = "STREAMLOAD_DATA"


@dataclass(frozen=True)
class DownloadReport:
    """What was fetched.

    Attributes:
        path: what ``load`` takes: a folder, or the hub name where the files are in its cache.
        folder: where the files are.
        files: all files of the checkpoint, relative to ``folder``.
        skipped: those that were there already; resumed: those of which a part was there.
        received_bytes: over the network, where that is known (not for the hub).
    """

    path: str
    folder: str
    files: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    resumed: tuple[str, ...] = ()
    received_bytes: int | None = None
    notices: tuple[str, ...] = ()
    elapsed_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        fields = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
        paths = {"path": printable(self.path), "folder": printable(self.folder)}
        return {"ok": True, **fields, **paths}

    def to_text(self) -> str:
        lines = [f"{printable(self.folder)}: {len(self.files)} files in {self.elapsed_s:.1f} s"]
        if self.received_bytes is not None:
            lines[0] += f", {format_bytes(self.received_bytes)} received"
        if self.skipped:
            lines.append(f"{len(self.skipped)} files were there already")
        if self.resumed:
            lines.append(f"{len(self.resumed)} files were resumed")
        lines += [f"notice: {notice}" for notice in self.notices]
        lines.append(f"to load it: streamload load {printable(self.path)}")
        return "\n".join(lines)


def download(
    what: str,
    folder: str | os.PathLike[str] | None = None,
    *,
    base_url: str | None = None,
    layers: Collection[int] | None = None,
    attempts: int = 5,
    pause_s: float = 1.0,
    progress: Progress | None = None,
) -> DownloadReport:
    """Fetch a checkpoint; what is there already is not fetched again.

    Args:
        what: ``hf:ORG/NAME[@REVISION]`` (extra ``hub``), or ``neox-20b``: the raw partitions.
        folder: where the files go. None: the hub's own cache, where ``load`` finds them by
            their name; for ``neox-20b`` see ``neox_folder``, inside ``$STREAMLOAD_DATA`` or
            ``data``.
        base_url: of ``neox-20b``, whose list of files lies below it; default:
            ``$STREAMLOAD_NEOX_URL``.
        layers: of ``neox-20b``, only these blocks and what is outside of blocks.
        attempts: of ``neox-20b``; give up after this many in a row that bring nothing new.
        pause_s: between such attempts; doubled each time.
        progress: called as progress(done_bytes, total_bytes, file name).

    Raises:
        DownloadError: the server refuses or breaks off; what arrived is kept.
        MissingExtraError: ``huggingface_hub`` is not installed.
        WriteError: the disk is full, or the folder cannot be written.
        ValueError: ``what`` is none of these, or there is no base address.
    """
    start_s = time.perf_counter()
    given = None if folder is None else os.fsdecode(folder)
    if what == _NEOX:
        address = base_url or os.environ.get(_BASE_URL_VARIABLE)
        if not address:
            raise ValueError(
                f"{_NEOX} needs base_url= (or ${_BASE_URL_VARIABLE}): the address of the folder "
                "that holds 20B_tokenizer.json, configs/20B.yml, latest and global_step150000/"
            )
        target = given or neox_folder(os.environ.get(_DATA_VARIABLE) or "data")
        get = partial(fetch, attempts=attempts, pause_s=pause_s, progress=progress)
        report = _neox(target, address.rstrip("/"), layers, get)
    elif match := HUB_NAME.fullmatch(what):
        if base_url is not None or layers is not None:
            raise ValueError(f"base_url and layers are for {_NEOX} only")
        # Not what it logs of each attempt: the last one's error is told.
        with quiet_logs("huggingface_hub"):
            report = _from_hub(what, match["repo"], match["revision"], given, progress)
    else:
        shown = without_secrets(what)
        raise ValueError(f"cannot download {shown!r}: expected hf:ORG/NAME[@REVISION] or {_NEOX}")
    return replace(report, elapsed_s=time.perf_counter() - start_s)


def neox_folder(data: str) -> str:
    """GPT-NeoX-20B in a data folder: ``neox_fast`` (a faster disk) if it exists, else ``neox``."""
    fast = os.path.join(data, "neox_fast")
    return fast if os.path.isdir(fast) else os.path.join(data, "neox")


def neox_files(layers: Collection[int] | None = None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The files of GPT-NeoX-20B as published, and those that are not needed to load it.

    Args:
        layers: only these blocks, 0 to 43, and what is outside of blocks; None: all.

    Raises:
        ValueError: there is no such block.
    """
    blocks = range(_NEOX_LAYERS) if layers is None else sorted(set(layers))
    unknown = [block for block in blocks if not 0 <= block < _NEOX_LAYERS]
    if unknown:
        raise ValueError(f"blocks are 0 to {_NEOX_LAYERS - 1}, not {unknown}")
    # 0 is the embedding, then the blocks from 2 on, the final norm and the readout.
    numbers = (0, *(block + 2 for block in blocks), _NEOX_LAYERS + 3, _NEOX_LAYERS + 4)
    parts = (
        f"{_STEP}/layer_{number:02d}-model_{rank:02d}-model_states.pt"
        for number in numbers
        for rank in range(_NEOX_RANKS)
    )
    states = tuple(f"{_STEP}/mp_rank_{rank:02d}_model_states.pt" for rank in range(8))
    return ("20B_tokenizer.json", "configs/20B.yml", "latest", *parts), states


def _neox(
    folder: str, base_url: str, layers: Collection[int] | None, get: Callable[[str, str], Fetched]
) -> DownloadReport:
    needed, unused = neox_files(layers)
    found: dict[str, Fetched] = {}
    notices: list[str] = []
    for name in (*needed, *unused):
        path = os.path.join(folder, *name.split("/"))
        try:
            found[name] = get(f"{base_url}/{urllib.parse.quote(name)}", path)
        except DownloadError as error:
            if name in needed:
                raise
            notices.append(f"left out (not needed for loading): {error}")
    return DownloadReport(
        folder,
        folder,
        tuple(found),
        tuple(name for name, one in found.items() if one.was_there),
        tuple(name for name, one in found.items() if one.resumed),
        sum(one.received_bytes for one in found.values()),
        tuple(notices),
    )


def _from_hub(
    what: str, repo: str, revision: str | None, folder: str | None, progress: Progress | None
) -> DownloadReport:
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise MissingExtraError(
            "huggingface_hub", extra="hub", purpose=f"downloading {what}"
        ) from error
    # Its errors are of several families, which changed from release to release.
    failures = (OSError, ValueError, getattr(errors, "HTTPError", OSError))
    chosen: dict[str, Any] = {"repo_id": repo, "revision": revision, "local_dir": folder}
    bar = _quiet_bar(progress, what)
    try:
        names = huggingface_hub.HfApi().list_repo_files(repo, revision=revision)

        def shards_of(index: str) -> Collection[str]:
            return read_index(huggingface_hub.hf_hub_download(filename=index, **chosen)).values()

        files = pick_files(names, shards_of)
        if not files:
            raise DownloadError(
                f"holds no weights that can be read; it holds {', '.join(sorted(names)[:8])}",
                path=what,
            )
        absent = sorted(set(files) - set(names))
        if absent:
            raise DownloadError(f"its index names files that are missing: {absent[:4]}", path=what)
        where = huggingface_hub.snapshot_download(
            allow_patterns=[glob.escape(name) for name in files], tqdm_class=bar, **chosen
        )
    except (DownloadError, CheckpointError):
        raise
    except failures as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DownloadError(f"the hub: {reason}", path=what) from error
    return DownloadReport(folder or what, where, files)


def _quiet_bar(progress: Progress | None = None, what: str = "") -> type[Any]:
    """A bar for the hub's library that draws nothing, and tells ``progress`` of bytes."""
    bar: Any = importlib.import_module("tqdm.auto").tqdm  # comes with huggingface_hub

    def quiet(self: Any, *args: Any, **options: Any) -> None:
        # Others count files, or what came over the network of what is put together from chunks.
        is_of_chunks = str(options.get("name", "")).endswith(".transfer")
        self.counts_bytes = options.get("unit") == "B" and not is_of_chunks
        self.done_bytes = int(options.get("initial") or 0)
        bar.__init__(self, *args, **{**options, "disable": True})

    def update(self: Any, count: float | None = 1) -> None:
        if self.counts_bytes and progress is not None:
            self.done_bytes += int(count or 0)
            progress(self.done_bytes, int(self.total or 0), what)

    return type("Quiet", (bar,), {"__init__": quiet, "update": update})
