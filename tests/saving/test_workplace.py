"""Temporary files in folders that others write to: links, locks and leftovers of theirs."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading

import pytest

from streamload.core.errors import WriteError
from streamload.saving import locks, workplace
from streamload.saving.atomic import StagedFile, staged_file
from streamload.saving.locks import locked, open_own
from streamload.saving.staged_folder import StagedFolder
from streamload.saving.workplace import Workplace, remove_leftovers, temporary_name

fcntl = pytest.importorskip("fcntl")


def names(folder):
    return sorted(os.listdir(folder))


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "victim"
    path.write_bytes(b"mine")
    yield path
    assert path.read_bytes() == b"mine"
    assert not path.is_symlink()


@pytest.fixture
def out(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


@pytest.fixture(params=["locks", "locks on files only", "no locks", "no flock at all"])
def file_system(request, monkeypatch):
    """What file systems have: NFS locks no folders, some lock nothing, Windows has no flock."""
    inner = fcntl.flock

    def flock(number, how):
        if request.param == "no locks":
            raise OSError(errno.ENOLCK, "No locks available")
        if request.param != "locks" and stat.S_ISDIR(os.fstat(number).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        inner(number, how)

    if request.param == "no flock at all":
        monkeypatch.setitem(sys.modules, "fcntl", None)
        monkeypatch.setattr(workplace, "_THROUGH_FOLDERS", False)
    else:
        monkeypatch.setattr(fcntl, "flock", flock)
    return request.param


def test_names_are_random_and_under_255_bytes():
    for name in ("n" * 255, "ü" * 127, os.fsdecode(b"\xff" * 200), "x"):
        one, two = temporary_name(f"/a/{name}"), temporary_name(f"/a/{name}")
        assert one != two
        assert os.path.dirname(one) == "/a"
        assert len(os.fsencode(os.path.basename(one))) <= 255
        assert str(os.getpid()) not in os.path.basename(one).split("-")


def test_files_and_folders_on_any_file_system(out, file_system):
    for content in (b"one", b"two"):
        file = staged_file(str(out / "x"), 3)
        file.write(content, 0)
        file.commit()
        assert (out / "x").read_bytes() == content
        folder = StagedFolder(str(out / "set"))
        folder.add("a").write(content, 0)
        folder.add(os.path.join("deep", "b"), seals=True).write(content, 0)
        folder.commit()
        assert (out / "set" / "deep" / "b").read_bytes() == content
        said = [*file.notices(), *folder.notices()]
        assert any("no locks" in text for text in said) is file_system.startswith("no")
    folder = StagedFolder(str(out / "set"))
    folder.add("a").write(b"never", 0)
    folder.discard()
    assert names(out) == ["set", "x"]
    assert names(out / "set") == ["a", "deep"]


def test_another_working_folder_meanwhile(out, tmp_path, monkeypatch):
    """The place is where the path led when the writing began."""
    monkeypatch.chdir(out)
    (out / "there").mkdir()
    file, new, there = StagedFile("x"), StagedFolder("new"), StagedFolder("there/")
    monkeypatch.chdir(tmp_path)
    for folder in (new, there):
        folder.add(os.path.join("deep", "a"), seals=True).write(b"1", 0)
        folder.commit()
        assert folder.notices() == []
    file.commit()
    assert names(tmp_path) == ["out"]
    assert names(out) == ["new", "there", "x"]
    assert names(out / "new" / "deep") == names(out / "there" / "deep") == ["a"]


def test_what_others_see_meanwhile_is_private(out):
    os.umask(umask := os.umask(0o022))
    file = StagedFile(str(out / "x"))
    (name,) = names(out)
    assert stat.S_IMODE((out / name).stat().st_mode) == 0o700
    file.commit()
    assert stat.S_IMODE((out / "x").stat().st_mode) == 0o666 & ~umask


class TestRights:
    def test_those_of_the_old_file_are_kept(self, out):
        (out / "x").write_bytes(b"old")
        os.chmod(out / "x", 0o4640)
        StagedFile(str(out / "x")).commit()
        assert stat.S_IMODE((out / "x").stat().st_mode) == 0o640

    @pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="gives a file away")
    def test_another_users_file_does_not_widen_them(self, out):
        (out / "x").write_bytes(b"old")
        os.chmod(out / "x", 0o666)
        os.chown(out / "x", 12345, 12345)
        os.umask(umask := os.umask(0o022))
        StagedFile(str(out / "x")).commit()
        assert stat.S_IMODE((out / "x").stat().st_mode) == 0o666 & ~umask


class TestLinks:
    def test_a_link_at_the_destination_is_replaced_not_followed(self, out, victim):
        (out / "x").symlink_to(victim)
        file = StagedFile(str(out / "x"))
        file.write(b"new", 0)
        file.commit()
        assert (out / "x").read_bytes() == b"new"
        assert not (out / "x").is_symlink()

    def test_a_dangling_one_too(self, out, tmp_path):
        (out / "x").symlink_to(tmp_path / "nothing")
        StagedFile(str(out / "x")).commit()
        assert not (tmp_path / "nothing").exists()

    def test_a_link_with_the_temporary_name_makes_a_new_name(self, out, victim, monkeypatch):
        given = [str(out / ".streamload-1-x.tmp"), str(out / ".streamload-2-x.tmp")]
        os.symlink(victim.parent, given[0])
        monkeypatch.setattr(workplace, "temporary_name", lambda _: given.pop(0))
        file = StagedFile(str(out / "x"))
        file.write(b"new", 0)
        file.commit()
        assert names(out) == [".streamload-1-x.tmp", "x"]

    def test_a_folder_that_is_swapped_for_a_link_is_noticed(self, out, victim, monkeypatch):
        inner = os.mkdir
        made = []

        def mkdir(path, *arguments, **options):
            inner(path, *arguments, **options)
            if "dir_fd" not in options and not made:
                made.append(path)
                os.rename(path, f"{path}.away")
                os.symlink(victim.parent, path)

        monkeypatch.setattr(os, "mkdir", mkdir)
        place = Workplace(str(out))
        assert place.path != made[0]
        place.remove()
        assert sorted(names(victim.parent)) == ["out", "victim"]

    def test_a_folder_moved_away_midway_still_gets_its_own_file(self, out, victim):
        file = StagedFile(str(out / "x"))
        (name,) = names(out)
        os.rename(out / name, out / "elsewhere")
        (out / name).mkdir()
        (out / name / "x").symlink_to(victim)
        file.write(b"new", 0)
        file.commit()
        assert (out / "x").read_bytes() == b"new"
        assert not (out / "x").is_symlink()

    def test_links_in_leftovers_are_removed_and_not_followed(self, out, victim):
        left = Workplace(str(out))
        left._close()
        os.symlink(victim.parent, os.path.join(left.path, "folder"))
        os.symlink(victim, os.path.join(left.path, "file"))
        os.symlink(victim.parent, out / ".streamload-3-x.tmp")
        remove_leftovers(str(out))
        assert names(out) == [".streamload-3-x.tmp"], "another's link is left alone"

    def test_a_link_for_a_lock(self, out, victim, monkeypatch):
        monkeypatch.setattr(locks, "_WAIT_S", 0.1)
        (out / ".streamload.lock").symlink_to(victim)
        inner = fcntl.flock

        def flock(number, how):
            if stat.S_ISDIR(os.fstat(number).st_mode):
                raise OSError(errno.EBADF, "Bad file descriptor")
            inner(number, how)

        monkeypatch.setattr(fcntl, "flock", flock)
        with locked(str(out)) as problem:
            assert "no locks" in problem
        assert (out / ".streamload.lock").is_symlink()


class TestLocks:
    def test_a_foreign_lock_is_not_waited_for_forever(self, out, monkeypatch):
        monkeypatch.setattr(locks, "_WAIT_S", 0.2)
        number = os.open(out, os.O_RDONLY)
        fcntl.flock(number, fcntl.LOCK_EX)
        folder = StagedFolder(str(out))
        folder.add("a", seals=True).write(b"1", 0)
        folder.commit()
        os.close(number)
        assert names(out) == ["a"]
        assert any("locked by another process" in text for text in folder.notices())

    def test_one_after_the_other(self, out, file_system):
        if "no" in file_system:
            pytest.skip("nothing keeps them apart")
        inside, most = [0], [0]

        def work():
            for _ in range(20):
                with locked(str(out)) as problem:
                    assert not problem
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                    os.stat(out)
                    inside[0] -= 1

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert most == [1]
        assert names(out) == []


class TestLeftovers:
    def test_a_living_writers_are_kept_and_a_dead_ones_go(self, out):
        code = (
            "import os, signal, sys\n"
            "from streamload.saving.atomic import StagedFile\n"
            "from streamload.saving.staged_folder import StagedFolder\n"
            "folder = StagedFolder(os.path.join(sys.argv[1], 'set'))\n"
            "folder.add(os.path.join('deep', 'a')).write(b'half', 0)\n"
            "file = StagedFile(os.path.join(sys.argv[1], 'x'))\n"
            "file.write(b'half', 0)\n"
            "print('made', flush=True)\n"
            "if sys.stdin.readline().strip() == 'die':\n"
            "    os.kill(os.getpid(), signal.SIGKILL)\n"
            "folder.commit()\n"
            "file.commit()\n"
        )
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(out)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        for writer in writers:
            assert writer.stdout.readline() == "made\n"
        assert len(names(out)) == 4
        remove_leftovers(str(out))
        assert len(names(out)) == 4
        writers[0].communicate("die\n", timeout=60)
        remove_leftovers(str(out))
        assert len(names(out)) == 2
        writers[1].communicate("finish\n", timeout=60)
        assert writers[1].returncode == 0
        assert names(out) == ["set", "x"]
        assert (out / "x").read_bytes() == b"half"

    def test_what_is_there(self, out):
        (out / ".streamload-1-old.tmp").write_bytes(b"half")
        (out / ".streamload-2-begun.tmp").mkdir()
        (out / ".streamload-3-others.tmp").mkdir()
        (out / ".streamload-3-others.tmp" / "data").write_bytes(b"theirs")
        (out / ".streamload-notes").write_bytes(b"theirs")
        os.mkfifo(out / ".streamload-5-fifo.tmp")
        with open(out / ".streamload-4-held.tmp", "wb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            remove_leftovers(str(out))
        assert names(out) == [
            ".streamload-3-others.tmp",
            ".streamload-4-held.tmp",
            ".streamload-5-fifo.tmp",
            ".streamload-notes",
        ]

    @pytest.mark.parametrize("when", ["before the lock is made", "before it is locked"])
    def test_a_writer_that_has_just_begun_gets_another_place(self, out, monkeypatch, when):
        inner, tried = os.open, []

        def cleaned(path, *arguments, **options):
            is_lock = path == ".streamload.lock" and "dir_fd" in options
            if not is_lock or tried:
                return inner(path, *arguments, **options)
            tried.append(path)
            if when == "before the lock is made":
                remove_leftovers(str(out))
                return inner(path, *arguments, **options)
            number = inner(path, *arguments, **options)
            remove_leftovers(str(out))
            return number

        monkeypatch.setattr(os, "open", cleaned)
        file = StagedFile(str(out / "x"))
        file.write(b"whole", 0)
        file.commit()
        assert (out / "x").read_bytes() == b"whole"
        assert tried
        assert names(out) == ["x"]

    def test_a_half_removed_one_is_removed(self, out):
        place = Workplace(str(out))
        os.close(place.open("data", os.O_RDWR | os.O_CREAT))
        place._close()
        remove_leftovers(str(out))
        assert names(out) == []


class TestTwoWriters:
    def test_the_first_says_that_it_was_replaced(self, out):
        one, two = StagedFile(str(out / "x")), StagedFile(str(out / "x"))
        one.write(b"one", 0)
        two.write(b"two", 0)
        one.commit()
        assert one.notices() == []
        two.commit()
        assert one.notices() == ["written, but replaced by another process since: x"]
        assert two.notices() == []
        one.take_back()
        assert (out / "x").read_bytes() == b"two"

    def test_a_new_folder_that_another_has_made_meanwhile(self, out):
        one, two = (StagedFolder(str(out / "set")) for _ in range(2))
        for name, folder in (("a", one), ("b", two)):
            folder.add(name, seals=True).write(name.encode(), 0)
            folder.add("both").write(name.encode(), 0)
        one.commit()
        two.commit()
        assert names(out / "set") == ["a", "b", "both"]
        assert (out / "set" / "both").read_bytes() == b"b"
        assert one.notices() == ["written, but replaced by another process since: both"]
        assert names(out) == ["set"]

    def test_one_that_gives_up_takes_nothing_of_the_other(self, out):
        one = StagedFolder(str(out / "deep" / "set"))
        two = StagedFolder(str(out / "deep" / "set"))
        for folder in (one, two):
            folder.add("a", seals=True).write(b"1", 0)
        one.discard()
        two.commit()
        assert names(out / "deep") == ["set"]
        assert names(out / "deep" / "set") == ["a"]

    def test_a_folder_that_goes_just_before_it_is_used(self, out, monkeypatch):
        inner = os.mkdir

        def mkdir(path, *arguments, **options):
            if ".streamload-" in str(path) and os.path.isdir(out / "deep"):
                monkeypatch.setattr(os, "mkdir", inner)
                os.rmdir(out / "deep")
            inner(path, *arguments, **options)

        monkeypatch.setattr(os, "mkdir", mkdir)
        folder = StagedFolder(str(out / "deep" / "set"))
        folder.add("a", seals=True).write(b"1", 0)
        folder.commit()
        assert names(out / "deep" / "set") == ["a"]


class TestOwnFile:
    @pytest.mark.parametrize("kind", ["link", "dangling link", "hard link", "another user's"])
    def test_what_is_not_ours_makes_room(self, out, victim, kind):
        path = out / "x.part"
        if kind == "link":
            path.symlink_to(victim)
        elif kind == "dangling link":
            path.symlink_to(out / "nothing")
        elif kind == "hard link":
            os.link(victim, path)
        else:
            path.write_bytes(b"poison")
            try:
                os.chown(path, 12345, 12345)
            except OSError:
                pytest.skip("no file can be given away")
        number = open_own(str(path))
        assert os.fstat(number).st_size == 0
        os.write(number, b"new")
        os.close(number)
        assert names(out) == ["x.part"]

    def test_one_that_another_holds(self, out):
        number = open_own(str(out / "x"))
        assert open_own(str(out / "x")) is None
        os.write(number, b"begun")
        os.close(number)
        number = open_own(str(out / "x"))
        assert os.read(number, 9) == b"begun"
        os.close(number)

    def test_one_that_gets_its_name_just_before_it_is_locked(self, out, monkeypatch):
        """As when another process finishes the file between the opening and the lock."""
        (out / "x.part").write_bytes(b"whole")
        inner = fcntl.flock

        def flock(number, how):
            monkeypatch.setattr(fcntl, "flock", inner)
            os.rename(out / "x.part", out / "x")
            inner(number, how)

        monkeypatch.setattr(fcntl, "flock", flock)
        number = open_own(str(out / "x.part"))
        os.ftruncate(number, 0)
        os.close(number)
        assert (out / "x").read_bytes() == b"whole"

    def test_a_folder_in_its_place(self, out):
        (out / "x").mkdir()
        with pytest.raises(OSError, match="directory"):
            open_own(str(out / "x"))


def test_where_every_place_is_taken_away_it_is_said(out, monkeypatch):
    monkeypatch.setattr(Workplace, "_occupy", lambda self: os.rmdir(self.path))
    with pytest.raises(WriteError, match="taken away"):
        StagedFile(str(out / "x"))
