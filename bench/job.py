"""What one measurement is about, and the peers it can be asked of. No heavy imports."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from bench.safetensors_header import Entry, read_headers

__all__ = ["Job", "Peer", "find_peers", "read_peer"]

_BESIDE = (
    ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias",
    ".rotary_emb.inv_freq",
)  # fmt: skip
PEERS_DIR = os.path.join(os.path.dirname(__file__), "peers")


@dataclass(frozen=True)
class Job:
    """One load: which files, to which dtype, with how many workers.

    Attributes:
        path: a folder with config.json, or one .safetensors file.
        dtype: torch name to cast floats to; None keeps the stored ones.
        workers: threads for those that let one choose.
        own_dir: where a peer keeps files of a format of its own.
    """

    path: str
    dtype: str | None
    workers: int
    own_dir: str

    @property
    def files(self) -> list[str]:
        """The .safetensors files, in name order."""
        if not os.path.isdir(self.path):
            return [self.path]
        names = sorted(n for n in os.listdir(self.path) if n.endswith(".safetensors"))
        return [os.path.join(self.path, n) for n in names]

    @property
    def entries(self) -> dict[str, Entry]:
        """What a model needs of the files: every tensor but the attention masks."""
        return {n: e for n, e in read_headers(self.files).items() if not is_mask(n)}

    def torch_dtype(self) -> Any:
        """The dtype as torch's own object, or None."""
        import torch

        return None if self.dtype is None else getattr(torch, self.dtype)

    def cast(self, tensor: Any) -> Any:
        """``tensor`` in the job's dtype if it is one of floats."""
        dtype = self.torch_dtype()
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def is_mask(name: str) -> bool:
    """True for what published GPT-2 and GPT-NeoX files carry beside their weights."""
    return name.endswith(_BESIDE)


@dataclass(frozen=True)
class Peer:
    """A loader to measure: one file that defines a few names.

    ``LABEL`` and ``DELIVERS`` (words for the table) and ``load(job)`` must be there. Left out,
    ``IMPORTS`` (modules to import before the clock starts) is ``("torch",)``, ``imports()``
    imports these, ``available()`` (None, or why not in a word) looks whether they are installed,
    ``prepare(job)`` (makes files in ``job.own_dir``, once, not timed) does nothing, and
    ``stored(result, job)`` (the loaded tensors under the file's names and in the file's
    orientation) takes the result's own names.
    """

    file: str
    module: ModuleType

    @property
    def name(self) -> str:
        return os.path.splitext(os.path.basename(self.file))[0]

    @property
    def label(self) -> str:
        return str(self.module.LABEL)

    @property
    def delivers(self) -> str:
        return str(self.module.DELIVERS)

    @property
    def imported(self) -> tuple[str, ...]:
        return tuple(getattr(self.module, "IMPORTS", ("torch",)))

    def available(self) -> str | None:
        own: Callable[[], str | None] | None = getattr(self.module, "available", None)
        if own is not None:
            return own()
        missing = [n for n in self.imported if importlib.util.find_spec(n.split(".")[0]) is None]
        return f"{missing[0].split('.')[0]} is not installed" if missing else None

    def imports(self) -> None:
        own: Callable[[], None] | None = getattr(self.module, "imports", None)
        if own is not None:
            own()
            return
        for name in self.imported:
            importlib.import_module(name)

    def prepare(self, job: Job) -> None:
        own: Callable[[Job], None] | None = getattr(self.module, "prepare", None)
        if own is not None:
            own(job)

    @property
    def prepares(self) -> bool:
        return hasattr(self.module, "prepare")

    def load(self, job: Job) -> Any:
        return self.module.load(job)

    def stored(self, result: Any, job: Job) -> dict[str, Any]:
        own: Callable[[Any, Job], dict[str, Any]] | None = getattr(self.module, "stored", None)
        if own is not None:
            return own(result, job)
        return dict(result) if hasattr(result, "keys") else dict(result.state_dict())


def read_peer(file: str) -> Peer:
    """The peer defined in ``file``.

    Raises:
        AttributeError: one of the names it must define is missing.
    """
    spec = importlib.util.spec_from_file_location(
        f"bench_peer_{os.path.splitext(os.path.basename(file))[0]}", file
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("LABEL", "DELIVERS", "load"):
        if not hasattr(module, name):
            raise AttributeError(f"{file} does not define {name}")
    return Peer(file, module)


def find_peers(
    only: Iterable[str] = (), *, folders: Iterable[str] = (), base: str = PEERS_DIR
) -> list[Peer]:
    """The peers of ``base`` and of more folders, or those named in ``only``.

    Raises:
        KeyError: a name in ``only`` is no peer.
    """
    files: dict[str, str] = {}
    for folder in (base, *folders):
        for entry in sorted(os.listdir(folder)):
            stem, ending = os.path.splitext(entry)
            if ending == ".py" and not entry.startswith("_"):
                files[stem] = os.path.join(folder, entry)
    names = list(only) or list(files)
    unknown = [name for name in names if name not in files]
    if unknown:
        raise KeyError(f"no peer {unknown[0]!r}; there are {', '.join(sorted(files))}")
    return [read_peer(files[name]) for name in names]
