"""What a verification found, as records and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from streamload.core.dtypes import BY_NAME
from streamload.core.specs import Shape
from streamload.core.wording import format_bytes, plural, printable, section

_SHOWN = 12


@dataclass
class OddValues:
    """What is odd about one tensor's values, of those that were read."""

    name: str
    elements: int = 0
    nan: int = 0
    inf: int = 0
    is_zero: bool = True


@dataclass(frozen=True, slots=True)
class DigestCheck:
    """One digest: what the bytes of ``what`` must have and what they have."""

    what: str
    kind: str
    expected: str
    found: str

    @property
    def ok(self) -> bool:
        return self.expected == self.found

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "what": printable(self.what), "ok": self.ok}


@dataclass(frozen=True, slots=True)
class Difference:
    """How one tensor differs.

    Attributes:
        name: as mapped; ``sources`` and ``others`` are the stored names on both sides.
        kind: ``"shape"``, ``"dtype"`` or ``"values"``.
        detail: one readable line.
        elements: how many differ; ``first`` is the index of the first.
        largest: the largest difference of finite values; None where there is none.
        dtypes: of both sides, by their safetensors names, if these differ.
    """

    name: str
    sources: tuple[str, ...]
    others: tuple[str, ...]
    kind: str
    detail: str
    elements: int = 0
    first: Shape = ()
    largest: float | None = None
    dtypes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["dtypes"]  # in ``detail`` already
        return {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}


@dataclass(frozen=True)
class VerifyReport:
    """What was found.

    Attributes:
        path, against: what was read.
        files: how many bytes of each file were checked or compared, each byte counted once.
        tensors: how many tensors were read, or compared.
        non_finite: tensors with NaN or infinite values, by stored name; a notice, not a failure.
        all_zero: stored names of tensors that hold nothing but zeros (a zero bias is common).
        digests: every digest there is: SHA-256 or git's SHA-1 of files that a hub cache names by
            content or notes at a download, CRC-32 of the storages of a .pt or .bin file.
        differences, only_here, only_there: of a comparison.
    """

    path: str = ""
    against: str | None = None
    files: Mapping[str, int] = field(default_factory=dict)
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
        """True if there was something to check, all digests fit, and nothing differs."""
        is_done = bool(self.tensors or self.digests)
        return (
            is_done
            and all(d.ok for d in self.digests)
            and not (self.differences or self.only_here or self.only_there)
        )

    def to_dict(self) -> dict[str, Any]:
        lists = {k: list(v) for k, v in vars(self).items() if isinstance(v, tuple)}
        return {
            "ok": self.ok,
            **vars(self),
            **lists,
            "files": {printable(name): nbytes for name, nbytes in self.files.items()},
            "path": printable(self.path),
            "against": None if self.against is None else printable(self.against),
            "non_finite": [{"name": v.name, "nan": v.nan, "inf": v.inf} for v in self.non_finite],
            "digests": [d.to_dict() for d in self.digests],
            "differences": [d.to_dict() for d in self.differences],
        }

    def to_text(self) -> str:
        what = "compared" if self.against is not None else "read"
        size = format_bytes(sum(self.files.values()))
        count = plural(self.tensors, "tensor")
        lines = [f"{what} {count}, {size} in {self.elapsed_s:.2f} s"]
        if not self.tensors:
            lines[0] = f"nothing was {what}: there are no tensors"
            if self.against is not None:
                lines[0] = "nothing was compared: no tensor is in both"
        rows = [f"{printable(file)}: {format_bytes(nbytes)}" for file, nbytes in self.files.items()]
        if len(rows) > 1:
            lines += section("each byte once of", rows, _SHOWN)
        if self.against is None and self.tensors:
            lines += self._found_lines()
        lines += _different_lines(self.differences)
        lines += section(f"only in {printable(self.path)}", list(map(repr, self.only_here)), _SHOWN)
        lines += section(f"only in {self.against}", list(map(repr, self.only_there)), _SHOWN)
        lines += [f"notice: {notice}" for notice in self.notices]
        if self.against is not None and self.ok:
            lines.append("no difference")
        return "\n".join(map(printable, lines))

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
            else "no digests to compare with: these files are not named by their content, and no "
            "download of the hub has noted any"
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
