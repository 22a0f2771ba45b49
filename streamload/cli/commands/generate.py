"""``streamload generate PATH``: a continuation, printed as it comes."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from streamload.cli.render.clock import seconds_since_start
from streamload.cli.render.progress import progress_bar
from streamload.cli.render.tables import say
from streamload.cli.shared_options import common_options, given, load_options
from streamload.cli.types import TOKENS
from streamload.core.wording import plural

if TYPE_CHECKING:
    from streamload.generation.tokenizer import TextStream, Tokenizer

_SAMPLING = ("max_new_tokens", "temperature", "top_k", "seed", "stop_token")


@click.command(
    "generate",
    epilog='Example: streamload generate ./gpt2-xl --dtype bfloat16 --prompt "Hello, my name is"',
)
@click.argument("path")
@click.option("--prompt", help="Text to continue; needs a tokenizer next to the weights.")
@click.option("--tokens", type=TOKENS, help="Token ids to continue, like 1,2,3.")
@click.option("--max-new-tokens", type=click.IntRange(min=0), default=50, show_default=True)
@click.option("--temperature", type=click.FloatRange(min=0.0), default=0.0, show_default=True)
@click.option(
    "--top-k", type=click.IntRange(min=1), help="Draw from the k most likely tokens only."
)
@click.option("--seed", type=click.IntRange(min=0), help="The same seed draws the same tokens.")
@click.option(
    "--stop-token",
    type=click.IntRange(min=0),
    help="Stop before this token. [default: with --prompt the model's end token, else none]",
)
@load_options
@common_options
def command(
    path: str, prompt: str | None, tokens: list[int] | None, as_json: bool, **options: Any
) -> None:
    """Load the checkpoint at PATH and continue a text or a list of tokens.

    The continuation goes to stdout as it is generated, everything else to stderr.
    """
    if (prompt is None) == (tokens is None):
        raise click.UsageError("give either --prompt TEXT or --tokens 1,2,3")
    # First of all: a prompt that cannot be read is told before the model is loaded.
    tokenizer, ids = _read_prompt(path, prompt, tokens)

    import streamload

    sampling = {name: options.pop(name) for name in _SAMPLING}
    with progress_bar("loading") as progress:
        loaded = streamload.load(path, progress=progress, **given(options))
    if sampling["stop_token"] is None and tokenizer is not None:
        sampling["stop_token"] = _end_token(loaded.config)
    start = time.perf_counter()
    steps = streamload.generate(loaded.model, ids, **sampling)
    printer = _Printer(None if tokenizer is None else tokenizer.stream(ids), quiet=as_json)
    first_token_s = None
    try:
        for token in steps:
            printer.add(token)
            if first_token_s is None:
                first_token_s = seconds_since_start()
    except KeyboardInterrupt:
        if printer.tokens:
            printer.show("\n")  # what comes next starts a line of its own
        raise
    printer.end()
    elapsed_s = time.perf_counter() - start
    if as_json:
        result: dict[str, Any] = {"tokens": printer.tokens, "text": printer.text}
        result |= {"first_token_s": first_token_s, "elapsed_s": elapsed_s}
        result["load"] = loaded.report.to_dict()
        say(json.dumps(result))
        return
    say(loaded.report.to_text(), err=True)
    text = f"{plural(len(printer.tokens), 'token')} in {elapsed_s:.2f} s"
    if first_token_s is not None:
        text += f"; first token {first_token_s:.2f} s after the process started"
    say(text, err=True)


class _Printer:
    """Collects tokens, and prints them as they come unless ``quiet``.

    Attributes:
        tokens: those so far.
        text: what they say so far, None without a tokenizer.
    """

    def __init__(self, stream: TextStream | None, *, quiet: bool) -> None:
        self._stream = stream
        self._quiet = quiet
        self.tokens: list[int] = []
        self.text = None if stream is None else ""

    def add(self, token: int) -> None:
        self.tokens.append(token)
        if self._stream is None:
            self.show(f" {token}" if len(self.tokens) > 1 else str(token))
        else:
            self._extend(self._stream.push(token))

    def end(self) -> None:
        if self._stream is not None:
            self._extend(self._stream.finish())
        self.show("\n")

    def show(self, text: str) -> None:
        if text and not self._quiet:
            click.echo(text, nl=False)

    def _extend(self, piece: str) -> None:
        self.text = (self.text or "") + piece
        self.show(piece)


def _read_prompt(
    path: str, prompt: str | None, tokens: list[int] | None
) -> tuple[Tokenizer | None, list[int]]:
    """The tokenizer, if the prompt is a text, and the prompt's token ids."""
    if prompt is None:
        return None, list(tokens or ())
    from streamload.generation.tokenizer import load_tokenizer
    from streamload.sources.hub import folder_of

    tokenizer = load_tokenizer(folder_of(path))
    ids = tokenizer.encode(prompt)
    if not ids:
        raise click.UsageError("the prompt has no tokens: give at least one character")
    return tokenizer, ids


def _end_token(config: Mapping[str, Any]) -> Any:
    """One id or several, as ``generate`` takes them; None if the configuration has none."""
    end = config.get("eos_token_id")
    return end if isinstance(end, (int, list)) else None
