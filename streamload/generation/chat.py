"""Chat templates: a message becomes the text that a model was trained to answer.

Source of the conventions: transformers' chat templates. A template is foreign code in Jinja's
language; it runs in Jinja's sandbox, in a process of its own with little time and memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from streamload.core.errors import CheckpointError, CheckpointNotFoundError
from streamload.generation.child import Child
from streamload.generation.tokenizer import require

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
_MAX_CHARS = 1 << 20  # the longest published ones have some 20,000
_RENDER_S, _RENDER_S_PER_CHAR = 1.0, 20e-6
_BUILT_BYTES, _BUILT_PER_CHAR = 64 << 20, 200
_DEFAULT = "default"


@dataclass(frozen=True)
class ChatTemplate:
    """A template, and the special tokens that it may write.

    Attributes:
        text: in Jinja's language.
        path: of the file it is from.
        tokens: ``bos_token`` and the like → how each is written.
    """

    text: str
    path: str
    tokens: Mapping[str, str] = field(default_factory=dict)

    def render(self, prompt: str, *, system: str | None = None) -> str:
        """The text of one message of the user, up to where the answer begins.

        Special tokens are in the text: it is encoded without adding any.

        Raises:
            CheckpointError: the template is none, refuses the messages (not every model takes a
                system message), or takes more time or memory than it should.
            MissingExtraError: Jinja is not installed.
        """
        require("jinja2", "--chat")
        if len(self.text) > _MAX_CHARS:
            raise CheckpointError(
                f"chat template of {len(self.text)} characters, expected at most {_MAX_CHARS}",
                path=self.path,
            )
        roles = {"user": prompt} if system is None else {"system": system, "user": prompt}
        messages = [{"role": role, "content": text} for role, text in roles.items()]
        chars = len(self.text) + sum(map(len, roles.values()))
        rendered: str = Child("chat_child", self.path).ask(
            "cannot use the chat template: ",
            cpu_s=_RENDER_S + _RENDER_S_PER_CHAR * chars,
            built_bytes=_BUILT_BYTES + _BUILT_PER_CHAR * chars,
            template=self.text,
            variables={**self.tokens, "messages": messages, "add_generation_prompt": True},
        )
        return rendered


def template_from(
    config: Mapping[str, Any], text: str | None, special: Mapping[str, Any], folder: str
) -> ChatTemplate:
    """The template of a checkpoint; one in a file of its own goes before the configuration's.

    Args:
        config: as in ``tokenizer_config.json``.
        text: of ``chat_template.jinja``, None without one.
        special: as in ``special_tokens_map.json``, for tokens the configuration does not name.
        folder: where these are.

    Raises:
        CheckpointNotFoundError: there is no template.
        CheckpointError: it is of another kind than a text, or a list of named ones.
    """
    found = config.get("chat_template") if text is None else text
    if isinstance(found, list):
        pairs = [(one.get("name"), one.get("template")) for one in found if isinstance(one, dict)]
        found = dict(pairs).get(_DEFAULT)
    path = f"{folder}/{CONFIG_FILE if text is None else TEMPLATE_FILE}"
    if found is None:
        raise CheckpointNotFoundError(
            "no chat template with the tokenizer: a base model has none, it continues a text; "
            "leave --chat away",
            path=folder,
        )
    if not isinstance(found, str):
        kind = type(found).__name__
        raise CheckpointError(f"chat_template must be a text, not of type {kind}", path=path)
    tokens = {**_tokens(special), **_tokens(config)}
    return ChatTemplate(found, path, tokens)


def _tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and its kin: a text, or an object with the text as ``content``."""
    found = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found
