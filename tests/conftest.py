"""Nothing here may depend on the machine's own caches or settings."""

import pytest
import tqdm
from hypothesis import settings

settings.register_profile("here", deadline=None, print_blob=True)
settings.load_profile("here")
# transformers' progress bars start a thread that watches them; tests count threads.
tqdm.tqdm.monitor_interval = 0


@pytest.fixture(autouse=True)
def _own_caches(tmp_path_factory, monkeypatch):
    """No test reads or writes the user's hub cache or cache folder."""
    folder = tmp_path_factory.getbasetemp() / "caches"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
