"""``synthesize``: a checkpoint of random weights in a published layout, tensor by tensor."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import IO, Any

from streamload.core.dtypes import parse_dtype
from streamload.core.errors import WriteError
from streamload.synthesis.made_up_tokenizer import tokenizer_json
from streamload.synthesis.presets import PRESETS
from streamload.synthesis.randoms import blocks
from streamload.synthesis.recipes import Preset, Recipe
from streamload.synthesis.shards import INDEX_NAME, Shard, index_json, plan_shards
from streamload.synthesis.staging import StagedFiles, check_free_space, write_all

__all__ = ["Progress", "SynthesisReport", "synthesize"]

Progress = Callable[[int, int, str], None]
_DTYPES = ("float32", "float16", "bfloat16")
_WEIGHT_ENDINGS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth")
_SLACK_BYTES = 16 << 20  # config, tokenizer, the file system's own bookkeeping


@dataclass(frozen=True, slots=True)
class SynthesisReport:
    """What was written.

    Attributes:
        reused: True if the very checkpoint was there already and nothing was written.
    """

    name: str
    path: str
    dtype: str
    files: tuple[str, ...]
    tensors: int
    bytes_written: int
    elapsed_s: float
    reused: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The fields under their names, for JSON."""
        return {"ok": True, **asdict(self), "files": list(self.files)}


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
    shards = plan_shards(
        preset.recipes(config, masks),
        dtype=dtype,
        max_shard_bytes=max_shard_bytes or preset.shard_bytes,
    )
    folder = os.fspath(directory)
    small = _small_files(config, shards, dtype, tokenizer)
    files = (*(shard.file for shard in shards), *small)
    tensors = sum(len(shard.recipes) for shard in shards)
    if _is_there(folder, shards, small, seed=seed, dtype=dtype):
        elapsed = time.perf_counter() - start
        return SynthesisReport(name, folder, dtype, files, tensors, 0, elapsed, reused=True)
    stale = _other_weights(folder)
    if stale and not force:
        raise WriteError(
            f"another checkpoint is there ({stale[0]}): choose an empty folder, "
            "or overwrite it with force=True (--force)",
            path=folder,
        )
    total = sum(shard.nbytes for shard in shards)
    check_free_space(folder, total + _SLACK_BYTES)
    with StagedFiles(folder) as staged:
        done = 0
        for shard in shards:
            done = _write_shard(staged, shard, seed, dtype, (done, total), progress)
        for file, data in small.items():
            staged.write(file, data)
    for file in set(stale) - set(files):
        os.unlink(os.path.join(folder, file))
    written = total + sum(map(len, small.values()))
    return SynthesisReport(
        name, folder, dtype, files, tensors, written, time.perf_counter() - start
    )


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
        config[preset.layers_key] = layers
    if config["model_type"] != "gpt2" or dtype != preset.dtype:
        config["torch_dtype"] = dtype  # the published GPT-2 configs do not say it
    return dict(sorted(config.items()))


def _small_files(
    config: dict[str, Any], shards: tuple[Shard, ...], dtype: str, tokenizer: bool
) -> dict[str, bytes]:
    """What stands beside the weights, in the order in which it is put in place."""
    files = {INDEX_NAME: index_json(shards, dtype=dtype)} if len(shards) > 1 else {}
    files["config.json"] = json.dumps(config, indent=2).encode() + b"\n"
    if tokenizer:
        text = tokenizer_json(config["vocab_size"], end_token=config["eos_token_id"])
        files["tokenizer.json"] = text.encode()
    return files


def _write_shard(
    staged: StagedFiles,
    shard: Shard,
    seed: int,
    dtype: str,
    done_total: tuple[int, int],
    progress: Progress | None,
) -> int:
    done, total = done_total
    with staged.open(shard.file) as file:
        write_all(file, shard.header)
        done += len(shard.header)
        for recipe in shard.recipes:
            for block in blocks(recipe, seed=seed, dtype=dtype):
                write_all(file, block)
                done += block.nbytes
                if progress is not None:
                    progress(done, total, recipe.name)
    return done


def _other_weights(folder: str) -> list[str]:
    if not os.path.isdir(folder):
        return []
    return sorted(file for file in os.listdir(folder) if file.endswith(_WEIGHT_ENDINGS))


def _is_there(
    folder: str, shards: tuple[Shard, ...], small: dict[str, bytes], *, seed: int, dtype: str
) -> bool:
    """True if the folder holds this checkpoint: small files, headers, sizes, samples of data."""
    if set(_other_weights(folder)) - {shard.file for shard in shards} - set(small):
        return False
    try:
        for file, data in small.items():
            with open(os.path.join(folder, file), "rb") as found:
                if found.read(len(data) + 1) != data:
                    return False
        return all(_same_shard(folder, shard, seed=seed, dtype=dtype) for shard in shards)
    except OSError:
        return False  # absent or unreadable: then it is not this checkpoint


def _same_shard(folder: str, shard: Shard, *, seed: int, dtype: str) -> bool:
    path = os.path.join(folder, shard.file)
    if os.path.getsize(path) != shard.nbytes:
        return False
    with open(path, "rb") as file:
        if file.read(len(shard.header)) != shard.header:
            return False
        first, last = shard.recipes[0], shard.recipes[-1]
        offset = shard.nbytes - last.nbytes(dtype)
        return _same_start(file, len(shard.header), first, seed, dtype) and _same_start(
            file, offset, last, seed, dtype
        )


def _same_start(file: IO[bytes], offset: int, recipe: Recipe, seed: int, dtype: str) -> bool:
    """Compare the tensor's first block; a tensor of another seed differs in it."""
    file.seek(offset)
    block = next(blocks(recipe, seed=seed, dtype=dtype))
    return bytes(block) == file.read(block.nbytes)
