"""The examples run, on checkpoints of their own making."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import sys

import pytest

from tests.docs.blocks import ROOT

EXAMPLES = ROOT / "examples"
SAID = {
    "compare_loaders.py": r"load_file +\d.*\nfrom_pretrained +\d.*\nstreamload +\d",
    "merge_adapter.py": r"4 of \d+ tensors were merged, and all are what they must be",
    "transformers_bfloat16.py": r"\d+ tensors equal from_pretrained's, bit for bit",
}


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_scripts(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of processes that it starts
    monkeypatch.setattr(sys, "argv", [str(EXAMPLES / name)])
    runpy.run_path(sys.argv[0], run_name="__main__")
    assert re.search(SAID[name], capsys.readouterr().out)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.ipynb")))
def test_notebooks(name, monkeypatch, tmp_path):
    """Cell by cell; what a cell ends with is shown as a notebook would."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    book = json.loads((EXAMPLES / name).read_text(encoding="utf-8"))
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    shown = []
    for number, cell in enumerate(cells):
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"{name}, cell {number}", "exec"), names)
        if last is not None:
            code = ast.Expression(last.value)
            value = eval(compile(code, f"{name}, cell {number}", "eval"), names)
            html = getattr(value, "_repr_html_", None)
            shown.append(html() if html is not None else repr(value))
    assert any("<details" in text and "blocks.0.qkv.weight" in text for text in shown)


def test_the_list_of_examples_is_whole():
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    files = {path.name for path in EXAMPLES.iterdir()} - {"README.md"}
    assert {match[0] for match in re.findall(r"\]\(((\w+)\.(py|ipynb))\)", text)} == files
