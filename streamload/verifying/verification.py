"""``verify``: is every byte of a checkpoint what it should be, and what another one has?"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from streamload.core.options import Reach, seconds, settings_from
from streamload.core.wording import without_secrets
from streamload.sources.detect import open_layers
from streamload.sources.wrapping.decoded_source import decoded
from streamload.verifying.checking import check
from streamload.verifying.comparing import compare_checkpoints
from streamload.verifying.verify_report import VerifyReport

if TYPE_CHECKING:
    import torch


def verify(
    path: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
    workers: int | None = None,
    chunk_bytes: int | None = None,
    timeout_s: float | None = None,
    download: bool | None = None,
    progress: Callable[[int, int, str], object] | None = None,
) -> VerifyReport:
    """Read all of a checkpoint and check it, or compare it with another.

    Alone: values that are not finite and tensors that are all zero are counted, and every digest
    that is known is compared. With ``against``: all tensors are compared under the names they
    have in a model, whatever the formats, layouts and name forms of the two are; masks and
    rotary tables that no model loads are left out.

    Args:
        path: a checkpoint, as ``load`` takes it.
        against: another one.
        dtype: compare after a cast of both to it; without, every bit counts.
        workers: threads that read; default: the cores there are, at most 8.
        chunk_bytes: how much one read brings; default 4 MiB.
        timeout_s: how long to wait for a server; see LoadOptions.
        download: False streams from the hub what its cache has not; see LoadOptions.
        progress: called as progress(done_bytes, total_bytes, name).

    Returns:
        A report; ``.ok`` is False for a wrong digest or a difference. It never raises for those.

    Raises:
        CheckpointError: a file cannot be used.
        ReadError: reading failed.
    """
    if dtype is not None and against is None:
        raise ValueError("dtype is for a comparison: pass against as well")
    settings = settings_from({"dtype": dtype, "workers": workers, "chunk_bytes": chunk_bytes})
    reach = Reach(seconds("timeout_s", timeout_s), download)
    start_s = time.perf_counter()
    with open_layers(path, None, reach=reach) as here:
        if against is None:
            report = check(here, settings, progress=progress)
        else:
            with open_layers(against, None, reach=reach) as there:
                one, two = decoded(here), decoded(there)
                if dtype is None and one is not here and two is not there:
                    one, two = here, there  # both are quantised: every stored bit counts
                report = compare_checkpoints(one, two, settings, progress=progress)
            report = replace(report, against=without_secrets(os.fsdecode(against)))
    shown = without_secrets(os.fsdecode(path))
    return replace(report, path=shown, elapsed_s=time.perf_counter() - start_s)
