"""Raw GPT-NeoX partitions: which files, in which order, and what is refused when some are off."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import streamload
from streamload.core.errors import CheckpointError, MissingExtraError
from streamload.sources.base import Source
from streamload.sources.neox.partitions import NeoXRawSource, find_partitions, open_neox
from tests.sources.conformance import SourceConformance
from tests.support.counting import work_done
from tests.support.tiny import values

WIDTH, INNER, VOCAB = 96, 384, 16
Files = dict[str, dict[str, torch.Tensor]]


def cut(blocks: int = 2, ranks: int = 2, *, width: int = WIDTH, padded: bool = True) -> Files:
    """The files of a checkpoint with distinct values in each part."""
    inner = 4 * width
    form = "layer_{:02d}-model_{:02d}-model_states.pt" if padded else (
        "layer_{}-model_{}-model_states.pt"
    )  # fmt: skip
    files: Files = {}
    for rank in range(ranks):
        content = {0: {"word_embeddings.weight": (VOCAB // ranks, width)}}
        for layer in range(2, blocks + 2):
            content[layer] = {
                "input_layernorm.weight": (width,),
                "attention.query_key_value.weight": (3 * width // ranks, width),
                "attention.query_key_value.bias": (3 * width // ranks,),
                "attention.dense.weight": (width, width // ranks),
                "attention.dense.bias": (width,),
                "attention.rotary_emb.inv_freq": (4,),
                "mlp.dense_h_to_4h.weight": (inner // ranks, width),
                "mlp.dense_4h_to_h.weight": (width, inner // ranks),
            }
        content[blocks + 3] = {"norm.weight": (width,), "norm.bias": (width,)}
        content[blocks + 4] = {"final_linear.weight": (VOCAB // ranks, width)}
        for layer, shapes in content.items():
            files[form.format(layer, rank)] = {
                key: values(1000 * layer + 10 * rank + i, *shape)
                for i, (key, shape) in enumerate(shapes.items())
            }
    return files


def write(folder: Path, files: Files) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        torch.save(content, folder / name)
    return folder


def opened(folder: Path, layers: set[int] | None = None) -> NeoXRawSource:
    partitions = find_partitions(str(folder))
    assert partitions is not None
    return open_neox(partitions, layers=None if layers is None else frozenset(layers))


def layer_numbers(source: NeoXRawSource) -> tuple[int, ...]:
    """The layers in the catalog, each once, in its order."""
    names = (name.split(".")[0] for name in source.catalog)
    return tuple(dict.fromkeys(int(name.removeprefix("layer_")) for name in names))


def refuse(folder: Path, *words: str) -> CheckpointError:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError) as caught:
        opened(folder)
    assert set(os.listdir("/proc/self/fd")) == before
    text = str(caught.value)
    assert str(folder) in text
    for word in words:
        assert word in text, text
    return caught.value


class TestPartitions(SourceConformance):
    @pytest.fixture
    def expected(self) -> dict[str, torch.Tensor]:
        places = {name: name.replace("_", "-").split("-") for name in cut()}
        return {
            f"layer_{int(place[1])}.model_{int(place[3])}.{key}": value
            for name, place in places.items()
            for key, value in cut()[name].items()
        }

    @pytest.fixture
    def source(self, tmp_path: Path) -> Iterator[Source]:
        with streamload.open_checkpoint(write(tmp_path, cut())) as source:
            yield source


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("padded", [True, False])
def test_lists_every_part_in_order_with_its_values(
    tmp_path: Path, ranks: int, padded: bool
) -> None:
    files = cut(ranks=ranks, padded=padded)
    with opened(write(tmp_path, files)) as source:
        assert layer_numbers(source) == (0, 2, 3, 5, 6)
        assert source.ranks == tuple(range(ranks))
        assert source.block_count == 2
        assert source.path == str(tmp_path)
        names = iter(source.catalog)
        by_place = {
            tuple(int(part.split("_")[1]) for part in name.split("-")[:2]): content
            for name, content in files.items()
        }
        for layer in layer_numbers(source):
            for key in by_place[layer, 0]:
                for rank in range(ranks):
                    name = next(names)
                    assert name == f"layer_{layer}.model_{rank}.{key}"
                    assert source.catalog[name].extent is not None
                    assert torch.equal(source.tensor(name), by_place[layer, rank][key])
        assert next(names, None) is None


def test_layers_are_ordered_by_number(tmp_path: Path) -> None:
    with opened(write(tmp_path, cut(blocks=10, padded=False, width=8))) as source:
        assert layer_numbers(source) == (0, *range(2, 12), 13, 14)
        layers = [int(name.split(".")[0].removeprefix("layer_")) for name in source.catalog]
        assert layers == sorted(layers)


def test_a_subset_opens_only_its_files(tmp_path: Path) -> None:
    write(tmp_path, cut(blocks=3))
    for layer in (2, 4):
        for rank in range(2):
            (tmp_path / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt").write_bytes(b"")
    (tmp_path / "layer_04-model_01-model_states.pt").unlink()
    with opened(tmp_path, {1}) as source:
        assert layer_numbers(source) == (0, 3, 6, 7)
        assert source.block_count == 3
    with opened(tmp_path, set()) as source:
        assert layer_numbers(source) == (0, 6, 7)
    with pytest.raises(CheckpointError, match=r"\[3, 7\].*0 to 2"):
        opened(tmp_path, {1, 3, 7})


def test_training_state_beside_it_is_never_opened(tmp_path: Path) -> None:
    write(tmp_path, cut())
    torch.save({"args": argparse.Namespace(x=1)}, tmp_path / "mp_rank_00_model_states.pt")
    (tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"junk")
    os.mkfifo(tmp_path / "layer_02-model_00-model_states.pt.pipe")
    with opened(tmp_path) as source:
        assert source.block_count == 2


def test_the_training_step(tmp_path: Path) -> None:
    for number in (9, 10, 100):
        write(tmp_path / f"global_step{number}", cut(blocks=1, width=8))
    (tmp_path / "global_step200").write_text("no folder")

    def step() -> tuple[str, int]:
        found = find_partitions(str(tmp_path))
        assert found is not None
        assert found.folder == str(tmp_path)
        return os.path.basename(found.step_folder), len(found.notices)

    assert step() == ("global_step100", 1)
    (tmp_path / "latest").write_text("global_step9\n")
    assert step() == ("global_step9", 0)
    direct = find_partitions(str(tmp_path / "global_step10"))
    assert direct is not None
    assert direct.step_folder == str(tmp_path / "global_step10")


@pytest.mark.parametrize(
    "text", ["../x", "/etc", "..", ".", "", "a/../../x", "a\\b", "C:x", "a\0b", "global_step7"]
)
def test_latest_must_name_a_folder_beside_it(tmp_path: Path, text: str) -> None:
    write(tmp_path / "x", cut(blocks=1, width=8))
    top = tmp_path / "top"
    write(top / "global_step10", cut(blocks=1, width=8))
    (top / "latest").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        find_partitions(str(top))
    assert str(top / "latest") in str(caught.value)


def test_folders_without_partitions(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert find_partitions(str(tmp_path)) is None
    (tmp_path / "global_step5").mkdir()
    assert find_partitions(str(tmp_path)) is None
    (tmp_path / "global_step5" / "mp_rank_00_model_states.pt").write_bytes(b"")
    assert find_partitions(str(tmp_path)) is None


def name_of(layer: int, rank: int) -> str:
    return f"layer_{layer:02d}-model_{rank:02d}-model_states.pt"


def without(*gone: str) -> Callable[[Files], None]:
    """Files whose names contain any of ``gone`` are taken away."""

    def change(files: Files) -> None:
        for name in [n for n in files if any(part in n for part in gone)]:
            del files[name]

    return change


def key_lost(files: Files) -> None:
    del files[name_of(2, 1)]["attention.dense.bias"]
    del files[name_of(3, 0)]["input_layernorm.weight"]


def uneven(files: Files) -> None:
    files[name_of(2, 1)]["attention.query_key_value.weight"] = torch.zeros(9, WIDTH)
    files[name_of(0, 1)]["word_embeddings.weight"] = torch.zeros(7, WIDTH)


def other_width(files: Files) -> None:
    files[name_of(3, 1)]["mlp.dense_4h_to_h.weight"] = torch.zeros(WIDTH, 3)


def swapped(files: Files) -> None:
    files[name_of(2, 0)], files[name_of(5, 0)] = files[name_of(5, 0)], files[name_of(2, 0)]
    files[name_of(2, 1)], files[name_of(5, 1)] = files[name_of(5, 1)], files[name_of(2, 1)]


def stray(files: Files) -> None:
    files[name_of(1, 0)] = files[name_of(1, 1)] = {"x": torch.zeros(2)}


def dense_of(*shape: int) -> Callable[[Files], None]:
    """Every rank's output matrix of block 0 has this shape."""

    def change(files: Files) -> None:
        for rank in (0, 1):
            files[name_of(2, rank)]["attention.dense.weight"] = torch.ones(shape)

    return change


