"""The public surface: others script against these names, signatures and options."""

import importlib
import inspect

import pytest

import streamload

NAMES = [
    "Chain", "CheckpointError", "CheckpointNotFoundError", "Concat", "DownloadError",
    "ExportReport", "Flatten", "HeadSplit", "Identity", "Interleaved", "LoadOptions",
    "LoadReport", "Loaded", "Mean", "MemoryBudgetError", "MemorySource", "MissingExtraError",
    "NameMap", "Permute", "Plan", "PlanError", "ReadError", "Rule", "Source", "Split", "Stack",
    "StreamloadError", "Sum", "Transpose", "Unflatten", "Unstack", "WriteError", "convert",
    "empty_weights", "export", "generate", "iter_tensors", "load", "load_into",
    "load_state_dict", "load_transformers", "mapping_for", "open_checkpoint", "plan",
]  # fmt: skip

# Parameter names in order; those behind "*" are keyword-only.
SIGNATURES = {
    "load": "path **options",
    "load_into": "module path * mapping expected_layers on_assign **options",
    "load_state_dict": "path * mapping **options",
    "load_transformers": "path * cls **options",
    "plan": "module path * mapping expected_layers **options",
    "iter_tensors": "path * names **options",
    "open_checkpoint": "path",
    "convert": "source path * names dtype max_shard_bytes adapter progress",
    "export": "module path * mapping dtype max_shard_bytes",
    "generate": "model ids * max_new_tokens temperature top_k top_p seed stop_token",
    "empty_weights": "",
    "mapping_for": "model_type config",
}
DEFAULTS = {
    "load_into": {"mapping": "auto", "expected_layers": None, "on_assign": None},
    "load_state_dict": {"mapping": "auto"},
    "load_transformers": {"cls": None},
    "plan": {"mapping": "auto", "expected_layers": None},
    "iter_tensors": {"names": None},
    "convert": {
        "names": "published",
        "dtype": None,
        "max_shard_bytes": None,
        "adapter": None,
        "progress": None,
    },
    "export": {"mapping": "auto", "dtype": None, "max_shard_bytes": None},
    "generate": {
        "temperature": 0.0,
        "top_k": None,
        "top_p": None,
        "seed": None,
        "stop_token": None,
    },
}
OPTIONS = (
    "dtype device mode layout workers chunk_bytes strict layers prefix check_memory ties overflow "
    "replicas cache progress on_layer quantize adapter"
)


def test_all_is_pinned() -> None:
    assert sorted(streamload.__all__) == NAMES


@pytest.mark.parametrize("name", sorted(streamload.__all__))
def test_every_name_is_there_and_listed(name: str) -> None:
    assert getattr(streamload, name).__doc__
    assert name in dir(streamload)
    assert getattr(streamload, name) is getattr(streamload, name)


@pytest.mark.parametrize(("name", "expected"), SIGNATURES.items())
def test_signatures(name: str, expected: str) -> None:
    parameters = inspect.signature(getattr(streamload, name)).parameters.values()
    text: list[str] = []
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and "*" not in text:
            text.append("*")
        text.append(f"**{p.name}" if p.kind is p.VAR_KEYWORD else p.name)
    assert " ".join(text) == expected
    found = {p.name: p.default for p in parameters if p.default is not p.empty}
    assert found == DEFAULTS.get(name, {})


def test_options() -> None:
    assert set(streamload.LoadOptions.__annotations__) == set(OPTIONS.split())
    text = streamload.LoadOptions.__doc__ or ""
    assert all(f"{option}:" in text for option in OPTIONS.split())


def test_errors_share_one_root() -> None:
    errors = [getattr(streamload, name) for name in streamload.__all__ if name.endswith("Error")]
    assert all(issubclass(error, streamload.StreamloadError) for error in errors)
    for name in ("ReadError", "WriteError", "DownloadError"):
        assert issubclass(getattr(streamload, name), OSError)
    assert issubclass(streamload.CheckpointNotFoundError, FileNotFoundError)
    assert issubclass(streamload.MissingExtraError, ImportError)


def test_a_module_of_the_package_hides_no_function() -> None:
    for module in ("loading", "saving", "generation", "planning", "module.empty_weights"):
        importlib.import_module(f"streamload.{module}")
    for name in ("load", "export", "generate", "plan", "empty_weights"):
        assert callable(getattr(streamload, name))
        assert not inspect.ismodule(getattr(streamload, name))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        streamload.no_such_name  # noqa: B018
