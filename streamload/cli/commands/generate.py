"""``streamload generate PATH``: a continuation, printed as it comes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from streamload.cli.model_choice import load_model, transformers_option
from streamload.cli.render.clock import seconds_since_start
from streamload.cli.render.progress import progress_bar
from streamload.cli.render.tables import say
from streamload.cli.shared_options import common_options, given, load_options
from streamload.cli.types import TOKENS
from streamload.core.errors import CheckpointError
from streamload.core.options import Reach
from streamload.core.wording import plural

if TYPE_CHECKING:
    from streamload.generation.tokenizer import TextStream, Tokenizer

_SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "stop_token")
_DRAWING = ("temperature", "top_k", "top_p")


@click.command(
    "generate",
    epilog='Example: streamload generate ./gpt2-xl --dtype bfloat16 --prompt "Hello, my name is"',
)
@click.argument("path")
@click.option("--prompt", help="Text to continue; needs a tokenizer next to the weights.")
@click.option("--tokens", type=TOKENS, help="Token ids to continue, like 1,2,3.")
@click.option("--max-new-tokens", type=click.IntRange(min=0), default=50, show_default=True)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0.0),
    help="0 takes the most likely token, above 0 draws. [default: 0.0]",
)
@click.option(
    "--top-k", type=click.IntRange(min=1), help="Draw from the k most likely tokens only."
)
@click.option(
    "--top-p",
    type=click.FloatRange(min=0.0, max=1.0, min_open=True),
    help="Draw from the most likely tokens whose chances add up to this.",
)
@click.option(
    "--sampling-defaults",
    is_flag=True,
    help="Where not given here, draw as generation_config.json says (else config.json).",
)
@click.option("--seed", type=click.IntRange(min=0), help="The same seed draws the same tokens.")
@click.option(
    "--stop-token",
    type=click.IntRange(min=0),
    multiple=True,
    help="Stop before this token; may be given several times. "
    "[default: with --prompt the model's end tokens, else none]",
)
@transformers_option
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
    reach = Reach(options["timeout_s"], options["download"])
    tokenizer, ids = _read_prompt(path, prompt, tokens, reach)

    import streamload
    from streamload.generation.settings import end_tokens, sampling_defaults

    sampling = given({name: options.pop(name) for name in _SAMPLING})
    draws_as_told = options.pop("sampling_defaults")
    with progress_bar("loading") as progress:
        loaded = load_model(path, progress=progress, **given(options))
    if loaded.config.get("is_encoder_decoder"):
        raise CheckpointError("an encoder and a decoder: it cannot continue a text", path=path)
    report = loaded.report
    if not sampling["stop_token"] and tokenizer is not None:
        sampling["stop_token"] = end_tokens(loaded.generation_config)
    if draws_as_told:
        defaults, left = sampling_defaults(loaded.generation_config)
        sampling = {**defaults, **sampling}
        report = replace(report, notices=(*report.notices, *_drawing(sampling, left)))
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
        result["load"] = report.to_dict()
        say(json.dumps(result))
        return
    say(report.to_text(), err=True)
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
            say(text, end="")

    def _extend(self, piece: str) -> None:
        self.text = (self.text or "") + piece
        self.show(piece)


def _read_prompt(
    path: str, prompt: str | None, tokens: list[int] | None, reach: Reach
) -> tuple[Tokenizer | None, list[int]]:
    """The tokenizer, if the prompt is a text, and the prompt's token ids."""
    if prompt is None:
        return None, list(tokens or ())
    tokenizer = _tokenizer(path, reach)
    ids = tokenizer.encode(prompt)
    if not ids:
        raise click.UsageError("the prompt has no tokens: give at least one character")
    return tokenizer, ids


def _tokenizer(path: str, reach: Reach) -> Tokenizer:
    """The one inside the checkpoint's files, else the one beside them."""
    from streamload.core.errors import CheckpointNotFoundError
    from streamload.generation.tokenizer import TOKENIZER_FILE, load_tokenizer, made_tokenizer
    from streamload.sources.detect import may_hold_companions, open_layers
    from streamload.sources.remote.side_files import folder_here

    holds_others = False
    if may_hold_companions(path):
        with open_layers(path, None, reach=reach) as source:
            if TOKENIZER_FILE in source.companions:
                return made_tokenizer(source.companion(TOKENIZER_FILE), source.path)
            holds_others = bool(source.companions)
    try:
        with folder_here(path, reach) as folder:
            return load_tokenizer(folder)
    except CheckpointNotFoundError:
        if not holds_others:
            raise
        text = "no tokenizer in its metadata, nor beside it: give token ids (--tokens 1,2,3)"
        raise CheckpointNotFoundError(text, path=path) from None


def _drawing(sampling: Mapping[str, Any], left: Sequence[str]) -> Iterator[str]:
    """What was made of the checkpoint's own settings."""
    used = ", ".join(f"{name}={sampling[name]}" for name in _DRAWING if name in sampling)
    draws = sampling.get("temperature", 0.0) > 0
    yield f"tokens are drawn with {used}" if draws else "the most likely token is taken"
    if left:
        yield f"the checkpoint also asks for {', '.join(left)}, which is not followed"