REFUSED: dict[str, tuple[Callable[[Files], None], list[str], int]] = {
    "rank files missing": (
        without(name_of(3, 1), name_of(0, 0)),
        [name_of(3, 1), name_of(0, 0)],
        2,
    ),
    "rank file of the readout missing": (without(name_of(6, 0)), [name_of(6, 0)], 1),
    "last rank missing everywhere": (without("model_01"), ["attention.dense.weight", "rank"], 2),
    "first rank missing everywhere": (without("model_00"), ["model_00"], 1),
    "first block missing": (without("layer_02"), ["layer_02", "block 0"], 1),
    "last block missing": (without("layer_03"), ["layer_03", "block 1"], 1),
    "embedding missing": (without("layer_00"), ["layer_00", "the embedding"], 1),
    "norm missing": (without("layer_05"), ["layer_05", "the final norm"], 1),
    "readout missing": (without("layer_06"), ["layer_06", "the readout"], 1),
    "norm and readout missing": (without("layer_05", "layer_06"), ["layer_05", "layer_06"], 2),
    "only the embedding": (without("layer_02", "layer_03", "layer_05", "layer_06"), ["block"], 3),
    "keys missing on one rank": (
        key_lost,
        [name_of(2, 1), "attention.dense.bias", name_of(3, 0), "input_layernorm.weight"],
        2,
    ),
    "uneven parts": (uneven, ["query_key_value.weight", "144 + 9 rows", "8 + 7 rows"], 2),
    "uneven columns": (other_width, ["mlp.dense_4h_to_h.weight", "[96, 3]"], 1),
    "files of one another's content": (swapped, ["norm.weight", "attention.dense.weight"], 2),
    "a scalar matrix": (dense_of(), ["attention.dense.weight", "shape []", "two dimensions"], 1),
    "a flat matrix": (dense_of(WIDTH), ["attention.dense.weight", f"shape [{WIDTH}]"], 1),
    "a deep matrix": (dense_of(WIDTH, 2, 3), ["attention.dense.weight", "two dimensions"], 1),
    "a layer that belongs nowhere": (stray, ["layer_01"], 1),
}


