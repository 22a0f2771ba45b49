"""Small quantised tensors of every format, and their values by plain float64 arithmetic."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
E2M1 = torch.cat([E2M1, -E2M1])
GENERATOR = torch.Generator().manual_seed(0)


@dataclass
class Case:
    """Stored tensors, what config.json says, and the values they mean, in float64."""

    stored: dict[str, Tensor]
    config: dict[str, Any]
    values: dict[str, Tensor]
    used: set[str] = field(default_factory=set)

    def write(self, folder: Path, **more: Any) -> Path:
        folder.mkdir(parents=True)
        save_file(self.stored, folder / "model.safetensors")
        config = {"model_type": "none", **more, "quantization_config": self.config}
        (folder / "config.json").write_text(json.dumps(config))
        return folder


def whole(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=GENERATOR)


def floats(*shape: int) -> Tensor:
    """Scales of a wide range."""
    return torch.exp2(whole(-9, 4, *shape).float()) * (1 + torch.rand(shape, generator=GENERATOR))


def eight_bits(dtype: torch.dtype, *shape: int) -> Tensor:
    """Every finite number there is."""
    numbers = whole(0, 256, *shape).to(torch.uint8)
    finite = torch.isfinite(numbers.view(dtype).float())
    return torch.where(finite, numbers, 0).view(dtype)


def spread(grid: Tensor, down: int, across: int, shape: tuple[int, ...]) -> Tensor:
    """Each block's number over the block, in float64."""
    rows = grid.double().repeat_interleave(down, -2)[..., : shape[-2], :]
    return rows.repeat_interleave(across, -1)[..., : shape[-1]]


def exponents(*shape: int) -> Tensor:
    return whole(110, 135, *shape).to(torch.uint8)


def power(stored: Tensor) -> Tensor:
    return torch.exp2(stored.view(torch.uint8).double() - 127)


def nibbles(stored: Tensor) -> Tensor:
    """Two numbers of each byte, the lower one first, along the last dimension."""
    pairs = torch.stack((stored.view(torch.uint8) & 15, stored.view(torch.uint8) >> 4), -1)
    return pairs.flatten(-2).long()


