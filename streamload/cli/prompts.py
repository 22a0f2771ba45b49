"""What ``generate`` continues: token ids as given, a text, or a chat's first message."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from streamload.core.errors import CheckpointNotFoundError, StreamloadError
from streamload.core.options import Reach
from streamload.sources.files import OpenFile
from streamload.sources.small_files import loads_strictly, read_object

if TYPE_CHECKING:
    from streamload.generation.chat import ChatTemplate
    from streamload.generation.tokenizer import Tokenizer
    from streamload.sources.base import Source

_MAX_BYTES = 4 << 20
_SPECIAL_TOKENS = "special_tokens_map.json"


@dataclass(frozen=True)
class Prompt:
    """What was asked for, as the command line has it.

    Attributes:
        text: None where token ids were given.
        tokens: those ids.
        is_chat: the text is a message, put into the checkpoint's chat template.
        system: the chat's system message.
    """

    text: str | None
    tokens: tuple[int, ...] = ()
    is_chat: bool = False
    system: str | None = None

    @property
    def shown(self) -> str:
        """What stands in front of the continuation on a terminal."""
        if self.text is None:
            return " ".join(map(str, self.tokens)) + " "
        return self.text + "\n" * self.is_chat


def read_prompt(path: str, prompt: Prompt, reach: Reach) -> tuple[Tokenizer | None, list[int]]:
    """The tokenizer, if the prompt is a text, and the prompt's token ids."""
    if prompt.text is None:
        return None, list(prompt.tokens)
    with _beside(path, reach) as found:
        tokenizer = found.tokenizer()
        template = found.template() if prompt.is_chat else None
    if template is None:
        ids = tokenizer.encode(prompt.text)
    else:
        # The template writes the special tokens itself.
        text = template.render(prompt.text, system=prompt.system)
        ids = tokenizer.encode(text, add_special=False)
    if not ids:
        raise click.UsageError("the prompt has no tokens: give at least one character")
    return tokenizer, ids


class _Beside:
    """Small files in the folder of the weights."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def tokenizer(self) -> Tokenizer:
        from streamload.generation.tokenizer import load_tokenizer

        return load_tokenizer(self._folder)

    def template(self) -> ChatTemplate:
        from streamload.generation.chat import CONFIG_FILE, TEMPLATE_FILE, template_from

        config, special = self._object(CONFIG_FILE), self._object(_SPECIAL_TOKENS)
        path = os.path.join(self._folder, TEMPLATE_FILE)
        text = None
        if os.path.isfile(path):
            with OpenFile(path) as file:
                data = file.read(0, min(file.size_bytes, _MAX_BYTES))
            text = data.decode("utf-8", "replace")
        return template_from(config, text, special, self._folder)

    def _object(self, name: str) -> dict[str, Any]:
        path = os.path.join(self._folder, name)
        return read_object(path) if os.path.isfile(path) else {}


class _Inside:
    """What the weights' own files hold, as GGUF's do."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def tokenizer(self) -> Tokenizer:
        from streamload.generation.tokenizer import TOKENIZER_FILE, made_tokenizer

        return made_tokenizer(self._source.companion(TOKENIZER_FILE), self._source.path)

    def template(self) -> ChatTemplate:
        from streamload.generation.chat import CONFIG_FILE, template_from

        config = loads_strictly(self._source.companion(CONFIG_FILE))
        return template_from(config, None, {}, self._source.path)


@contextmanager
def _beside(path: str, reach: Reach) -> Iterator[_Beside | _Inside]:
    """The tokenizer's files inside the checkpoint's, else those beside them."""
    from streamload.generation.tokenizer import TOKENIZER_FILE
    from streamload.sources.detect import may_hold_companions, open_layers
    from streamload.sources.remote.side_files import folder_here

    holds_others = False
    if may_hold_companions(path):
        with open_layers(path, None, reach=reach) as source:
            if TOKENIZER_FILE in source.companions:
                yield _Inside(source)
                return
            holds_others = bool(source.companions)
    with folder_here(path, reach) as folder:
        try:
            yield _Beside(folder)
        except CheckpointNotFoundError:
            if not holds_others:
                _be_there(path, reach)
                raise
            text = "no tokenizer in its metadata, nor beside it: give token ids (--tokens 1,2,3)"
            raise CheckpointNotFoundError(text, path=path) from None


def _be_there(path: str, reach: Reach) -> None:
    """Raise CheckpointNotFoundError if there are no weights either, as on a wrong path."""
    from streamload.sources.detect import open_layers

    try:
        open_layers(path, None, reach=reach).close()
    except CheckpointNotFoundError:
        raise
    except StreamloadError:
        return  # damaged, but there: what was missing is told first