@pytest.mark.parametrize("case", REFUSED)
def test_incomplete_or_unfitting_files_are_refused(tmp_path: Path, case: str) -> None:
    change, words, count = REFUSED[case]
    files = cut()
    change(files)
    error = refuse(write(tmp_path, files), *words)
    assert len(error.problems) == count, error.problems


def test_all_damaged_files_are_named(tmp_path: Path) -> None:
    write(tmp_path, cut())
    for name in (name_of(2, 1), name_of(5, 0)):
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data[:-50])
    error = refuse(tmp_path, name_of(2, 1), name_of(5, 0), "cut short")
    assert len(error.problems) == 2


def test_two_files_for_one_partition(tmp_path: Path) -> None:
    write(tmp_path, cut())
    (tmp_path / "layer_2-model_0-model_states.pt").write_bytes(b"")
    refuse(tmp_path, "layer_2-model_0", "layer_02-model_00")


def test_parts_of_two_types_are_told(tmp_path: Path) -> None:
    files = cut()
    name = name_of(2, 1)
    files[name] = {key: value.half() for key, value in files[name].items()}
    with opened(write(tmp_path, files)) as source:
        (notice,) = source.catalog.notices
        assert "F32 and F16" in notice
        assert "layer_02" in notice
        assert source.catalog["layer_2.model_1.attention.dense.weight"].dtype == "F16"
        assert source.catalog["layer_2.model_0.attention.dense.weight"].dtype == "F32"


