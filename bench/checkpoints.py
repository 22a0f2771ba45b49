"""Checkpoints to measure with: the published GPT-2 layout with random values.

Values do not matter for speed, sizes and names do: these files have the names, shapes, element
type and mask buffers of the published ones, and a config.json.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from bench.safetensors_header import write_header

__all__ = ["SIZES", "Size", "checkpoint", "gpt2_tensors", "results_dir"]


@dataclass(frozen=True)
class Size:
    """Width, depth, heads, vocabulary and context of a GPT-2."""

    width: int
    layers: int
    heads: int
    vocabulary: int = 50257
    context: int = 1024


SIZES = {
    "gpt2-tiny": Size(64, 2, 4, 512, 64),
    "gpt2": Size(768, 12, 12),
    "gpt2-medium": Size(1024, 24, 16),
    "gpt2-large": Size(1280, 36, 20),
    "gpt2-xl": Size(1600, 48, 25),
}

_CHUNK = 1 << 22


def results_dir() -> str:
    """Where checkpoints and results are kept: ``$BENCH_DIR``, or ``bench-results`` here."""
    return os.environ.get("BENCH_DIR") or os.path.abspath("bench-results")


def checkpoint(name: str) -> str:
    """The folder of the named checkpoint, made if there is none.

    Raises:
        KeyError: there is no size of that name.
    """
    if name not in SIZES:
        raise KeyError(f"no model {name!r}; there are {', '.join(SIZES)}")
    folder = os.path.join(results_dir(), "checkpoints", name)
    if not os.path.exists(os.path.join(folder, "model.safetensors")):
        os.makedirs(folder, exist_ok=True)
        _write_config(SIZES[name], os.path.join(folder, "config.json"))
        part = os.path.join(folder, "model.safetensors.part")
        _write_tensors(SIZES[name], part)
        os.replace(part, os.path.join(folder, "model.safetensors"))
    return folder


def gpt2_tensors(size: Size) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes as published, weights of Conv1D as [in, out]."""
    width = size.width
    yield "wte.weight", (size.vocabulary, width)
    yield "wpe.weight", (size.context, width)
    for layer in range(size.layers):
        at = f"h.{layer}"
        yield f"{at}.ln_1.weight", (width,)
        yield f"{at}.ln_1.bias", (width,)
        yield f"{at}.attn.bias", (1, 1, size.context, size.context)
        yield f"{at}.attn.c_attn.weight", (width, 3 * width)
        yield f"{at}.attn.c_attn.bias", (3 * width,)
        yield f"{at}.attn.c_proj.weight", (width, width)
        yield f"{at}.attn.c_proj.bias", (width,)
        yield f"{at}.ln_2.weight", (width,)
        yield f"{at}.ln_2.bias", (width,)
        yield f"{at}.mlp.c_fc.weight", (width, 4 * width)
        yield f"{at}.mlp.c_fc.bias", (4 * width,)
        yield f"{at}.mlp.c_proj.weight", (4 * width, width)
        yield f"{at}.mlp.c_proj.bias", (width,)
    yield "ln_f.weight", (width,)
    yield "ln_f.bias", (width,)


def _write_config(size: Size, path: str) -> None:
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": size.vocabulary,
        "n_positions": size.context,
        "n_ctx": size.context,
        "n_embd": size.width,
        "n_layer": size.layers,
        "n_head": size.heads,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "bos_token_id": size.vocabulary - 1,
        "eos_token_id": size.vocabulary - 1,
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump(config, file, indent=2)


def _write_tensors(size: Size, path: str) -> None:
    """One tensor after the other, so that memory stays at one chunk."""
    import numpy as np

    tensors = list(gpt2_tensors(size))
    rows = [(name, shape, "F32", 4 * int(np.prod(shape))) for name, shape in tensors]
    start = write_header(path, rows)
    with open(path, "r+b") as file:
        file.seek(start)
        for name, shape in tensors:
            if name.endswith(".attn.bias"):
                file.write(np.tril(np.ones(shape[2:], dtype=np.float32)).tobytes())
                continue
            random = np.random.default_rng(zlib.crc32(name.encode()))
            left = int(np.prod(shape))
            while left:
                values = random.standard_normal(min(left, _CHUNK), dtype=np.float32)
                values *= 0.02
                if ".ln_" in f".{name}" and name.endswith(".weight"):
                    values += 1
                file.write(memoryview(values).cast("B"))
                left -= len(values)
        file.flush()
        os.fsync(file.fileno())
