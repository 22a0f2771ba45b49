"""What a path is: decided by content, never by guessing between two."""

import json

import pytest
import torch

import streamload
from streamload.sources.hub import folder_of
from tests.support.tiny import refused, values, write, write_gpt2

W = {"w": values(1, 2, 3)}


def test_a_file_an_index_a_folder(tmp_path):
    folder = write_gpt2(tmp_path / "m")
    for path in (folder, folder + "/", f"{folder}/model.safetensors"):
        with streamload.open_checkpoint(path) as source:
            assert source.path == path
            assert "wte.weight" in source.catalog
        assert folder_of(path).rstrip("/") == folder


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "diffusion.safetensors", "X.SAFETENSORS", "consolidated.safetensors"],
)
def test_the_only_file_of_a_folder_is_taken(tmp_path, name):
    write(tmp_path / name, W)
    (tmp_path / "README.md").write_text("hello")
    assert torch.equal(streamload.load_state_dict(tmp_path)["w"], W["w"])


def test_model_safetensors_wins_over_other_files(tmp_path):
    write(tmp_path / "model.safetensors", W)
    write(tmp_path / "model.fp16.safetensors", {"w": W["w"] + 1})
    assert torch.equal(streamload.load_state_dict(tmp_path)["w"], W["w"])


def test_safetensors_win_over_pickles(tmp_path):
    write(tmp_path / "weights.safetensors", W)
    torch.save({"w": W["w"] + 1}, tmp_path / "pytorch_model.bin")
    assert torch.equal(streamload.load_state_dict(tmp_path)["w"], W["w"])


AMBIGUOUS = {
    "two files": ("a.safetensors", "b.safetensors"),
    "two sets": (
        "a-00001-of-00001.safetensors",
        "b-00001-of-00001.safetensors",
    ),
    "two counts": ("m-00001-of-00001.safetensors", "m-00001-of-00002.safetensors"),
    "parts of another numbering": ("model-1-of-2.safetensors", "model-2-of-2.safetensors"),
}


ODD_PARTS = {
    "one of two, not padded": ["m-1-of-2.safetensors"],
    "one of two, padded otherwise": ["m-001-of-002.safetensors"],
    "one of none": ["m-00001-of-00000.safetensors"],
    "none of one": ["m-00000-of-00001.safetensors"],
    "two of one": ["m-00002-of-00001.safetensors"],
    "one of one and two of one": ["m-00001-of-00001.safetensors", "m-00002-of-00001.safetensors"],
    "one of none, not padded": ["m-1-of-0.bin"],
}


@pytest.mark.parametrize("name", ODD_PARTS)
def test_parts_that_are_no_whole_set_are_refused(tmp_path, name):
    for at, file in enumerate(ODD_PARTS[name]):
        write(tmp_path / file, {f"w{at}": torch.ones(1)})
    with refused(tmp_path, kind=streamload.CheckpointError) as caught:
        streamload.open_checkpoint(tmp_path)
    assert "part" in str(caught[0]) or "missing" in str(caught[0])
    with streamload.open_checkpoint(tmp_path / ODD_PARTS[name][0]) as source:
        assert list(source.catalog) == ["w0"]


@pytest.mark.parametrize("name", ["m-1-of-1.safetensors", "m-00001-of-00001.safetensors"])
def test_the_only_part_of_one_is_the_whole(tmp_path, name):
    write(tmp_path / name, W)
    assert torch.equal(streamload.load_state_dict(tmp_path)["w"], W["w"])


def test_a_stray_file_beside_a_whole_set_is_refused_unless_an_index_decides(tmp_path):
    parts = [f"m-0000{at}-of-00002.safetensors" for at in (1, 2)]
    for at, name in enumerate(parts):
        write(tmp_path / name, {f"w{at}": torch.ones(1)})
    write(tmp_path / "extra.safetensors", {"x": torch.ones(1)})
    with refused(tmp_path, kind=streamload.CheckpointError) as caught:
        streamload.open_checkpoint(tmp_path)
    assert "extra.safetensors" in str(caught[0])
    assert "m-*-of-00002" in str(caught[0])
    weight_map = {f"w{at}": name for at, name in enumerate(parts)}
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert set(streamload.load_state_dict(tmp_path)) == {"w0", "w1"}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_what_may_be_several_things_is_refused_with_their_names(tmp_path, name):
    for at, file in enumerate(AMBIGUOUS[name]):
        write(tmp_path / file, {f"w{at}": torch.ones(1)})
    with refused(tmp_path, kind=streamload.CheckpointError) as caught:
        streamload.open_checkpoint(tmp_path)
    assert "several" in str(caught[0])


def test_several_indexes_are_refused(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    with refused(tmp_path, kind=streamload.CheckpointError) as caught:
        streamload.open_checkpoint(tmp_path)
    assert "a.safetensors.index.json" in str(caught[0])


@pytest.mark.parametrize("files", [[], ["README.md", "config.json"], ["adapter_model.safetensors"]])
def test_a_folder_without_a_checkpoint_says_what_was_looked_for(tmp_path, files):
    for name in files:
        (tmp_path / name).write_text("{}")
    with refused(tmp_path, kind=streamload.CheckpointNotFoundError) as caught:
        streamload.open_checkpoint(tmp_path)
    text = str(caught[0])
    assert "model.safetensors.index.json" in text
    assert ".bin" in text
    assert all(name in text for name in files)


@pytest.mark.parametrize("path", ["absent.safetensors", "absent/", "no/such/folder", ""])
def test_a_path_that_is_not_there(tmp_path, path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused(path, kind=streamload.CheckpointNotFoundError):
        streamload.open_checkpoint(path)
    with pytest.raises(FileNotFoundError):
        streamload.load_state_dict(path)


def test_a_dangling_link_says_where_it_leads(tmp_path):
    (tmp_path / "x.safetensors").symlink_to("../blobs/gone")
    with refused(tmp_path / "x.safetensors", kind=streamload.CheckpointNotFoundError) as caught:
        streamload.open_checkpoint(tmp_path / "x.safetensors")
    assert "../blobs/gone" in str(caught[0])


def test_a_file_used_as_a_folder(tmp_path):
    path = write(tmp_path / "x.safetensors", W)
    with refused(path, kind=streamload.CheckpointError):
        streamload.open_checkpoint(path + "/model.safetensors")


def test_content_wins_over_a_pickle_ending(tmp_path):
    path = write(tmp_path / "model.bin", W)
    assert torch.equal(streamload.load_state_dict(path)["w"], W["w"])


def test_content_that_is_a_pickle_is_not_opened_as_safetensors(tmp_path):
    path = tmp_path / "x.safetensors"
    torch.save(W, path)
    with refused(path, kind=streamload.CheckpointError) as caught:
        streamload.open_checkpoint(path)
    assert "pickle" in str(caught[0])


def test_every_header_length_opens(tmp_path):
    """Also those whose first bytes look like a pickle's (0x80 0x02 …) or a zip's."""
    from tests.support.tiny import container, entry

    for extra in (0x280, 0x480, 0x580, 0x4B50):
        text = container({"w": entry("F32", [1], 0, 4)})[8:].decode().ljust(extra)
        path = tmp_path / f"{extra}.safetensors"
        path.write_bytes(container(text, b"\0\0\x80\x3f", pad=1))
        assert streamload.load_state_dict(path)["w"].item() == 1.0
        path.write_bytes(path.read_bytes()[:8])
        with pytest.raises(streamload.CheckpointError, match="cut short"):
            streamload.open_checkpoint(path)
