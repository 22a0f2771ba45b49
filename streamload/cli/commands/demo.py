"""``streamload demo``: the whole way once, on a small checkpoint made here, in a few seconds."""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

import click

from streamload.cli.render.progress import progress_bar
from streamload.cli.render.reporting import report_text
from streamload.cli.render.tables import columns, heading, say_report
from streamload.cli.render.terminal import is_quiet, say
from streamload.cli.shared_options import common_options
from streamload.core.errors import StreamloadError, WriteError
from streamload.core.report import LoadReport
from streamload.core.wording import format_bytes, plural, printable

if TYPE_CHECKING:
    from streamload.cli.render import trials

_PROMPT = "The ship set sail"
_NEW_TOKENS = 16
_BROKEN = "h.3.mlp.c_fc.weight"
_NEXT = """\
with a folder of your own (or hf:ORG/NAME, a .gguf file, an https:// or s3:// address):
  streamload inspect ./my-model
  streamload plan ./my-model --dtype bfloat16
  streamload load ./my-model --dtype bfloat16
  streamload generate ./my-model --dtype bfloat16 --prompt "Hello"
and in Python:
  model = streamload.load("./my-model", dtype="bfloat16").model
  report = streamload.load_into(my_module, "./my-model")"""


@click.command("demo", epilog="Example: streamload demo -v")
@click.argument("directory", required=False, type=click.Path(file_okay=False))
@click.option("-v", "--verbose", is_flag=True, help="List every assignment.")
@common_options
def command(directory: str | None, verbose: bool, as_json: bool) -> None:
    """Go the whole way on a small checkpoint of random weights: nothing is downloaded.

    Writes a GPT-2 of 12 blocks under its published names (25 MB, kept in DIRECTORY or in the
    user's cache for the next time), loads it, compares every tensor with the file, time and memory
    with safetensors' load_file, generates with the model as it was initialised and as it was
    loaded, and shows how a wrong shape is refused.
    """

    def tell(text: str) -> None:
        """Each step when it is done; with --json, everything comes at the end."""
        if not as_json and not is_quiet():
            say(text)

    with progress_bar("making a checkpoint"):
        folder = _make(directory)
    tell(f"{heading('checkpoint')} {printable(folder)}")

    with progress_bar("loading") as progress:
        import streamload

        loaded = streamload.load(folder, progress=progress)
        from streamload.cli.render import trials
    report = loaded.report
    tell(f"{heading('load')} {report_text(report, verbose=verbose)}\n")

    other = trials.by_load_file(folder, report)
    tell("\n".join(_beside(report, other)) + "\n")
    equal = trials.equal_tensors(loaded.model, other.model)
    tell(f"{plural(equal, 'tensor')} equal the file, bit for bit (as load_file reads it)\n")

    before, after = trials.continuations(folder, loaded, _PROMPT, _NEW_TOKENS)
    tell(heading(f"{_PROMPT!r} continued, greedily"))
    tell(f"  before: random weights\n    {before}\n  after: loaded weights\n    {after}\n")
    if before == after:
        raise StreamloadError(
            "the continuation is the same before and after the load: nothing was loaded"
        )
    tied = trials.check_ties(loaded)
    tell(f"{heading('tied')} {' is '.join(tied)}: one tensor, counted once\n")

    refusal = trials.refusal(folder, loaded.model, _BROKEN)
    tell(f"{heading('refused')}, as it should be, a file with a wrong shape:\n  {refusal}")
    tell("  the model is untouched: every value is what it was\n")
    result = {"ok": True, "path": folder, "before": before, "after": after}
    result |= {"equal_tensors": equal, "load_file": other.to_dict()}
    result |= {"tied": list(tied), "refusal": refusal, "load": report.to_dict()}
    say_report(as_json, lambda: result, lambda: f"{heading('next')}, {_NEXT}")


def _beside(report: LoadReport, other: trials.ByLoadFile) -> list[str]:
    """Time and memory of both, in this process."""
    size = report.memory.peak_rss_bytes
    rows = [
        ("", "time", "memory"),
        ("streamload.load", f"{report.elapsed_s:.2f} s", format_bytes(size)),
        ("load_file, load_state_dict", f"{other.elapsed_s:.2f} s", format_bytes(other.peak_bytes)),
    ]
    head, *others = columns(rows, right=frozenset({1, 2}), least={0: 12})
    return [heading(head), *others]


def _make(directory: str | None) -> str:
    """The stub's folder; written on the first use, in a temporary folder if need be."""
    from streamload.saving.cache.entries import cache_folder
    from streamload.synthesis import synthesize

    if directory is not None:
        return synthesize("gpt2-stub", directory).path
    folder = os.path.join(cache_folder(), "demo", "gpt2-stub")
    try:
        return synthesize("gpt2-stub", folder, force=True).path
    except WriteError:  # no home folder, or one that cannot be written to
        folder = os.path.join(tempfile.mkdtemp(prefix="streamload-"), "gpt2-stub")
        return synthesize("gpt2-stub", folder).path
