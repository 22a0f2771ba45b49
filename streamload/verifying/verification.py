"""``verify``: is every byte of a checkpoint what it should be, and what another one has?"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamload.core.dtypes import BY_NAME
from streamload.core.options import Settings, settings_from
from streamload.core.wording import format_bytes, plural, printable, section
from streamload.sources.detect import open_checkpoint
from streamload.verifying.checking import DigestCheck, OddValues, check
from streamload.verifying.comparing import Difference, compare_checkpoints

if TYPE_CHECKING:
    import torch

_SHOWN = 12


@dataclass(frozen=True)
class VerifyReport:
    """What was found.

    Attributes:
        path, against: what was read.
        tensors: how many tensors were read, or compared.
        non_finite: tensors with NaN or infinite values, by stored name; a notice, not a failure.
        all_zero: stored names of tensors that hold nothing but zeros (a zero bias is common).
        digests: every digest there is: SHA-256 or git's SHA-1 of files that a hub cache names by
            content, CRC-32 of the storages of a .pt or .bin file.
        differences, only_here, only_there: of a comparison.
    """

    path: str
    against: str | None = None
    tensors: int = 0
    non_finite: tuple[OddValues, ...] = ()
    all_zero: tuple[str, ...] = ()
    digests: tuple[DigestCheck, ...] = ()
    differences: tuple[Difference, ...] = ()
    only_here: tuple[str, ...] = ()
    only_there: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    bytes_read: int = 0
    elapsed_s: float = 0.0

    @property
    def ok(self) -> bool:
        """True if all digests fit and nothing differs."""
        return all(d.ok for d in self.digests) and not (
            self.differences or self.only_here or self.only_there
        )

    def to_dict(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        return {
            "ok": self.ok,
            "path": printable(self.path),
            "against": None if self.against is None else printable(self.against),
            "tensors": self.tensors,
            "non_finite": [{"name": v.name, "nan": v.nan, "inf": v.inf} for v in self.non_finite],
            "all_zero": list(self.all_zero),
            "digests": [d.to_dict() for d in self.digests],
            "differences": [d.to_dict() for d in self.differences],
            "only_here": list(self.only_here),
            "only_there": list(self.only_there),
            "notices": list(self.notices),
            "bytes_read": self.bytes_read,
            "elapsed_s": self.elapsed_s,
        }

    def to_text(self) -> str:
        """A few readable lines."""
        what = "compared" if self.against is not None else "read"
        lines = [
            f"{what} {self.tensors} tensors, {format_bytes(self.bytes_read)} "
            f"in {self.elapsed_s:.2f} s"
        ]
        if self.against is None:
            lines += self._found_lines()
        lines += _different_lines(self.differences)
        lines += section(f"only in {printable(self.path)}", list(map(repr, self.only_here)), _SHOWN)
        lines += section(f"only in {self.against}", list(map(repr, self.only_there)), _SHOWN)
        lines += [f"notice: {notice}" for notice in self.notices]
        if self.against is not None and self.ok:
            lines.append("no difference")
        return "\n".join(lines)

    def _found_lines(self) -> list[str]:
        odd = [f"{v.name!r}: {v.nan} NaN, {v.inf} infinite" for v in self.non_finite]
        lines = section("not finite", odd, _SHOWN) or ["all values are finite"]
        lines += section("all zero", list(map(repr, self.all_zero)), _SHOWN)
        wrong = [
            f"{printable(d.what)}: {d.kind} is {d.found}, expected {d.expected}"
            for d in self.digests
            if not d.ok
        ]
        good = len(self.digests) - len(wrong)
        lines += section("damaged", wrong, _SHOWN)
        lines.append(
            f"{good} of {len(self.digests)} digests fit"
            if self.digests
            else "no digests to compare with: these files are not named by their content"
        )
        return lines


def _different_lines(differences: tuple[Difference, ...]) -> list[str]:
    """Differing dtypes are a line for each pair of them, not one for each tensor."""
    pairs = Counter((d.detail, d.dtypes) for d in differences if d.kind == "dtype")
    lines = []
    for (pair, names), count in pairs.items():
        dtypes = [BY_NAME[name] for name in names]
        hint = ""
        if all(d.kind == "float" for d in dtypes):
            narrow = min(dtypes, key=lambda d: d.bits).torch_name
            hint = f"; compare after a cast with dtype={narrow!r}"
        lines.append(f"{plural(count, 'tensor')}: {pair}{hint}")
    others = [f"{d.name!r}: {d.detail}" for d in differences if d.kind != "dtype"]
    return lines + section("different", others, _SHOWN)


def verify(
    path: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
    workers: int | None = None,
    chunk_bytes: int | None = None,
    progress: Callable[[int, int, str], object] | None = None,
) -> VerifyReport:
    """Read all of a checkpoint and check it, or compare it with another.

    Alone: values that are not finite and tensors that are all zero are counted, and every digest
    that is known is compared. With ``against``: all tensors are compared under the names they
    have in a model, whatever the formats, layouts and name forms of the two are; masks and
    rotary tables that no model loads are left out.

    Args:
        path: a checkpoint, as ``load`` takes it.
        against: another one.
        dtype: compare after a cast of both to it; without, every bit counts.
        workers: threads that read; default: the cores there are, at most 8.
        chunk_bytes: how much one read brings; default 4 MiB.
        progress: called as progress(done_bytes, total_bytes, name).

    Returns:
        A report; ``.ok`` is False for a wrong digest or a difference. It never raises for those.

    Raises:
        CheckpointError: a file cannot be used.
        ReadError: reading failed.
    """
    if dtype is not None and against is None:
        raise ValueError("dtype is for a comparison: pass against as well")
    settings = settings_from({"dtype": dtype, "workers": workers, "chunk_bytes": chunk_bytes})
    start_s = time.perf_counter()
    if against is not None:
        return _compared(os.fsdecode(path), os.fsdecode(against), settings, start_s, progress)
    with open_checkpoint(path) as source:
        found = check(
            source,
            workers=settings.workers,
            chunk_bytes=settings.chunk_bytes,
            progress=progress,
        )
        notices = source.catalog.notices
    values = found.values.values()
    return VerifyReport(
        os.fsdecode(path),
        tensors=len(values),
        non_finite=tuple(v for v in values if v.nan or v.inf),
        all_zero=tuple(v.name for v in values if v.is_zero and v.elements),
        digests=tuple(found.digests),
        notices=notices,
        bytes_read=found.bytes_read,
        elapsed_s=time.perf_counter() - start_s,
    )


def _compared(
    path: str,
    against: str,
    settings: Settings,
    start_s: float,
    progress: Callable[[int, int, str], object] | None,
) -> VerifyReport:
    with open_checkpoint(path) as here, open_checkpoint(against) as there:
        found = compare_checkpoints(here, there, settings, progress=progress)
    return VerifyReport(
        path,
        against,
        found.compared,
        differences=tuple(found.differences),
        only_here=found.only_here,
        only_there=found.only_there,
        notices=tuple(found.notices),
        bytes_read=found.bytes_read,
        elapsed_s=time.perf_counter() - start_s,
    )
