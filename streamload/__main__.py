"""``python -m streamload``: the command line."""

from streamload.cli import main

if __name__ == "__main__":
    main(prog_name="streamload")
