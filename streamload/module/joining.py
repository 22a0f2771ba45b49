"""The ranks that load or export one module together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn

from streamload.module.sharded import ranks_of
from streamload.ranks.together import Together


@contextmanager
def together(module: nn.Module, timeout_s: float | None = None) -> Iterator[Together | None]:
    """The ranks that hold parts of ``module``, or None where it is all this process's own.

    Whatever is raised inside ends what every rank does.
    """
    ranks = ranks_of(module)
    group = _group(ranks, timeout_s) if len(ranks) > 1 else None
    if group is None:
        yield None
        return
    try:
        yield group
    except BaseException as error:
        group.fail(error)
        raise


def confirming(group: Together | None) -> Callable[[], object] | None:
    """What a commit calls last: returns once every rank has come so far."""
    return None if group is None else partial(group.share, "committed", {})


def _group(ranks: tuple[int, ...], timeout_s: float | None) -> Together | None:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if not dist.is_initialized() or dist.get_backend() == "fake" or dist.get_rank() not in ranks:
        return None
    store = distributed_c10d._get_default_store()
    return Together(store, dist.get_rank(), ranks, timeout_s)
