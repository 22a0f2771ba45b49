"""SentencePiece's merges, which a file has only as scores of whole tokens."""

from __future__ import annotations

from collections.abc import Mapping

# SentencePiece's trainers make pieces of at most 16 characters; longer ones are runs of one sign.
_MOST_CHARS = 1024


def merges_by_score(pieces: Mapping[str, tuple[float, int]]) -> list[str]:
    """Every way to put a piece together of two others, the best piece first.

    SentencePiece joins the neighbours whose union has the best score; a BPE model joins those of
    the first merge. They agree if the merges stand in the order of the unions' scores.

    Args:
        pieces: token → its score and its place.

    Returns:
        Merges as ``"left right"``.

    Raises:
        ValueError: a piece is longer than any can be.
    """
    found: list[tuple[float, int, int, int, int, str]] = []
    for piece, (score, _) in pieces.items():
        if len(piece) > _MOST_CHARS:
            raise ValueError(f"a token has {len(piece)} characters; the limit is {_MOST_CHARS}")
        if " " in piece:  # spaces are written as a sign of their own
            continue
        for at in range(1, len(piece)):
            left, right = pieces.get(piece[:at]), pieces.get(piece[at:])
            if left is not None and right is not None:
                sides = left[1], right[1]
                order = (-score, -at, at - len(piece), *sides)
                found.append((*order, f"{piece[:at]} {piece[at:]}"))
    return [merge for *_, merge in sorted(found)]
