"""torchao's int8 weight, multiplied by torch's own int8 kernel where that is the faster way."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

# Each row of the input reads the whole weight again, which the product in the input's dtype does
# not; but that casts the weight first.
_MOST_ROWS = 8
_KERNEL = getattr(torch, "_weight_int8pack_mm", None)


@cache
def int8_tensor() -> Any:
    """The class of our int8 weights; imports torchao.

    Raises:
        ImportError: it is not installed, or too old.
    """
    from torchao.quantization import Int8Tensor as TorchaoTensor

    class Int8Tensor(TorchaoTensor):  # type: ignore[misc]
        """The same values; what it is saved or pickled as is torchao's class."""

        def __reduce_ex__(self, protocol: Any) -> Any:
            plain = TorchaoTensor(
                self.qdata, self.scale, self.block_size, self.dtype, zero_point=self.zero_point
            )
            for name, value in vars(self).items():
                setattr(plain, name, value)  # that it is a parameter, too
            return plain.__reduce_ex__(protocol)

    theirs = TorchaoTensor._TORCH_FN_TABLE[TorchaoTensor][F.linear]

    @Int8Tensor.implements_torch_function(F.linear)  # type: ignore[untyped-decorator]
    def linear(function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return (
            _linear(*args, **(kwargs or {}))
            if _is_fast(args[0])
            else theirs(function, types, args, kwargs)
        )

    return Int8Tensor


def _is_fast(x: torch.Tensor) -> bool:
    rows = x.numel() // max(x.shape[-1], 1)
    return (
        _KERNEL is not None
        and 0 < rows <= _MOST_ROWS
        and x.dtype == torch.bfloat16
        and x.device.type == "cpu"
        and not (x.requires_grad and torch.is_grad_enabled())
    )


def _linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    assert _KERNEL is not None, "asked before"
    # The kernel takes scales in the input's dtype only, as torchao applies them; it multiplies its
    # float32 sums with them, which is one rounding less.
    scales = weight.scale.to(x.dtype).flatten()
    product: torch.Tensor = _KERNEL(x.reshape(-1, x.shape[-1]), weight.qdata, scales)
    if bias is not None:
        product = product + bias
    return product.reshape(*x.shape[:-1], -1)
