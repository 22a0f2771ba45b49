"""One load's memory and bytes over time: recorded, then written as JSON or as a picture."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

from streamload.cli.render.progress import Progress
from streamload.cli.types import Parsed
from streamload.core.errors import MissingExtraError
from streamload.core.wording import printable
from streamload.saving.atomic import StagedFile, committing
from streamload.system.peaks import PeakSampler

if TYPE_CHECKING:
    from streamload.core.report import LoadReport

_MIB = 1 << 20
_WIDTH_INCHES, _HEIGHT_INCHES, _DPI = 8.3, 4.2, 150


def _checked_path(path: str) -> str:
    """A path that a trace can be written to; refused before the load, not after it.

    Raises:
        ValueError: neither .png nor .json, or not in a folder that exists.
        MissingExtraError: a picture is wanted and matplotlib is not installed.
    """
    ending = os.path.splitext(path)[1].lower()
    if ending not in (".png", ".json"):
        raise ValueError(f"{printable(path)} ends in neither .png nor .json")
    folder = os.path.dirname(path) or os.curdir
    if not os.path.isdir(folder):
        raise ValueError(f"the folder {printable(folder)} does not exist")
    if os.path.isdir(path):
        raise ValueError(f"{printable(path)} is a folder")
    if ending == ".png":
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise MissingExtraError(
                "matplotlib", extra="plot", purpose="a picture of the load"
            ) from error
    return path


TRACE_PATH = Parsed("file", _checked_path)


class Trace:
    """Context manager that records memory and progress from its start to its end."""

    def __init__(self) -> None:
        self._sampler = PeakSampler(record=True)
        self._start_s = 0.0
        self._bytes: list[tuple[float, int]] = []
        self._total_bytes = 0

    def __enter__(self) -> Trace:
        self._start_s = time.perf_counter()
        self._bytes = [(0.0, 0)]
        self._sampler.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._sampler.__exit__(*exc)

    def progress(self, shown: Progress | None) -> Progress:
        """A progress callback that records, and calls the one that is shown."""

        def note(done_bytes: int, total_bytes: int, name: str) -> None:
            self._bytes.append((time.perf_counter() - self._start_s, done_bytes))
            self._total_bytes = total_bytes
            if shown is not None:
                shown(done_bytes, total_bytes, name)

        return note

    def to_dict(self, report: LoadReport) -> dict[str, Any]:
        """As JSON: bytes held by the process, not over the start; times in seconds."""
        samples = self._sampler.samples
        return {
            "path": report.source,
            "mode": report.mode,
            "dtype": report.dtype,
            "memory": {
                "elapsed_s": [round(at_s, 4) for at_s, _ in samples],
                "rss_bytes": [held.rss for _, held in samples],
                "anonymous_bytes": [held.anonymous for _, held in samples],
                "file_bytes": [held.file for _, held in samples],
            },
            "read": {
                "elapsed_s": [round(at_s, 4) for at_s, _ in self._bytes],
                "done_bytes": [done for _, done in self._bytes],
                "total_bytes": self._total_bytes,
            },
            "load": report.to_dict(),
        }

    def write(self, path: str, report: LoadReport) -> None:
        """Write the file, whole or not at all.

        Raises:
            WriteError: it cannot be written.
        """
        trace = self.to_dict(report)
        data = _picture(trace) if path.lower().endswith(".png") else json.dumps(trace).encode()
        with committing(StagedFile(path)) as file:
            file.write(data, 0)


def _picture(trace: dict[str, Any]) -> bytes:
    """Two panels over one axis of time: memory over the start, and bytes read. A PNG.

    Lines differ in width and dashes, so that it reads in black and white.
    """
    import io

    from matplotlib.figure import Figure

    memory, read = trace["memory"], trace["read"]
    figure = Figure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    curves = (
        ("rss_bytes", "resident", "-", 2.0),
        ("anonymous_bytes", "anonymous", "--", 1.2),
        ("file_bytes", "file (mapped)", ":", 1.6),
    )
    for key, label, dashes, width in curves:
        over = [(nbytes - memory[key][0]) / _MIB for nbytes in memory[key]]
        style = {"linestyle": dashes, "linewidth": width, "color": "#1b5e8c"}
        upper.plot(memory["elapsed_s"], over, label=label, **style)
    upper.set_ylabel("memory over the start, MiB")
    upper.legend(frameon=False, loc="upper left")
    # parse_math: dollar signs in a path are no mathematics.
    title = f"{trace['path']} to {trace['dtype'] or 'its stored dtype'}, {trace['mode']}"
    upper.set_title(title, fontsize=9, parse_math=False)
    lower.plot(read["elapsed_s"], [b / _MIB for b in read["done_bytes"]], color="black")
    lower.set_ylabel("read, MiB")
    lower.set_xlabel("seconds")
    for axis in (upper, lower):
        axis.grid(color="#dddddd", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()
