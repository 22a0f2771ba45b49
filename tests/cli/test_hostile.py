"""Names of tensors, files, folders and models are anybody's: none reaches a terminal as a command.

All commands run in one process on a pseudo-terminal, with names that try to be more than names.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import textwrap
import unicodedata

import pytest
import torch
from safetensors.torch import save_file

from streamload.core.wording import printable, printable_lines
from streamload.synthesis.made_up_tokenizer import tokenizer_json
from tests.support.pseudo_terminal import on_a_terminal
from tests.support.tiny import GPT2_CONFIG, gpt2_tensors

CLIPBOARD = "\x1b]52;c;ZXZpbA==\x07"
# Clipboard, colour, title, C1, bidirectional override and isolate, a faked line, backspace, DEL.
EVIL = f"EVIL{CLIPBOARD}\x1b[31mRED\x1b]0;EVIL\x07\x9b31mRED\u202eEVIL\u2066\r\nFAKED\x08\x7f"
FILE = EVIL.replace("/", "")
WORD = "EVIL"
# What rich and we write ourselves: styles, cursor and line commands.
OURS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def test_escaping():
    for text in (EVIL, "\x00", "\x85", "\u2028", "\u200f", "\u061c", "\ud800", "a\tb"):
        assert printable(text).isprintable()
        assert "\x1b" not in printable_lines(text)
    assert printable_lines("a\nb\u202e", kept="\t") == "a\nb\\u202e"
    assert printable_lines("a\tb\x1b", kept="\t") == "a\tb\\x1b"
    assert printable("é 重み 🙂 \\n") == "é 重み 🙂 \\n"
    assert printable(printable(EVIL)) == printable(EVIL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model under names of the worst kind, with a tokenizer whose tokens are such texts."""
    made = tmp_path_factory.mktemp("hostile") / f"dir{FILE}"
    made.mkdir()
    tensors = gpt2_tensors() | {f"h.0.{EVIL}.weight": torch.tensor([float("nan")])}
    tensors[f"{EVIL}.scale"] = torch.zeros(2)
    metadata = {f"m{EVIL}": f"v{EVIL}"}
    save_file({n: t.contiguous() for n, t in tensors.items()}, made / "model.safetensors", metadata)
    (made / "config.json").write_text(json.dumps({**GPT2_CONFIG, "note": EVIL}))
    (made / "generation_config.json").write_text(json.dumps({"penalty_alpha": EVIL}))
    tokenizer = json.loads(tokenizer_json(400, end_token=399))
    vocabulary = {"a": 0, **{f"{EVIL}{at}": at for at in range(1, 13)}}
    tokenizer |= {"added_tokens": [], "pre_tokenizer": None, "decoder": None}
    tokenizer["model"] = {"type": "BPE", "vocab": vocabulary, "merges": []}
    (made / "tokenizer.json").write_text(json.dumps(tokenizer))
    return made


