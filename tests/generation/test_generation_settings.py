"""What a checkpoint says of its generation: end tokens, how to draw."""

import json

import pytest
from click.testing import CliRunner

import streamload
from streamload.cli import main
from streamload.core.errors import CheckpointError
from streamload.generation.settings import end_tokens, sampling_defaults
from streamload.synthesis import synthesize


@pytest.fixture
def folder(tmp_path):
    return synthesize("llama-tiny", tmp_path / "m").path


def settings(folder, generation=None, **config):
    with open(f"{folder}/config.json", encoding="utf-8") as file:
        changed = json.load(file) | config
    with open(f"{folder}/config.json", "w", encoding="utf-8") as file:
        json.dump(changed, file)
    if generation is not None:
        with open(f"{folder}/generation_config.json", "w", encoding="utf-8") as file:
            file.write(generation if isinstance(generation, str) else json.dumps(generation))
    return streamload.load(folder)


class TestWhereTheyComeFrom:
    def test_config_alone(self, folder):
        found = settings(folder).generation_config
        assert found == {"bos_token_id": 1, "eos_token_id": 2}

    def test_the_file_of_its_own_goes_first(self, folder):
        own = {"eos_token_id": [7, 8], "do_sample": True, "top_p": 0.9, "pad_token_id": None}
        found = settings(folder, own, pad_token_id=3, temperature=0.7).generation_config
        assert found["eos_token_id"] == [7, 8]
        assert found["bos_token_id"] == 1
        assert found["pad_token_id"] == 3
        assert (found["temperature"], found["top_p"]) == (0.7, 0.9)
        assert "hidden_size" not in found

    def test_a_list_in_config(self, folder):
        assert settings(folder, eos_token_id=[2, 5]).generation_config["eos_token_id"] == [2, 5]

    @pytest.mark.parametrize("text", ["{", "[1]", '{"eos_token_id": 1, "eos_token_id": 2}'])
    def test_a_damaged_file_is_told(self, folder, text):
        loaded = settings(folder, text)
        assert loaded.generation_config["eos_token_id"] == 2
        assert any("generation_config.json" in n for n in loaded.report.notices)

    def test_beside_a_single_file_and_of_chosen_layers(self, folder):
        settings(folder, {"eos_token_id": 9})
        loaded = streamload.load(f"{folder}/model.safetensors", layers=[1])
        assert loaded.generation_config["eos_token_id"] == 9


@pytest.mark.parametrize(
    ("value", "expected"), [(None, []), (3, [3]), (0, [0]), ([], []), ([3, 0], [3, 0])]
)
def test_end_tokens(value, expected):
    assert end_tokens({"eos_token_id": value}) == expected


@pytest.mark.parametrize("value", ["</s>", True, 1.5, [1, "2"], {"id": 1}])
def test_what_is_no_token(value):
    with pytest.raises(CheckpointError, match="eos_token_id must be a token id"):
        end_tokens({"eos_token_id": value})


class TestSamplingDefaults:
    def test_without_do_sample_the_most_likely_token(self):
        assert sampling_defaults({"temperature": 0.6, "top_p": 0.9}) == ({}, [])

    def test_as_told_and_as_transformers_fills_in(self):
        told = {"do_sample": True, "temperature": 0.6, "top_k": 0, "top_p": 0.9}
        assert sampling_defaults(told)[0] == {"temperature": 0.6, "top_p": 0.9}
        filled = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
        assert sampling_defaults({"do_sample": True})[0] == filled

    def test_what_is_not_followed_is_listed(self):
        asked = {"repetition_penalty": 1.05, "num_beams": 1, "suppress_tokens": [3], "min_p": None}
        assert sampling_defaults(asked)[1] == ["repetition_penalty=1.05", "suppress_tokens=[3]"]


class TestCommand:
    @pytest.fixture
    def run(self):
        return lambda *args: CliRunner().invoke(main, [str(arg) for arg in args])

    @pytest.fixture
    def tokens(self, run):
        def call(path, *options):
            args = ("--max-new-tokens", 8, "--json", *options)
            result = run("generate", path, "--prompt", "Hi there", *args)
            assert result.exit_code == 0, result.stderr
            return json.loads(result.stdout)

        return call

    def test_end_tokens_of_the_file(self, tokens, folder):
        whole = tokens(folder, "--stop-token", 319)["tokens"]
        stop = next(t for t in whole if t != whole[0])
        settings(folder, {"eos_token_id": [stop, 319]}, eos_token_id=318)
        assert tokens(folder)["tokens"] == whole[: whole.index(stop)]

    def test_stop_token_may_be_given_several_times(self, tokens, folder):
        whole = tokens(folder, "--stop-token", 319)["tokens"]
        stop = next(t for t in whole if t != whole[0])
        ends = ("--stop-token", 319, "--stop-token", stop)
        assert tokens(folder, *ends)["tokens"] == whole[: whole.index(stop)]

    def test_draws_as_told_only_where_asked_for(self, tokens, folder):
        own = {"do_sample": True, "temperature": 3.0, "top_p": 0.99, "repetition_penalty": 1.1}
        greedy = tokens(folder)["tokens"]
        settings(folder, own)
        assert tokens(folder, "--seed", 1)["tokens"] == greedy
        drawn = tokens(folder, "--seed", 1, "--sampling-defaults")
        assert drawn["tokens"] != greedy
        notices = drawn["load"]["notices"]
        assert "tokens are drawn with temperature=3.0, top_k=50, top_p=0.99" in notices
        assert any("repetition_penalty=1.1, which is not followed" in n for n in notices)
        given = tokens(folder, "--sampling-defaults", "--temperature", 0)
        assert given["tokens"] == greedy

    def test_no_token(self, run, folder):
        settings(folder, {"eos_token_id": "</s>"})
        result = run("generate", folder, "--prompt", "x")
        assert result.exit_code == 1
        assert "eos_token_id" in result.stderr
