"""Checkpoints to measure with: published layouts with random values, made once.

Values do not matter for speed, sizes and names do: these files have the names, shapes, element
types and mask buffers of the published ones, and a config.json.
"""

import json
import os


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
    import numpy
    from safetensors.numpy import save_file

    path = os.path.join(results_dir(), "checkpoints", f"{count}-tensors.safetensors")
    if not os.path.exists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        values = numpy.random.default_rng(0).random((count, 64), dtype=numpy.float32)
        tensors = {f"part.{i:07}.weight": values[i] for i in range(count)}
        save_file(tensors, path + ".part", metadata={"format": "pt"})
        os.replace(path + ".part", path)
    return path


def with_holes() -> str:
    """A folder with a GPT-2 of 20 billion parameters whose data is a hole: no space on disk."""
    from streamload.core.specs import TensorSpec
    from streamload.saving.file_layout import lay_out
    from streamload.synthesis import PRESETS

    preset = PRESETS["gpt2"]
    config = {**preset.config, "n_embd": 6144, "n_layer": 44, "n_head": 64, "n_positions": 2048}
    specs = [TensorSpec(r.name, "F32", r.shape, "") for r in preset.recipes(config, False)]
    (layout,) = lay_out(specs, "model.safetensors")
    folder = os.path.join(results_dir(), "checkpoints", "gpt2-20b-holes")
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, layout.name), "wb") as file:
        file.write(layout.header)
        file.truncate(layout.nbytes)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as config_file:
        json.dump(config, config_file)
    return folder
