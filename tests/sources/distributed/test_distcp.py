"""Folders of torch.distributed.checkpoint against torch's own conversion of them."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import streamload
from streamload.cli import main
from streamload.core.errors import CheckpointError
from streamload.core.pieces import Pieces
from streamload.sources.base import Source
from tests.sources.conformance import SourceConformance
from tests.support.tiny import GPT2_CONFIG, gpt2_tensors, meta_gpt2, same_bits, values, write_gpt2

KINDS = [f"{kind}-{ranks}" for kind in ("pieces", "app") for ranks in (1, 2, 4)]


def flat(tree: Mapping[str, Any], start: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{start}{key}.")
        elif isinstance(value, torch.Tensor):
            yield start + key, value


def by_torch(folder: Path, path: Path, *nest: str) -> dict[str, torch.Tensor]:
    """What torch itself makes of a folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(folder, path)
    state = torch.load(path, weights_only=False)
    for key in nest:
        state = state[key]
    return dict(flat(state))


@pytest.fixture
def judged(written: Path, tmp_path: Path) -> Callable[[str], tuple[Path, dict[str, torch.Tensor]]]:
    def judge(kind: str) -> tuple[Path, dict[str, torch.Tensor]]:
        nest = ("model",) if kind.startswith("pieces") else ("app", "model")
        return written / kind, by_torch(written / kind, tmp_path / "judge.pt", *nest)

    return judge


