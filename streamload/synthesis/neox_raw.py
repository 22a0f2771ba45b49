"""Raw GPT-NeoX partitions as published for the 20B model: one torch file per layer and rank."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from streamload.core.errors import StreamloadError, WriteError
from streamload.core.specs import Shape, numel
from streamload.saving.atomic import StagedFile
from streamload.synthesis.made_up_tokenizer import tokenizer_json
from streamload.synthesis.randoms import encode, values
from streamload.synthesis.recipes import Recipe
from streamload.synthesis.writing import Progress, SynthesisReport, new_checkpoint

if TYPE_CHECKING:
    import torch

STEP_FOLDER = "global_step150000"

_CONFIG = """\
# Fields of the published 20B.yml that describe the model.
{{
  "pipe-parallel-size": 1,
  "model-parallel-size": {partitions},

  "num-layers": {layers},
  "hidden-size": {hidden},
  "num-attention-heads": {heads},
  "seq-length": 2048,
  "max-position-embeddings": 2048,
  "norm": "layernorm",
  "layernorm-epsilon": 1.0e-5,
  "pos-emb": "rotary",
  "rotary-pct": 0.25,
  "no-weight-tying": true,
  "gpt-j-residual": true,
  "output-layer-parallelism": "column",
  "activation": "gelu",
  "make-vocab-size-divisible-by": {divisor},

  "vocab-file": "./20B_tokenizer.json",
  "tokenizer-type": "HFTokenizer",
  "fp16": {{ "enabled": true }},
  "checkpoint-factor": 500,
  "seed": 1234
}}
"""

Split = Literal["dim 0", "dim 1", "sum", "duplicate"]
_LAYER_FILE = re.compile(r"layer_\d+-model_\d+-model_states\.pt")
_HEAD_SIZES = (96, 64, 32, 16)


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor of a layer file: its key, its merged shape, how ranks share it."""

    key: str
    shape: Shape
    split: Split
    kind: Literal["normal", "norm"] = "normal"

    def shape_of_rank(self, partitions: int) -> Shape:
        shape = list(self.shape)
        if self.split.startswith("dim"):
            shape[int(self.split[-1])] //= partitions
        return tuple(shape)


