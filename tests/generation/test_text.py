"""Tokenizers of a folder, and decoding as tokens come."""

import json
import sys

import pytest

from streamload.core.errors import CheckpointError, CheckpointNotFoundError, MissingExtraError
from streamload.generation.tokenizer import load_tokenizer
from streamload.synthesis.made_up_tokenizer import byte_alphabet, tokenizer_json

TEXT = "héllo 重み 🙂 end"


@pytest.fixture
def tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(400, end_token=399), "utf-8")
    return load_tokenizer(tmp_path)


def test_round_trip(tokenizer):
    ids = tokenizer.encode(TEXT)
    assert len(ids) == len(TEXT.encode())
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.vocab_size == 400
    assert tokenizer.decode([399]) == ""


def test_streaming_gives_whole_characters_only(tokenizer):
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in tokenizer.encode(TEXT)]
    assert [piece for piece in pieces if piece] == list(TEXT)
    assert stream.finish() == ""


def test_streaming_a_long_text_past_its_window(tokenizer):
    text = TEXT * 40
    stream = tokenizer.stream(tokenizer.encode("before "))
    assert "".join(stream.push(t) for t in tokenizer.encode(text)) + stream.finish() == text


def test_unfinished_character_comes_at_the_end(tokenizer):
    ids = tokenizer.encode("a🙂")
    stream = tokenizer.stream()
    assert [stream.push(token) for token in ids[:-1]] == ["a", "", "", ""]
    assert stream.finish() == "\ufffd"


def test_bytes_that_never_make_a_character_are_not_held_forever(tokenizer):
    number = {byte: i for i, (byte, _) in enumerate(byte_alphabet())}
    stream = tokenizer.stream()
    pieces = [stream.push(number[0xFF]) for _ in range(200)]
    assert "".join(pieces) + stream.finish() == "\ufffd" * 200
    assert len("".join(pieces)) >= 197


def test_context_is_not_repeated(tokenizer):
    stream = tokenizer.stream(tokenizer.encode("prompt"))
    assert stream.push(tokenizer.encode("!")[0]) == "!"


def test_vocab_and_merges(tmp_path):
    vocab = {character: i for i, (_, character) in enumerate(byte_alphabet())}
    vocab |= {"he": 256, "<|endoftext|>": 257}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\n")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("he")[:1] == [256]
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.encode("<|endoftext|>") == [257]


def test_absent_and_damaged_files(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="--tokens"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json.*not a tokenizer"):
        load_tokenizer(tmp_path)


def test_missing_package_says_how_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r"streamload\[text\]"):
        load_tokenizer(tmp_path)


def test_surrogates_do_not_break_encoding(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\udce9b")) == "a?b"


class TestTheProcess:
    """What happens to the process in which a tokenizer runs happens to no other."""

    @staticmethod
    def written(folder, **changes):
        parts = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": []}
        parts |= {"normalizer": None, "pre_tokenizer": None, "post_processor": None}
        parts |= {"decoder": None, "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
        (folder / "tokenizer.json").write_text(json.dumps({**parts, **changes}))
        return load_tokenizer(folder)

    @staticmethod
    def split(pattern):
        named = {"pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        return {"type": "Split", **named}

    def test_a_panic_is_an_error_and_the_next_text_is_encoded(self, tmp_path, capfd):
        tokenizer = self.written(tmp_path, pre_tokenizer=self.split("(a+)+$"))
        with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot encode a text: Onig"):
            tokenizer.encode("a" * 60 + "b")
        assert tokenizer.encode("aa") == [0, 0]
        assert capfd.readouterr() == ("", "")

    def test_time_and_memory_are_bounded(self, tmp_path):
        replace = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
        many = {"type": "Sequence", "normalizers": [replace] * 20}
        tokenizer = self.written(tmp_path, normalizer=many)
        for _ in range(2):
            with pytest.raises(CheckpointError, match="more time or memory"):
                tokenizer.encode("a")

    def test_a_file_that_is_too_large(self, tmp_path):
        with open(tmp_path / "tokenizer.json", "wb") as file:
            file.truncate(300_000_000)
        with pytest.raises(CheckpointError, match="300000000 bytes, expected at most"):
            load_tokenizer(tmp_path)

    def test_nothing_of_the_current_folder_is_imported(self, tmp_path, monkeypatch):
        (tmp_path / "here").mkdir()
        for name in ("tokenizers", "json", "signal", "streamload"):
            (tmp_path / "here" / f"{name}.py").write_text("raise SystemExit(9)")
        monkeypatch.chdir(tmp_path / "here")
        monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
        assert self.written(tmp_path).encode("a") == [0]

    def test_it_ends_with_its_tokenizer(self, tmp_path):
        tokenizer = self.written(tmp_path)
        child = tokenizer._child.process
        assert child.poll() is None
        del tokenizer
        assert child.returncode is not None

    def test_an_answer_that_was_broken_off_is_not_taken_for_another(self, tmp_path, monkeypatch):
        tokenizer = self.written(tmp_path)

        class Interrupted:
            def readline(self):
                raise KeyboardInterrupt

        monkeypatch.setattr(tokenizer._child.process, "stdout", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            tokenizer.encode("a")
        monkeypatch.undo()
        with pytest.raises(CheckpointError):
            tokenizer.encode("a")
