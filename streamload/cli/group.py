"""The ``streamload`` group: knows its commands by name and one-line help, imports them late."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Sequence
from typing import Any

import click

from streamload.cli.failures import failures_as_one_line, quiet_option, traceback_option
from streamload.cli.render.terminal import width_of
from streamload.cli.shared_options import version_option
from streamload.core.wording import suggestion

_NARROW = 52  # click's own help is never narrower
# In the order of a first visit; a command is ``command`` in the module of its name.
_COMMANDS = {
    "demo": "Make a small checkpoint, load it, generate, and show a refusal.",
    "inspect": "List a checkpoint's tensors, or look into one of them.",
    "plan": "Say what a load would do and need, without doing it.",
    "load": "Load a checkpoint and print the report.",
    "generate": "Continue a text or a list of tokens.",
    "convert": "Rewrite a checkpoint as safetensors, cast or renamed if you like.",
    "verify": "Check a checkpoint's bytes and values, or compare it with another.",
    "download": "Fetch a checkpoint from the hub, or GPT-NeoX-20B from a mirror.",
    "cache": "List, verify or clear the converted copies that --cache keeps.",
    "bench": "Measure how fast this machine loads a checkpoint, and how fast it could.",
    "synth": "Write a checkpoint of random weights in a published layout.",
}


class LazyGroup(click.Group):
    """A group that imports ``streamload.cli.commands.NAME`` when the command NAME is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"streamload.cli.commands.{cmd_name}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if name and not name.startswith("-") and name not in _COMMANDS:
            python = "; use streamload.export in Python" if name == "export" else ""
            ctx.fail(f"no such command {name!r}{python or suggestion(name, _COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        """Run; a failure outside a command (while parsing, while exiting) is one line too."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                # An arrow must not fail on a Windows code page, nor an odd name anywhere.
                stream.reconfigure(errors="backslashreplace")
        with failures_as_one_line({}):
            return super().main(args, *rest, **extra)

    def make_context(
        self, info_name: str | None, args: list[str], *rest: Any, **extra: Any
    ) -> click.Context:
        """Arguments of the group itself; its width is that of commands' help, too."""
        width = width_of()
        if width is not None and width < _NARROW:
            extra.setdefault("terminal_width", width - 1)
        with failures_as_one_line({}):
            return super().make_context(info_name, args, *rest, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; a failure is one line, with ``--json`` also an object on stdout."""
        with failures_as_one_line(ctx.meta):
            return super().invoke(ctx)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Example: streamload demo. For a command's options: streamload COMMAND --help.",
)
@version_option(hidden=False)
@quiet_option
@traceback_option
def main() -> None:
    """Bring large checkpoints into PyTorch models with little more memory than these take."""
