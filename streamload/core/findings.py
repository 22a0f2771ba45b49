"""What planning and loading find: records, put into words once, where a report is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

_NAMED = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that refuses a load, or that its user should know.

    Attributes:
        text: what is so; of ``tensor``, if that is set.
        refuses: the load cannot be done.
        tensor: the name of the tensor that it is about.
        lead: stands before the tensor's name, such as the names of its sources.
        count: how many values it is about; stands for ``{count}`` in ``text``.
    """

    text: str
    refuses: bool = False
    tensor: str = ""
    lead: str = ""
    count: int = 0

    def __str__(self) -> str:
        text = self.text.replace("{count}", str(self.count)) if self.count else self.text
        return f"{self.lead}{self.tensor!r}{text}" if self.tensor else text


def in_words(findings: Iterable[Finding], *, refusing: bool) -> tuple[str, ...]:
    """One line for each finding that refuses, or for each that stops nothing."""
    return tuple(str(finding) for finding in findings if finding.refuses is refusing)


def fold(findings: Iterable[Finding]) -> list[str]:
    """The problems for one line: what many tensors have in common is said once."""
    groups: dict[tuple[str, bool], list[Finding]] = {}
    for finding in findings:
        if finding.refuses:
            groups.setdefault((finding.text, bool(finding.tensor)), []).append(finding)
    folded = []
    for (text, is_of_tensors), members in groups.items():
        if len(members) == 1 or not is_of_tensors:
            folded.append(str(members[0]))
            continue
        names = ", ".join(repr(member.tensor) for member in members[:_NAMED])
        more = ", …" if len(members) > _NAMED else ""
        folded.append(f"each of {len(members)} tensors ({names}{more}){text}")
    return folded


def added_up(findings: Iterable[Finding]) -> list[Finding]:
    """Findings that differ in their counts alone become one each."""
    counts: Counter[Finding] = Counter()
    for finding in findings:
        counts[replace(finding, count=0)] += finding.count
    return [replace(finding, count=count) for finding, count in counts.items()]
