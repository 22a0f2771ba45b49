"""What stands for the models and servers that the pages name: tiny checkpoints, and loopback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from streamload.synthesis import synthesize
from tests.support.loopback import Site
from tests.support.remote import tree

_COMMIT = "c0ffee" + "0" * 34


def _gguf(folder: Path) -> None:
    from tests.families.test_gguf import FAMILIES, published, with_tokenizer
    from tests.support.gguf_files import write_gguf

    config = {**FAMILIES["llama"], "vocab_size": 420}
    path = folder / "model-Q4_K_M.gguf"
    write_gguf(path, published(config), config, "Q4_K", extra=with_tokenizer)


def _adapted(folder: Path) -> None:
    from tests.adapters.judge import write_adapter, write_base

    base = write_base(folder / "llama", "llama")
    for seed, name in enumerate(("my-lora", "another")):
        write_adapter(folder / name, base, seed, target_modules=["q_proj", "v_proj"])


def _quantised(folder: Path) -> None:
    from tests.decoding.quantised import CASES

    CASES["fp8 blocks"]().write(folder / "deepseek-fp8")


# What a page names → what makes it.
_MADE: dict[str, Callable[[Path], None]] = {
    "model-Q4_K_M.gguf": _gguf,
    "./my-lora": _adapted,
    "./deepseek-fp8": _quantised,
}
_SMALL = {
    "synth gpt2-xl": "synth gpt2-tiny",
    # Every peer is a process that imports its library.
    "compare --model gpt2": "compare --rounds 1 --peers streamload_stream --model gpt2-tiny",
}


def prepare(text: str, folder: Path) -> None:
    """Make in ``folder`` the checkpoints that a page's text names and does not make itself."""
    for name, make in _MADE.items():
        if name in text:
            make(folder)


def small(text: str) -> str:
    """A command that makes a big model, or measures one, with a tiny one instead."""
    for big, tiny in _SMALL.items():
        text = text.replace(big, tiny)
    return text


class Servers:
    """One server on loopback that is every server and bucket the pages name."""

    def __init__(self, site: Site, bucket: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._url, self._bucket = site.url, bucket
        synthesize("gpt2-tiny", folder)
        files = tree(folder)
        for start in ("models/gpt2-xl/", "bucket/", "container/gpt2/"):
            site.files |= {start + name: data for name, data in files.items()}
        hub = f"openai-community/gpt2/resolve/{_COMMIT}/"
        site.files |= {hub + name: data for name, data in files.items()}
        about = {"sha": _COMMIT, "siblings": [{"rfilename": name} for name in files]}
        where = "api/models/openai-community/gpt2/revision/main"
        site.files[where] = json.dumps(about).encode()
        site.etags = dict.fromkeys(site.files, '"one"')
        site.date = "Wed, 21 Oct 2015 07:28:00 GMT"
        google = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        google |= {"gcs_base_url": site.url, "disable_oauth": True}
        for name, value in {
            "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(google),
            "GOOGLE_ALLOW_HTTP": "true",
            "AZURE_STORAGE_ACCOUNT_NAME": "account",
            "AZURE_STORAGE_SAS_TOKEN": "sv=2020&sig=none",
            "AZURE_STORAGE_ENDPOINT": site.url,
            "AZURE_ALLOW_HTTP": "true",
            "HF_ENDPOINT": site.url,
            "HF_HOME": str(folder / "home"),
        }.items():
            patch.setenv(name, value)

    def stand_in(self, text: str) -> str:
        return text.replace("https://host", self._url).replace("s3://bucket", self._bucket)
