"""What is measured: peers, which load, and the jobs they get. No heavy imports."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamload.measuring.floor import Piece


@dataclass(frozen=True)
class Job:
    """One load: of which checkpoint, to which dtype, with how many workers.

    Attributes:
        path: a checkpoint, as ``streamload.load`` takes it.
        dtype: torch's name of what floats are cast to; None keeps the stored ones.
        workers: threads for those that let one choose.
        own_dir: where a peer keeps files of a format of its own.
        chunk_bytes: size of a block for streamload; None is its default.
        tensors: load tensors alone, without a model.
    """

    path: str
    dtype: str | None
    workers: int
    own_dir: str = ""
    chunk_bytes: int | None = None
    tensors: bool = False

    @functools.cached_property
    def pieces(self) -> Sequence[Piece]:
        """The stored tensors that a load reads."""
        from streamload.measuring.survey import survey

        return survey(self.path, dtype=self.dtype).pieces

    def torch_dtype(self) -> Any:
        import torch

        return None if self.dtype is None else getattr(torch, self.dtype)

    def cast(self, tensor: Any, *, copy: bool = False) -> Any:
        """``tensor`` in the job's dtype if it is one of floats; ``copy``: in memory of its own."""
        dtype = self.torch_dtype() if tensor.is_floating_point() else None
        return tensor.to(dtype or tensor.dtype, copy=copy)

    def check(self, _peer: Peer, _result: Any) -> str:
        """What is said of the values that were loaded; kinds of jobs that check them override."""
        return "not checked"

    def to_order(self) -> dict[str, Any]:
        """The job for another process, as JSON has it."""
        return {"class": f"{type(self).__module__}:{type(self).__qualname__}", **asdict(self)}


def read_job(order: dict[str, Any]) -> Job:
    """The job that ``Job.to_order`` wrote down."""
    fields = dict(order)
    module, _, name = fields.pop("class").partition(":")
    job: Job = getattr(importlib.import_module(module), name)(**fields)
    return job


class Peer:
    """A loader to measure.

    Attributes:
        reference: how another process finds it: a file, or ``MODULE:NAME``, a key of the
            module's ``PEERS``.
        name: for options and figures; ``label`` and ``delivers`` are words for the table.
        imported: modules to import before the clock starts.
        published: builds models that have published names; others would stay random.
        prepare: makes files in the job's ``own_dir``, once, not timed; None if there is no need.
        tokens: continues a text: job, ids and how many to yield; None if it only loads.
    """

    imported: tuple[str, ...] = ("torch",)
    published = False
    prepare: Callable[[Any], None] | None = None
    tokens: Callable[[Any, list[int], int], Iterator[int]] | None = None

    def __init__(self, name: str, label: str, delivers: str) -> None:
        self.reference = f"{type(self).__module__}:{name}"
        self.name = name
        self.label = label
        self.delivers = delivers

    def available(self) -> str | None:
        """None, or why it cannot run, in a word."""
        packages = [name.split(".")[0] for name in self.imported]
        missing = [name for name in packages if importlib.util.find_spec(name) is None]
        return f"{missing[0]} is not installed" if missing else None

    def unfit(self, _job: Any) -> str | None:
        """None, or why measuring this job with it would say nothing, in a word."""
        return None

    def imports(self) -> None:
        for name in self.imported:
            importlib.import_module(name)

    def get_ready(self, _job: Job) -> None:
        self.imports()

    def load(self, job: Any) -> Any:
        """Load: a module, a dict of tensors, or what has a ``.model``."""
        raise NotImplementedError

    def stored(self, result: Any, _job: Any) -> dict[str, Any]:
        """The loaded tensors under the file's names and in the file's orientation."""
        return dict(result) if hasattr(result, "keys") else dict(result.state_dict())


class FilePeer(Peer):
    """A peer that one file defines.

    ``LABEL``, ``DELIVERS`` and ``load(job)`` must be there. ``IMPORTS``, ``PUBLISHED`` and
    functions with the names of Peer's methods (``imports()``, ``available()``, ``unfit(job)``,
    ``prepare(job)``, ``stored(result, job)``, ``tokens(job, ids, count)``) may be.

    Raises:
        AttributeError: one of the names it must define is missing.
    """

    def __init__(self, file: str) -> None:
        name = os.path.splitext(os.path.basename(file))[0]
        spec = importlib.util.spec_from_file_location(f"bench_peer_{name}", file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for needed in ("LABEL", "DELIVERS", "load"):
            if not hasattr(module, needed):
                raise AttributeError(f"{file} does not define {needed}")
        super().__init__(name, module.LABEL, module.DELIVERS)
        self.reference = file
        self.imported = getattr(module, "IMPORTS", self.imported)
        self.published = getattr(module, "PUBLISHED", self.published)
        # Functions of the file stand in for the methods.
        for method in ("available", "unfit", "imports", "load", "stored", "prepare", "tokens"):
            if hasattr(module, method):
                setattr(self, method, getattr(module, method))


def read_peer(reference: str) -> Peer:
    """The peer that ``reference`` names."""
    if reference.endswith(".py"):
        return FilePeer(reference)
    module, _, name = reference.partition(":")
    peer: Peer = importlib.import_module(module).PEERS[name]
    return peer
