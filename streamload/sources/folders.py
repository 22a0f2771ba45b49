"""Which files of a folder are the checkpoint, by their names; no file is opened."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from streamload.core.errors import CheckpointError
from streamload.core.wording import listed, printable
from streamload.sources.recognise import describe_parts
from streamload.sources.remote.urls import is_url

PART_OF = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})(?P<ending>\.\w+)")
_ANY_PART = re.compile(r".+-0*(?P<part>\d+)-of-0*(?P<count>\d+)\.\w+")
_PARTITION = re.compile(
    r"(layer_\d+-model_\d+-model_states|mp_rank_\d+_model_states|(bf16_|fp16_)?zero_pp_.*)\.pt"
)
# Files that are opened together, and say themselves what each has of a tensor.
_PARTS_OF_ONE = re.compile(
    r"consolidated\.\d+\.(pth|pt)|shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors"
)
# How the names of files begin that stand beside weights and are none.
# (``mmproj``: llama.cpp's vision projectors.)
NOT_WEIGHTS = ("adapter_", "optimizer", "training_args", "scheduler", "rng_state", "mmproj")
_VARIANT = re.compile(r"\.(fp16|bf16|fp32|fp8|int8|non_ema|ema)[.-]", re.IGNORECASE)
# Best first.
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
TORCH_ENDINGS = (".bin", ".pt", ".pth")
# A conversion to streamload's own names, which no other library should take for the model.
LOCAL_FILE = "local.safetensors"
# torch.distributed.checkpoint: what the ranks wrote, and what says which pieces these are.
DISTCP_ENDING, DISTCP_METADATA = ".distcp", ".metadata"


def names_in(folder: str) -> list[str]:
    """The names in a folder, sorted; at an address those that may be the checkpoint.

    Raises:
        CheckpointError: it cannot be listed.
    """
    if is_url(folder):
        from streamload.sources.remote.remote_folder import names_at

        return names_at(folder)
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise CheckpointError(f"cannot be listed: {error.strerror}", path=folder) from error


def is_distcp(folder: str) -> bool:
    """True for a folder of torch.distributed.checkpoint, by the names of its files."""
    names = names_in(folder)
    if DISTCP_METADATA not in names:
        return False
    # With nothing that could be meant instead, its files are absent.
    rest = [name for name in names if not name.startswith(".") and not name.endswith(".json")]
    return not rest or any(name.endswith(DISTCP_ENDING) for name in rest)


def choose_files(files: Sequence[str], endings: tuple[str, ...]) -> list[str] | None:
    """The names of the files to open, or of one index; None if there is none of this kind."""
    kinds = [name for name in files if name.lower().endswith(endings)]
    indexes = [n for n in files if n.lower().endswith(tuple(e + ".index.json" for e in endings))]
    indexes = [n for n in indexes if not _VARIANT.search(n)] or indexes
    preferred = [n for n in indexes if n in INDEXES]
    if len(indexes) > 1 and not preferred:
        raise CheckpointError(f"several indexes: {', '.join(indexes)}; pass the one that is meant")
    if indexes:
        return (preferred or indexes)[:1]
    for name in ("model.safetensors", "pytorch_model.bin", LOCAL_FILE):
        if name in kinds:
            return [name]
    # Mistral's folders repeat all weights under other names in consolidated*: a last resort.
    main = [n for n in kinds if not n.startswith(("consolidated", *NOT_WEIGHTS))]
    candidates = main or [n for n in kinds if n.startswith("consolidated")]
    candidates = [n for n in candidates if not _PARTITION.fullmatch(n)]
    # Other copies of the same weights (``NAME.fp16.safetensors``) stand back for the plain ones.
    candidates = [n for n in candidates if not _VARIANT.search(n)] or candidates
    if len(candidates) > 1 and all(map(_PARTS_OF_ONE.fullmatch, candidates)):
        return candidates
    parts = [match for n in candidates if (match := PART_OF.fullmatch(n))]
    if parts:
        return _complete_set(parts, [n for n in candidates if not PART_OF.fullmatch(n)])
    if len(candidates) > 1:
        way = describe_parts(candidates) or "pass the one that is meant"
        raise CheckpointError(
            f"several checkpoint files and no index: "
            f"{', '.join(map(printable, candidates[:6]))}; {way}"
        )
    if not candidates:
        return None
    match = _ANY_PART.fullmatch(candidates[0])
    if match and (match["part"], match["count"]) != ("1", "1"):
        raise CheckpointError(
            f"{printable(candidates[0])} is by its name one part of a set, and there is no other "
            "part and no index; pass the file itself if it is all that is meant"
        )
    return candidates


def refuse_missing(absent: Sequence[str], count: int) -> None:
    """Refuse a set of ``count`` shards of which some are ``absent``; lists them."""
    if absent:
        raise CheckpointError(
            f"{len(absent)} of {count} shards are missing: {listed(absent)}",
            problems=tuple(f"shard {name!r} is missing" for name in absent),
        )


def _complete_set(parts: Sequence[re.Match[str]], others: Sequence[str]) -> list[str]:
    """All parts of a set ``NAME-00001-of-00003``, when no index says so.

    Raises:
        CheckpointError: parts are missing or more than they say; there are several sets, or
            ``others`` beside them.
    """
    sets: dict[tuple[str, str, str], dict[int, str]] = {}
    for match in parts:
        key = (match["stem"], match["count"], match["ending"])
        sets.setdefault(key, {})[int(match["part"])] = match.string
    if len(sets) > 1:
        raise CheckpointError(
            "several sets of shards and no index: "
            + ", ".join(f"{stem}-*-of-{count}" for stem, count, _ in sets)
        )
    (stem, count, ending), found = next(iter(sets.items()))
    beyond = [name for part, name in found.items() if not 1 <= part <= int(count)]
    if beyond:
        raise CheckpointError(
            f"{', '.join(map(printable, beyond[:8]))}: no such part in a set of {int(count)}",
            problems=tuple(f"shard {name!r} is no part of {int(count)}" for name in beyond),
        )
    absent = sorted({*range(1, int(count) + 1)} - found.keys())
    refuse_missing([f"{stem}-{part:05d}-of-{count}{ending}" for part in absent], int(count))
    if others:
        raise CheckpointError(
            f"several things that may be meant and no index: {printable(stem)}-*-of-{count} and "
            f"{', '.join(map(printable, others[:6]))}; pass the file that is meant, or move what "
            "is not out of the folder"
        )
    return [found[part] for part in sorted(found)]