def fp8(dtype: torch.dtype, down: int, across: int, *shape: int, name: str = "weight_scale_inv"):
    def make() -> Case:
        q = eight_bits(dtype, *shape)
        grid = (*shape[:-2], -(-shape[-2] // down), -(-shape[-1] // across))
        scale = floats(*grid)
        values = q.float().double() * spread(scale, down, across, shape)
        stored = {"a.weight": q, f"a.{name}": scale, "a.input_scale": torch.ones(1)}
        config = {"quant_method": "fp8", "weight_block_size": [down, across]}
        return Case(stored, config, {"a.weight": values})

    return make


def one_scale(scale: Tensor, *shape: int, method: str = "fp8") -> Callable[[], Case]:
    """A scale for all, each matrix or each row."""

    def make() -> Case:
        q = eight_bits(torch.float8_e4m3fn, *shape)
        wide = scale.double()
        if wide.dim() == len(shape) - 1 and wide.numel() > 1:
            wide = wide[..., None]
        stored = {"a.weight": q, "a.weight_scale": scale, "a.activation_scale": torch.ones(1)}
        return Case(stored, {"quant_method": method}, {"a.weight": q.float().double() * wide})

    return make


def powers_of_two() -> Case:
    q, s = eight_bits(torch.float8_e4m3fn, 200, 96), exponents(2, 1)
    values = q.float().double() * spread(power(s), 128, 128, (200, 96))
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    return Case(
        {"a.weight": q, "a.weight_scale_inv": s.view(torch.float8_e8m0fnu)},
        config,
        {"a.weight": values},
    )


def fp4_beside_fp8() -> Case:
    """As DeepSeek-V4's: experts of 4 bits in int8, all else of 8; scales are called ``scale``."""
    q, s = eight_bits(torch.float8_e4m3fn, 128, 256), exponents(1, 2)
    packed, t = whole(0, 256, 24, 48).to(torch.uint8), exponents(24, 3)
    stored = {
        "attn.wq.weight": q,
        "attn.wq.scale": s.view(torch.float8_e8m0fnu),
        "experts.0.w1.weight": packed.view(torch.int8),
        "experts.0.w1.scale": t.view(torch.float8_e8m0fnu),
        "norm.weight": torch.ones(5, dtype=torch.bfloat16),
    }
    values = {
        "attn.wq.weight": q.float().double() * spread(power(s), 128, 128, (128, 256)),
        "experts.0.w1.weight": E2M1[nibbles(packed)] * spread(power(t), 1, 32, (24, 96)),
        "norm.weight": torch.ones(5).double(),
    }
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return Case(stored, config, values)


def mxfp4() -> Case:
    """As gpt-oss's experts, which end as ``[expert, in, out]``."""
    blocks, scales = whole(0, 256, 3, 40, 4, 16).to(torch.uint8), exponents(3, 40, 4)
    q = E2M1[nibbles(blocks.view(3, 40, 64))]
    values = (q * spread(power(scales), 1, 32, (3, 40, 128))).transpose(1, 2)
    name = "experts.gate_up_proj"
    stored = {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return Case(stored, {"quant_method": "mxfp4"}, {name: values})


def compressed(form: str, weights: dict[str, Any], stored: dict[str, Tensor], values: Tensor):
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    stored = {**stored, "head.weight": torch.ones(2, 2)}
    return Case(stored, config, {"a.weight": values, "head.weight": torch.ones(2, 2).double()})


def int8_rows() -> Case:
    q, s = whole(-128, 128, 30, 50).to(torch.int8), floats(30, 1).bfloat16()
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    stored = {"a.weight": q, "a.weight_scale": s, "a.input_scale": torch.ones(1)}
    return compressed("int-quantized", weights, stored, q.double() * s.double())


def int8_zeros() -> Case:
    q, s, z = whole(-128, 128, 30, 50).to(torch.int8), floats(30, 1), whole(-90, 90, 30, 1)
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}
    stored = {"a.weight": q, "a.weight_scale": s, "a.weight_zero_point": z.to(torch.int8)}
    return compressed("int-quantized", weights, stored, (q - z).double() * s.double())


def float_rows() -> Case:
    q, s = eight_bits(torch.float8_e4m3fn, 30, 50), floats(30, 1).bfloat16()
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    stored = {"a.weight": q, "a.weight_scale": s}
    return compressed("float-quantized", weights, stored, q.float().double() * s.double())


def float_blocks() -> Case:
    q, s = eight_bits(torch.float8_e4m3fn, 100, 130), floats(2, 3)
    weights = {"num_bits": 8, "strategy": "block", "block_structure": [64, 64]}
    values = q.float().double() * spread(s, 64, 64, (100, 130))
    return compressed("float-quantized", weights, {"a.weight": q, "a.weight_scale": s}, values)


def words_of(numbers: Tensor, bits: int, dim: int) -> Tensor:
    """Unsigned numbers packed in 32-bit words along a dimension, the first in the lowest bits."""
    each = 32 // bits
    apart = numbers.long().movedim(dim, -1).unflatten(-1, (-1, each))
    packed = (apart << torch.arange(each) * bits).sum(-1)
    packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed)
    return packed.to(torch.int32).movedim(-1, dim).contiguous()


def packed_ints(bits: int, symmetric: bool) -> Callable[[], Case]:
    def make() -> Case:
        q, s = whole(0, 1 << bits, 24, 128), floats(24, 2)
        z = whole(0, 1 << bits, 24, 2) if not symmetric else torch.full((24, 2), 1 << (bits - 1))
        weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 64}
        stored = {
            "a.weight_packed": words_of(q, bits, 1),
            "a.weight_scale": s.half(),
            "a.weight_shape": torch.tensor([24, 128]),
        }
        if not symmetric:
            stored["a.weight_zero_point"] = words_of(z, bits, 0)
        values = (q - spread(z, 1, 64, (24, 128))) * spread(s.half(), 1, 64, (24, 128))
        return compressed("pack-quantized", weights | {"symmetric": symmetric}, stored, values)

    return make


