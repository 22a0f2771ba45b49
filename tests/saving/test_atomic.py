"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import errno
import os

import pytest

from streamload.core.errors import WriteError
from streamload.saving.atomic import StagedFile, check_space, translated
from streamload.saving.staged_folder import StagedFolder


def names(folder):
    return sorted(os.listdir(folder))


class TestFile:
    def test_it_has_its_name_after_the_commit_only(self, tmp_path):
        path = tmp_path / "x"
        path.write_bytes(b"old")
        file = StagedFile(str(path))
        file.write(b"cd", 2)
        file.write(memoryview(b"ab"), 0)
        assert path.read_bytes() == b"old"
        file.commit()
        assert path.read_bytes() == b"abcd"
        assert names(tmp_path) == ["x"]

    @pytest.mark.parametrize("finished", [True, False])
    def test_discarding_leaves_the_old_one(self, tmp_path, finished):
        path = tmp_path / "x"
        path.write_bytes(b"old")
        file = StagedFile(str(path))
        file.write(b"new", 0)
        if finished:
            file.finish()
            file.finish()
        file.discard()
        file.discard()
        assert path.read_bytes() == b"old"
        assert names(tmp_path) == ["x"]

    def test_taking_back_a_name_that_was_free(self, tmp_path):
        for old in (None, b"old"):
            path = tmp_path / f"x{old!r}"
            if old is not None:
                path.write_bytes(old)
            file = StagedFile(str(path))
            file.commit()
            file.take_back()
            assert path.exists() is (old is not None)

    def test_writes_that_take_less_than_asked_are_continued(self, tmp_path, monkeypatch):
        inner = os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda fd, data, at: inner(fd, data[:3], at))
        file = StagedFile(str(tmp_path / "x"))
        file.write(b"0123456789", 0)
        file.commit()
        assert (tmp_path / "x").read_bytes() == b"0123456789"

    def test_without_pwrite(self, tmp_path, monkeypatch):
        monkeypatch.delattr(os, "pwrite")
        file = StagedFile(str(tmp_path / "x"))
        file.write(b"cd", 2)
        file.write(b"ab", 0)
        file.commit()
        assert (tmp_path / "x").read_bytes() == b"abcd"

    def test_where_nothing_can_be_made(self, tmp_path):
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(WriteError, match="file/x"):
            StagedFile(str(tmp_path / "file" / "x"))
        with pytest.raises(WriteError, match="none/x"):
            StagedFile(str(tmp_path / "none" / "x"))


class TestFolder:
    def test_a_new_one_appears_at_once(self, tmp_path):
        folder = StagedFolder(str(tmp_path / "new" / "out") + "/")
        folder.add("a").write(b"1", 0)
        assert not (tmp_path / "new" / "out").exists()
        folder.add("b", seals=True).write(b"2", 0)
        folder.commit()
        assert names(tmp_path / "new") == ["out"]
        assert names(tmp_path / "new" / "out") == ["a", "b"]

    def test_discarding_a_new_one(self, tmp_path):
        folder = StagedFolder(str(tmp_path / "out"))
        folder.add("a").write(b"1", 0)
        folder.discard()
        assert names(tmp_path) == []

    @pytest.mark.parametrize("at", [1, 2, 3])
    def test_what_fails_before_the_seal_is_taken_back(self, tmp_path, monkeypatch, at):
        (tmp_path / "a").write_bytes(b"old")
        folder = StagedFolder(str(tmp_path))
        for name in ("a", "b"):
            folder.add(name).write(b"new", 0)
        folder.add("index", seals=True).write(b"new", 0)
        folder.add("extra").write(b"new", 0)
        inner, count = os.replace, [0]

        def replace(*arguments, **options):
            count[0] += 1
            if count[0] == at:
                raise OSError(errno.EIO, "Input/output error")
            inner(*arguments, **options)

        monkeypatch.setattr(os, "replace", replace)
        with pytest.raises(WriteError):
            folder.commit()
        folder.discard()
        assert names(tmp_path) == ["a"]

    def test_what_fails_behind_the_seal_is_left(self, tmp_path, monkeypatch):
        folder = StagedFolder(str(tmp_path))
        folder.add("a").write(b"new", 0)
        folder.add("index", seals=True).write(b"new", 0)
        folder.add("extra").write(b"new", 0)
        inner = os.replace

        def replace(source, target, **options):
            if target.endswith("extra"):
                raise OSError(errno.EIO, "Input/output error")
            inner(source, target, **options)

        monkeypatch.setattr(os, "replace", replace)
        with pytest.raises(WriteError):
            folder.commit()
        folder.discard()
        assert names(tmp_path) == ["a", "index"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_no_room_is_said_in_words(code):
    with pytest.raises(WriteError, match="p: cannot be written: no room") as info, translated("p"):
        raise OSError(code, "x")
    assert info.value.errno == code


def test_room_is_checked(tmp_path):
    check_space(str(tmp_path), 1)
    with pytest.raises(WriteError, match="no room"):
        check_space(str(tmp_path), 1 << 62)
