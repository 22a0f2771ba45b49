"""Torch code on stand-ins gives places; carried out, they give what torch gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from streamload.core.specs import contiguous_strides
from streamload.hf.tracing import NoPlaceError, Traced, refold
from streamload.mapping.layout import Layout, LayoutError
from tests.hf.carrying import carried_out

RE_LAYS: dict[str, tuple[list[tuple[int, ...]], Callable[..., Tensor | Sequence[Tensor]]]] = {
    "transpose": ([(3, 4)], lambda a: a.transpose(0, 1).contiguous()),
    "t": ([(3, 4)], lambda a: a.t()),
    "permute": ([(2, 3, 4)], lambda a: a.permute(2, 0, 1)),
    "movedim": ([(2, 3, 4)], lambda a: a.movedim(0, -1)),
    "cat": ([(2, 3), (4, 3)], lambda a, b: torch.cat([a, b])),
    "cat of the last": ([(2, 3), (2, 1)], lambda a, b: torch.cat([a, b], dim=-1)),
    "stack": ([(2, 3), (2, 3)], lambda a, b: torch.stack([a, b], dim=1)),
    "stack at the end": ([(2, 3), (2, 3)], lambda a, b: torch.stack([a, b], dim=-1)),
    "stack of scalars": ([(), ()], lambda a, b: torch.stack([a, b])),
    "chunk": ([(6, 2)], lambda a: a.chunk(3)),
    "uneven chunk": ([(7, 2)], lambda a: a.chunk(3)),
    "split": ([(7, 2)], lambda a: torch.split(a, [4, 1, 2])),
    "unbind": ([(3, 2, 2)], lambda a: a.unbind(1)),
    "slice": ([(5, 4)], lambda a: a[1:4, :2]),
    "select": ([(5, 4)], lambda a: a[-1]),
    "rows by number": ([(5, 4)], lambda a: a[:, [3, 0]]),
    "squeeze": ([(1, 4, 1)], lambda a: a.squeeze(0)),
    "squeeze all": ([(1, 4, 1)], lambda a: a.squeeze()),
    "unsqueeze": ([(3, 4)], lambda a: a.unsqueeze(1)),
    "flatten": ([(2, 3, 4)], lambda a: a.flatten(1)),
    "unflatten": ([(6, 4)], lambda a: a.unflatten(0, (-1, 2))),
    "interleaved rows": (
        [(8, 3)],
        lambda a: a.view(2, 2, 2, 3).transpose(1, 2).reshape(8, 3),
    ),
    "pairs": ([(4, 6)], lambda a: a.reshape(4, 3, 2).transpose(1, 2).reshape(4, 6)),
    "other factors": ([(4, 6)], lambda a: a.reshape(2, 12)),
    "and back": ([(4, 6)], lambda a: a.transpose(0, 1).reshape(3, 2, 4).transpose(0, 2)),
    "stack, then cat": (
        [(2, 3)] * 4,
        lambda a, b, c, d: torch.cat([torch.stack([a, b]), torch.stack([c, d])], dim=1),
    ),
    "nothing": ([(0, 3)], lambda a: a.reshape(3, 0)),
    "detach": ([(2, 2)], lambda a: a.detach().clone()),
}


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("name", RE_LAYS)
def test_places_give_what_torch_gives(name: str, is_turned: bool) -> None:
    shapes, code = RE_LAYS[name]
    values = [torch.rand(shape) for shape in shapes]
    if is_turned:  # a stored tensor whose memory is in another order
        values = [v.T.contiguous().T if v.ndim == 2 else v for v in values]
    expected = code(*values)
    wanted = [expected] if isinstance(expected, Tensor) else list(expected)
    found = carried_out(code, *values)
    assert len(found) == len(wanted)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    "code",
    [
        lambda a: a * 2,
        lambda a: a + a,
        lambda a: torch.cat([a, torch.ones(1, 4)]),
        lambda a: a.new_zeros(2, 4),
        lambda a: a[::2],
        lambda a: a.double(),
        lambda a: a.expand(2, 3, 4),
        lambda a: a[[0, 1], [0, 1]],
        lambda a: torch.empty(3, 4).copy_(a),
        lambda a: a.sum(),
    ],
)
def test_code_that_computes_has_no_places(code: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(NoPlaceError):
        code(Traced(Layout.whole(0, (3, 4)), torch.float32))


@pytest.mark.parametrize("shape", [(2, 12), (24,), (4, 3, 2), (1, 24, 1), (2, 2, 2, 3)])
def test_any_shape_may_be_folded_into_any_other(shape: tuple[int, ...]) -> None:
    values = torch.arange(24.0)
    layout = refold(Layout.whole(0, (4, 6)), shape)
    target = torch.full(shape, -1.0)
    for copy in layout.copies(["0"], contiguous_strides(shape)):
        taken = values.as_strided(copy.shape, copy.source_strides, copy.source_offset)
        target.as_strided(copy.shape, copy.target_strides, copy.target_offset).copy_(taken)
    assert torch.equal(target, values.reshape(shape))


def test_rows_that_no_axes_describe_are_refused() -> None:
    turned = Layout.whole(0, (4, 6)).permute((1, 0))
    with pytest.raises(LayoutError, match="cannot view"):
        refold(turned, (8, 3))
    with pytest.raises(LayoutError, match="cannot view"):
        refold(turned, (5, 5))
