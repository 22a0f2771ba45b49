"""Tokenizers in metadata: the files made of them against the tokenizers they were written from."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from streamload.core.errors import CheckpointError
from streamload.sources.files import OpenFile
from streamload.sources.gguf.header import read_header
from streamload.sources.gguf.metadata import Metadata
from streamload.sources.gguf.tokenizer import has_tokenizer, tokenizer_config, tokenizer_json

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "It's 12345 o'clock, isn't it?  Two spaces,\n\nand two lines.\t Tab.",
    "def f(x):\n    return x ** 2  # größer — 日本語 😀",
    "aaaa aaaaaaaa  aaaa",
    "I'LL SAY WE'RE HERE",
    "x",
    "",
]
CORPUS = [*TEXTS * 3, "one two three four five six seven eight nine ten " * 5, "0123456789 " * 3]
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
_SPACE = "\u2581"


def written(path: Any, tokens: Sequence[str], types: Sequence[int], **values: Any) -> Metadata:
    """A file with a tokenizer and nothing else, read back as metadata."""
    writer = gguf.GGUFWriter(path, values.pop("architecture", "llama"))
    writer.add_tokenizer_model(values.pop("model"))
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(types))
    adders: dict[str, Callable[[Any], None]] = {
        "pre": writer.add_tokenizer_pre,
        "merges": writer.add_token_merges,
        "scores": writer.add_token_scores,
        "bos": writer.add_bos_token_id,
        "eos": writer.add_eos_token_id,
        "unk": writer.add_unk_token_id,
        "add_bos": writer.add_add_bos_token,
        "add_eos": writer.add_add_eos_token,
        "add_space_prefix": writer.add_add_space_prefix,
        "template": writer.add_chat_template,
    }
    for name, value in values.items():
        adders[name](value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with OpenFile(os.fspath(path)) as file:
        return Metadata(os.fspath(path), read_header(file).metadata)


def built(metadata: Metadata) -> Any:
    return tokenizers.Tokenizer.from_str(tokenizer_json(metadata).decode())


def trained(pre: Any, *, normalizer: Any = None) -> Any:
    """A byte-level tokenizer, as its own package makes it."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre
    made.normalizer = normalizer
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


def parts_of(made: Any) -> tuple[list[str], list[str]]:
    """Tokens and merges of a BPE tokenizer."""
    state = json.loads(made.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].__getitem__)
    merges = [m if isinstance(m, str) else " ".join(m) for m in state["merges"]]
    return tokens, merges


def split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def qwen2() -> Any:
    theirs = pytest.importorskip("transformers.models.qwen2.tokenization_qwen2")
    return split(theirs.PRETOKENIZE_REGEX)


def by_transformers(name: str) -> Any:
    theirs = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    return split(theirs.GGUF_PRE_TOKENIZER_SPLITS[name])


def smollm() -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


BYTE_LEVEL = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "qwen2": qwen2,
    "llama-bpe": lambda: by_transformers("llama-bpe"),
    "tekken": lambda: by_transformers("tekken"),
    "smollm": smollm,
}


@pytest.mark.parametrize("pre", BYTE_LEVEL)
def test_byte_level(tmp_path, pre):
    normalizer = normalizers.NFC() if pre == "qwen2" else None
    made = trained(BYTE_LEVEL[pre](), normalizer=normalizer)
    tokens, merges = parts_of(made)
    types = [CONTROL if token == "<|end|>" else NORMAL for token in tokens]
    end = tokens.index("<|end|>")
    found = built(
        written(
            tmp_path / "x.gguf", tokens, types, model="gpt2", pre=pre, merges=merges,
            bos=end, eos=end, add_bos=False,
        )
    )  # fmt: skip
    for text in [*TEXTS, "a\u0301e\u0301", "one<|end|>two"]:
        ids = made.encode(text).ids
        assert found.encode(text).ids == ids, text
        assert found.decode(ids) == made.decode(ids)


def test_what_comes_before_and_after_a_text(tmp_path):
    tokens, merges = parts_of(trained(BYTE_LEVEL["gpt-2"]()))
    kinds = [CONTROL if token == "<|end|>" else NORMAL for token in tokens]
    end = tokens.index("<|end|>")

    def ids(**options: Any) -> list[int]:
        values = {"model": "gpt2", "merges": merges, "bos": end, "eos": end + 1, **options}
        return list(built(written(tmp_path / "x.gguf", tokens, kinds, **values)).encode("x").ids)

    plain = ids(pre="gpt-2")
    assert ids(pre="gpt-2", add_bos=True) == [end, *plain]
    assert ids(pre="gpt-2", add_bos=True, add_eos=True) == [end, *plain, end + 1]
    assert ids(pre="llama-bpe") == [end, *plain]  # where the file does not say, as llama.cpp
    assert ids(pre="llama-bpe", add_bos=False) == plain


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory) -> Any:
    """A real SentencePiece model."""
    library = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "corpus.txt").write_text("\n".join(CORPUS))
    library.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"), model_prefix=str(folder / "m"), model_type="bpe",
        vocab_size=340, byte_fallback=True, character_coverage=0.985,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False, user_defined_symbols=["<mark>"], minloglevel=2,
        hard_vocab_limit=False,
    )  # fmt: skip
    return library.SentencePieceProcessor(model_file=str(folder / "m.model"))


