"""``streamload demo``: the whole way once, on a small checkpoint made here, in a few seconds."""

from __future__ import annotations

import os
import tempfile
from itertools import zip_longest

import click

from streamload.cli.render.tables import columns, heading, say, say_result
from streamload.cli.shared_options import common_options
from streamload.core.errors import StreamloadError, WriteError
from streamload.core.wording import printable

_PROMPT = "The ship set sail"
_NEW_TOKENS = 24
_BROKEN = "h.3.mlp.c_fc.weight"


@click.command("demo", epilog="Example: streamload demo -v")
@click.argument("directory", required=False, type=click.Path(file_okay=False))
@click.option("-v", "--verbose", is_flag=True, help="List every assignment.")
@common_options
def command(directory: str | None, verbose: bool, as_json: bool) -> None:
    """Go the whole way on a small checkpoint of random weights: nothing is downloaded.

    Writes a GPT-2 of 12 blocks under its published names (25 MB, kept in DIRECTORY or in the
    user's cache for the next time), loads it, generates with the model as it was initialised
    and as it was loaded, checks the tied weights, and shows how a wrong shape is refused.
    """

    def tell(text: str) -> None:
        """Each step when it is done; with --json, everything comes at the end."""
        if not as_json:
            say(text)

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

    refusal = trials.refusal(folder, loaded.model, _BROKEN)
    tell(f"{heading('refused')}, as it should be, a file with a wrong shape:\n  {refusal}")
    result = {"ok": True, "path": folder, "before": before, "after": after}
    result |= {"tied": list(tied), "refusal": refusal, "load": loaded.report.to_dict()}
    untouched = "  the model is untouched: every value is what it was"
    say_result(as_json, lambda: result, lambda: untouched)


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


def _side_by_side(before: str, after: str, width: int = 38) -> list[str]:
    import textwrap

    left, right = (textwrap.wrap(text, width) for text in (before, after))
    rows = zip_longest(left, right, fillvalue="")
    heads = ("  before: random weights", "after: loaded weights")
    return columns([heads, *((f"  {before}", after) for before, after in rows)])
