"""From exceptions to lines and exit codes."""

import json

import pytest
from click.testing import CliRunner

from streamload.cli.failures import (
    as_options,
    exit_code,
    failure_as_dict,
    failures_as_one_line,
    one_line,
)
from streamload.cli.group import main
from streamload.core.errors import (
    CheckpointError,
    MemoryBudgetError,
    MissingExtraError,
    PlanError,
    ReadError,
)
from streamload.core.report import LoadReport

BUDGET = MemoryBudgetError("needs much", needed_bytes=5, available_bytes=3, limit="cgroup")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CheckpointError("cut"), 1),
        (PlanError("does not fit"), 1),
        (ReadError("gone"), 1),
        (MissingExtraError("tokenizers", extra="text", purpose="a prompt"), 1),
        (OSError(28, "No space left on device"), 1),
        (ValueError("top_k"), 1),
        (BUDGET, 3),
        (MemoryError(), 3),
        (KeyboardInterrupt(), 130),
        (RuntimeError("a bug"), None),
    ],
)
def test_exit_codes(error, code):
    assert exit_code(error) == code


def test_many_problems_are_cut_to_a_few():
    text = "x.safetensors does not fit:\n" + "\n".join(f"  problem {i}" for i in range(50))
    assert one_line(PlanError(text)) == (
        "x.safetensors does not fit: problem 0; problem 1; problem 2; "
        "… and 47 more (--json or `streamload plan` lists all)"
    )


def test_what_a_terminal_cannot_show_is_escaped():
    assert one_line(CheckpointError("a\x1b[31mb\udce9")) == "a\\x1b[31mb\\udce9"
    assert one_line(MemoryError()) == "out of memory: MemoryError"
    assert one_line(KeyboardInterrupt()) == "interrupted"


def test_failures_as_json():
    report = LoadReport(source="x", missing=("a.weight",), problems=("missing a.weight",))
    made = failure_as_dict(PlanError("refused", report=report))
    assert made["ok"] is False
    assert made["missing"] == ["a.weight"]
    assert made["error"] == "refused"
    assert failure_as_dict(BUDGET)["memory"] == {
        "needed_bytes": 5,
        "available_bytes": 3,
        "limit": "cgroup",
    }
    two = CheckpointError("damaged", problems=("one", "two"))
    assert failure_as_dict(two)["problems"] == ["one", "two"]


def test_translation_prints_and_exits(capsys):
    with pytest.raises(SystemExit) as end, failures_as_one_line({"streamload.as_json": True}):
        raise BUDGET
    assert end.value.code == 3
    out, err = capsys.readouterr()
    assert json.loads(out)["ok"] is False
    assert err == "streamload: error: needs much\n"


def test_faults_of_our_own_keep_their_traceback():
    with pytest.raises(ZeroDivisionError), failures_as_one_line({}):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("dtype='bfloat16' would need 3 GiB", "--dtype bfloat16 would need 3 GiB"),
        ("overwrite it with force=True (--force)", "overwrite it with --force"),
        ("quantize='int8' needs torchao", "--quantize int8 needs torchao"),
        ("check_memory=False tries", "--no-check-memory tries"),
        ("base_url= is needed", "--base-url is needed"),
        ("/a/mode=map/x: cut; 'dtype=f' is lost", "/a/mode=map/x: cut; 'dtype=f' is lost"),
    ],
)
def test_keyword_arguments_are_spelled_as_options(text, shown):
    assert as_options(text) == shown
    assert one_line(PlanError(text)) == shown


@pytest.mark.parametrize(
    ("option", "answer"),
    [
        ("--torch-dtype", "it is called --dtype here"),
        ("--device-map", "it is called --device here"),
        ("--load-in-8bit", "--quantize int8 is what there is"),
        ("--dtpye", "--dtype"),
    ],
)
def test_options_of_other_programs_are_answered(option, answer):
    result = CliRunner().invoke(main, ["load", "x", option, "y"])
    assert result.exit_code == 2
    assert option in result.stderr
    assert answer in result.stderr
