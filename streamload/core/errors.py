"""Every error streamload raises.

    StreamloadError
    ├── CheckpointError        the files cannot be used: missing, cut, damaged, of an unknown kind
    │   └── CheckpointNotFoundError (also FileNotFoundError)
    ├── PlanError              file and module do not fit; ``.report`` lists every problem
    ├── MemoryBudgetError      the load would need more memory than there is
    ├── RankError              another rank of the load failed, is gone, or loads something else
    ├── ReadError (also OSError)   reading failed midway, or the file changed meanwhile
    ├── WriteError (also OSError)  writing an export, a conversion or a cache entry failed
    ├── DownloadError (also OSError)  a server refused, or broke off
    └── MissingExtraError (also ImportError)  an optional package is not installed

Each names the file, the tensor where there is one, what was expected and what was found.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from streamload.core.wording import listed, printable, printable_lines, without_secrets

if TYPE_CHECKING:
    from streamload.core.report import LoadReport


_MOST_CHARS = 20_000


def note_overwritten(error: BaseException, names: Sequence[str]) -> None:
    """Say in ``error`` which tensors had been overwritten in place before it was raised.

    Its type and arguments stay; the names are also in its attribute ``overwritten``.
    """
    error.overwritten = tuple(names)  # type: ignore[attr-defined]
    text = f"already overwritten, at least in part: {listed(map(repr, names))}"
    if isinstance(error, StreamloadError):
        error.extend(text)
    elif hasattr(error, "add_note"):  # Python 3.11
        error.add_note(text)


def _cut(message: str) -> str:
    if len(message) <= _MOST_CHARS:
        return message
    half = _MOST_CHARS // 2
    left = len(message) - 2 * half
    return f"{message[:half]} … ({left} characters) … {message[-half:]}"


class StreamloadError(Exception):
    """Base of all errors raised on purpose by streamload.

    A message can be printed anywhere: the middle of a long one is cut, control characters are
    escaped.
    """

    def __init__(self, *args: object) -> None:
        message, *others = args or ("",)
        super().__init__(printable_lines(_cut(str(message))), *others)

    def extend(self, text: str) -> None:
        self.args = (f"{self}; {printable_lines(text)}", *self.args[1:])


class _LocatedError(StreamloadError):
    """An error in a file, or in one of its tensors: the message begins with both.

    Attributes:
        path: the file or folder the message is about.
        tensor: the stored tensor's name, if the fault is one tensor's.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | os.PathLike[str] | None = None,
        tensor: str | None = None,
    ) -> None:
        shown = None if path is None else without_secrets(os.fspath(path))
        where = "" if shown is None else f"{printable(shown)}: "
        which = "" if tensor is None else f"tensor {tensor!r}: "
        super().__init__(f"{where}{which}{message}")
        self.path = shown
        self.tensor = tensor

    def __str__(self) -> str:
        # OSError's own __str__ prefers errno and strerror.
        return str(self.args[0])


class CheckpointError(_LocatedError):
    """A checkpoint file is missing, damaged or of a kind that cannot be read.

    Attributes:
        problems: every problem found, one line each (the message joins them).
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | os.PathLike[str] | None = None,
        tensor: str | None = None,
        problems: tuple[str, ...] = (),
    ) -> None:
        super().__init__(printable(_cut(message)), path=path, tensor=tensor)
        self._listed = tuple(map(printable, problems))

    @property
    def problems(self) -> tuple[str, ...]:
        return self._listed or (str(self),)


def refuse(
    problems: Iterable[str], *, most: int = 20, path: str | None = None, tensor: str | None = None
) -> None:
    """Raise a CheckpointError with all ``problems``, if there are any; its message has ``most``."""
    if lines := tuple(problems):
        text = listed(lines, most, separator="; ", more="; and {left} more")
        raise CheckpointError(text, path=path, tensor=tensor, problems=lines)


@contextmanager
def naming(path: str) -> Iterator[None]:
    """A CheckpointError from within that names no file is made to name ``path``."""
    try:
        yield
    except CheckpointError as error:
        if error.path is None:
            error.args, error.path = (f"{printable(path)}: {error}",), path
        raise


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path; the message says what was looked for."""


class PlanError(StreamloadError):
    """File and module do not fit together; nothing was touched.

    Attributes:
        report: missing, unexpected, shape_mismatch, unfilled and all problems, if it got so far.
    """

    def __init__(self, message: str, *, report: LoadReport | None = None) -> None:
        super().__init__(message)
        self.report = report


class MemoryBudgetError(StreamloadError):
    """The load needs more memory than is available; nothing was allocated.

    Attributes:
        needed_bytes, available_bytes: what the plan needs, and what the machine or cgroup has.
        limit: which limit binds: ``"cgroup"``, ``"machine"`` or ``"device"``.
    """

    def __init__(
        self, message: str, *, needed_bytes: int, available_bytes: int, limit: str
    ) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.limit = limit


class RankError(StreamloadError):
    """A load by several ranks ended because of some of them; no rank keeps anything of it.

    Attributes:
        ranks: whose doing it was, as far as is known.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class _LocatedOSError(_LocatedError, OSError):
    def __init__(
        self,
        message: str,
        *,
        path: str | os.PathLike[str] | None = None,
        tensor: str | None = None,
        errno: int | None = None,
    ) -> None:
        super().__init__(message, path=path, tensor=tensor)
        self.errno = errno


class ReadError(_LocatedOSError):
    """Reading failed midway: an I/O error, a file cut short, or a file replaced meanwhile."""


class WriteError(_LocatedOSError):
    """Writing failed; the files that were there before are intact."""


class DownloadError(_LocatedOSError):
    """A download was not finished; the bytes that arrived are kept, and the next try resumes."""


class MissingExtraError(StreamloadError, ImportError):
    """An optional dependency is not installed; the message has the command that installs it."""

    def __init__(self, package: str, *, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}: pip install 'streamload[{extra}]'"
        )
        self.package = package
        self.extra = extra
