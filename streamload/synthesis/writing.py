"""``synthesize``: a checkpoint of random weights in a published layout, tensor by tensor."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import IO, Any

from streamload.core.dtypes import BY_TORCH_NAME, parse_dtype
from streamload.core.errors import WriteError
from streamload.core.specs import TensorSpec
from streamload.mapping.tables.registry import layer_count_field
from streamload.saving.atomic import committing
from streamload.saving.file_layout import NewFile, index_text, lay_out
from streamload.saving.staged_folder import StagedFolder
from streamload.synthesis.made_up_tokenizer import tokenizer_json
from streamload.synthesis.presets import PRESETS
from streamload.synthesis.randoms import blocks
from streamload.synthesis.recipes import Preset

Progress = Callable[[int, int, str], None]
_Draw = Callable[[str], Iterator[memoryview]]
_DTYPES = ("float32", "float16", "bfloat16")
_WEIGHT_ENDINGS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth")
SLACK_BYTES = 16 << 20  # config, tokenizer, the file system's own bookkeeping


@dataclass(frozen=True, slots=True)
class SynthesisReport:
    """What was written.

    Attributes:
        reused: True if the very checkpoint was there already and nothing was written.
        notices: what else is to be known of the files.
    """

    name: str
    path: str
    dtype: str
    files: tuple[str, ...]
    tensors: int
    bytes_written: int
    elapsed_s: float
    reused: bool = False
    notices: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The fields under their names, for JSON."""
        lists = {"files": list(self.files), "notices": list(self.notices)}
        return {"ok": True, **asdict(self), **lists}


