"""The public surface: others script against these names, signatures and options."""

import importlib
import inspect
import pydoc
import re
import typing

import pytest
import torch

import streamload
from tests.support import stub

NAMES = [
    "Chain", "CheckpointError", "CheckpointNotFoundError", "Concat", "DownloadError",
    "ExportReport", "Flatten", "HeadSplit", "Identity", "Interleaved", "LoadOptions",
    "LoadReport", "Loaded", "Mean", "MemoryBudgetError", "MemorySource", "MissingExtraError",
    "NameMap", "Permute", "Plan", "PlanError", "RankError", "ReadError", "Rule", "Source", "Split",
    "Stack",
    "StreamloadError", "Sum", "Transpose", "Unflatten", "Unstack", "WriteError", "convert",
    "empty_weights", "export", "generate", "iter_tensors", "load", "load_into",
    "load_state_dict", "load_transformers", "mapping_for", "open_checkpoint", "plan",
]  # fmt: skip

OPTIONS = (
    "dtype device mode layout workers chunk_bytes ring_bytes strict layers prefix check_memory "
    "ties overflow replicas cache progress on_layer quantize adapter timeout_s download"
)
OPTION_DEFAULTS = dict.fromkeys(OPTIONS.split()) | {
    "device": "cpu",
    "strict": True,
    "check_memory": True,
    "ties": "refuse",
    "overflow": "report",
    "replicas": "refuse",
    "cache": False,
}
OF_ITER_TENSORS = "dtype device workers chunk_bytes ring_bytes prefix timeout_s download"
# Parameter names in order; those behind "*" are keyword-only.
SIGNATURES = {
    "load": f"path * {OPTIONS}",
    "load_into": f"module path * mapping expected_layers on_assign {OPTIONS}",
    "load_state_dict": f"path * mapping {OPTIONS}",
    "load_transformers": f"path * cls {OPTIONS} key_mapping distributed_config",
    "plan": f"module path * mapping expected_layers {OPTIONS}",
    "iter_tensors": f"path * names {OF_ITER_TENSORS}",
    "open_checkpoint": "path * timeout_s download",
    "convert": "source path * names dtype max_shard_bytes prefix adapter timeout_s download "
    "progress",
    "export": "module path * mapping dtype max_shard_bytes",
    "generate": "model ids * max_new_tokens temperature top_k top_p seed stop_token",
    "empty_weights": "",
    "mapping_for": "model_type config",
}
STREAMS, BY_ITSELF = OPTION_DEFAULTS | {"mode": "stream"}, OPTION_DEFAULTS | {"mode": "auto"}
DEFAULTS = {
    "load": BY_ITSELF,
    "load_into": STREAMS | {"mapping": "auto", "expected_layers": None, "on_assign": None},
    "load_state_dict": STREAMS | {"mapping": "auto"},
    "load_transformers": BY_ITSELF | {"cls": None, "key_mapping": None, "distributed_config": None},
    "plan": OPTION_DEFAULTS
    | {"module": None, "path": None, "mapping": "auto", "expected_layers": None},
    "iter_tensors": {"names": None}
    | {name: OPTION_DEFAULTS[name] for name in OF_ITER_TENSORS.split()},
    "convert": {
        "names": "published",
        "dtype": None,
        "max_shard_bytes": None,
        "prefix": None,
        "adapter": None,
        "timeout_s": None,
        "download": None,
        "progress": None,
    },
    "open_checkpoint": {"timeout_s": None, "download": None},
    "export": {"mapping": "auto", "dtype": None, "max_shard_bytes": None},
    "generate": {
        "temperature": 0.0,
        "top_k": None,
        "top_p": None,
        "seed": None,
        "stop_token": None,
    },
}
TAKE_OPTIONS = [name for name, text in SIGNATURES.items() if " dtype device " in text]


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


@pytest.mark.parametrize("name", TAKE_OPTIONS)
def test_every_option_shows_its_type_its_default_and_what_it_means(name: str) -> None:
    """To ``help``, to IPython's ``?`` and to what completes names in a running Python."""
    function = getattr(streamload, name)
    assert "**options" not in inspect.getdoc(function)
    for parameter in inspect.signature(function).parameters.values():
        assert not isinstance(parameter.annotation, str), "types, not their source text"
        assert re.search(rf"^    {parameter.name}: \S+", inspect.getdoc(function), re.MULTILINE)
    text = pydoc.plain(pydoc.render_doc(function))
    assert "dtype: torch.dtype | str | None = None" in text
    if name != "iter_tensors":
        assert "Literal['auto', 'stream', 'map']" in text


def test_editors_and_type_checkers_see_the_same() -> None:
    assert stub.PATH.read_text("utf-8") == stub.text(), "python -m tests.support.stub writes it"


@pytest.mark.parametrize("name", TAKE_OPTIONS)
def test_a_static_reader_completes_every_option(name: str) -> None:
    """Jedi stands for editors that look at the files alone."""
    jedi = pytest.importorskip("jedi")
    (signature,) = jedi.Script(f"import streamload\nstreamload.{name}(").get_signatures()
    parameters = list(inspect.signature(getattr(streamload, name)).parameters)
    assert [p.name for p in signature.params if p.name != "*"] == parameters
    assert all(f"\n    {option}: " in signature.docstring() for option in parameters)


def test_choices_are_literals() -> None:
    hints = typing.get_type_hints(streamload.LoadOptions, localns={"torch": torch})
    for name, values in {
        "mode": ("auto", "stream", "map"),
        "layout": ("contiguous", "stored"),
        "ties": ("refuse", "keep"),
        "overflow": ("report", "refuse"),
        "replicas": ("refuse", "average"),
        "quantize": ("int8",),
    }.items():
        assert "".join(values) in re.sub(r"[^a-z0-9]", "", str(hints[name])), name


def test_dir_lists_public_names_alone() -> None:
    assert importlib.import_module("streamload.loading.calls")
    assert dir(streamload) == streamload.__all__


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
