"""What stands in the cache folder is input: made anew or refused, never believed blindly."""

from __future__ import annotations

import json
import os
import shutil
import stat
import struct
import time

import pytest
import torch

import streamload
from streamload.core.errors import WriteError
from streamload.core.specs import Catalog
from streamload.saving.cache import trust
from streamload.saving.cache.entries import clear_cache, list_cache, verify_entry
from streamload.saving.cache.facts import Facts, facts_of
from streamload.saving.cache.limit import set_cache_limit
from streamload.saving.cache.trust import note_path
from streamload.sources import files
from streamload.synthesis import synthesize


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("STREAMLOAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def gpt2(tmp_path):
    return synthesize("gpt2-tiny", tmp_path / "gpt2", masks=False).path


@pytest.fixture
def entry(cache, gpt2):
    """The path of a good entry."""
    load(gpt2)
    (path,) = [cache / name for name in os.listdir(cache) if not name.startswith(".")]
    return path


def load(path):
    return streamload.load(path, dtype="bfloat16", cache=True)


def said(report, text):
    return any(text in notice for notice in report.notices)


def is_right(loaded, path):
    expected = streamload.load(path, dtype="bfloat16").model.state_dict()
    found = loaded.model.state_dict()
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def header_of(path):
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(path, header, body, *, text=None, pad=b""):
    raw = (text if text is not None else json.dumps(header)).encode() + pad
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + body)


class TestWhatIsMadeAnew:
    """The load gives right values, the entry is whole afterwards and the next load maps it."""

    @pytest.fixture(autouse=True)
    def _is_mended(self, entry, gpt2, cache):
        yield
        loaded = load(gpt2)
        assert is_right(loaded, gpt2)
        assert said(loaded.report, "made anew")
        assert said(loaded.report, "cache written")
        again = load(gpt2)
        assert again.report.mode == "map"
        assert is_right(again, gpt2)
        assert [verify_entry(e) for e in list_cache()] == [[]]
        names = os.listdir(cache)
        assert sorted(names) == sorted([entry.name, f".{entry.name}.checked"])

    @pytest.mark.parametrize("restored", [False, True])
    @pytest.mark.parametrize("at", [-3, -2000, 9000, 40, 2])
    def test_a_flipped_byte(self, entry, at, restored):
        """In the data, the header, its length; also where size and time are as they were."""
        time.sleep(0.02)  # the system's clock of files ticks every few milliseconds
        before = entry.stat()
        with open(entry, "r+b") as file:
            file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
        if restored:
            os.utime(entry, ns=(before.st_atime_ns, before.st_mtime_ns))

    @pytest.mark.parametrize("keep", [0, 1, 8, 5000, -1])
    def test_cut(self, entry, keep):
        os.truncate(entry, keep if keep >= 0 else entry.stat().st_size - 1)

    def test_longer(self, entry):
        with open(entry, "ab") as file:
            file.write(b"\0")

    @pytest.mark.parametrize("value", ["[" * 100_000, '{"version": 1}'])
    def test_facts_that_are_none(self, entry, value):
        header, body = header_of(entry)
        header["__metadata__"]["streamload_cache"] = value
        with_header(entry, header, body)

    @pytest.mark.parametrize(("field", "value"), [("notices", 3), ("crc32", []), ("plan", None)])
    def test_facts_of_other_types(self, entry, field, value):
        header, body = header_of(entry)
        facts = json.loads(header["__metadata__"]["streamload_cache"])
        facts[field] = value
        header["__metadata__"]["streamload_cache"] = json.dumps(facts)
        with_header(entry, header, body)

    def test_a_misaligned_one(self, entry):
        header, body = header_of(entry)
        text = json.dumps(header)
        pad = b" " * ((1 - (8 + len(text))) % 64)
        with_header(entry, header, body, text=text, pad=pad)

    def test_another_dtype_of_equal_size(self, entry):
        header, body = header_of(entry)
        for name, info in header.items():
            if name != "__metadata__":
                info["dtype"] = "F16"
        with_header(entry, header, body)

    def test_a_tensor_more(self, entry):
        header, body = header_of(entry)
        end = max(i["data_offsets"][1] for n, i in header.items() if n != "__metadata__")
        header["more"] = {"dtype": "U8", "shape": [1], "data_offsets": [end, end + 1]}
        with_header(entry, header, body + b"\0")

    def test_two_tensors_exchanged(self, entry):
        header, body = header_of(entry)
        same = [n for n in header if n != "__metadata__" and header[n]["shape"] == [64]]
        one, two = same[:2]
        header[one], header[two] = header[two], header[one]
        with_header(entry, header, body)

    def test_another_entry_under_its_name(self, entry, gpt2, cache):
        streamload.load(gpt2, dtype="float16", cache=True)
        (other,) = [n for n in os.listdir(cache) if n[0] != "." and n != entry.name]
        os.replace(cache / other, entry)
        os.unlink(note_path(str(cache / other)))

    def test_a_link(self, entry, tmp_path):
        os.rename(entry, tmp_path / "elsewhere")
        entry.symlink_to(tmp_path / "elsewhere")

    def test_others_may_write_it(self, entry):
        os.chmod(entry, 0o666)

    def test_another_users(self, entry):
        try:
            os.chown(entry, 12345, 12345)
        except OSError:
            pytest.skip("no file can be given away")

    def test_a_fifo(self, entry):
        entry.unlink()
        os.mkfifo(entry)