def nvfp4() -> Case:
    packed, s = whole(0, 256, 20, 32).to(torch.uint8), eight_bits(torch.float8_e4m3fn, 20, 4)
    overall = torch.tensor([32.0])
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    stored = {
        "a.weight_packed": packed,
        "a.weight_scale": s,
        "a.weight_global_scale": overall,
        "a.input_global_scale": torch.ones(1),
    }
    values = E2M1[nibbles(packed)] * spread(s.float() / overall, 1, 16, (20, 64))
    return compressed("nvfp4-pack-quantized", weights, stored, values)


def mxfp4_words() -> Case:
    packed, s = whole(0, 256, 20, 32).to(torch.uint8), exponents(20, 2)
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    values = E2M1[nibbles(packed)] * spread(power(s), 1, 32, (20, 64))
    stored = {"a.weight_packed": packed, "a.weight_scale": s}
    return compressed("mxfp4-pack-quantized", weights, stored, values)


def modelopt() -> Case:
    packed, s = whole(0, 256, 20, 32).to(torch.uint8), eight_bits(torch.float8_e4m3fn, 20, 4)
    overall = torch.tensor(0.25)
    stored = {"a.weight": packed, "a.weight_scale": s, "a.weight_scale_2": overall}
    values = E2M1[nibbles(packed)] * spread(s.float() * overall, 1, 16, (20, 64))
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    return Case(stored, config, {"a.weight": values})


def gptq(bits: int, form: str, *, ordered: bool = True) -> Callable[[], Case]:
    def make() -> Case:
        q, s = whole(0, 1 << bits, 128, 48), floats(2, 48).half()
        z = whole(0, 1 << bits, 2, 48)
        group = torch.arange(128) // 64 if ordered else whole(0, 2, 128)
        kept = z if form == "gptq_v2" else (z - 1) % (1 << bits)
        stored = {
            "a.qweight": words_of(q, bits, 0),
            "a.scales": s,
            "a.qzeros": words_of(kept, bits, 1),
            "a.g_idx": group.to(torch.int32),
        }
        values = ((q - z[group]).double() * s.double()[group]).t()
        config = {"quant_method": "gptq", "bits": bits, "group_size": 64, "desc_act": not ordered}
        return Case(stored, config | {"checkpoint_format": form}, {"a.weight": values})

    return make


def awq() -> Case:
    q, s, z = whole(0, 16, 128, 48), floats(2, 48).half(), whole(0, 16, 2, 48)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def turned(numbers: Tensor) -> Tensor:
        return words_of(numbers.unflatten(1, (-1, 8))[:, :, order].flatten(1), 4, 1)

    stored = {"a.qweight": turned(q), "a.scales": s, "a.qzeros": turned(z)}
    group = torch.arange(128) // 64
    values = ((q - z[group]).double() * s.double()[group]).t()
    config = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}
    return Case(stored, config, {"a.weight": values})


def state(**facts: Any) -> Tensor:
    return torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8)


