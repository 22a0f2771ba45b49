"""GGUF: one file, or the parts that llama.cpp's ``gguf-split`` makes of one.

The source speaks the language of published checkpoints: names, layouts, configuration and
tokenizer are what a published checkpoint of the model has, so that everything above knows of one
dialect only. What is not in the language of one of our families keeps GGUF's own names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import TYPE_CHECKING, Any

from streamload.core.errors import CheckpointError, refuse
from streamload.core.specs import Catalog
from streamload.core.wording import plural, printable
from streamload.sources.block_source import BlockSource, join_files, read_each
from streamload.sources.files import ReadableFile
from streamload.sources.folders import PART_OF, refuse_missing
from streamload.sources.gguf.config import config_of, token_ids
from streamload.sources.gguf.header import Header, StoredTensor, read_header
from streamload.sources.gguf.metadata import Metadata, shown
from streamload.sources.gguf.names import ARCHITECTURES
from streamload.sources.gguf.published import (
    ROTARY_FACTORS,
    default_dtype,
    not_decoded,
    published_specs,
)
from streamload.sources.gguf.tokenizer import has_tokenizer, tokenizer_config, tokenizer_json
from streamload.sources.small_files import dumped

if TYPE_CHECKING:
    import torch

_GENERATION, _TOKENIZER = "generation_config.json", ("tokenizer.json", "tokenizer_config.json")
_MOST_PARTS = 10_000
_COUNT, _NUMBER, _TENSORS = "split.count", "split.no", "split.tensors.count"


def open_gguf(paths: Sequence[str], *, given: str) -> GgufSource:
    """Open one file, or all parts of a set, as one checkpoint.

    Args:
        paths: one file, which may be any part of a set beside it, or all parts in order.
        given: the path the user gave, for messages.

    Raises:
        CheckpointError: a file is damaged, a part is missing or of another set, or a tensor is of
            no known type.
    """
    if len(paths) == 1:
        paths = _whole_set(paths[0])
    with ExitStack() as opened:
        parts = read_each(paths, lambda file: (file, read_header(file)), opened, given=given)
        _check_set([header for _, header in parts], given)
        files = ((file.path, header.tensors) for file, header in parts)
        tensors, _ = join_files(files, given=given, owners={})
        source = GgufSource(
            given, [file for file, _ in parts], [header for _, header in parts], tensors
        )
        opened.pop_all()
    return source


class GgufSource(BlockSource):
    """A GGUF checkpoint of one or more files."""

    def __init__(
        self,
        path: str,
        files: Sequence[ReadableFile],
        headers: Sequence[Header],
        tensors: Mapping[str, StoredTensor],
    ) -> None:
        super().__init__(path, files)
        self._metadata = Metadata(headers[0].path, headers[0].metadata)
        self._tensors = tensors
        notices = tuple(
            f"{header.spare_bytes} bytes after the last tensor of {header.path!r} are not read"
            for header in headers
            if header.spare_bytes
        )
        specs = published_specs(self._metadata, tensors)
        texts = {
            key: value if isinstance(value, str) else shown(value)
            for key, value in headers[0].metadata.items()
        }
        self.catalog = Catalog(specs, texts, notices, not_decoded(tensors))
        self.default_dtype = default_dtype(tensors)
        self.companions = (_GENERATION,)
        if has_tokenizer(self._metadata):
            self.companions += _TOKENIZER

    def tensor(self, name: str) -> torch.Tensor:
        from streamload.sources.wrapping.reader import values_of

        return values_of(self, self.catalog[name])

    def config(self) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
        kind = self._metadata.architecture
        if kind not in ARCHITECTURES:
            config, notices = super().config()
            text = (
                f"GGUF's architecture {printable(kind)!r} has no table here (there are "
                f"{', '.join(ARCHITECTURES)}): names stay GGUF's own"
                f"{'' if config else ', and there is no config.json beside the file'}"
            )
            return config, (*notices, text)
        return dict(self._config), ()

    @cached_property
    def _config(self) -> dict[str, Any]:
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        config = config_of(self._metadata, shapes, self._rotary_factors())
        assert config is not None, "the architecture is known"
        return config

    def _rotary_factors(self) -> bytes | None:
        found = self._tensors.get(ROTARY_FACTORS)
        if found is None:
            return None
        if found.type.name != "F32":
            raise CheckpointError(
                f"is of type {found.type.name}, expected F32",
                path=found.extent.file,
                tensor=ROTARY_FACTORS,
            )
        data = bytearray(found.extent.nbytes)
        self.read_into(found.extent, memoryview(data), tensor=ROTARY_FACTORS)
        return bytes(data)

    def companion(self, name: str) -> bytes:
        if name not in self.companions:
            raise KeyError(name)
        if name == _GENERATION:
            ids = token_ids(self._metadata)
            return dumped({key: at for key, at in ids.items() if at is not None})
        make = tokenizer_json if name == _TOKENIZER[0] else tokenizer_config
        return make(self._metadata)


def _whole_set(path: str) -> list[str]:
    """All parts of the set that the file is of by its name, if it has others beside it."""
    folder, name = os.path.split(path)
    match = PART_OF.fullmatch(name)
    if match is None or int(match["count"]) <= 1:
        return [path]
    count = int(match["count"])
    names = [
        f"{match['stem']}-{part:05d}-of-{match['count']}{match['ending']}"
        for part in range(1, min(count, _MOST_PARTS) + 1)
    ]
    absent = [one for one in names if not os.path.exists(os.path.join(folder, one))]
    refuse_missing(absent, count)
    return [os.path.join(folder, one) for one in names]


def _check_set(headers: Sequence[Header], given: str) -> None:
    """Parts must be as many, and in the order, that they say themselves."""
    problems = []
    for at, header in enumerate(headers):
        metadata = Metadata(header.path, header.metadata)
        count, number = metadata.whole(_COUNT), metadata.whole(_NUMBER)
        if len(headers) == 1 and count is not None and count > 1:
            problems.append(
                f"is part {number} of {count} ({_COUNT}), but its name is not like "
                f"NAME-00001-of-{count:05d}.gguf, by which the others are found"
            )
        elif len(headers) > 1 and (count, number) != (len(headers), at):
            problems.append(
                f"{header.path}: {_COUNT} is {count} and {_NUMBER} is {number}, expected "
                f"{len(headers)} and {at}"
            )
    refuse(problems, path=given)
    first = Metadata(headers[0].path, headers[0].metadata)
    expected, count = first.whole(_TENSORS), sum(len(header.tensors) for header in headers)
    if expected is not None and expected != count:
        raise CheckpointError(
            f"{_TENSORS} is {expected}, but {plural(len(headers), 'file')} hold {count}", path=given
        )