def facts_with(**changed):
    good = Facts("p", "f", "s", "BF16", 1.0, ("n",), {"t": "0" * 8})
    (text,) = good.metadata().values()
    return Catalog({}, {"streamload_cache": json.dumps({**json.loads(text), **changed})})


class TestFacts:
    def test_good_ones(self):
        found = facts_of(facts_with(dtype=None, written_s=3, notices=["\x1b[2J"]))
        assert (found.dtype, found.written_s, found.notices) == (None, 3, ("\\x1b[2J",))
        assert facts_of(facts_with(made_with=["a=\x1b"])).made_with == ("a=\\x1b",)

    def test_entries_of_before_made_with(self):
        (text,) = Facts("p", "f", "s", "BF16", 1.0).metadata().values()
        old = {key: value for key, value in json.loads(text).items() if key != "made_with"}
        assert facts_of(Catalog({}, {"streamload_cache": json.dumps(old)})).made_with == ()

    @pytest.mark.parametrize(
        "text",
        [
            *("", "{", "[]", "null", "3", '"text"', "[" * 100_000, '{"a":' * 100_000, "\ud800"),
            *("{}", '{"version": 1}', '{"version": true}', '{"version": 99}', "NaN", "1" * 10_000),
        ],
    )
    def test_none(self, text):
        assert facts_of(Catalog({}, {"streamload_cache": text})) is None

    @pytest.mark.parametrize("value", [3, True, [[1]], {"a": 1}, 1e400, -1, None, [None], "x"])
    def test_other_types(self, value):
        right = {"dtype": (None, "x"), "source": ("x",), "written_s": (3,), "plan": ("x",)}
        for name in (
            "plan",
            "source",
            "dtype",
            "written_s",
            "crc32",
            "notices",
            "made_with",
            "version",
        ):
            if value is True or value not in right.get(name, ()):
                assert facts_of(facts_with(**{name: value})) is None, name
        assert facts_of(facts_with(more=value)) is None


class TestTheNote:
    def test_a_hit_reads_no_data(self, entry, gpt2, monkeypatch):
        monkeypatch.setattr(trust, "wrong_sums", None)
        assert load(gpt2).report.mode == "map"

    def test_an_entry_that_was_moved_is_compared_once(self, entry, gpt2, monkeypatch):
        shutil.copy(entry, f"{entry}.new")
        os.replace(f"{entry}.new", entry)
        loaded = load(gpt2)
        assert said(loaded.report, "its checksums still match")
        assert loaded.report.mode == "map"
        monkeypatch.setattr("streamload.saving.cache.through.wrong_sums", None)
        assert not said(load(gpt2).report, "checksums")

    @pytest.mark.parametrize(
        "text", [b"", b"{}", b"[1]", b"null", b"[" * 5000, b"\xff", b"[true, 1e999]", b"x" * 10_000]
    )
    def test_another_note_is_none(self, entry, gpt2, text):
        with open(note_path(str(entry)), "wb") as file:
            file.write(text)
        loaded = load(gpt2)
        assert said(loaded.report, "its checksums still match")
        assert is_right(loaded, gpt2)
        assert not said(load(gpt2).report, "checksums")

    @pytest.mark.parametrize("kind", ["link", "folder", "others may write it"])
    def test_a_note_that_is_no_file_of_ours(self, entry, gpt2, kind, tmp_path):
        note = note_path(str(entry))
        if kind == "link":
            os.rename(note, tmp_path / "note")
            os.symlink(tmp_path / "note", note)
        elif kind == "folder":
            os.unlink(note)
            os.mkdir(note)
        else:
            os.chmod(note, 0o666)
        assert said(load(gpt2).report, "its checksums still match")
        assert said(load(gpt2).report, "checksums") is (kind == "folder")

    def test_a_use_is_noted_there(self, entry, gpt2):
        before = entry.stat()
        os.utime(note_path(str(entry)), (1, 1))
        load(gpt2)
        assert list_cache()[0].to_dict()["unused_s"] < 60
        after = entry.stat()
        assert files.identity_of(after) == files.identity_of(before)

    def test_it_goes_with_its_entry(self, entry, gpt2, cache):
        clear_cache()
        assert os.listdir(cache) == []