def piece_types(model: Any) -> list[int]:
    found = []
    for at in range(model.vocab_size()):
        if model.is_unknown(at):
            found.append(UNKNOWN)
        elif model.is_control(at):
            found.append(CONTROL)
        elif model.is_byte(at):
            found.append(BYTE)
        else:
            found.append(USER if model.id_to_piece(at) == "<mark>" else NORMAL)
    return found


def test_sentence_piece(tmp_path, sentence_piece):
    size = sentence_piece.vocab_size()
    tokens = [sentence_piece.id_to_piece(at) for at in range(size)]
    metadata = written(
        tmp_path / "x.gguf", tokens, piece_types(sentence_piece), model="llama",
        scores=[sentence_piece.get_score(at) for at in range(size)], bos=1, eos=2, unk=0,
    )  # fmt: skip
    found = built(metadata)
    for text in [*TEXTS[:-1], " leading", "  two", "trailing ", "🙂 bytes", "new words entirely"]:
        ids = sentence_piece.encode(text)
        assert found.encode(text).ids == [1, *ids], text
        assert found.decode([1, *ids]) == sentence_piece.decode(ids)
    marked = found.encode("fox<mark>dog").ids
    assert tokens.index("<mark>") in marked
    assert found.encode("fox").ids[:2] == marked[:2]


def test_as_transformers_builds_it(tmp_path, sentence_piece):
    transformers = pytest.importorskip("transformers")
    size = sentence_piece.vocab_size()
    tokens = [sentence_piece.id_to_piece(at) for at in range(size)]
    metadata = written(
        tmp_path / "x.gguf", tokens, piece_types(sentence_piece), model="llama",
        scores=[sentence_piece.get_score(at) for at in range(size)], bos=1, eos=2, unk=0,
    )  # fmt: skip
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="x.gguf")
    found = built(metadata)
    for text in TEXTS[:-1]:
        assert found.encode(text).ids == theirs(text)["input_ids"], text


def test_configuration_of_the_tokenizer(tmp_path, sentence_piece):
    size = sentence_piece.vocab_size()
    tokens = [sentence_piece.id_to_piece(at) for at in range(size)]
    scores = [sentence_piece.get_score(at) for at in range(size)]
    metadata = written(
        tmp_path / "x.gguf", tokens, piece_types(sentence_piece), model="llama", scores=scores,
        bos=1, eos=2, unk=0, template="{{ messages }}",
    )  # fmt: skip
    config = json.loads(tokenizer_config(metadata))
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "</s>")
    assert config["chat_template"] == "{{ messages }}"
    transformers = pytest.importorskip("transformers")
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json(metadata))
    (tmp_path / "tokenizer_config.json").write_bytes(tokenizer_config(metadata))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS[:-1]:
        assert theirs(text)["input_ids"] == built(metadata).encode(text).ids


def test_a_whole_tokenizer_json_in_the_file():
    made = trained(BYTE_LEVEL["gpt-2"]())
    metadata = Metadata("x", {"tokenizer.huggingface.json": made.to_str()})
    assert built(metadata).encode(TEXTS[0]).ids == made.encode(TEXTS[0]).ids
    with pytest.raises(CheckpointError, match=r"huggingface.json' is not valid JSON"):
        tokenizer_json(Metadata("x", {"tokenizer.huggingface.json": "{"}))


def test_no_tokenizer_is_none():
    assert not has_tokenizer(Metadata("x", {}))
    assert not has_tokenizer(Metadata("x", {"tokenizer.ggml.model": "no_vocab"}))
    assert has_tokenizer(Metadata("x", {"tokenizer.ggml.model": "bert"}))


BASE: dict[str, Any] = {"model": "gpt2", "pre": "gpt-2", "merges": ["a b"]}
FAULTS: dict[str, tuple[Mapping[str, Any], str]] = {
    "kind": ({**BASE, "model": "bert"}, "'bert', expected gpt2 or llama"),
    "pre": ({**BASE, "pre": "poro-chat"}, "'poro-chat'"),
    "merges": ({"model": "gpt2", "pre": "gpt-2"}, "no 'tokenizer.ggml.merges'"),
    "scores": ({"model": "llama"}, "neither 'tokenizer.ggml.scores'"),
    "not as many scores": ({"model": "llama", "scores": [1.0]}, "3 numbers, one for each token"),
    "scores that are none": ({"model": "llama", "scores": [1.0, float("nan"), 0.0]}, "scores"),
    "beyond": ({**BASE, "bos": 99, "add_bos": True}, "token 99 has a role"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refused_by_name(tmp_path, fault):
    values, said = FAULTS[fault]
    with pytest.raises(CheckpointError) as info:
        tokenizer_json(written(tmp_path / "x.gguf", ["a", "b", "ab"], [1, 1, 1], **dict(values)))
    assert said in str(info.value)
    assert "x.gguf" in str(info.value)


def test_a_token_without_end_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="2000 characters"):
        tokenizer_json(
            written(
                tmp_path / "x.gguf", ["a" * 2000, "b"], [1, 1], model="llama", scores=[0.0, 1.0]
            )
        )
