"""Nothing here may depend on the machine's own caches or settings."""

import importlib.util
import signal
import sys

import pytest
import tqdm
from hypothesis import settings

# What is drawn is the same in every run, so that a run says something about the change it judges.
settings.register_profile("here", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("here")
# transformers' progress bars start a thread that watches them; tests count threads.
tqdm.tqdm.monitor_interval = 0

# A shell that starts pytest in the background has it ignore SIGINT, and what is ignored stays so
# in every process started from here, where tests interrupt. What is caught does not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class NoTorch:
    """Stands where torch is not installed: what imports it is skipped, the rest runs."""

    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers"):
            pytest.skip("needs torch", allow_module_level=True)


if importlib.util.find_spec("torch") is None:
    sys.meta_path.append(NoTorch())


@pytest.fixture(autouse=True)
def _same_random_values():
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def _own_caches(tmp_path_factory, monkeypatch):
    """No test reads or writes the user's hub cache or cache folder."""
    folder = tmp_path_factory.getbasetemp() / "caches"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
