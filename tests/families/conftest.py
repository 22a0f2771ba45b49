import pytest
import transformers

from tests.families.checkpoints import FAMILIES, saved

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Name of a family → its saved checkpoint."""
    root = tmp_path_factory.mktemp("families")
    return lambda name: saved(name, root)


@pytest.fixture(params=FAMILIES)
def checkpoint(request, checkpoints):
    """Each family's saved checkpoint in turn."""
    return checkpoints(request.param)