def synthesize_neox_raw(
    directory: str | os.PathLike[str],
    *,
    layers: int = 44,
    partitions: int = 2,
    hidden: int = 6144,
    vocab_size: int = 50432,
    seed: int = 0,
    sparse: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> SynthesisReport:
    """Write a folder of raw GPT-NeoX partitions with random float16 weights.

    ``global_step150000/layer_NN-model_PP-model_states.pt`` for every layer and rank, ``latest``,
    ``configs/20B.yml``, ``20B_tokenizer.json`` and eight empty ``mp_rank`` files. The merged
    weights are the same for any number of partitions. One layer file is in memory at a time
    (453 MB at full size).

    Args:
        directory: made if it is not there.
        layers: number of transformer blocks.
        partitions: number of ranks.
        hidden: model width, a multiple of 16.
        vocab_size: padded number of tokens, at least 256.
        seed: of the random numbers.
        sparse: reserve the space of the weights without writing them: the files have their full
            size and take no room on disk; all weights read as zero.
        force: overwrite another raw checkpoint.
        progress: called with (bytes done, bytes in all, file name).

    Raises:
        ValueError: the sizes cannot be cut into so many partitions.
        WriteError: there is another checkpoint, or too little space, or writing failed.
    """
    start = time.perf_counter()
    heads = _heads(hidden)
    if layers < 1 or partitions < 1:
        raise ValueError(f"at least one layer and one partition, not {layers} and {partitions}")
    if heads % partitions or vocab_size % partitions:
        raise ValueError(
            f"{heads} heads and {vocab_size} tokens cannot be cut into {partitions} partitions"
        )
    folder = os.fspath(directory)
    config = _CONFIG.format(
        partitions=partitions,
        layers=layers,
        hidden=hidden,
        heads=heads,
        divisor=vocab_size // partitions if vocab_size < 50432 else 256,
    )
    small = {
        "configs/20B.yml": config.encode(),
        "20B_tokenizer.json": tokenizer_json(vocab_size).encode(),
        "latest": STEP_FOLDER.encode(),
    }
    files = {
        f"{STEP_FOLDER}/layer_{number:02d}-model_{rank:02d}-model_states.pt": (number, rank, parts)
        for number, parts in _layer_files(layers, hidden, vocab_size)
        for rank in range(partitions)
    }
    names = (*files, *small)
    total = sum(_nbytes(parts, partitions) for _, _, parts in files.values())
    written = 0 if sparse else total
    done = tensors = 0
    with new_checkpoint(folder, lambda: _layer_files_in(folder), written, force=force) as staged:
        for file, (number, rank, parts) in files.items():
            drawn = _rank_tensors(number, parts, rank, partitions, seed=seed, sparse=sparse)
            _save(drawn, staged.add(file), sparse=sparse)
            done += _nbytes(parts, partitions)
            tensors += len(parts)
            if progress is not None:
                progress(done, total, file)
        for rank in range(8):
            _save({}, staged.add(f"{STEP_FOLDER}/mp_rank_{rank:02d}_model_states.pt"))
        for file, data in small.items():
            staged.add(file).write(data, 0)
    elapsed = time.perf_counter() - start
    return SynthesisReport(
        "neox-20b-raw",
        folder,
        "float16",
        names,
        tensors,
        written,
        elapsed,
        notices=tuple(staged.notices()),
    )


def _layer_files(layers: int, hidden: int, vocab: int) -> Iterator[tuple[int, tuple[_Part, ...]]]:
    """File number and content; numbers 1 and ``layers`` + 2 hold no weights and do not exist."""
    yield 0, (_Part("word_embeddings.weight", (vocab, hidden), "dim 0"),)
    block = (
        *_norm("input_layernorm", hidden),
        *_norm("post_attention_layernorm", hidden),
        *_linear("attention.query_key_value", 3 * hidden, hidden, "dim 0"),
        *_linear("attention.dense", hidden, hidden, "dim 1"),
        *_linear("mlp.dense_h_to_4h", 4 * hidden, hidden, "dim 0"),
        *_linear("mlp.dense_4h_to_h", hidden, 4 * hidden, "dim 1"),
    )
    for layer in range(layers):
        yield layer + 2, block
    yield layers + 3, tuple(_norm("norm", hidden))
    yield layers + 4, (_Part("final_linear.weight", (vocab, hidden), "dim 0"),)


def _norm(name: str, hidden: int) -> Iterator[_Part]:
    yield _Part(f"{name}.weight", (hidden,), "duplicate", "norm")
    yield _Part(f"{name}.bias", (hidden,), "duplicate")


def _linear(name: str, out: int, width: int, split: Split) -> Iterator[_Part]:
    yield _Part(f"{name}.weight", (out, width), split)
    yield _Part(f"{name}.bias", (out,), "dim 0" if split == "dim 0" else "sum")


def _rank_tensors(
    number: int, parts: tuple[_Part, ...], rank: int, partitions: int, *, seed: int, sparse: bool
) -> dict[str, torch.Tensor]:
    import torch

    tensors = {}
    for part in parts:
        shape = part.shape_of_rank(partitions)
        tensor = torch.empty(shape, dtype=torch.float16)  # untouched pages cost nothing
        if not sparse:
            recipe = Recipe(f"{number}.{part.key}", part.shape, part.kind)
            _fill(tensor.numpy(), recipe, part.split, rank, partitions, seed)
        tensors[part.key] = tensor
    return tensors


def _fill(target: Any, recipe: Recipe, split: Split, rank: int, partitions: int, seed: int) -> None:
    """Draw the merged tensor some rows at a time and keep the rank's share of them."""
    width = recipe.shape[1] if len(recipe.shape) == 2 else 1
    rows = max(1, (1 << 20) // width)
    first = rank * target.shape[0] if split == "dim 0" else 0
    columns = slice(rank * target.shape[-1], (rank + 1) * target.shape[-1])
    at = 0
    for block in values(recipe, seed=seed, block_elements=rows * width):
        drawn = encode(block, "float16").reshape(-1, *recipe.shape[1:])
        begin, end = max(at, first), min(at + len(drawn), first + len(target))
        if begin < end:
            kept = drawn[begin - at : end - at]
            if split == "dim 1":
                kept = kept[:, columns]
            target[begin - first : end - first] = kept / partitions if split == "sum" else kept
        at += len(drawn)
        if at >= first + len(target):
            return


def _save(tensors: dict[str, torch.Tensor], file: StagedFile, *, sparse: bool = False) -> None:
    import torch

    try:
        if not sparse:
            torch.save(tensors, file.temporary)
        elif not hasattr(torch.serialization, "skip_data"):
            raise StreamloadError("sparse files need torch 2.6 or newer")
        else:
            with torch.serialization.skip_data():
                torch.save(tensors, file.temporary)
    except (OSError, RuntimeError) as error:  # torch's own writer reports a full disk so
        raise WriteError(f"writing failed: {error}", path=file.path) from error
    file.finish()


def _nbytes(parts: tuple[_Part, ...], partitions: int) -> int:
    return sum(2 * numel(part.shape_of_rank(partitions)) for part in parts)


def _heads(hidden: int) -> int:
    """64 at full width; narrower models have at least four heads if their width allows it."""
    fitting = [size for size in _HEAD_SIZES if hidden > 0 and hidden % size == 0]
    if not fitting:
        raise ValueError(f"hidden size {hidden} is not a multiple of 16")
    many = [size for size in fitting if hidden // size >= 4]
    return hidden // (many or fitting[-1:])[0]


def _layer_files_in(folder: str) -> list[str]:
    step = os.path.join(folder, STEP_FOLDER)
    names = sorted(os.listdir(step)) if os.path.isdir(step) else []
    return [f"{STEP_FOLDER}/{name}" for name in names if _LAYER_FILE.fullmatch(name)]