def four_bits(*shape: int, nested: bool) -> Callable[[], Case]:
    """As bitsandbytes keeps them: flat, the first number of a byte in its upper bits."""

    def make() -> Case:
        count = math.prod(shape)
        packed = whole(0, 256, count // 2, 1).to(torch.uint8)
        table = torch.sort(torch.rand(16, generator=GENERATOR) * 2 - 1).values
        blocks = -(-count // 64)
        absmax = floats(blocks)
        facts = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
        stored = {"a.weight": packed, "a.weight.quant_map": table}
        if nested:
            code, outer = torch.rand(256, generator=GENERATOR), floats(-(-blocks // 256))
            small = whole(0, 256, blocks).to(torch.uint8)
            each = outer.repeat_interleave(256)[:blocks]
            absmax = code[small.long()] * each + 0.125
            facts |= {"nested_blocksize": 256, "nested_offset": 0.125, "nested_dtype": "float32"}
            stored |= {"a.weight.absmax": small, "a.weight.nested_absmax": outer}
            stored["a.weight.nested_quant_map"] = code
        else:
            stored["a.weight.absmax"] = absmax
        stored["a.weight.quant_state.bitsandbytes__nf4"] = state(**facts)
        q = table[nibbles(packed).view(-1, 2).flip(1).reshape(-1)]
        values = q.double() * absmax.double().repeat_interleave(64)[:count]
        config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
        return Case(stored, config, {"a.weight": values.view(shape)})

    return make


def int8_bitsandbytes() -> Case:
    q, s = whole(-127, 128, 30, 50).to(torch.int8), floats(30)
    stored = {"a.weight": q, "a.SCB": s, "a.weight_format": torch.tensor(0, dtype=torch.uint8)}
    # The library rounds twice: number x largest value, then a 127th of it.
    values = (q.float() * s[:, None]).double() * torch.tensor(1 / 127).double()
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    return Case(stored, config, {"a.weight": values})


CASES: dict[str, Callable[[], Case]] = {
    "fp8 blocks": fp8(torch.float8_e4m3fn, 128, 128, 256, 384),
    "fp8 ragged": fp8(torch.float8_e4m3fn, 128, 128, 300, 200),
    "fp8 other blocks": fp8(torch.float8_e5m2, 64, 32, 70, 130),
    "fp8 rows of blocks": fp8(torch.float8_e4m3fnuz, 1, 32, 33, 65),
    "fp8 experts": fp8(torch.float8_e4m3fn, 16, 16, 3, 40, 36, name="weight_scale"),
    "fp8 tensor": one_scale(torch.tensor(0.37), 40, 30),
    "fp8 tensor [1]": one_scale(torch.tensor([0.37]), 3, 40, 30),
    "fp8 rows [M, 1]": one_scale(floats(40, 1), 40, 30, method="fbgemm_fp8"),
    "fp8 rows [M]": one_scale(floats(40), 40, 30),
    "fp8 experts' rows": one_scale(floats(3, 40, 1), 3, 40, 30),
    "fp8 experts' columns": one_scale(floats(3, 1, 30), 3, 40, 30),
    "e8m0": powers_of_two,
    "fp4 beside fp8": fp4_beside_fp8,
    "mxfp4": mxfp4,
    "int8 rows": int8_rows,
    "int8 zeros": int8_zeros,
    "float rows": float_rows,
    "float blocks": float_blocks,
    "int4": packed_ints(4, True),
    "int4 zeros": packed_ints(4, False),
    "int8 words": packed_ints(8, True),
    "int8 words, zeros": packed_ints(8, False),
    "nvfp4": nvfp4,
    "mxfp4 words": mxfp4_words,
    "modelopt nvfp4": modelopt,
    "gptq": gptq(4, "gptq"),
    "gptq v2 of 8 bits": gptq(8, "gptq_v2"),
    "gptq of 2 bits": gptq(2, "gptq"),
    "gptq in any order": gptq(4, "gptq", ordered=False),
    "awq": awq,
    "bitsandbytes": four_bits(48, 96, nested=False),
    "bitsandbytes, short block": four_bits(9, 22, nested=False),
    "bitsandbytes, nested": four_bits(128, 256, nested=True),
    "bitsandbytes, nested, short": four_bits(48, 96, nested=True),
    "bitsandbytes int8": int8_bitsandbytes,
}
