"""Meta's parts of one model, put together as they are cut, against the whole."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

import streamload
from streamload.core.errors import CheckpointError, StreamloadError
from tests.families.test_meta_names import PARAMS, to_meta
from tests.models.peers import check_agrees
from tests.support.tiny import same_bits

ROWS = ("wq", "wk", "wv", "w1", "w3", "output")
WK = "layers.0.attention.wk.weight"
COLUMNS = ("wo", "w2")


def cut(tensors, ranks, *, embedding_dim):
    """What each rank of Meta's model parallelism holds."""
    parts = [{} for _ in range(ranks)]
    for name, tensor in tensors.items():
        kind = name.split(".")[-2]
        dim = 0 if kind in ROWS else 1 if kind in COLUMNS else None
        dim = embedding_dim if kind == "tok_embeddings" else dim
        for rank, part in enumerate(parts):
            part[name] = tensor.clone() if dim is None else tensor.chunk(ranks, dim)[rank].clone()
    return parts


@pytest.fixture(scope="module")
def peer(checkpoints):
    """transformers' model, with a vocabulary that can be cut into four."""
    config = copy.deepcopy(checkpoints("plain-llama").peer.config)
    config.vocab_size = 96
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def meta(peer, tmp_path):
    """Writes the parts; returns their folder and the whole."""
    whole = to_meta(peer.state_dict(), 4, 2)

    def make(ranks=2, *, embedding_dim=1, change=None, params=PARAMS):
        parts = cut(whole, ranks, embedding_dim=embedding_dim)
        if change is not None:
            change(parts)
        folder = tmp_path / "parts"
        folder.mkdir()
        for rank, part in enumerate(parts):
            torch.save(part, folder / f"consolidated.{rank:02d}.pth")
        (folder / "params.json").write_text(json.dumps(params))
        return folder, whole

    return make


def meta_whole(folder):
    """The same model of parts that agree, with other values."""
    whole = folder.parent / "agreeing"
    whole.mkdir()
    for path in folder.glob("*.pth"):
        part = torch.load(path)
        torch.save(
            {name: torch.zeros_like(tensor) for name, tensor in part.items()}, whole / path.name
        )
    (whole / "params.json").write_text((folder / "params.json").read_text())
    return whole


def refusal(folder):
    with pytest.raises(StreamloadError) as caught:
        streamload.load(folder)
    return str(caught.value)


@pytest.mark.parametrize("embedding_dim", [0, 1])
@pytest.mark.parametrize("ranks", [2, 4])
def test_parts_are_equal_to_the_whole(meta, peer, tmp_path, ranks, embedding_dim):
    # Two key and value heads: of four parts, neighbours hold the same one.
    def shared(parts):
        if ranks == 4:
            for name in parts[0]:
                if name.split(".")[-2] in ("wk", "wv"):
                    halves = torch.cat([part[name] for part in parts]).chunk(2)
                    for rank, part in enumerate(parts):
                        part[name] = halves[rank // 2].clone()

    folder, whole = meta(ranks, embedding_dim=embedding_dim, change=shared)
    with streamload.open_checkpoint(folder) as source:
        assert source.catalog.keys() == whole.keys()
        for name, tensor in whole.items():
            assert same_bits(source.tensor(name), tensor), name
    loaded = streamload.load(folder)
    assert loaded.report.summary().endswith("missing=0 unexpected=0 shape_mismatch=0")
    peer.save_pretrained(tmp_path / "published")
    expected = streamload.load(tmp_path / "published").model.state_dict()
    for name, tensor in loaded.model.state_dict().items():
        assert same_bits(tensor, expected[name]), name
    check_agrees(peer, loaded.model)
    report = streamload.convert(folder, tmp_path / "new", max_shard_bytes=10_000)
    assert report.names == "published"
    assert len(report.files) > 1
    found = {}
    for file in report.files:
        found |= load_file(tmp_path / "new" / file)
    published = peer.state_dict()
    assert all(same_bits(found[name], published[name]) for name in found)
    assert "config.json" in {path.name for path in (tmp_path / "new").iterdir()}


def test_by_the_names_in_the_files(meta):
    """For a module that has Meta's own names."""
    folder, whole = meta(2)
    found = streamload.load_state_dict(folder, mapping={name: name for name in whole})
    assert all(same_bits(found[name], tensor) for name, tensor in whole.items())


def test_norms_that_differ_are_refused(meta):
    folder, _ = meta(4, change=lambda parts: parts[2]["layers.1.ffn_norm.weight"].add_(0.25))
    text = refusal(folder)
    assert "'layers.1.ffn_norm.weight'" in text
    assert "consolidated.02.pth" in text
    assert "by up to 0.25" in text
    with pytest.raises(CheckpointError, match="ffn_norm"), streamload.open_checkpoint(folder) as s:
        s.tensor("layers.1.ffn_norm.weight")
    # Nothing of a module that holds data is overwritten before they have been compared.
    model = streamload.load(meta_whole(folder)).model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="ffn_norm") as caught:
        streamload.load_into(model, folder)
    assert "overwritten" not in str(caught.value)
    assert all(same_bits(tensor, before[n]) for n, tensor in model.state_dict().items())
    with pytest.raises(CheckpointError, match="ffn_norm"):
        streamload.convert(folder, folder.parent / "new")
    assert not (folder.parent / "new").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda parts: parts[1].pop("layers.0.attention.wq.weight"), "is not in"),
        (lambda parts: parts[1].update({"norm.weight": torch.ones(31)}), "its parts differ"),
        (lambda parts: parts[1].update({"output.weight": torch.ones(3, 32)}), "its parts differ"),
        (lambda parts: [p.update({"adapter.weight": torch.ones(3, 9)}) for p in parts], "no layer"),
        (lambda parts: [p.update({"layers.0.bias": torch.ones(3)}) for p in parts], "not known"),
        (
            lambda parts: [p.update({"tok_embeddings.weight": torch.ones(9, 9)}) for p in parts],
            "no embedding of width 32",
        ),
        (
            lambda parts: [p.update({WK: torch.ones(9, 32)}) for p in parts],
            "params.json means 16",
        ),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused_by_name(meta, change, words):
    folder, _ = meta(2, change=change)
    assert words in refusal(folder)


def test_parts_that_are_absent(meta):
    folder, _ = meta(4)
    (folder / "consolidated.01.pth").unlink()
    assert "consolidated.01.pth is absent" in refusal(folder)
    (folder / "consolidated.03.pth").unlink()
    (folder / "consolidated.02.pth").unlink()
    # One part alone has a file like any other: its shapes tell.
    assert refusal(folder)


def test_the_last_part_is_missed_without_params(meta):
    folder, _ = meta(4)
    (folder / "params.json").unlink()
    (folder / "consolidated.03.pth").unlink()
    assert "is a part missing?" in refusal(folder)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"n_layers": PARAMS["n_layers"] + 1}, ("layers", str(PARAMS["n_layers"]))),
        ({"vocab_size": 7}, ("tok_embeddings.weight", "[7, ")),
        ({"ffn_dim_multiplier": 9.0}, ("layers.0.feed_forward.w1.weight",)),
    ],
    ids=str,
)
def test_params_of_another_model_are_refused(meta, tmp_path, changed, words):
    folder, _ = meta(params={**PARAMS, **changed})
    for use in (streamload.load, lambda path: streamload.convert(path, tmp_path / "out")):
        with pytest.raises(StreamloadError) as caught:
            use(folder)
        assert all(word in str(caught.value) for word in ("params.json means", *words))
    assert not (tmp_path / "out").exists()
