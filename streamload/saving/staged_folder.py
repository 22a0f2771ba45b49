"""Several files that belong together, put in place whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection
from contextlib import suppress

from streamload.saving.atomic import StagedFile, check_space, notices_of, sync_folder, translated
from streamload.saving.locks import locked
from streamload.saving.workplace import Workplace, remove_leftovers, whole_path

_TRIES = 100


class StagedFolder:
    """Files written into an existing or a new folder.

    A folder that is not there yet appears whole, by one rename. In an existing one the files are
    renamed one by one in the order they were added, while other writers wait. The one that seals
    the set is what makes readers see it, so an index goes behind its shards; a failure before it
    takes everything back.

    Args:
        path: of the folder.
        nbytes: about how much will be written.
        durable: see StagedFile.
        settle: called before files are put into a folder that is there, while other writers wait:
            the last chance to rename them. Gives the names of older files that go once the new
            ones are in place.

    Raises:
        WriteError: there is too little room, or nothing can be written there.
    """

    def __init__(
        self,
        path: str,
        *,
        nbytes: int = 0,
        durable: bool = True,
        settle: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self.path = path.rstrip(os.sep) or path
        self._problems: list[str] = []
        self._durable = durable
        self._settle = settle
        self._files: list[StagedFile] = []
        self._seal: StagedFile | None = None
        self._sealed = False
        self._made: list[str] = []
        self._workplaces: dict[str, Workplace] = {}
        parent, self._name = os.path.split(self.path)
        with translated(self.path):
            self._parent = whole_path(parent)
        self._place = os.path.join(self._parent, self._name)
        self._is_new = not os.path.lexists(self._place)
        for folder in (self._parent, self._place):
            remove_leftovers(folder)
        check_space(self._place, nbytes, path=self.path)
        with translated(self.path):
            first = self._workplace(self._parent if self._is_new else self._place)
            if self._is_new:
                first.make_folder(self._name)
        self._problems.append(first.problem)

    def _workplace(self, folder: str) -> Workplace:
        """The one in a folder, which is made with those above it; leftovers in it go."""
        for _ in range(_TRIES):
            if folder in self._workplaces:
                break
            self._make(folder)
            remove_leftovers(folder)
            with suppress(FileNotFoundError):  # another that gave up took the folder away
                self._workplaces[folder] = Workplace(folder, self._name)
        else:
            raise OSError(errno.ENOENT, "the folder is taken away as soon as it is made")
        return self._workplaces[folder]

    def _make(self, folder: str) -> None:
        above = folder
        while above and not os.path.lexists(above):
            self._made.append(above)
            above = os.path.dirname(above)
        os.makedirs(folder, exist_ok=True)

    def add(
        self, name: str, *, seals: bool = False, instead_of: StagedFile | None = None
    ) -> StagedFile:
        """A new file of the set, whose subfolders are made.

        Args:
            name: relative to the folder.
            seals: readers see the set once this file has its name.
            instead_of: one that was added before, which is dropped.
        """
        path = os.path.join(self._place, name)
        if instead_of is not None:
            instead_of.discard()
        with translated(path):
            if self._is_new:
                workplace, inner = self._workplaces[self._parent], os.path.join(self._name, name)
                workplace.make_folder(os.path.dirname(inner))
            else:
                workplace, inner = self._workplace(os.path.dirname(path)), os.path.basename(name)
        file = StagedFile(path, durable=self._durable, place=(workplace, inner))
        if instead_of is None:
            self._files.append(file)
        else:
            self._files[self._files.index(instead_of)] = file
        if seals:
            self._seal = file
        return file

    def commit(self) -> None:
        """Put all files in place."""
        for file in self._files:
            file.finish()
        if not (self._is_new and self._appears()):
            with locked(self._place) as problem:
                self._problems.append(problem)
                self._replace()
        self._remove_workplaces()

    def _appears(self) -> bool:
        """Give the new folder its name; False if another process has made it meanwhile."""
        with translated(self.path):
            try:
                self._workplaces[self._parent].put_folder_in_place(self._name, self._place)
            except OSError:
                if not os.path.isdir(self._place):
                    raise
                return False
        self._sealed = True
        if self._durable:
            sync_folder(self._parent)
        return True

    def _replace(self) -> None:
        """Put the files in place one by one, then remove what older sets left."""
        old = self._settle()
        for file in self._files:
            if self._is_new:
                with translated(file.path):
                    os.makedirs(os.path.dirname(file.path), exist_ok=True)
            file.commit()
            self._sealed |= file is self._seal
        new = {file.path for file in self._files}
        for path in (os.path.join(self._place, name) for name in old):
            if path not in new:
                with translated(path), suppress(FileNotFoundError):
                    os.unlink(path)

    def notices(self) -> list[str]:
        """What is to be said once it is in place."""
        gone = [file.path for file in self._files if not file.is_in_place()]
        return notices_of(self._problems, [os.path.relpath(path, self._place) for path in gone])

    def discard(self) -> None:
        """Remove everything that was written, and the folders that were made for it."""
        for file in self._files:
            file.discard()
            if not self._sealed:
                file.take_back()
        self._remove_workplaces()
        for folder in sorted(self._made, reverse=True):  # the innermost first
            with suppress(OSError):  # another's file is in it, or what was put in place
                os.rmdir(folder)

    def _remove_workplaces(self) -> None:
        for workplace in self._workplaces.values():
            workplace.remove()
