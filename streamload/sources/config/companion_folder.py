"""A folder with the small files that belong to a checkpoint, wherever they are."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from streamload.sources.base import Source
from streamload.sources.remote.side_files import folder_here
from streamload.sources.small_files import dumped

_CONFIGS = ("config.json", "generation_config.json")


@contextmanager
def config_folder(source: Source) -> Iterator[str]:
    """The checkpoint's own folder. If it is far away, or its files hold the configuration inside:
    one with ``config.json`` and ``generation_config.json``, for libraries that read nothing else,
    which is gone afterwards.
    """
    if not source.companions:
        with folder_here(source.path) as folder:
            yield folder
        return
    with tempfile.TemporaryDirectory(prefix="streamload-") as folder:
        files = {name: source.companion(name) for name in source.companions if name in _CONFIGS}
        config, _ = source.config()
        if config is not None:
            files["config.json"] = dumped(config)
        for name, data in files.items():
            with open(os.path.join(folder, name), "wb") as file:
                file.write(data)
        yield folder