@pytest.fixture(scope="module")
def other(folder):
    """Files that are refused: of an unknown model, damaged, of two vocabularies, a torch file."""
    parent = folder.parent
    (parent / f"type{FILE}").mkdir()
    (parent / f"type{FILE}" / "config.json").write_text(json.dumps({"model_type": EVIL}))
    save_file({EVIL: torch.ones(2)}, parent / f"type{FILE}" / "model.safetensors")
    (parent / f"cut{FILE}.safetensors").write_bytes(b"\x50\0\0\0\0\0\0\0{")
    header = json.dumps({EVIL: {"dtype": EVIL, "shape": [1], "data_offsets": [0, 4]}}).encode()
    (parent / f"bad{FILE}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    torch.save({"state_dict": {f"w{EVIL}": torch.ones(2)}, EVIL: 1}, parent / f"x{FILE}.pt")
    index = {"weight_map": {EVIL: f"no{FILE}.safetensors"}}
    (parent / f"i{FILE}.safetensors.index.json").write_text(json.dumps(index))
    return parent


def commands(folder, parent):
    """Every command, as it succeeds and as it refuses."""
    here, file = str(folder), str(folder / "model.safetensors")
    tensor = f"h.0.{EVIL}.weight"
    lenient = ("--no-strict",)
    return [
        ("inspect", here),
        ("inspect", here, "--all"),
        ("inspect", here, tensor),
        ("inspect", here, f"no{EVIL}"),
        ("inspect", here, "a", f"b{EVIL}"),
        ("inspect", here, f"--{EVIL}"),
        ("inspect", str(parent / f"absent{FILE}")),
        ("inspect", f"hf:a/b{EVIL}"),
        ("inspect", str(parent / f"cut{FILE}.safetensors")),
        ("inspect", str(parent / f"bad{FILE}.safetensors")),
        ("inspect", str(parent / f"x{FILE}.pt")),
        ("inspect", str(parent / f"i{FILE}.safetensors.index.json")),
        ("inspect", here, "--json"),
        ("plan", here),
        ("plan", here, *lenient),
        ("plan", str(parent / f"type{FILE}")),
        ("load", here),
        ("load", here, *lenient, "-v"),
        ("load", here, "--traceback"),
        ("load", here, *lenient, "--cache"),
        ("load", here, *lenient, "--trace", str(parent / f"t{FILE}.json")),
        ("load", here, "--dtype", EVIL),
        ("load", here, "--trace", f"{EVIL}.txt"),
        ("generate", here, *lenient, "--tokens", "1,2", "--max-new-tokens", "3"),
        ("generate", here, *lenient, "--prompt", "a", "--sampling-defaults"),
        ("generate", here, "--tokens", EVIL),
        ("convert", here, str(parent / f"out{FILE}")),
        ("convert", here, str(parent / f"out{FILE}.safetensors"), "--names", "local"),
        ("convert", file, str(parent / f"no{FILE}" / "x" / "y.safetensors")),
        ("convert", str(parent / f"x{FILE}.pt"), str(parent / f"p{FILE}.safetensors")),
        ("verify", here),
        ("verify", here, "--against", str(parent / f"type{FILE}")),
        ("verify", str(parent / f"x{FILE}.pt")),
        ("cache", "list"),
        ("cache", "verify"),
        ("cache", EVIL),
        ("cache", "clear"),
        ("synth", "gpt2-stub", str(parent / f"s{FILE}"), "--layers", "1"),
        ("synth", EVIL, "x"),
        ("download", EVIL),
        ("download", f"hf:{EVIL}", str(parent / f"d{FILE}")),
        ("demo", str(parent / f"demo{FILE}")),
        ("bench", str(parent / f"cut{FILE}.safetensors"), "--rounds", "1"),
        (f"{EVIL}",),
        (f"--{EVIL}",),
    ]


RUN = textwrap.dedent("""
    import json, sys
    from streamload.cli.group import main
    for args in json.load(open(sys.argv[1])):
        print("=====", ascii(args[:1]), flush=True)
        try:
            main([str(a) for a in args], prog_name="streamload")
        except SystemExit as end:
            print("exit", end.code, flush=True)
""")


@pytest.fixture(scope="module")
def shown(folder, other, tmp_path_factory):
    scratch = tmp_path_factory.mktemp("terminal")
    (scratch / "commands.json").write_text(json.dumps(commands(folder, other)))
    environment = {"STREAMLOAD_CACHE": str(scratch / f"cache{FILE}"), "HF_HUB_OFFLINE": "1"}
    code = ["-c", RUN, str(scratch / "commands.json")]
    return on_a_terminal(code, COLUMNS="200", TERM="xterm-256color", **environment)


def test_no_name_is_a_command_to_the_terminal(shown, folder, other):
    assert shown.count("=====") == len(commands(folder, other)), shown[-3000:]
    assert shown.count(WORD) > 100
    assert "Traceback" in shown  # asked for, once
    plain = OURS.sub("", shown)
    odd = {c for c in plain if unicodedata.category(c) in ("Cc", "Cf", "Cs")} - set("\r\n\t")
    assert not odd, [plain[max(at - 200, 0) : at + 60] for at in (plain.find(c) for c in odd)]
    # What we write ourselves stands around names, but no name brought any of it, nor a new line.
    found = re.search(r"\x1b\[31mRED|[\r\n]FAKED", shown)
    assert found is None, shown[max(found.start() - 200, 0) : found.end() + 60]


@pytest.mark.parametrize("command", ["inspect", "plan", "load", "generate", "verify"])
def test_every_command_was_really_shown_them(shown, command):
    parts = [part for part in shown.split("===== ") if part.startswith(f"['{command}']")]
    assert any(WORD in part and "exit 0" in part for part in parts)


def test_the_progress_bar_shows_names_as_text(capfd, monkeypatch):
    from streamload.cli.render import progress

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress.progress_bar("loading") as show:
        show(1, 2, f"[bold]{EVIL}[/bold]")
        show(2, 2, EVIL * 5000)
    written = OURS.sub("", capfd.readouterr().err)
    assert not {c for c in written if unicodedata.category(c) in ("Cc", "Cf")} - set("\r\n")


def test_errors_can_be_printed_by_anyone(other):
    import streamload

    for name in sorted(set(os.listdir(other)) - {f"out{FILE}", f"s{FILE}", f"demo{FILE}"}):
        with contextlib.suppress(OSError), pytest.raises(streamload.StreamloadError) as caught:
            streamload.load(other / name)
        assert printable_lines(str(caught.value)) == str(caught.value)
