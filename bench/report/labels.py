"""Words in pictures: where labels go so that none covers another, names cut to a length."""

from collections.abc import Callable, Sequence


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Each place moved as little as needed, in the same order, at least ``gap`` apart.

    All are kept between ``low`` and ``high`` where they fit; where they do not, they share the
    room evenly.
    """
    if len(places) > 1:
        gap = min(gap, (high - low) / (len(places) - 1))
    order = sorted(range(len(places)), key=lambda at: places[at])
    # Runs of labels that touch: (sum of the places wished for their lowest one, how many).
    runs: list[tuple[float, int]] = []
    for at in order:
        runs.append((places[at], 1))
        while len(runs) > 1 and _start(runs[-2]) + gap * runs[-2][1] > _start(runs[-1]):
            (later, more), (total, count) = runs.pop(), runs.pop()
            runs.append((total + later - gap * count * more, count + more))
    found, at = [0.0] * len(places), 0
    for run in runs:
        for step in range(run[1]):
            found[order[at]] = _start(run) + gap * step
            at += 1
    return _pushed_in(found, order, gap, low, high)


def _start(run: tuple[float, int]) -> float:
    return run[0] / run[1]


def _pushed_in(
    places: list[float], order: Sequence[int], gap: float, low: float, high: float
) -> list[float]:
    least = low
    for at in order:
        places[at] = max(places[at], least)
        least = places[at] + gap
    most = high
    for at in reversed(order):
        places[at] = min(places[at], most)
        most = places[at] - gap
    return places


def shortened(text: str, most: int) -> str:
    """At most ``most`` letters of text; what is left out is in the middle."""
    if len(text) <= most:
        return text
    kept = max(1, most - 1)
    tail = kept // 2
    return text[: kept - tail] + "…" + text[len(text) - tail :]


def wrapped(text: str, fits: Callable[[str], bool], at: str = " ") -> list[str]:
    """Lines that each fit, broken ``at`` only; what does not fit is on a line of its own."""
    lines: list[str] = []
    for part in text.split(at):
        longer = f"{lines[-1]}{at}{part}" if lines else part
        if lines and fits(longer):
            lines[-1] = longer
        else:
            lines.append(part)
    return lines
