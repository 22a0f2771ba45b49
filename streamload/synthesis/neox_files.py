"""The small files beside raw GPT-NeoX partitions: configuration, tokenizer, ``latest``."""

from __future__ import annotations

from streamload.synthesis.made_up_tokenizer import tokenizer_json

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


def small_files(
    layers: int, partitions: int, hidden: int, heads: int, vocab_size: int
) -> dict[str, bytes]:
    """File name to content; the model's configuration is YAML, as GPT-NeoX reads it."""
    config = _CONFIG.format(
        partitions=partitions,
        layers=layers,
        hidden=hidden,
        heads=heads,
        divisor=vocab_size // partitions if vocab_size < 50432 else 256,
    )
    return {
        "configs/20B.yml": config.encode(),
        "20B_tokenizer.json": tokenizer_json(vocab_size).encode(),
        "latest": STEP_FOLDER.encode(),
    }
