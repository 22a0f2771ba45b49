"""``python -m streamload``: the command line."""

from streamload.cli.ending import run

if __name__ == "__main__":
    run()
