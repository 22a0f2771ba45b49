"""What ranks tell each other, by way of the process group's own store.

The store is there whatever the backend is, has keys that can be asked for without waiting, and
outlives a collective that broke off. So a rank that is gone can be named, and nobody hangs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from streamload.core.errors import RankError
from streamload.ranks.cards import in_words

# How long a rank may give no sign while others wait for it, unless told otherwise.
TIMEOUT_S = 300.0
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.0005, 0.1
# Others are looked at as often as they give signs; whether all are there is asked far more often.
_SIGNS_S = 1.0


class Store(Protocol):
    """What is used of ``torch.distributed.Store``."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def add(self, key: str, amount: int, /) -> int: ...

    def check(self, keys: list[str], /) -> bool: ...


class Together:
    """One load by several ranks, as one of them sees it.

    Args:
        store: that all of them reach.
        rank: this one's number; ``ranks`` are all of them.
        timeout_s: a rank that gives no sign for so long, while others wait for it, is gone.
    """

    def __init__(
        self, store: Store, rank: int, ranks: Sequence[int], timeout_s: float | None = None
    ) -> None:
        self.rank = rank
        self.ranks = tuple(ranks)
        self._store = store
        self._timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
        self._signs = 0
        self._last_sign_s = 0.0
        self._is_over = False
        with self._reached():
            group = "-".join(map(str, self.ranks))
            number = store.add(f"streamload/{group}/calls/{rank}", 1)
        self._prefix = f"streamload/{group}/{number}"

    def sign(self) -> None:
        """Tell the others that this rank is at work; now and then, however often it is called.

        Raises:
            RankError: another one failed meanwhile.
        """
        now_s = time.monotonic()
        if now_s - self._last_sign_s < min(self._timeout_s / 8, _SIGNS_S):
            return
        self._last_sign_s = now_s
        self._signs += 1
        with self._reached():
            self._store.set(self._key("signs", self.rank), str(self._signs))
            self._raise_if_failed()

    def raise_if_failed(self) -> None:
        """Raise RankError if another rank failed meanwhile."""
        with self._reached():
            self._raise_if_failed()

    def share(self, step: str, found: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Give the others ``found``, and wait for theirs of the same step: by rank, own included.

        Raises:
            RankError: a rank failed, or gave no sign for too long.
        """
        with self._reached():
            self._store.set(self._key(step, self.rank), json.dumps(found))
            self._wait(step)
            return {rank: json.loads(self._store.get(self._key(step, rank))) for rank in self.ranks}

    def fail(self, error: BaseException) -> None:
        """Have every other rank end with an error that names this one and what befell it."""
        if self._is_over:
            return  # it is they who told
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self._post([self.rank], f"rank {self.rank} failed: {text}")

    def _post(self, ranks: Sequence[int], text: str) -> None:
        self._is_over = True
        try:
            if not self._store.check([self._failed]):
                self._store.set(self._failed, json.dumps({"ranks": list(ranks), "text": text}))
        except (RuntimeError, OSError):
            pass  # without a store the others cannot go on either, and will say so themselves

    @property
    def _failed(self) -> str:
        return f"{self._prefix}/failed"

    def _key(self, step: str, rank: int) -> str:
        return f"{self._prefix}/{step}/{rank}"

    def _raise_if_failed(self) -> None:
        if self._store.check([self._failed]):
            self._is_over = True
            told = json.loads(self._store.get(self._failed))
            raise RankError(f"{told['text']}; every rank ends", ranks=tuple(told["ranks"]))

    def _wait(self, step: str) -> None:
        """Return once all have come to a step."""
        keys = [self._key(step, rank) for rank in self.ranks]
        # All ranks ask one store: each of many more seldom, so that it is not all it does.
        wait_s, longest_s = _SHORTEST_WAIT_S, min(0.01 + 0.001 * len(keys), _LONGEST_WAIT_S)
        look_s = min(self._timeout_s / 8, _SIGNS_S)
        looked_s = 0.0
        seen = dict.fromkeys(self.ranks, "")
        last_s = dict.fromkeys(self.ranks, time.monotonic())
        while True:
            # In this order: what all have said is the same for all, a failure may come later.
            if self._store.check(keys):
                return
            self._raise_if_failed()
            time.sleep(wait_s)
            wait_s = min(wait_s * 1.5, longest_s, look_s)
            if time.monotonic() - looked_s < look_s:
                continue
            looked_s = time.monotonic()
            absent = [r for r, key in zip(self.ranks, keys, strict=True) if not self._has(key)]
            for rank in absent:
                sign = self._sign_of(rank)
                if sign != seen[rank]:
                    seen[rank], last_s[rank] = sign, time.monotonic()
            now_s = time.monotonic()
            gone = [rank for rank in absent if now_s - last_s[rank] > self._timeout_s]
            if gone:
                text = (
                    f"{in_words(gone)} gave no sign for {self._timeout_s:g} s, waiting for {step!r}"
                )
                self._post(gone, text)
                raise RankError(f"{text}; every rank ends", ranks=tuple(gone))

    def _has(self, key: str) -> bool:
        return self._store.check([key])

    def _sign_of(self, rank: int) -> str:
        key = self._key("signs", rank)
        return self._store.get(key).decode() if self._has(key) else ""

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """What the store raises where its host is gone, as an error of ours."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            if isinstance(error, RankError):
                raise
            self._is_over = True
            others = tuple(rank for rank in self.ranks if rank != self.rank)
            raise RankError(
                "the process group's store cannot be reached any more: the process that holds it "
                f"is gone (rank {self.ranks[0]}, unless torchrun holds it): "
                f"{str(error).partition(chr(10))[0]}",
                ranks=others[:1] if self.rank != self.ranks[0] else (),
            ) from error
