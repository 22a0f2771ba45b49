"""torchao's int8 weight, multiplied by torch's own int8 kernel where that is the faster way."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torchao.quantization import Int8Tensor as TorchaoInt8Tensor

# Each row of the input reads the whole weight again, which the product in the input's dtype does
# not; but that casts the weight first.
_MOST_ROWS = 8
_KERNEL = getattr(torch, "_weight_int8pack_mm", None)


class Int8Tensor(TorchaoInt8Tensor):  # type: ignore[misc]
    """The same values; what it is saved or pickled as is torchao's class."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = TorchaoInt8Tensor(
            self.qdata, self.scale, self.block_size, self.dtype, zero_point=self.zero_point
        )
        for name, value in vars(self).items():
            setattr(plain, name, value)  # that it is a parameter, too
        return plain.__reduce_ex__(protocol)


@Int8Tensor.implements_torch_function(F.linear)  # type: ignore[untyped-decorator]
def _linear(function: Any, types: Any, args: Any, kwargs: Any) -> torch.Tensor:
    x, weight = args[:2]
    rows = x.numel() // max(x.shape[-1], 1)
    if (
        _KERNEL is None
        or not 0 < rows <= _MOST_ROWS
        or x.dtype != torch.bfloat16
        or x.device.type != "cpu"
        or (x.requires_grad and torch.is_grad_enabled())
    ):
        table = TorchaoInt8Tensor._TORCH_FN_TABLE[TorchaoInt8Tensor]
        found: torch.Tensor = table[F.linear](function, types, args, kwargs)
        return found
    # Scales of one, so that they are applied to the product as torchao applies them: the kernel
    # takes them in the input's dtype only.
    ones = x.new_ones(weight.shape[0])
    product = _KERNEL(x.reshape(rows, -1), weight.qdata, ones)
    product = product * weight.scale.to(product.dtype).flatten()
    bias = args[2] if len(args) > 2 else kwargs.get("bias") if kwargs else None
    if bias is not None:
        product = product + bias
    out: torch.Tensor = product.reshape(*x.shape[:-1], -1)
    return out
