"""``streamload demo``: the whole way once, on a small checkpoint made here, in a few seconds."""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

import click

from streamload.cli.options import common_options
from streamload.cli.render.tables import columns, heading, say
from streamload.core.errors import PlanError, StreamloadError, WriteError, printable

_PROMPT = "The ship set sail"
_NEW_TOKENS = 24
_BROKEN = "h.3.mlp.c_fc.weight"


@click.command("demo", epilog="Example: streamload demo -v")
@click.argument("directory", required=False, type=click.Path(file_okay=False))
@click.option("-v", "--verbose", is_flag=True, help="List every assignment.")
@common_options
def command(directory: str | None, verbose: bool, as_json: bool) -> None:
    """Show the whole way on a small checkpoint of random weights: nothing is downloaded.

    Writes a GPT-2 of 12 blocks under its published names (25 MB, kept in DIRECTORY, or in the
    user's cache, for the next time), loads it, generates with the model as it was initialised
    and as it was loaded, checks the tied weights, and shows what a wrong shape gets.
    """
    # Without --json, each step is told when it is done; with it, everything at the end.
    tell = _nothing if as_json else say
    folder = _make(directory)
    tell(f"{heading('checkpoint')} {printable(folder)}")

    import streamload
    from streamload.cli.render import trials

    loaded = streamload.load(folder)
    tell(f"{heading('load')} {loaded.report.to_text(verbose=verbose)}\n")

    before, after = trials.continuations(folder, loaded, _PROMPT, _NEW_TOKENS)
    tell(heading(f"{_PROMPT!r} continued, greedily"))
    tell("\n".join(_side_by_side(before, after)) + "\n")
    if before == after:
        raise StreamloadError(
            "the continuation is the same before and after the load: nothing was loaded"
        )
    tied = trials.check_ties(loaded)
    tell(f"{heading('tied')} {' is '.join(tied)}: one tensor, counted once\n")

    refusal = _refusal(folder, loaded)
    tell(f"{heading('refused')}, as it should be, a file with a wrong shape:\n  {refusal}")
    tell("  the model is untouched: every value is what it was")
    if as_json:
        result: dict[str, Any] = {"ok": True, "path": folder, "before": before, "after": after}
        result |= {"tied": list(tied), "refusal": refusal, "load": loaded.report.to_dict()}
        say(json.dumps(result))


def _nothing(text: str) -> None:
    del text


def _make(directory: str | None) -> str:
    """The stub's folder; made on the first use, in a temporary folder if need be."""
    from streamload.synthesis import synthesize

    if directory is not None:
        return synthesize("gpt2-stub", directory).path
    try:
        return synthesize("gpt2-stub", _cache_folder(), force=True).path
    except WriteError:  # no home, or one that cannot be written
        folder = os.path.join(tempfile.mkdtemp(prefix="streamload-"), "gpt2-stub")
        return synthesize("gpt2-stub", folder).path


def _cache_folder() -> str:
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    base = base or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "streamload", "demo", "gpt2-stub")


def _side_by_side(before: str, after: str, width: int = 38) -> list[str]:
    import textwrap

    left, right = (textwrap.wrap(text, width) or [""] for text in (before, after))
    rows = [("  before: random weights", "after: loaded weights")]
    for i in range(max(len(left), len(right))):
        rows.append((f"  {left[i]}" if i < len(left) else "", right[i] if i < len(right) else ""))
    return columns(rows)


def _refusal(folder: str, loaded: Any) -> str:
    """Load a copy of the checkpoint with one misshapen weight into the model; what it says."""
    import streamload
    from streamload.cli.errors import one_line
    from streamload.cli.render import trials

    values = trials.fingerprint(loaded.model)
    with tempfile.TemporaryDirectory(prefix="streamload-") as temporary:
        trials.write_misshapen(folder, temporary, _BROKEN)
        try:
            streamload.load_into(loaded.model, temporary)
        except PlanError as error:
            refusal = one_line(error).replace(temporary, "broken-copy")
        else:
            raise StreamloadError(f"a wrong shape of {_BROKEN!r} was not refused")
    if trials.fingerprint(loaded.model) != values:
        raise StreamloadError("the refused load changed the model")
    return refusal
