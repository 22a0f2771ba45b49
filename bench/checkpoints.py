"""Checkpoints to measure with: published layouts with random values, made once.

Values do not matter for speed, sizes and names do: these files have the names, shapes, element
types and mask buffers of the published ones, and a config.json.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable

from bench.safetensors_header import write_header

__all__ = ["checkpoint", "many_tensors", "results_dir", "vocabulary_of", "with_holes"]

_CHUNK_BYTES = 1 << 22


def results_dir() -> str:
    """Where checkpoints and results are kept: ``$BENCH_DIR``, or ``bench-results`` here."""
    return os.environ.get("BENCH_DIR") or os.path.abspath("bench-results")


def checkpoint(name: str) -> str:
    """The folder of the named checkpoint (see ``streamload synth``), made if there is none.

    Raises:
        ValueError: there is no checkpoint of that name.
    """
    from streamload.synthesis import synthesize

    folder = os.path.join(results_dir(), "checkpoints", name)
    synthesize(name, folder)
    return folder


def vocabulary_of(path: str) -> int:
    """Number of tokens of the checkpoint in folder ``path``."""
    with open(os.path.join(path, "config.json"), encoding="utf-8") as file:
        return int(json.load(file)["vocab_size"])


def many_tensors(count: int) -> str:
    """A file of ``count`` tensors of 64 float32 numbers."""
    path = os.path.join(results_dir(), "checkpoints", f"{count}-tensors.safetensors")
    if not os.path.exists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        rows = ((f"part.{i:07}.weight", (64,), "F32", 256) for i in range(count))
        start = write_header(path + ".part", rows)
        with open(path + ".part", "r+b") as file:
            file.seek(start)
            for left in range(256 * count, 0, -_CHUNK_BYTES):
                # Random bytes may be NaN; as numbers they are only copied.
                file.write(os.urandom(min(left, _CHUNK_BYTES)))
        os.replace(path + ".part", path)
    return path


def with_holes() -> str:
    """A folder with a GPT-2 of 20 billion parameters whose data is a hole: no space on disk."""
    from streamload.synthesis import PRESETS

    preset = PRESETS["gpt2"]
    config = {**preset.config, "n_embd": 6144, "n_layer": 44, "n_head": 64, "n_positions": 2048}
    recipes = preset.recipes(config, False)
    folder = os.path.join(results_dir(), "checkpoints", "gpt2-20b-holes")
    os.makedirs(folder, exist_ok=True)
    _write_holes(((r.name, r.shape, "F32", r.nbytes("float32")) for r in recipes), folder)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file)
    return folder


def _write_holes(rows: Iterable[tuple[str, tuple[int, ...], str, int]], folder: str) -> None:
    write_header(os.path.join(folder, "model.safetensors"), rows)