def save(state: dict[str, Any], folder: Path, **options: Any) -> Path:
    """One process, as without a process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, **options))
    return folder


def check_equal(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert same_bits(found[name], tensor.contiguous()), name


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_torchs_own_conversion(judged, kind):
    folder, wanted = judged(kind)
    check_equal(streamload.load_state_dict(folder), wanted)
    with streamload.open_checkpoint(folder) as source:
        check_equal({name: source.tensor(name) for name in source.catalog}, wanted)
        cut = [spec for spec in source.catalog.tensors.values() if spec.encoding is not None]
        assert all(isinstance(spec.encoding, Pieces) for spec in cut)
        assert bool(cut) == (not kind.endswith("-1"))


@pytest.mark.parametrize("kind", KINDS)
def test_convert_gives_them_back_as_one_checkpoint(judged, tmp_path, kind):
    folder, wanted = judged(kind)
    report = streamload.convert(folder, tmp_path / "new", max_shard_bytes=300)
    assert len(report.files) > 1
    found = {}
    for file in report.files:
        found |= load_file(tmp_path / "new" / file)
    check_equal(found, wanted)
    check_equal(streamload.load_state_dict(tmp_path / "new"), wanted)
    assert not any("not copied" in notice for notice in report.notices)


@pytest.mark.parametrize("chunk_bytes", [16, 100, 4096])
@pytest.mark.parametrize("dtype", [None, "float64", "bfloat16"])
def test_runs_of_any_length_and_casts(judged, chunk_bytes, dtype):
    folder, wanted = judged("pieces-4")
    found = streamload.load_state_dict(folder, dtype=dtype, chunk_bytes=chunk_bytes, workers=2)
    for name, tensor in wanted.items():
        to = getattr(torch, dtype) if dtype and tensor.is_floating_point() else tensor.dtype
        assert same_bits(found[name], tensor.to(to).contiguous()), name


def test_into_a_module_that_holds_data(judged):
    folder, wanted = judged("app-4")
    module = nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 3, bias=False))
    report = streamload.load_into(module, folder, mapping="auto")
    assert report.summary() == "loaded=5 missing=0 unexpected=0 shape_mismatch=0"
    assert any("'optim'" in notice for notice in report.notices)
    check_equal(module.state_dict(), wanted)


def test_the_optimizer_is_never_read(judged, tmp_path):
    """Not even its pieces are looked at: here, they are gone."""
    _, wanted = judged("app-2")
    state = {"model": wanted, "optimizer": {"state": {"m": torch.ones(500)}}}
    saved = save(state, tmp_path / "two", single_file_per_rank=False)
    with streamload.open_checkpoint(saved) as source:
        kept = set(source.files)
    gone = [file for file in saved.glob("*.distcp") if str(file) not in kept]
    assert gone
    for file in gone:
        file.unlink()
    check_equal(streamload.load_state_dict(saved), wanted)


@pytest.mark.parametrize(
    ("state", "prefix", "names", "words"),
    [
        ({"a.w": 1, "b": 2}, None, ["a.w", "b"], ""),
        ({"model": {"a.w": 1}, "optimizer": {"a.w": 2}}, None, ["a.w"], "leading 'model.'"),
        ({"model": {"a.w": 1}, "optimizer": {"a.w": 2}}, "model", ["a.w"], "'optimizer'"),
        ({"model": {"a.w": 1}, "optimizer": {"a.w": 2}}, "optimizer", ["a.w"], "'model'"),
        ({"state_dict": {"a.w": 1}, "epoch": 3}, None, ["a.w"], "'epoch'"),
        ({"app": {"model": {"a.w": 1}, "optim": {"a.w": 2}}}, None, ["a.w"], "'app.model.'"),
        ({"app": {"model": {"a.w": 1}, "optim": {"a.w": 2}}}, "app.model", ["a.w"], ""),
        ({"app": {"model": {"a.w": 1}, "optim": {"a.w": 2}}}, "app", ["model.a.w"], ""),
        # torchtitan: the model's names at the top, training state under names of its own.
        ({"a.w": 1, "optimizer": {"state.a.w.exp_avg": 2}, "train_state": {"step": 4}}, None,
         ["a.w"], "'optimizer'"),
        # transformers' own names begin with what is a nest elsewhere.
        ({"model.a.w": 1, "lm_head.w": 2}, None, ["lm_head.w", "model.a.w"], ""),
        ({"model": {"model.a.w": 1, "lm_head.w": 2}}, None, ["lm_head.w", "model.a.w"], ""),
        ({"model": {"model.a.w": 1, "lm_head.w": 2}}, "model.model", ["a.w"], ""),
    ],
)  # fmt: skip
def test_the_models_weights_are_found(tmp_path, state, prefix, names, words):
    def tensors(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: tensors(value) for key, value in tree.items()}
        return torch.full((2,), float(tree))

    folder = save(tensors(state), tmp_path / "x")
    found = streamload.load_state_dict(folder, prefix=prefix)
    assert sorted(found) == names
    with streamload.open_checkpoint(folder) as source:
        notices = " ".join(source.catalog.notices)
    assert prefix or words in notices


def test_two_models_need_a_prefix(tmp_path):
    state = {"model": {"w": torch.ones(2)}, "module": {"w": torch.zeros(2)}}
    folder = save(state, tmp_path / "x")
    with pytest.raises(CheckpointError, match="prefix='model' or prefix='module'"):
        streamload.load_state_dict(folder)
    assert torch.equal(streamload.load_state_dict(folder, prefix="module")["w"], torch.zeros(2))


def test_only_an_optimizer_is_refused(tmp_path):
    folder = save({"optimizer": {"w": torch.ones(2)}}, tmp_path / "x")
    with pytest.raises(CheckpointError, match=r"tensors only under optimizer|'optimizer'"):
        streamload.load_state_dict(folder)


def test_without_nested_names(tmp_path):
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner(flatten_state_dict=False)
    state = {"model.w": torch.ones(2), "optimizer.w": torch.zeros(2)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=tmp_path / "x", planner=planner)
    assert list(streamload.load_state_dict(tmp_path / "x")) == ["model.w"]
    assert list(streamload.load_state_dict(tmp_path / "x", prefix="model")) == ["w"]


def test_a_published_model_and_its_files(tmp_path):
    """Known names, a configuration and a tokenizer: what comes out is a published folder."""
    tensors = gpt2_tensors()
    folder = save({"model": tensors, "optimizer": {"w": torch.ones(3)}}, tmp_path / "run")
    (folder / "config.json").write_text(json.dumps(GPT2_CONFIG))
    (folder / "tokenizer_config.json").write_text("{}")
    model = streamload.load(folder).model
    expected = meta_gpt2()
    streamload.load_into(expected, write_gpt2(tmp_path / "plain"))
    check_equal(model.state_dict(), expected.state_dict())
    report = streamload.convert(folder, tmp_path / "new", prefix="model")
    assert report.names == "published"
    assert {"config.json", "tokenizer_config.json", "model.safetensors"} <= set(
        os.listdir(tmp_path / "new")
    )
    check_equal(load_file(tmp_path / "new" / "model.safetensors"), tensors)


def test_whole_tensors_are_mapped_where_aligned(written):
    with streamload.open_checkpoint(written / "pieces-4") as source:
        spec = source.catalog["steps"]
        assert spec.extent is not None
        view = source.mapped("steps")
        assert (view is not None) == (spec.extent.offset % 8 == 0)
        assert source.mapped("rows.float32") is None
    # What a run saves again writes over the files, so that nothing is mapped by itself.
    report = streamload.plan(nn.Linear(2, 2), written / "pieces-4", strict=False).report
    assert report.mode == "stream"


def test_extra_states_reach_their_modules(tmp_path):
    class Counting(nn.Module):
        seen: object = None

        def get_extra_state(self):
            return ("seen", 7, torch.ones(2))

        def set_extra_state(self, state):
            self.seen = state

    folder = save(
        {"model": nn.Sequential(nn.Linear(2, 2), Counting()).state_dict()}, tmp_path / "x"
    )
    module = nn.Sequential(nn.Linear(2, 2), Counting())
    streamload.load_into(module, folder)
    state = module[1].seen
    assert isinstance(state, tuple)
    assert state[:2] == ("seen", 7)
    assert torch.equal(state[2], torch.ones(2))


@pytest.mark.parametrize("inner", [".metadata", ""])
def test_inspect_lists_whole_tensors(written, inner):
    done = CliRunner().invoke(main, ["inspect", str(written / "pieces-4" / inner), "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    files = {os.path.basename(file): nbytes for file, nbytes in said["files"].items()}
    assert files.keys() == {f"__{rank}_0.distcp" for rank in range(4)}
    assert min(files.values()) > 1000
    assert sum(files.values()) == said["totals"]["nbytes"]
    tensors = {tensor["name"]: tensor for tensor in said["tensors"]}
    assert tensors["expert_grid.float32"]["shape"] == [4, 6, 8]
    assert tensors["expert_grid.bfloat16"]["dtype"] == "BF16"


class TestConformance(SourceConformance):
    @pytest.fixture
    def source(self, written: Path) -> Iterator[Source]:
        with streamload.open_checkpoint(written / "pieces-4") as source:
            yield source

    @pytest.fixture
    def expected(self, written: Path, tmp_path: Path) -> Mapping[str, torch.Tensor]:
        found = by_torch(written / "pieces-4", tmp_path / "judge.pt", "model")
        return {name: tensor.contiguous() for name, tensor in found.items()}


# --- what is refused ---------------------------------------------------------------------------


@pytest.fixture
def copied(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written / "pieces-4", tmp_path / "copy")
    return tmp_path / "copy"


def refusal(folder: Path) -> CheckpointError:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError) as caught:
        streamload.open_checkpoint(folder)
    assert set(os.listdir("/proc/self/fd")) == before
    assert str(caught.value).isprintable()
    return caught.value


def test_absent_files_are_all_named(copied):
    (copied / "__1_0.distcp").unlink()
    (copied / "__3_0.distcp").unlink()
    text = str(refusal(copied))
    assert "__1_0.distcp is absent" in text
    assert "__3_0.distcp is absent" in text


def test_a_file_that_was_cut(copied):
    path = copied / "__2_0.distcp"
    path.write_bytes(path.read_bytes()[:9000])
    error = refusal(copied)
    assert "__2_0.distcp" in str(error)
    assert "cut short" in str(error)


def test_metadata_that_is_absent(copied):
    (copied / ".metadata").unlink()
    assert ".distcp" in str(refusal(copied))
    (copied / "__0.metadata").write_bytes(b"")
    assert "saved for itself" in str(refusal(copied))


def test_links_that_lead_nowhere(copied):
    (copied / "__1_0.distcp").unlink()
    (copied / "__1_0.distcp").symlink_to("nowhere")
    assert "is a link to 'nowhere'" in str(refusal(copied))


def test_metadata_alone(copied):
    for file in copied.glob("*.distcp"):
        file.unlink()
    (copied / "config.json").write_text("{}")
    assert "__3_0.distcp is absent" in str(refusal(copied))


def test_one_file_of_the_folder(copied):
    assert "folder" in str(refusal(copied / "__0_0.distcp"))


def test_files_of_another_save(copied, tmp_path):
    """The metadata of one, the data of another: offsets lead to something else."""
    other = save({"model": {"rows.float32": values(1, 4, 3)}}, tmp_path / "other")
    shutil.copy(other / "__0_0.distcp", copied / "__0_0.distcp")
    assert "__0_0.distcp" in str(refusal(copied))
