"""``streamload cache`` and ``--cache``."""

import hashlib
import json
import os

import pytest


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("STREAMLOAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_list_verify_clear(run, tiny, cache):
    assert "0 entries" in run("cache").stdout
    assert "cache written" in run("load", tiny, "--cache", "--dtype", "float16").stdout
    assert "loaded from cache" in run("load", tiny, "--cache", "--dtype", "float16").stdout
    listed = run("cache", "list").stdout
    assert "1 entry, " in listed
    assert f"{tiny} (float16)" in listed
    assert listed.splitlines()[0].split() == ["id", "size", "used", "written", "made", "from"]
    (entry,) = json.loads(run("cache", "list", "--json").stdout)["entries"]
    assert entry["dtype"] == "float16"
    assert entry["nbytes"] == os.path.getsize(entry["path"])
    assert 0 <= entry["age_s"] < 60
    verified = run("cache", "verify")
    assert verified.exit_code == 0
    assert "all checksums match" in verified.stdout
    assert "removed 1 entry" in run("cache", "clear").stdout
    assert json.loads(run("cache", "--json").stdout)["entries"] == []


def test_a_damaged_entry(run, tiny, cache):
    run("load", tiny, "--cache")
    (name,) = [name for name in os.listdir(cache) if not name.startswith(".")]
    with open(cache / name, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    result = run("cache", "verify", "--json")
    assert result.exit_code == 1
    assert "checksum" in json.loads(result.stdout)["problems"][0]
    os.truncate(cache / name, 20)
    assert run("cache", "verify").exit_code == 1
    assert run("cache", "clear").exit_code == 0
    assert os.listdir(cache) == []


@pytest.mark.skipif(os.name == "nt", reason="there are no such access rights")
def test_a_folder_that_others_can_write(run, tiny, cache):
    run("load", tiny, "--cache")
    os.chmod(cache, 0o777)
    assert "cache not used: " in run("load", tiny, "--cache").stdout
    result = run("cache", "verify")
    assert result.exit_code == 1
    assert "others can write to it (mode 0777): run `chmod 700" in result.stdout


def entries(run, *arguments):
    return json.loads(run("cache", *arguments, "--json").stdout)


def test_one_entry_is_removed(run, tiny, cache, tmp_path):
    for layers in ("0", "1", "0-1"):
        run("load", tiny, "--cache", "--layers", layers)
    listed = entries(run)["entries"]
    assert [one["made_with"] for one in listed] == [["layers=0,1"], ["layers=1"], ["layers=0"]]
    assert "(float32, layers=1)" in run("cache").stdout
    assert run("cache", "remove").exit_code == 2
    assert run("cache", "clear", tiny).exit_code == 2
    unknown = run("cache", "remove", "feedbeef")
    assert (unknown.exit_code, unknown.stderr.count("\n")) == (1, 1)
    assert len(entries(run)["entries"]) == 3
    went = entries(run, "remove", listed[1]["id"][:6])
    assert [one["path"] for one in went["removed"]] == [listed[1]["path"]]
    assert not os.path.exists(listed[1]["path"])
    assert [one["id"] for one in entries(run)["entries"]] == [listed[0]["id"], listed[2]["id"]]
    assert "removed 2 entries" in run("cache", "remove", os.path.relpath(tiny)).stdout
    assert entries(run)["entries"] == []


def test_an_adapter_is_told(run, tiny, cache, tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["c_fc"]}
    config |= {"fan_in_fan_out": True}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    at = "base_model.model.transformer.h.0.mlp.c_fc"
    factors = {f"{at}.lora_A.weight": torch.ones(2, 64), f"{at}.lora_B.weight": torch.ones(256, 2)}
    save_file(factors, tmp_path / "adapter_model.safetensors")
    assert run("load", tiny, "--cache", "--adapter", tmp_path).exit_code == 0
    (entry,) = entries(run)["entries"]
    assert entry["made_with"] == [f"adapter={tmp_path}"]
    assert f"adapter={tmp_path}" in run("cache").stdout


def test_the_cache_keeps_itself_under_a_size(run, tiny, cache):
    def load(layers):
        return run("load", tiny, "--cache", "--layers", layers).stdout

    for at, layers in enumerate(("0", "1", "0-1")):
        load(layers)
        path = entries(run)["entries"][0]["path"]
        for name in (path, f"{cache}/.{os.path.basename(path)}.checked"):
            os.utime(name, (1e9 + at, 1e9 + at))
    sizes = {one["made_with"][0]: one["nbytes"] for one in entries(run)["entries"]}
    load("0")  # written first, and used last now
    limit = sizes["layers=0"] + sizes["layers=0,1"]
    done = entries(run, "--max-bytes", limit)
    assert [one["made_with"] for one in done["removed"]] == [["layers=1"]]
    assert (done["max_bytes"], done["nbytes"]) == (limit, limit)
    assert f"of at most {limit / 1024:.1f} KiB" in run("cache").stdout
    # Loads keep to it: the new one stays, and what was used longest ago goes.
    assert "removed from the cache, to keep it under its limit: 1 copy" in load("1")
    left = {one["made_with"][0] for one in entries(run)["entries"]}
    assert left == {"layers=0", "layers=1"}
    assert run("cache", "--max-bytes", "10KiB").exit_code == 0
    refused = load("0-1")
    assert "cache not written: " in refused
    assert "more than the cache may have (10.0 KiB)" in refused
    assert entries(run)["entries"] == []
    assert entries(run, "--max-bytes", "none")["max_bytes"] is None
    assert "cache written" in load("0-1")
    assert run("cache", "--max-bytes", "lots").exit_code == 2


def test_the_beginning_of_several_ids_removes_none(run, cache):
    cache.mkdir(mode=0o700)
    of = {}
    for n in range(5000):
        name = f"{n:020x}-{0:020x}.safetensors"
        short = hashlib.sha256(name.encode()).hexdigest()[:4]
        if of.setdefault(short, name) != name:
            break
    for one in (of[short], name):
        (cache / one).write_bytes(b"")
    result = run("cache", "remove", short)
    assert result.exit_code == 2
    assert "begins several ids" in result.stderr
    assert len(os.listdir(cache)) == 2
