"""``streamload generate PATH``: a continuation, printed as it comes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from streamload.cli.failures import as_options
from streamload.cli.model_choice import load_model, transformers_option
from streamload.cli.prompts import Prompt, read_prompt
from streamload.cli.render.continuation import Continuation
from streamload.cli.render.progress import progress_bar
from streamload.cli.render.reporting import report_text
from streamload.cli.render.terminal import is_terminal, note, say
from streamload.cli.shared_options import common_options, given, load_options
from streamload.cli.types import TOKENS, number
from streamload.core.errors import CheckpointError
from streamload.core.options import Reach

if TYPE_CHECKING:
    from torch import nn

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
    type=number(),
    help="0 takes the most likely token, above 0 draws. [default: 0.0]",
)
@click.option(
    "--top-k",
    type=click.IntRange(min=1),
    help="With --temperature: draw from the k most likely tokens only.",
)
@click.option(
    "--top-p",
    type=number(above=0.0, most=1.0),
    help="With --temperature: draw from the most likely tokens whose chances add up to this.",
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
@click.option(
    "--stop",
    multiple=True,
    metavar="TEXT",
    help="Stop before this text; may be given several times.",
)
@click.option(
    "--chat", is_flag=True, help="The prompt is a message: put it into the chat template."
)
@click.option("--system", metavar="TEXT", help="With --chat: a system message before it.")
@click.option("-v", "--verbose", is_flag=True, help="Report the load with every assignment.")
@transformers_option
@load_options
@common_options
def command(
    path: str,
    prompt: str | None,
    tokens: list[int] | None,
    stop: tuple[str, ...],
    chat: bool,
    system: str | None,
    verbose: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Load the checkpoint at PATH and continue a text or a list of tokens.

    The continuation goes to stdout as it is generated, everything else to stderr. On a terminal
    the prompt stands in front of it.
    """
    if (prompt is None) == (tokens is None):
        raise click.UsageError("give either --prompt TEXT or --tokens 1,2,3")
    if tokens is not None and (chat or stop):
        raise click.UsageError(f"{'--chat' if chat else '--stop'} needs --prompt TEXT")
    if system is not None and not chat:
        raise click.UsageError("--system needs --chat")
    if not all(stop):
        raise click.UsageError("--stop needs at least one character")
    if options["temperature"] is None and not options["sampling_defaults"]:
        for name in ("top_k", "top_p"):
            if options[name] is not None:  # without a temperature nothing is drawn
                spelt = name.replace("_", "-")
                raise click.UsageError(f"--{spelt} needs --temperature, like --temperature 1")
    asked = Prompt(prompt, tuple(tokens or ()), chat, system)
    reach = Reach(options["timeout_s"], options["download"])
    sampling = given({name: options.pop(name) for name in _SAMPLING})
    draws_as_told = options.pop("sampling_defaults")
    with progress_bar("loading") as progress:
        # First of all: a prompt that cannot be read is told before the model is loaded.
        tokenizer, ids = read_prompt(path, asked, reach)
        loaded = load_model(path, progress=progress, **given(options))
    if loaded.config.get("is_encoder_decoder"):
        raise CheckpointError("an encoder and a decoder: it cannot continue a text", path=path)
    report = loaded.report
    if not sampling["stop_token"] and tokenizer is not None:
        from streamload.generation.settings import end_tokens

        sampling["stop_token"] = end_tokens(loaded.generation_config)
    if draws_as_told:
        from streamload.generation.settings import sampling_defaults

        defaults, left = sampling_defaults(loaded.generation_config)
        sampling = {**defaults, **sampling}
        report = replace(report, notices=(*report.notices, *_drawing(sampling, left)))
    stream = None if tokenizer is None else tokenizer.stream(ids)
    made = Continuation(stream, stop, silent=as_json)
    elapsed_s = _continue(loaded.model, ids, made, asked.shown, sampling)
    if as_json:
        result: dict[str, Any] = {"tokens": made.tokens, "text": made.text}
        result |= {"first_token_s": made.first_token_s, "elapsed_s": elapsed_s}
        told = report if verbose else replace(report, loaded=())
        result["load"] = told.to_dict()
        say(json.dumps(result), raw=True)
        return
    if verbose or not is_terminal():
        note(report_text(report, verbose=verbose))
    else:
        for notice in report.notices:
            note(as_options(f"notice: {notice}"))
    note(made.speed(elapsed_s))


def _continue(
    model: nn.Module, ids: list[int], made: Continuation, shown: str, sampling: dict[str, Any]
) -> float:
    """Generate and print; returns the seconds that took."""
    import streamload

    steps = streamload.generate(model, ids, **sampling)
    try:
        made.begin(shown)
        for token in steps:
            made.add(token)
            if made.is_over:
                break
    except BaseException:
        if made.tokens or is_terminal():
            made.show("\n")  # what comes next starts a line of its own
        raise
    return made.end()


def _drawing(sampling: Mapping[str, Any], left: Sequence[str]) -> Iterator[str]:
    """What was made of the checkpoint's own settings."""
    used = ", ".join(f"{name}={sampling[name]}" for name in _DRAWING if name in sampling)
    draws = sampling.get("temperature", 0.0) > 0
    yield f"tokens are drawn with {used}" if draws else "the most likely token is taken"
    if left:
        yield f"the checkpoint also asks for {', '.join(left)}, which is not followed"
