"""Decodes 32-bit words of small unsigned numbers, GPTQ's and AWQ's, to float32."""

from __future__ import annotations

import torch

from streamload.core.errors import CheckpointError
from streamload.decoding.packed import AWQ_ORDER, PackedWords
from streamload.decoding.scratch import Parts


def decode(
    encoding: PackedWords, parts: Parts, start: int, stop: int, out: torch.Tensor, /
) -> None:
    """See ``registry.Decoder``; ``out`` is float32."""
    reads = {at: parts.read(at, *bounds) for at, *bounds in encoding.reads(start, stop)}
    outputs, each = encoding.outputs, encoding.in_word
    first, last = start // outputs, stop // outputs
    values = out.view(last - first, outputs)
    words = parts.scratch.elements("words", reads[0].numel(), torch.int32)
    for at in range(each):
        torch.bitwise_right_shift(reads[0], encoding.bits * at, out=words)
        words.bitwise_and_((1 << encoding.bits) - 1)
        if encoding.by_columns:
            column = AWQ_ORDER[at] if each == 8 else at
            values[:, column::each] = words.view(last - first, -1)
        else:
            values[at::each] = words.view(-1, outputs)
    scales = reads[1].float().view(-1, outputs)
    zeros = _columns(encoding, reads[2].view(scales.shape[0], -1))
    rows = torch.arange(first, last) // encoding.group - first // encoding.group
    if len(encoding.parts) > 3:
        rows = reads[3].long()
        if bool(((rows < 0) | (rows >= scales.shape[0])).any()):
            raise CheckpointError(
                f"a group is none of {scales.shape[0]}", tensor=encoding.parts[3].name
            )
    values.sub_(zeros.index_select(0, rows)).mul_(scales.index_select(0, rows))


def _columns(encoding: PackedWords, words: torch.Tensor) -> torch.Tensor:
    """Zeros, which are packed along the columns in both formats, as float32."""
    each, mask = encoding.in_word, (1 << encoding.bits) - 1
    apart = torch.empty(*words.shape, each)
    for at in range(each):
        column = AWQ_ORDER[at] if encoding.by_columns and each == 8 else at
        apart[..., column] = ((words >> encoding.bits * at) + encoding.zero_offset & mask).float()
    return apart.view(words.shape[0], -1)[:, : encoding.outputs]
