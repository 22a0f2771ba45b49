"""Jobs on safetensors files, checked against them, and the peers of ``bench/peers``."""

import functools
import os
from collections.abc import Iterable, Sequence
from typing import Any

from bench.safetensors_header import read_headers
from streamload.measuring import peers
from streamload.measuring.floor import Piece
from streamload.measuring.own_peers import COPY, PEERS
from streamload.measuring.peers import Peer, read_peer

_BESIDE = (
    ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias",
    ".rotary_emb.inv_freq",
)  # fmt: skip
"""What published GPT-2 and GPT-NeoX files carry beside their weights."""


class Job(peers.Job):
    """A load of a folder with config.json, or of one .safetensors file."""

    @functools.cached_property
    def files(self) -> list[str]:
        """The .safetensors files, in name order."""
        if not os.path.isdir(self.path):
            return [self.path]
        names = sorted(n for n in os.listdir(self.path) if n.endswith(".safetensors"))
        return [os.path.join(self.path, n) for n in names]

    @functools.cached_property
    def entries(self) -> dict[str, Piece]:
        """What a model needs of the files: every tensor but the attention masks."""
        return {n: e for n, e in read_headers(self.files).items() if not n.endswith(_BESIDE)}

    @functools.cached_property
    def pieces(self) -> Sequence[Piece]:
        """The same, read without streamload."""
        return list(self.entries.values())

    def reason_against(self, peer: Peer) -> str | None:
        """None, or why the peer cannot load this, in a word."""
        if peer.published and "tok_embed.weight" in self.entries:  # as our own models have it
            return "cannot read these names"
        return peer.available()

    def check(self, peer: Peer, result: Any) -> str:
        from bench.values import check

        return check(peer.stored(result, self), self)


def find_peers(
    only: Iterable[str] = (), *, kind: str = "peers", folders: Iterable[str] = ()
) -> list[Peer]:
    """The loaders of ``bench/KIND`` and of more folders; for peers our modes and the floor, too.

    Only those named are taken; all if none is.

    Raises:
        KeyError: a name in ``only`` is no peer.
    """
    own = {name: peer.reference for name, peer in PEERS.items() if peer is not COPY}
    known = own if kind == "peers" else {}
    known = dict(sorted((known | _in(os.path.join(os.path.dirname(__file__), kind))).items()))
    for folder in folders:
        known |= _in(folder)
    names = list(only) or list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise KeyError(f"no peer {unknown[0]!r}; there are {', '.join(sorted(known))}")
    return [read_peer(known[name]) for name in names]


def _in(folder: str) -> dict[str, str]:
    files = sorted(n for n in os.listdir(folder) if n.endswith(".py") and not n.startswith("_"))
    return {name.removesuffix(".py"): os.path.join(folder, name) for name in files}