def synthesize(
    name: str,
    directory: str | os.PathLike[str],
    *,
    seed: int = 0,
    dtype: str | None = None,
    layers: int | None = None,
    masks: bool = True,
    tokenizer: bool = True,
    max_shard_bytes: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> SynthesisReport:
    """Write a checkpoint with random weights, its config.json and a tokenizer.json.

    Names, order, shapes and config are those of the published checkpoint ``name`` (a key of
    ``PRESETS``). The same name, seed and options give the same bytes. At most 64 MiB of memory
    are used, whatever the model's size. Files appear whole or not at all.

    Args:
        name: for example ``"gpt2-xl"``.
        directory: made if it is not there.
        seed: of the random numbers; not negative.
        dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``; None is the published one.
        layers: number of blocks, if not the published one.
        masks: write the causal masks that the published files hold beside their weights.
        tokenizer: write a byte-level tokenizer.json.
        max_shard_bytes: cut into files of at most this many bytes, with an index.
        force: overwrite a different checkpoint.
        progress: called with (bytes done, bytes in all, tensor name).

    Raises:
        ValueError: an unknown name or dtype.
        WriteError: there is another checkpoint, or too little space, or writing failed.
    """
    start = time.perf_counter()
    preset = _preset(name)
    dtype = _dtype_name(dtype) or preset.dtype
    config = _config(preset, dtype, layers)
    recipes = {recipe.name: recipe for recipe in preset.recipes(config, masks)}
    specs = [
        TensorSpec(r.name, BY_TORCH_NAME[r.dtype or dtype].name, r.shape, "")
        for r in recipes.values()
    ]
    shards = lay_out(
        specs,
        "model.safetensors",
        max_shard_bytes=max_shard_bytes or preset.shard_bytes,
        aligned=False,
    )

    def draw(tensor: str) -> Iterator[memoryview]:
        return blocks(recipes[tensor], seed=seed, dtype=dtype)

    folder = os.fspath(directory)
    small = _small_files(config, shards, tokenizer)
    files = (*(shard.name for shard in shards), *small)
    report = SynthesisReport(name, folder, dtype, files, len(recipes), 0, 0.0, reused=True)
    if _is_there(folder, shards, small, draw):
        return replace(report, elapsed_s=time.perf_counter() - start)
    total = sum(shard.nbytes for shard in shards)
    done = 0
    with new_checkpoint(folder, lambda: _other_weights(folder), total, force=force) as staged:
        for shard in shards:
            weights = staged.add(shard.name)
            weights.write(shard.header, 0)
            for tensor, offset in shard.offsets.items():
                for block in draw(tensor):
                    weights.write(block, offset)
                    offset += block.nbytes
                    if progress is not None:
                        progress(done + offset, total, tensor)
            weights.finish()
            done += shard.nbytes
        for file, data in small.items():
            staged.add(file).write(data, 0)
    written = total + sum(map(len, small.values()))
    elapsed = time.perf_counter() - start
    notices = tuple(staged.notices())
    return replace(report, bytes_written=written, elapsed_s=elapsed, reused=False, notices=notices)


@contextmanager
def new_checkpoint(
    folder: str, weights: Callable[[], Sequence[str]], nbytes: int, *, force: bool
) -> Iterator[StagedFolder]:
    """A staged folder for a checkpoint; what is left of other ``weights`` is then removed.

    Args:
        folder: of the checkpoint.
        weights: lists those that are there, relative to the folder.
        nbytes: of the new weights.
        force: overwrite others.

    Raises:
        WriteError: there are weights, and not ``force``; or there is too little space.
    """
    old = weights()
    if old and not force:
        raise WriteError(
            f"another checkpoint is there ({os.path.basename(old[0])}): choose an empty folder, "
            "or overwrite it with force=True (--force)",
            path=folder,
        )
    # What is made up can be made again: nothing waits for the disk.
    staged = StagedFolder(folder, nbytes=nbytes + SLACK_BYTES, durable=False, settle=weights)
    with committing(staged):
        yield staged


def _preset(name: str) -> Preset:
    try:
        return PRESETS[name]
    except KeyError:
        raise ValueError(f"unknown checkpoint {name!r}; known: {', '.join(PRESETS)}") from None


def _dtype_name(dtype: str | None) -> str | None:
    found = parse_dtype(dtype)
    if found is None:
        return None
    if found.torch_name not in _DTYPES:
        raise ValueError(f"cannot write {dtype}; choose one of {', '.join(_DTYPES)}")
    return found.torch_name


def _config(preset: Preset, dtype: str, layers: int | None) -> dict[str, Any]:
    config = dict(preset.config)
    if layers is not None:
        if layers < 1:
            raise ValueError(f"a model has at least one block, not {layers}")
        config[layer_count_field(config["model_type"])] = layers
    if config["model_type"] != "gpt2" or dtype != preset.dtype:
        config["torch_dtype"] = dtype  # the published GPT-2 configs do not say it
    return dict(sorted(config.items()))


def _small_files(
    config: dict[str, Any], shards: Sequence[NewFile], tokenizer: bool
) -> dict[str, bytes]:
    """What stands beside the weights, in the order in which it is put in place."""
    files: dict[str, bytes] = {}
    if len(shards) > 1:
        files["model.safetensors.index.json"] = index_text(shards)
    files["config.json"] = json.dumps(config, indent=2).encode() + b"\n"
    if tokenizer:
        text = tokenizer_json(config["vocab_size"], end_token=config["eos_token_id"])
        files["tokenizer.json"] = text.encode()
    return files


def _other_weights(folder: str) -> list[str]:
    if not os.path.isdir(folder):
        return []
    return sorted(file for file in os.listdir(folder) if file.endswith(_WEIGHT_ENDINGS))


def _is_there(
    folder: str, shards: Sequence[NewFile], small: Mapping[str, bytes], draw: _Draw
) -> bool:
    """True if the folder holds this checkpoint: small files, headers, sizes, samples of data."""
    if set(_other_weights(folder)) - {shard.name for shard in shards} - set(small):
        return False
    try:
        for file, data in small.items():
            with open(os.path.join(folder, file), "rb") as found:
                if found.read(len(data) + 1) != data:
                    return False
        return all(_same_shard(os.path.join(folder, s.name), s, draw) for s in shards)
    except OSError:
        return False  # absent or unreadable: then it is not this checkpoint


def _same_shard(path: str, shard: NewFile, draw: _Draw) -> bool:
    if os.path.getsize(path) != shard.nbytes:
        return False
    with open(path, "rb") as file:
        if file.read(len(shard.header)) != shard.header:
            return False
        names = list(shard.offsets)
        return all(_same_start(file, shard.offsets[n], draw(n)) for n in (names[0], names[-1]))


def _same_start(file: IO[bytes], offset: int, drawn: Iterator[memoryview]) -> bool:
    """Compare the tensor's first block; a tensor of another seed differs in it."""
    file.seek(offset)
    block = next(drawn)
    return bytes(block) == file.read(block.nbytes)
