"""``streamload cache`` and ``--cache``."""

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
