"""``streamload generate PATH``: a continuation, printed as it comes."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from streamload.cli.options import common_options, given, load_options
from streamload.cli.render.clock import seconds_since_start
from streamload.cli.render.progress import progress_bar
from streamload.cli.render.tables import say
from streamload.cli.types import TOKENS

if TYPE_CHECKING:
    from streamload.generation.tokenizer import TextStream, Tokenizer


@click.command(
    "generate",
    epilog='Example: streamload generate ./gpt2-xl --dtype bfloat16 --prompt "Hello, my name is"',
)
@click.argument("path")
@click.option("--prompt", help="Text to continue; needs a tokenizer beside the weights.")
@click.option("--tokens", type=TOKENS, help="Token ids to continue, like 1,2,3.")
@click.option("--max-new-tokens", type=click.IntRange(min=0), default=50, show_default=True)
@click.option("--temperature", type=click.FloatRange(min=0.0), default=0.0, show_default=True)
@click.option("--top-k", type=click.IntRange(min=1), help="Draw among the k most likely only.")
@click.option("--seed", type=click.IntRange(min=0), help="The same seed draws the same tokens.")
@click.option(
    "--stop-token",
    type=click.IntRange(min=0),
    help="End before this token. [default: the model's end token after a --prompt, else none]",
)
@load_options
@common_options
def command(
    path: str,
    prompt: str | None,
    tokens: list[int] | None,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int | None,
    stop_token: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Load the checkpoint at PATH and continue a text or a list of tokens.

    What is generated goes to stdout as it comes, everything else to stderr.
    """
    if (prompt is None) == (tokens is None):
        raise click.UsageError("give either --prompt TEXT or --tokens 1,2,3")
    tokenizer, ids = _read_prompt(path, prompt, tokens)

    import streamload

    with progress_bar("loading") as progress:
        loaded = streamload.load(path, progress=progress, **given(options))
    stop: Any = stop_token
    if stop is None and tokenizer is not None:
        stop = _end_token(loaded.config)
    start = time.perf_counter()
    steps = streamload.generate(
        loaded.model,
        ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        stop_token=stop,
    )
    writer = _Writer(None if tokenizer is None else tokenizer.stream(ids), quiet=as_json)
    first_token_s = None
    try:
        for token in steps:
            writer.add(token)
            if first_token_s is None:
                first_token_s = seconds_since_start()
    except KeyboardInterrupt:
        writer.break_off()
        raise
    writer.end()
    elapsed_s = time.perf_counter() - start
    if as_json:
        result: dict[str, Any] = {"tokens": writer.tokens, "text": writer.text}
        result |= {"first_token_s": first_token_s, "elapsed_s": elapsed_s}
        result["load"] = loaded.report.to_dict()
        say(json.dumps(result))
        return
    say(loaded.report.to_text(), err=True)
    count = len(writer.tokens)
    text = f"{count} {'token' if count == 1 else 'tokens'} in {elapsed_s:.2f} s"
    if first_token_s is not None:
        text += f"; first token {first_token_s:.2f} s after the process started"
    say(text, err=True)


class _Writer:
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
        """One more token."""
        self.tokens.append(token)
        if self._stream is None:
            self._print(f"{' ' if len(self.tokens) > 1 else ''}{token}")
        else:
            self._extend(self._stream.push(token))

    def end(self) -> None:
        """No more tokens."""
        if self._stream is not None:
            self._extend(self._stream.finish())
        self._print("\n")

    def break_off(self) -> None:
        """Interrupted: what comes next starts a line of its own."""
        if self.tokens:
            self._print("\n")

    def _extend(self, piece: str) -> None:
        self.text = (self.text or "") + piece
        self._print(piece)

    def _print(self, piece: str) -> None:
        if piece and not self._quiet:
            click.echo(piece, nl=False)


def _read_prompt(
    path: str, prompt: str | None, tokens: list[int] | None
) -> tuple[Tokenizer | None, list[int]]:
    """The prompt's token ids, before the model is loaded; the tokenizer if it is a text."""
    if prompt is None:
        return None, list(tokens or ())
    from streamload.generation.tokenizer import load_tokenizer
    from streamload.sources.hub import folder_of

    tokenizer = load_tokenizer(folder_of(path))
    ids = tokenizer.encode(prompt)
    if not ids:
        raise click.UsageError("the prompt has no tokens; give at least one character")
    return tokenizer, ids


def _end_token(config: Mapping[str, Any]) -> Any:
    end = config.get("eos_token_id")
    return end if isinstance(end, (int, list)) else None