class TestTheFolder:
    def test_it_is_made_for_this_user_alone(self, entry, cache):
        os.umask(umask := os.umask(0o022))
        assert stat.S_IMODE(cache.stat().st_mode) == 0o700 & ~umask
        assert all(stat.S_IMODE((cache / n).stat().st_mode) == 0o600 for n in os.listdir(cache))

    @pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o722])
    def test_one_that_others_can_write_is_refused(self, cache, gpt2, mode):
        cache.mkdir()
        cache.chmod(mode)
        loaded = load(gpt2)
        assert said(loaded.report, f"cache not used: {cache}: others can write to it (mode")
        assert said(loaded.report, "chmod 700")
        assert is_right(loaded, gpt2)
        assert os.listdir(cache) == []

    def test_one_that_they_could_write_before_is_not_believed(self, entry, cache, gpt2):
        cache.chmod(0o777)
        assert load(gpt2).report.mode == "stream"
        cache.chmod(0o700)
        assert load(gpt2).report.mode == "map"

    @pytest.mark.parametrize("mode", [0o700, 0o755, 0o500])
    def test_one_that_they_can_read_is_used(self, cache, gpt2, mode):
        cache.mkdir()
        cache.chmod(mode)
        assert load(gpt2).report.ok
        cache.chmod(0o700)

    def test_one_in_a_folder_of_everybodys(self, cache, gpt2, tmp_path):
        tmp_path.chmod(0o1777)
        load(gpt2)
        assert load(gpt2).report.mode == "map"

    def test_another_users(self, cache, gpt2):
        cache.mkdir(mode=0o700)
        try:
            os.chown(cache, 12345, 12345)
        except OSError:
            pytest.skip("no folder can be given away")
        loaded = load(gpt2)
        assert said(loaded.report, "belongs to another user (uid 12345)")
        assert os.listdir(cache) == []

    def test_one_that_is_swapped_before_it_is_written(self, cache, gpt2, monkeypatch):
        inner = os.makedirs

        def makedirs(path, *arguments, **options):
            inner(path, *arguments, **options)
            if str(path) == str(cache):
                cache.chmod(0o777)

        monkeypatch.setattr(os, "makedirs", makedirs)
        assert said(load(gpt2).report, "cache not written: ")
        assert os.listdir(cache) == []

    def test_a_file_in_its_place(self, cache, gpt2):
        cache.write_bytes(b"mine")
        cache.chmod(0o666)
        loaded = load(gpt2)
        assert said(loaded.report, f"cache not used: {cache}: it is not a folder")
        assert is_right(loaded, gpt2)
        assert cache.read_bytes() == b"mine"

    def test_a_folder_in_an_entrys_place(self, entry, gpt2):
        entry.unlink()
        entry.mkdir()
        (entry / "data").write_bytes(b"mine")
        loaded = load(gpt2)
        assert said(loaded.report, "made anew")
        assert said(loaded.report, "cache not written")
        assert is_right(loaded, gpt2)
        assert (entry / "data").read_bytes() == b"mine"


def test_a_dangling_link_is_replaced(entry, gpt2, tmp_path):
    entry.unlink()
    entry.symlink_to(tmp_path / "nothing")
    assert said(load(gpt2).report, "cache written")
    assert not (tmp_path / "nothing").exists()
    assert load(gpt2).report.mode == "map"


def test_whatever_stands_there_is_listed_verified_and_cleared(entry, cache, gpt2, tmp_path):
    empty, deep, link, fifo, folder = (cache / f"{'0' * 20}-{n:020x}.safetensors" for n in range(5))
    empty.write_bytes(b"")
    deep.write_bytes(struct.pack("<Q", 50_000) + b"[" * 50_000)
    link.symlink_to(tmp_path)
    os.mkfifo(fifo)
    folder.mkdir()
    (cache / "notes.txt").write_bytes(b"mine")
    found = {os.path.basename(e.path): e for e in list_cache()}
    assert len(found) == 6
    assert [name for name, e in found.items() if not e.problem] == [entry.name]
    assert [name for name, e in found.items() if not verify_entry(e)] == [entry.name]
    assert all(json.dumps(e.to_dict()) for e in found.values())
    with pytest.raises(WriteError, match=rf"{folder.name}: cannot be removed"):
        clear_cache()
    assert sorted(os.listdir(cache)) == [folder.name, "notes.txt"]
    assert tmp_path.is_dir()


def test_checkpoints_of_somebody_else_in_the_folder_stay(entry, cache):
    mine = cache / "model.safetensors"
    shutil.copy(entry, mine)
    assert [e.path for e in list_cache()] == [str(entry)]
    assert [e.path for e in set_cache_limit(1)] == [str(entry)]
    assert clear_cache() == []
    assert mine.exists()
