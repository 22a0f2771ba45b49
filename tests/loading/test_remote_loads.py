"""Loads from a server: the same values, plan, report, progress and memory as from a disk."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

import streamload
from streamload.cli import main
from streamload.core.errors import PlanError
from streamload.mapping.tables.registry import build_model
from streamload.saving.cache.entries import list_cache
from streamload.synthesis import synthesize
from streamload.verifying import verify
from tests.support.remote import nothing_of_the_users, site, tree  # noqa: F401
from tests.support.tiny import bag, same_bits, write

MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("made") / "tiny"
    synthesize("gpt2-tiny", path)
    (path / "generation_config.json").write_text('{"eos_token_id": 7}')
    return os.fspath(path)


@pytest.fixture
def url(site, folder):  # noqa: F811
    site.files = tree(folder, "m/")
    site.etags = {name: f'"{hash(data)}"' for name, data in site.files.items()}
    return f"{site.url}/m"


def run(*args):
    return CliRunner().invoke(main, list(args))


def same_state(a, b):
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"layers": [1]}], ids=str)
def test_load_is_as_from_disk(url, folder, options):
    told = []
    far = streamload.load(url, progress=lambda *args: told.append(args), **options)
    near = streamload.load(folder, mode="stream", **options)
    assert same_state(far.model.state_dict(), near.model.state_dict())
    assert far.generation_config == near.generation_config
    assert far.config == near.config
    theirs, ours = near.report.to_dict(), far.report.to_dict()
    for name in ("loaded", "ignored", "tied", "mode", "layout", "bytes_read", "bytes_written"):
        assert ours[name] == theirs[name]
    assert ours["source"] == url
    assert told[-1][0] == told[-1][1] == far.report.bytes_read


def test_other_calls_take_addresses(url, folder):
    assert same_state(streamload.load_state_dict(url), streamload.load_state_dict(folder))
    far, near = dict(streamload.iter_tensors(url)), dict(streamload.iter_tensors(folder))
    assert list(far) == list(near)
    assert same_state(far, near)
    report = verify(url, against=folder)
    assert report.ok
    assert verify(url).ok


def test_load_transformers(url, folder):
    pytest.importorskip("transformers")
    far = streamload.load_transformers(url, dtype="bfloat16")
    near = streamload.load_transformers(folder, dtype="bfloat16")
    assert same_state(far.model.state_dict(), near.model.state_dict())
    assert far.model.generation_config.eos_token_id == 7
    assert far.model.config.name_or_path == url


@pytest.mark.parametrize("options", [{}, {"mode": "auto"}], ids=str)
def test_a_plan_reads_headers_only(url, site, options):  # noqa: F811
    with streamload.empty_weights():
        model = build_model("gpt2", streamload.load(url, layers=[0, 1]).config)
    site.requests.clear()
    found = streamload.plan(model, url, **options)
    assert found.ok
    assert any("only headers and small files were read" in n for n in found.report.notices)
    asked = [wanted for _, path, wanted in site.requests if path.endswith("model.safetensors")]
    assert asked == ["bytes=0-4095"]


def test_mapping_is_refused_with_the_way_out(url):
    with pytest.raises(PlanError, match=r"mode='map' needs a file on this machine: cache=True"):
        streamload.load(url, mode="map")


def test_the_cache_makes_a_local_copy(url, site, monkeypatch, tmp_path):  # noqa: F811
    monkeypatch.setenv("STREAMLOAD_CACHE", str(tmp_path))
    address = url.replace("http://", "http://user:HUSH@") + "?sig=HUSH"
    first = streamload.load(address, cache=True, dtype="bfloat16")
    site.requests.clear()
    second = streamload.load(url, cache=True, dtype="bfloat16")
    assert second.report.mode == "map"
    assert any("loaded from cache" in notice for notice in second.report.notices)
    assert same_state(first.model.state_dict(), second.model.state_dict())
    assert [w for _, path, w in site.requests if "safetensors" in path and "index" not in path] == [
        "bytes=0-4095"
    ]
    (entry,) = list_cache()
    assert entry.source == url
    for name, data in tree(tmp_path).items():
        assert b"HUSH" not in data
        assert "HUSH" not in name


@pytest.mark.parametrize("change", ["etag", "size", "none"])
def test_another_file_is_not_taken_from_the_cache(url, site, monkeypatch, tmp_path, change):  # noqa: F811
    monkeypatch.setenv("STREAMLOAD_CACHE", str(tmp_path))
    streamload.load(url, cache=True)
    name = "m/model.safetensors"
    if change == "etag":
        site.etags[name] = '"another"'
    elif change == "size":
        data = site.files[name]
        length = int.from_bytes(data[:8], "little")
        site.files[name] = (length + 8).to_bytes(8, "little") + data[8 : 8 + length]
        site.files[name] += b" " * 8 + data[8 + length :]
    else:
        site.etags.clear()
    report = streamload.load(url, cache=True).report
    assert report.mode == "stream"
    told = " ".join(report.notices)
    assert ("cache not used" in told) is (change == "none")


_MEASURED = """
import sys
import streamload
from tests.support.tiny import bag
module = bag({f"part.{n}": (1024, 1024) for n in range(32)})
report = streamload.load_into(module, sys.argv[1], dtype="bfloat16", workers=2)
print(report.memory.peak_rss_bytes)
"""


def test_peak_memory_is_as_from_disk(site, tmp_path):  # noqa: F811
    """128 MiB, cast to 64: beside the model there are a few blocks, not the file."""
    write(tmp_path / "x.safetensors", {f"part.{n}": torch.randn(1024, 1024) for n in range(32)})
    site.files = tree(tmp_path)

    def peak(path):
        command = [sys.executable, "-c", _MEASURED, path]
        return int(subprocess.run(command, check=True, capture_output=True, timeout=120).stdout)

    near, far = peak(os.fspath(tmp_path / "x.safetensors")), peak(f"{site.url}/x.safetensors")
    assert far <= near + 32 * MIB


def test_a_failed_load_leaves_the_module_and_no_thread(site, tmp_path):  # noqa: F811
    import threading

    write(tmp_path / "x.safetensors", {"part.0": torch.randn(1024, 1024)})
    site.files = tree(tmp_path)
    module = bag({"part.0": (1024, 1024), "other": (2,)})
    before = threading.active_count()
    with pytest.raises(PlanError):
        streamload.load_into(module, f"{site.url}/x.safetensors")
    assert all(p.is_meta for p in module.parameters())
    assert threading.active_count() <= before + 1  # the server's


class TestCommands:
    def test_inspect(self, url):
        shown = run("inspect", f"{url}/?sig=HUSH")
        assert shown.exit_code == 0
        assert re.search(r"received: 4\.\d KiB in 2 answers", shown.output)  # header, config.json
        found = json.loads(run("inspect", f"{url}?sig=HUSH", "--json").stdout)
        assert found["received_bytes"] < 6000
        assert "HUSH" not in shown.output + json.dumps(found)

    def test_plan(self, url):
        shown = run("plan", f"{url}?sig=HUSH", "--timeout-s", "5")
        assert shown.exit_code == 0
        assert "only headers and small files were read" in shown.output
        assert "HUSH" not in shown.output

    def test_generate(self, url, folder):
        pytest.importorskip("tokenizers")
        args = ("--prompt", "Hello", "--max-new-tokens", "3", "--json")
        far = json.loads(run("generate", f"{url}?sig=HUSH", *args).stdout)
        near = json.loads(run("generate", folder, *args).stdout)
        assert far["tokens"] == near["tokens"]
        assert far["text"] == near["text"]
        assert "HUSH" not in json.dumps(far)

    def test_convert_and_verify(self, url, tmp_path):
        new = os.fspath(tmp_path / "new")
        assert run("convert", url, new, "--dtype", "bfloat16").exit_code == 0
        assert sorted(os.listdir(new)) == [
            "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"
        ]  # fmt: skip
        compared = run("verify", f"{url}?sig=HUSH", "--against", new, "--dtype", "bfloat16")
        assert compared.exit_code == 0
        assert "HUSH" not in compared.output

    @pytest.mark.parametrize(
        ("args", "text"),
        [
            (("load", "{}/absent.safetensors?sig=HUSH"), "404"),
            (("load", "{}", "--mode", "map"), "--mode map needs a file on this machine: --cache"),
            (("bench", "{}"), "on this machine"),
            (("convert", "{}x", "/nowhere"), "no checkpoint"),
            (("convert", "{0}", "{0}/new?sig=HUSH"), "written to this machine only"),
        ],
    )
    def test_failures_are_one_line(self, url, args, text):
        failed = run(*(arg.format(url) for arg in args))
        assert failed.exit_code == 1
        assert text in failed.stderr
        assert len(failed.stderr.strip().splitlines()) == 1
        assert "HUSH" not in failed.output

    def test_a_timeout_that_is_none(self, url):
        assert run("load", url, "--timeout-s", "0").exit_code == 2


@pytest.mark.parametrize(
    "call",
    [
        streamload.load,
        streamload.load_state_dict,
        lambda url: streamload.load_state_dict(url, mapping=lambda name: name),
    ],
    ids=["load", "load_state_dict", "by a function"],
)
def test_the_configuration_is_asked_for_once(url, site, call, monkeypatch):  # noqa: F811
    from streamload.sources.config import beside

    asked = []
    real = beside.read_object
    monkeypatch.setattr(beside, "read_object", lambda path: asked.append(path) or real(path))
    call(url)
    assert [path for path in asked if path.endswith("/config.json")] == [f"{url}/config.json"]
