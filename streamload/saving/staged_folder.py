"""Several files that belong together, put in place whole or not at all."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress

from streamload.saving.atomic import (
    StagedFile,
    check_space,
    locked,
    remove_leftovers,
    sync_folder,
    temporary_name,
    translated,
)


class StagedFolder:
    """Files written into an existing or a new folder.

    A folder that is not there yet appears whole, by one rename. In an existing one the files are
    renamed one by one in the order they were added. The one that seals the set is what makes
    readers see it, so an index goes behind its shards; a failure before it takes everything back.

    Args:
        path: of the folder.
        nbytes: about how much will be written.
        durable: see StagedFile.

    Raises:
        WriteError: there is too little room, or nothing can be written there.
    """

    def __init__(self, path: str, *, nbytes: int = 0, durable: bool = True) -> None:
        self.path = path.rstrip(os.sep) or path
        self._durable = durable
        self._files: list[StagedFile] = []
        self._seal: StagedFile | None = None
        self._sealed = False
        self._made: list[str] = []
        self._prepared: set[str] = set()
        self._is_new = not os.path.lexists(self.path)
        parent = os.path.dirname(self.path) or os.curdir
        for folder in (parent, self.path):
            remove_leftovers(folder)
        check_space(self.path, nbytes)
        with translated(self.path):
            self._folder = temporary_name(self.path) if self._is_new else self.path
            self._prepare(self._folder)

    def _prepare(self, folder: str) -> None:
        """Make a folder and those above it; remove what killed runs left in it."""
        if folder in self._prepared:
            return
        above = folder
        while above and not os.path.lexists(above):
            self._made.append(above)
            above = os.path.dirname(above)
        os.makedirs(folder, exist_ok=True)
        remove_leftovers(folder)
        self._prepared.add(folder)

    def add(self, name: str, *, seals: bool = False) -> StagedFile:
        """A new file of the set, whose subfolders are made.

        Args:
            name: relative to the folder.
            seals: readers see the set once this file has its name.
        """
        shown = os.path.join(self.path, name)
        path = os.path.join(self._folder, name)
        with translated(shown):
            self._prepare(os.path.dirname(path))
        file = StagedFile(path, shown=shown, durable=self._durable)
        self._files.append(file)
        if seals:
            self._seal = file
        return file

    def commit(self) -> None:
        """Put all files in place."""
        for file in self._files:
            file.finish()
        parent = os.path.dirname(self.path) or os.curdir
        with locked(parent):  # two sets that go to one place must not mix
            for file in self._files:
                file.commit()
                self._sealed |= file is self._seal
            if self._is_new:
                with translated(self.path):
                    self._put_folder_in_place()
        if self._is_new and self._durable:
            sync_folder(parent)

    def _put_folder_in_place(self) -> None:
        try:
            os.rename(self._folder, self.path)
        except OSError:
            if not os.path.isdir(self.path):
                raise
            # Another process has made the folder meanwhile: this set replaces its files.
            for file in self._files:
                there = os.path.join(self.path, os.path.relpath(file.path, self._folder))
                os.makedirs(os.path.dirname(there), exist_ok=True)
                os.replace(file.path, there)
            shutil.rmtree(self._folder, ignore_errors=True)

    def discard(self) -> None:
        """Remove everything that was written, and the folders that were made for it."""
        for file in self._files:
            file.discard()
            if not self._sealed:
                file.take_back()
        if self._is_new:
            shutil.rmtree(self._folder, ignore_errors=True)
        for folder in sorted(self._made, reverse=True):  # the innermost first
            with suppress(OSError):  # another's file is in it, or what was put in place
                os.rmdir(folder)
