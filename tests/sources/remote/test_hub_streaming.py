"""``hf:ORG/NAME`` streamed from a hub on loopback, of one commit, with the user's token."""

import json

import pytest

import streamload
from streamload.core.errors import CheckpointError, CheckpointNotFoundError
from tests.support.loopback import Site, serve
from tests.support.remote import tree
from tests.support.tiny import gpt2_tensors, same_bits, write_gpt2

COMMIT = "c0ffee" + "0" * 34


@pytest.fixture
def hub(site, tmp_path, monkeypatch):
    """A hub whose weights are on another server, as the real one's are."""
    write_gpt2(tmp_path)
    files = tree(tmp_path, f"org/name/resolve/{COMMIT}/")
    info = {"sha": COMMIT, "siblings": [{"rfilename": n.rpartition("/")[2]} for n in files]}
    info["siblings"] += [{"rfilename": "onnx/model.onnx"}, {"rfilename": ".gitattributes"}]
    weights = f"org/name/resolve/{COMMIT}/model.safetensors"
    with serve(Site(files={"blob": files.pop(weights)})) as far:
        site.files = files | {"api/models/org/name/revision/main": json.dumps(info).encode()}
        site.redirects[weights] = f"{far.url}/blob?X-Signature=THEIRS"
        site.far = far
        monkeypatch.setenv("HF_ENDPOINT", site.url)
        monkeypatch.setenv("HF_TOKEN", "hf_HUSH")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        yield site


def test_streams_what_the_cache_has_not(hub):
    loaded = streamload.load("hf:org/name", download=False)
    state = loaded.model.state_dict()
    assert same_bits(state["tok_embed.weight"], gpt2_tensors()["wte.weight"])
    assert loaded.report.source == f"{hub.url}/org/name/resolve/{COMMIT}"
    assert loaded.config["model_type"] == "gpt2"
    assert "HUSH" not in json.dumps(loaded.report.to_dict())


def test_the_token_goes_to_the_hub_alone(hub):
    streamload.load("hf:org/name", download=False)
    assert {sent["Authorization"] for sent in hub.headers} == {"Bearer hf_HUSH"}
    assert hub.far.headers
    assert not any("Authorization" in sent for sent in hub.far.headers)


def test_nothing_is_fetched_unasked(hub):
    with pytest.raises(
        CheckpointNotFoundError, match=r"not in the local hub cache.*download=False"
    ):
        streamload.load("hf:org/name")
    assert hub.requests == []


def test_the_cache_goes_first(hub, tmp_path, monkeypatch):
    folder = tmp_path / "hub" / "models--org--name"
    write_gpt2(folder / "snapshots" / COMMIT)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert streamload.load("hf:org/name", download=False).report.source == "hf:org/name"
    (folder / "snapshots" / COMMIT / "model.safetensors").unlink()  # as after fetching a tokenizer
    assert streamload.load("hf:org/name", download=False).report.source.startswith(hub.url)


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        (None, CheckpointNotFoundError, "404.*set HF_TOKEN"),
        (b"<html>", CheckpointError, "not one of a hub"),
        (b"[]", CheckpointError, "not one of a hub"),
        (b'{"sha": 5, "siblings": []}', CheckpointError, "not one of a hub"),
        (b'{"sha": "abc", "siblings": null}', CheckpointError, "not one of a hub"),
        (b'{"sha": "abc", "siblings": []}', CheckpointNotFoundError, "no checkpoint"),
    ],
)
def test_what_a_hub_does_not_have(hub, answer, kind, text):
    hub.files = {} if answer is None else {"api/models/org/name/revision/main": answer}
    with pytest.raises(kind, match=text) as info:
        streamload.open_checkpoint("hf:org/name", download=False)
    assert "HUSH" not in str(info.value)


def test_offline_is_offline(hub, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE"):
        streamload.open_checkpoint("hf:org/name", download=False)
    assert hub.requests == []
