"""The command line: one module per command, imported when the command is used."""

from streamload.cli.group import main

__all__ = ["main"]
