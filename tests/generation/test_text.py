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