@pytest.mark.skipif(
    not hasattr(torch.serialization, "skip_data"), reason="this torch cannot write files with holes"
)
def test_the_published_list_opens_quickly(tmp_path: Path) -> None:
    """94 files of 20 billion parameters' size, with holes instead of values."""
    width, inner, rows = 6144, 24576, 50432
    block = {
        "attention.query_key_value.weight": (3 * width // 2, width),
        "attention.dense.weight": (width, width // 2),
        "mlp.dense_h_to_4h.weight": (inner // 2, width),
        "mlp.dense_4h_to_h.weight": (width, inner // 2),
    } | {f"vector {i}": (width,) for i in range(9)}
    shapes = dict.fromkeys(range(2, 46), block) | {
        0: {"word_embeddings.weight": (rows // 2, width)},
        47: {"norm.weight": (width,), "norm.bias": (width,)},
        48: {"final_linear.weight": (rows // 2, width)},
    }
    with torch.serialization.skip_data():
        for layer, content in shapes.items():
            for rank in range(2):
                empty = {k: torch.empty(s, dtype=torch.float16) for k, s in content.items()}
                torch.save(empty, tmp_path / name_of(layer, rank))
    started = time.process_time()
    with work_done() as work:
        source = opened(tmp_path)
    assert time.process_time() - started < 1.5
    assert work.reads < 60 * 94
    assert work.bytes_read < 16 << 20
    with source:
        assert source.block_count == 44
        assert len(layer_numbers(source)) * len(source.ranks) == 94
        assert 40e9 < source.catalog.nbytes < 42e9
        config, _ = source.config()
    assert (config["num_attention_heads"], config["intermediate_size"]) == (64, 24576)
    assert config["vocab_size"] == 50432


# --- configuration ---------------------------------------------------------------------------


def config_of(folder: Path) -> tuple[dict[str, object] | None, str]:
    with opened(folder) as source:
        config, notices = source.config()
    return config, "\n".join(notices)


def test_config_json_comes_first(tmp_path: Path) -> None:
    write(tmp_path / "global_step1", cut(width=8))
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "x.yml").write_text("num-layers: 7")
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 2}))
    for folder in (tmp_path, tmp_path / "global_step1"):
        config, told = config_of(folder)
        assert config == {"num_attention_heads": 2, "model_type": "gpt_neox"}
        assert "config.json" in told
    os.rename(tmp_path / "config.json", tmp_path / "global_step1" / "config.json")
    assert config_of(tmp_path)[0]["num_attention_heads"] == 2


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "llama"}', "[" * 100_000, "\xff"])
def test_a_wrong_config_json_is_refused(tmp_path: Path, text: str) -> None:
    write(tmp_path, cut(width=8))
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError) as caught:
        config_of(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_yml_files_with_either_spelling(tmp_path: Path) -> None:
    write(tmp_path / "global_step1", cut(width=8))
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "a.yml").write_text(
        '{\n  # as published\n  "num-layers": 2, "hidden_size": 8, "num-attention-heads": 2,\n'
        '  "rotary_pct": 0.25, "gpt-j-residual": true, "norm": "layernorm", "pos-emb": "rotary",\n'
        '  "no-weight-tying": true\n}\n'
    )
    (tmp_path / "configs" / "paths.yml").write_text("vocab-file: x\nhidden-size: 8\n")
    config, told = config_of(tmp_path)
    assert config == {
        "model_type": "gpt_neox",
        "architectures": ["GPTNeoXForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "vocab_size": VOCAB,
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000,
        "use_parallel_residual": True,
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }
    assert "a.yml" in told
    assert "default: rotary_emb_base=10000" in told


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num-layers: 44\nnum-attention-heads: 2", ["44", "2"]),
        ("hidden-size: 8", ["num-attention-heads"]),
        (
            "num-layers: 2\nnum-attention-heads: 2\nnorm: rmsnorm\npos_emb: alibi",
            ["rmsnorm", "ali"],
        ),
        ("num-layers: [", ["YAML"]),
        ("!!python/object/apply:os.system ['x']", ["YAML"]),
    ],
)
def test_yml_files_that_do_not_fit_are_refused(tmp_path: Path, text: str, words: list[str]) -> None:
    write(tmp_path, cut(width=8))
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "x.yml").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        config_of(tmp_path)
    for word in [*words, str(tmp_path / "configs")]:
        assert word in str(caught.value)


def test_two_yml_files_that_disagree(tmp_path: Path) -> None:
    write(tmp_path, cut(width=8))
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "a.yml").write_text("num-layers: 2\nnum-attention-heads: 2")
    (tmp_path / "configs" / "b.yml").write_text("num_attention_heads: 4")
    with pytest.raises(CheckpointError, match=r"b\.yml.*4.*a\.yml.* 2"):
        config_of(tmp_path)


def test_yml_files_need_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, cut(width=8))
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "x.yml").write_text("num-layers: 2")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(MissingExtraError, match=r"streamload\[neox\]"):
        config_of(tmp_path)


def test_shapes_and_published_values(tmp_path: Path) -> None:
    write(tmp_path, cut())
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "x.yml").write_text("a: 1")
    config, told = config_of(tmp_path)
    assert config["num_attention_heads"] == 1
    assert config["hidden_size"] == WIDTH
    assert config["intermediate_size"] == INNER
    assert config["rotary_pct"] == 0.25
    assert config["use_parallel_residual"] is True
    assert "1 heads of 96" in told
    assert "GPT-NeoX-20B" in told


def test_heads_that_shapes_do_not_tell(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"width 8.*config\.json"):
        config_of(write(tmp_path, cut(width=8)))
