"""``hf:ORG/NAME[@REVISION]``: found in the hub's own cache, by its layout, without network."""

import os

import pytest
import torch

import streamload
from streamload.sources.hub import cache_folder
from tests.support.tiny import LAYERS, gpt2_tensors, meta_gpt2, refused, values, write, write_gpt2

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache as the hub's tools leave it: blobs, snapshots of links, references."""
    root = tmp_path / "hub"
    repository = root / "models--org--tiny"
    plain = write_gpt2(tmp_path / "plain")
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for at, name in enumerate(os.listdir(plain)):
        os.rename(f"{plain}/{name}", repository / "blobs" / f"{at:064d}")
        (snapshot / name).symlink_to(f"../../blobs/{at:064d}")
    (repository / "refs" / "pr").mkdir(parents=True)
    for name in ("main", "v1.0", "pr/7"):
        (repository / "refs" / name).write_text(COMMIT + "\n" * (name == "v1.0"))
    monkeypatch.setenv("HF_HUB_CACHE", str(root))
    return root


@pytest.mark.parametrize("revision", ["", "@main", "@v1.0", "@pr/7", f"@{COMMIT}"])
def test_a_snapshot_of_links_loads(cache, revision):
    path = f"hf:org/tiny{revision}"
    module = meta_gpt2()
    report = streamload.load_into(module, path)
    assert report.source == path
    assert report.model_type == "gpt2"
    assert torch.equal(module.tok_embed.weight, gpt2_tensors()["wte.weight"])
    assert streamload.plan(meta_gpt2(), path, expected_layers=LAYERS).ok


def test_shards_behind_links_load(cache, tmp_path):
    snapshot = cache / "models--org--tiny" / "snapshots" / COMMIT
    (snapshot / "model.safetensors").unlink()
    names = list(gpt2_tensors())
    for at, part in enumerate((names[:5], names[5:]), 1):
        blob = write(
            cache / "models--org--tiny" / "blobs" / f"shard{at}",
            {n: gpt2_tensors()[n] for n in part},
        )
        (snapshot / f"model-{at:05d}-of-00002.safetensors").symlink_to(
            os.path.relpath(blob, snapshot)
        )
    assert streamload.load_into(meta_gpt2(), "hf:org/tiny").ok


@pytest.mark.parametrize(
    "path",
    [
        "hf:org/other",
        "hf:org/tiny@v2",
        "hf:tiny",
        "hf:",
        "hf:org/",
        "hf:/etc",
        "hf:org/tiny/more",
        "hf:../tiny",
        "hf:org/..",
        "hf:org/tiny@../../../../etc",
        "hf:org/tiny@/etc/passwd",
        "hf:org/ti ny",
        "hf:org/tiny@",
    ],
)
def test_what_is_not_in_the_cache_says_how_to_get_it(cache, path):
    with refused(path, kind=streamload.CheckpointNotFoundError):
        streamload.open_checkpoint(path)


def test_a_reference_does_not_lead_out(cache):
    (cache / "models--org--tiny" / "refs" / "main").write_text("../../../..")
    with refused("hf:org/tiny", kind=streamload.CheckpointNotFoundError):
        streamload.open_checkpoint("hf:org/tiny")


def test_a_download_that_was_broken_off_names_repository_and_file(cache):
    snapshot = cache / "models--org--tiny" / "snapshots" / COMMIT
    os.unlink(os.path.realpath(snapshot / "model.safetensors"))
    with refused("hf:org/tiny", kind=streamload.CheckpointError) as caught:
        streamload.open_checkpoint("hf:org/tiny")
    assert "model.safetensors" in str(caught[0])


def test_a_damaged_blob_names_the_repository(cache):
    snapshot = cache / "models--org--tiny" / "snapshots" / COMMIT
    os.truncate(os.path.realpath(snapshot / "model.safetensors"), 100)
    with refused("hf:org/tiny", kind=streamload.CheckpointError) as caught:
        streamload.open_checkpoint("hf:org/tiny")
    assert str(snapshot / "model.safetensors") in str(caught[0])


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HF_HUB_CACHE": "/a"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/b", "HF_HOME": "/c"}, "/b"),
        ({"HF_HOME": "/c"}, "/c/hub"),
        ({"XDG_CACHE_HOME": "/d"}, "/d/huggingface/hub"),
        ({}, "/home/me/.cache/huggingface/hub"),
        ({"HF_HUB_CACHE": "~/x"}, "/home/me/x"),
    ],
)
def test_the_cache_is_where_the_hubs_own_tools_keep_it(monkeypatch, environment, expected):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == expected


def test_a_file_of_that_name_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("./hf:org", {"w": values(1, 2)})
    assert streamload.load_state_dict("hf:org").keys() == {"w"}


def test_what_the_hubs_own_cache_writes_is_found(tmp_path, monkeypatch):
    """The layout is checked against huggingface_hub itself."""
    hub = pytest.importorskip("huggingface_hub")
    from huggingface_hub.file_download import repo_folder_name

    assert repo_folder_name(repo_id="org/tiny", repo_type="model") == "models--org--tiny"
    assert hub.constants.HF_HUB_CACHE
