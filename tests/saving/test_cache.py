"""``cache=True``: written once, mapped afterwards, never trusted when stale or damaged."""

import errno
import os
import shutil
import threading
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

import streamload
from streamload.saving.atomic import StagedFile
from streamload.saving.cache import facts
from streamload.saving.cache.entries import cache_folder, clear_cache, list_cache, verify_entry
from streamload.sources import addresses
from streamload.sources.files import OpenFile
from streamload.synthesis import synthesize

IDS = torch.tensor([[1, 5, 2, 7]])


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("STREAMLOAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def gpt2(tmp_path):
    return synthesize("gpt2-tiny", tmp_path / "gpt2").path


def said(report, text):
    return any(text in notice for notice in report.notices)


def entries_in(cache):
    return [name for name in os.listdir(cache) if not name.startswith(".")]


def entry_of(cache):
    (path,) = [cache / name for name in entries_in(cache)]
    return path


def test_the_second_load_maps_what_the_first_wrote(cache, gpt2):
    plain = streamload.load(gpt2, dtype="bfloat16")
    first = streamload.load(gpt2, dtype="bfloat16", cache=True)
    second = streamload.load(gpt2, dtype="bfloat16", cache=True)
    assert said(first.report, "cache written")
    assert (first.report.mode, second.report.mode) == ("stream", "map")
    assert said(second.report, "loaded from cache")
    assert second.report.bytes_read == 0
    assert second.report.loaded == first.report.loaded, "the ledger is that of the checkpoint"
    assert second.model.lm_head.weight is second.model.tok_embed.weight
    for name, tensor in plain.model.state_dict().items():
        found = second.model.state_dict()[name]
        assert torch.equal(found, tensor), name
        assert found.is_contiguous()
    assert torch.equal(second.model(IDS), plain.model(IDS))


def test_load_into_and_load_state_dict(cache, gpt2):
    expected = streamload.load_state_dict(gpt2)
    assert streamload.load_state_dict(gpt2, cache=True).keys() == expected.keys()
    found = streamload.load_state_dict(gpt2, cache=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert found["lm_head.weight"] is found["tok_embed.weight"]
    told = []
    with streamload.empty_weights():
        module = torch.nn.ModuleDict({"wte": torch.nn.Embedding(320, 64)})
    for _ in range(2):
        report = streamload.load_into(
            module,
            gpt2,
            mapping={"wte.weight": "wte.weight"},
            strict=False,
            cache=True,
            on_assign=lambda *names: told.append(names),
        )
        with streamload.empty_weights():
            module["wte"] = torch.nn.Embedding(320, 64)
    assert said(report, "loaded from cache")
    assert told == [("wte.weight", "wte.weight")] * 2


@pytest.mark.parametrize(
    "other",
    [{"dtype": "float16"}, {"layers": [0]}, {"dtype": "float16", "overflow": "refuse"}],
)
def test_other_options_have_entries_of_their_own(cache, gpt2, other):
    streamload.load(gpt2, cache=True, dtype="bfloat16")
    assert said(streamload.load(gpt2, cache=True, **other).report, "cache written")
    assert said(streamload.load(gpt2, cache=True, **other).report, "loaded from cache")
    assert len(list_cache()) == 2


def test_a_changed_file_is_read_again_and_its_old_entry_goes(cache, gpt2):
    streamload.load(gpt2, cache=True)
    path = f"{gpt2}/model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    tensors["wte.weight"] += 1
    save_file(tensors, path)
    again = streamload.load(gpt2, cache=True)
    assert said(again.report, "cache written")
    assert torch.equal(again.model.tok_embed.weight, tensors["wte.weight"])
    assert len(list_cache()) == 1


def in_place(path, new):
    inode = os.stat(path).st_ino
    shutil.copyfile(new, path)
    assert os.stat(path).st_ino == inode


def by_rename(path, new):
    os.replace(new, path)


def removed_and_copied(path, new):
    os.unlink(path)
    shutil.copy(new, path)


def copied_with_times(path, new):
    shutil.copystat(path, new)
    shutil.copy2(new, path)


REPLACEMENTS = [in_place, by_rename, removed_and_copied, copied_with_times]


@pytest.mark.parametrize("replacement", REPLACEMENTS)
@pytest.mark.parametrize("known", ["all", "no ctime", "no ctime, same inode"])
def test_a_file_of_equal_size_and_time_is_not_taken_for_the_old_one(
    cache, gpt2, replacement, known, monkeypatch
):
    """Whatever the file system knows: without ctime the samples of the bytes are left."""
    if known != "all":
        inode = (lambda s: 0) if known.endswith("inode") else (lambda s: s.st_ino)
        monkeypatch.setattr(
            addresses, "identity_of", lambda s: (inode(s), s.st_size, s.st_mtime_ns)
        )
    path = f"{gpt2}/model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file(tensors, path)  # by the writer that writes the other one
    streamload.load(gpt2, cache=True)
    before = os.stat(path)
    for tensor in tensors.values():
        tensor += 1
    save_file(tensors, path + ".new")
    assert os.path.getsize(path + ".new") == before.st_size
    replacement(path, path + ".new")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    again = streamload.load(gpt2, cache=True)
    assert said(again.report, "cache written")
    assert torch.equal(again.model.tok_embed.weight, tensors["wte.weight"])
    assert said(streamload.load(gpt2, cache=True).report, "loaded from cache")
    assert len(list_cache()) == 1


def test_one_value_changed_in_place_is_noticed_by_the_ctime(cache, gpt2):
    streamload.load(gpt2, cache=True)
    path = f"{gpt2}/model.safetensors"
    time.sleep(0.02)  # the system's clock of files ticks every few milliseconds
    before = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(before.st_size - 6000)
        file.write(b"\0\0\x80\x3f")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert said(streamload.load(gpt2, cache=True).report, "cache written")


def test_reading_and_access_times_lose_no_hit(cache, gpt2):
    streamload.load(gpt2, cache=True)
    for name in os.listdir(gpt2):
        with open(f"{gpt2}/{name}", "rb") as file:
            file.read()
    streamload.load(gpt2, mode="map")
    assert list(streamload.iter_tensors(gpt2))
    assert said(streamload.load(gpt2, cache=True).report, "loaded from cache")


def test_an_entry_that_another_load_uses_meanwhile_is_as_good(cache, gpt2, monkeypatch):
    streamload.load(gpt2, cache=True)
    inner = OpenFile.check_unchanged

    def touch_first(self):
        if str(cache) in self.path:
            time.sleep(0.02)
            os.utime(self.path, ns=(1, os.stat(self.path).st_mtime_ns))
        inner(self)

    monkeypatch.setattr(OpenFile, "check_unchanged", touch_first)
    assert said(streamload.load(gpt2, cache=True).report, "loaded from cache")


def test_a_hub_blob_with_other_bytes_is_not_taken_for_its_name(cache, gpt2, tmp_path):
    blob = tmp_path / "hub" / "blobs" / ("ab" * 32)
    blob.parent.mkdir(parents=True)
    shutil.copy(f"{gpt2}/model.safetensors", blob)
    snapshot = tmp_path / "hub" / "snapshots" / "one"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(blob)
    shutil.copy(f"{gpt2}/config.json", snapshot / "config.json")
    streamload.load(snapshot, cache=True)
    tensors = {name: tensor + 1 for name, tensor in load_file(blob).items()}
    save_file(tensors, blob)
    again = streamload.load(snapshot, cache=True)
    assert said(again.report, "cache written")
    assert torch.equal(again.model.tok_embed.weight, tensors["wte.weight"])


def test_a_copy_has_an_entry_of_its_own(cache, gpt2, tmp_path):
    streamload.load(gpt2, cache=True)
    shutil.copytree(gpt2, tmp_path / "copy")
    assert said(streamload.load(tmp_path / "copy", cache=True).report, "cache written")
    assert len(list_cache()) == 2


def test_hub_blobs_are_known_by_content(cache, gpt2, tmp_path):
    """Two snapshots of one blob share an entry, whatever its inode."""
    for hub in ("one", "two"):
        blobs = tmp_path / hub / "blobs"
        blobs.mkdir(parents=True)
        shutil.copy(f"{gpt2}/model.safetensors", blobs / ("ab" * 32))
        snapshot = tmp_path / hub / "snapshots" / hub
        snapshot.mkdir(parents=True)
        (snapshot / "model.safetensors").symlink_to(blobs / ("ab" * 32))
        shutil.copy(f"{gpt2}/config.json", snapshot / "config.json")
        report = streamload.load(snapshot, cache=True).report
    assert said(report, "loaded from cache")


class TestDamaged:
    @pytest.mark.parametrize("keep", [0, 7, 3000, -1])
    def test_a_cut_entry_is_made_anew(self, cache, gpt2, keep):
        streamload.load(gpt2, cache=True)
        path = entry_of(cache)
        size = path.stat().st_size
        os.truncate(path, size + keep if keep < 0 else keep)
        loaded = streamload.load(gpt2, cache=True)
        assert said(loaded.report, "damaged cache entry is made anew")
        assert said(loaded.report, "cache written")
        assert entry_of(cache).stat().st_size == size
        assert said(streamload.load(gpt2, cache=True).report, "loaded from cache")

    def test_an_entry_of_another_version_is_made_anew(self, cache, gpt2, monkeypatch):
        streamload.load(gpt2, cache=True)
        monkeypatch.setattr(facts, "VERSION", 999)
        loaded = streamload.load(gpt2, cache=True)
        assert not said(loaded.report, "loaded from cache")

    def test_a_flipped_byte_is_found_by_verify(self, cache, gpt2):
        streamload.load(gpt2, cache=True)
        path = entry_of(cache)
        (entry,) = list_cache()
        assert verify_entry(entry) == []
        with open(path, "r+b") as file:
            file.seek(-3, os.SEEK_END)
            byte = file.read(1)
            file.seek(-3, os.SEEK_END)
            file.write(bytes([byte[0] ^ 1]))
        (problem,) = verify_entry(list_cache()[0])
        assert "do not fit its checksum" in problem

    def test_what_a_killed_run_left_is_removed(self, cache, gpt2):
        cache.mkdir()
        left = cache / ".streamload-999999999-x.safetensors.tmp"
        left.write_bytes(b"half")
        streamload.load(gpt2, cache=True)
        assert not left.exists()


class TestNotWritten:
    def test_a_full_disk_costs_the_cache_not_the_load(self, cache, gpt2, monkeypatch):
        def full(self, data, offset):
            raise OSError(errno.ENOSPC, "No space left on device")

        def write(self, data, offset):
            from streamload.saving.atomic import translated

            with translated(self.path):
                full(self, data, offset)

        monkeypatch.setattr(StagedFile, "write", write)
        loaded = streamload.load(gpt2, cache=True)
        assert said(loaded.report, "cache not written")
        assert said(loaded.report, "no room")
        assert loaded.report.ok
        assert os.listdir(cache) == []
        assert loaded.model(IDS).isfinite().all()

    def test_a_folder_that_cannot_be_made(self, gpt2, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("STREAMLOAD_CACHE", str(tmp_path / "file" / "cache"))
        assert said(streamload.load(gpt2, cache=True).report, "cache not written")

    def test_an_interrupted_write_leaves_nothing(self, cache, gpt2, monkeypatch):
        def interrupted(self, data, offset):
            raise KeyboardInterrupt

        monkeypatch.setattr(StagedFile, "write", interrupted)
        with streamload.empty_weights():
            module = torch.nn.ModuleDict({"wte": torch.nn.Embedding(320, 64)})
        before = module["wte"].weight
        with pytest.raises(KeyboardInterrupt):
            streamload.load_into(
                module, gpt2, mapping={"wte.weight": "wte.weight"}, strict=False, cache=True
            )
        assert module["wte"].weight is before
        assert os.listdir(cache) == []

    def test_modules_that_hold_values(self, cache, gpt2):
        module = torch.nn.ModuleDict({"wte": torch.nn.Embedding(320, 64)})
        report = streamload.load_into(
            module, gpt2, mapping={"wte.weight": "wte.weight"}, strict=False, cache=True
        )
        assert said(report, "cache not used: the module holds values")
        assert not cache.exists()

    def test_stored_layout(self, cache, gpt2):
        report = streamload.load(gpt2, layout="stored", cache=True).report
        assert said(report, "cache not used")


def test_overflow_is_told_again(cache, gpt2):
    path = f"{gpt2}/model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    tensors["ln_f.weight"][3] = 1e30
    save_file(tensors, path)
    for _ in range(2):
        report = streamload.load(gpt2, dtype="float16", cache=True).report
        assert said(report, "1 finite values overflow")
    assert said(report, "loaded from cache")


def test_writing_to_a_mapped_parameter_leaves_the_entry(cache, gpt2):
    streamload.load(gpt2, cache=True)
    model = streamload.load(gpt2, cache=True).model
    with torch.no_grad():
        model.tok_embed.weight.zero_()
    assert verify_entry(list_cache()[0]) == []
    clear_cache()
    assert list_cache() == []
    assert model(IDS).shape == (1, 4, 320), "what is mapped outlives its file"


def test_two_loads_at_once(cache, gpt2):
    models, errors = [], []

    def work():
        try:
            models.append(streamload.load(gpt2, dtype="bfloat16", cache=True).model)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert all(torch.equal(m(IDS), models[0](IDS)) for m in models)
    assert len(entries_in(cache)) == 1


def test_a_cached_load_takes_no_memory_of_its_own(cache, tmp_path):
    """64 MiB of weights; the second load must not copy them."""
    tensors = {f"t{i}": torch.zeros(1024, 1024, 4) for i in range(4)}
    save_file(tensors, tmp_path / "big.safetensors")
    with streamload.empty_weights():
        module = torch.nn.ParameterDict({n: torch.empty(t.shape) for n, t in tensors.items()})
    streamload.load_into(module, tmp_path / "big.safetensors", dtype="bfloat16", cache=True)
    with streamload.empty_weights():
        module = torch.nn.ParameterDict({n: torch.empty(t.shape) for n, t in tensors.items()})
    report = streamload.load_into(
        module, tmp_path / "big.safetensors", dtype="bfloat16", cache=True
    )
    assert report.bytes_read == 0
    assert report.mode == "map"
    assert report.memory.peak_anonymous_bytes < 16 << 20


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"STREAMLOAD_CACHE": "/a/b"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/streamload"),
        ({"HOME": "/home/me"}, "/home/me/.cache/streamload"),
    ],
)
def test_where_it_is(monkeypatch, variables, expected):
    for name in ("STREAMLOAD_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.platform", "linux")
    assert cache_folder() == expected


@pytest.mark.parametrize("name", ["__metadata__", "a\ud800"])
def test_a_name_that_no_entry_can_hold_is_loaded_all_the_same(cache, tmp_path, name):
    torch.save({name: torch.ones(3), "w": torch.ones(2)}, tmp_path / "x.bin")
    module = torch.nn.Module()
    with streamload.empty_weights():
        module.register_parameter(name, torch.nn.Parameter(torch.zeros(3)))
        module.register_parameter("w", torch.nn.Parameter(torch.zeros(2)))
    report = streamload.load_into(module, tmp_path / "x.bin", cache=True)
    assert said(report, "cache not written")
    assert torch.equal(module.get_parameter(name).detach(), torch.ones(3))
    assert not cache.exists() or os.listdir(cache) == []
