"""Options that several commands have, and what they mean here."""

import os

import click

from bench import checkpoints
from bench.job import Job, find_peers
from bench.report.looks import LOOKS
from streamload.cli.render.tables import say
from streamload.core.errors import StreamloadError
from streamload.core.options import usable_cpus
from streamload.measuring.peers import Peer

DTYPES = click.Choice(["float32", "bfloat16", "float16", "stored"])

MODEL = click.option(
    "--model", default="gpt2", show_default=True,
    help="A name that `streamload synth` knows: gpt2 (0.5 GB), gpt2-xl (6.4 GB), llama-3.2-1b "
    "(2.5 GB), gpt2-tiny, ... Made with random values if it is not there.",
)  # fmt: skip
PATH = click.option(
    "--path", type=click.Path(exists=True),
    help="Your own checkpoint instead: a folder with config.json, or a .safetensors file.",
)  # fmt: skip
DTYPE = click.option(
    "--dtype", type=DTYPES, default="bfloat16", show_default=True,
    help="What floating-point tensors are cast to.",
)  # fmt: skip
WORKERS = click.option(
    "--workers", type=click.IntRange(1), default=usable_cpus, show_default="all CPUs",
    help="Threads, for loaders that let one choose.",
)  # fmt: skip
ROUNDS = click.option(
    "--rounds", type=click.IntRange(1), default=3, show_default=True,
    help="Measurements of each; medians are shown.",
)  # fmt: skip
COLD = click.option("--cold", is_flag=True, help="Drop the files from the page cache before each.")
LIMIT_MB = click.option(
    "--limit-mb", type=click.IntRange(1),
    help="Memory that each process may use, MiB (needs a control group of one's own).",
)  # fmt: skip
PEERS = click.option(
    "--peers", default="", help="Names as `peers` lists them, with commas between [default: all]."
)
TIMEOUT_S = click.option(
    "--timeout-s", type=float, default=600, show_default=True, help="Ends a loader that hangs."
)
PLOT = click.option("--plot", is_flag=True, help="Draw pictures as PNG files.")
HTML = click.option(
    "--html", type=click.Path(dir_okay=False), help="Write one page with all of it, self-contained."
)
THEME = click.option(
    "--theme", type=click.Choice(sorted(LOOKS)), default="light", show_default=True,
    help="Of the PNG files; the page follows its reader's.",
)  # fmt: skip
PEERS_DIR = click.option(
    "--peers-dir", type=click.Path(exists=True, file_okay=False), multiple=True,
    help="A folder with loaders of your own (bench/README.md says how).",
)  # fmt: skip


def checkpoint(model: str, path: str | None) -> str:
    """Where the checkpoint is; it has files that the loaders can be compared on."""
    if path is None:
        say(f"checkpoint: {model} (random values, made once)", err=True)
        try:
            return checkpoints.checkpoint(model)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--model") from error
        except StreamloadError as error:
            raise click.ClickException(str(error)) from error
    from streamload.sources.detect import open_checkpoint

    try:
        with open_checkpoint(path):
            job = Job(path, None, 1)
            if any(file.endswith(".safetensors") for file in job.files) and job.pieces:
                return path
    except StreamloadError as error:
        raise click.BadParameter(str(error), param_hint="--path") from error
    except KeyError as error:
        raise click.BadParameter(f"tensors of dtype {error}", param_hint="--path") from error
    raise click.BadParameter(
        f"no tensors in .safetensors files in {path}; loaders are compared on these "
        "(streamload convert makes them of other formats)",
        param_hint="--path",
    )


def vocabulary(path: str) -> int:
    """Number of tokens that the checkpoint's model knows."""
    try:
        return checkpoints.vocabulary_of(path)
    except (OSError, KeyError, ValueError) as error:
        text = f"no vocab_size in {os.path.join(path, 'config.json')}"
        raise click.BadParameter(text, param_hint="--path") from error


def torch_name(dtype: str) -> str | None:
    """What torch calls it; None for what is stored."""
    return None if dtype == "stored" else dtype


def chosen_peers(names: str, folders: tuple[str, ...], *, kind: str = "peers") -> list[Peer]:
    """The loaders of these names, with commas between; all if there are none."""
    wanted = [name.strip() for name in names.split(",")]
    try:
        return find_peers(filter(None, wanted), kind=kind, folders=folders)
    except KeyError as error:
        raise click.BadParameter(error.args[0], param_hint="--peers") from error
    except (AttributeError, ImportError, SyntaxError) as error:
        raise click.BadParameter(str(error), param_hint="--peers-dir") from error
