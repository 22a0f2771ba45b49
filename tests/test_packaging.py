"""Every package that is imported is declared: at the top of a file, by what everybody installs."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import streamload

tomllib = pytest.importorskip("tomllib")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Distributions that are not called like what they are imported as.
DISTRIBUTIONS = {"yaml": "pyyaml", "PIL": "pillow"}
# Not for those who use streamload.
FOR_DEVELOPMENT = {"test", "bench", "docs", "release"}


def names_in(requirements: list[str]) -> set[str]:
    """Distributions that a list of requirements brings, its own extras' included."""
    found: set[str] = set()
    for requirement in requirements:
        name, extras = re.match(r"([\w.-]+)(?:\[([\w, -]+)\])?", requirement).groups()
        if name == "streamload":
            for extra in extras.split(","):
                found |= names_in(PROJECT["optional-dependencies"][extra.strip()])
        else:
            found.add(name.lower().replace("_", "-"))
    return found


CORE = names_in(PROJECT["dependencies"])
EXTRAS = {extra: names_in(wanted) for extra, wanted in PROJECT["optional-dependencies"].items()}


def third_party(tree: ast.AST, *, is_top: bool = True) -> Iterator[tuple[str, int, bool]]:
    """(distribution, line, whether importing the file needs it) of every import."""
    for node in ast.iter_child_nodes(tree):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            modules = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
        for module in modules:
            package = module.partition(".")[0]
            if package not in {*sys.stdlib_module_names, "streamload", "bench", "tests"}:
                distribution = DISTRIBUTIONS.get(package, package.lower().replace("_", "-"))
                yield distribution, node.lineno, is_top
        is_lazy = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or (
            isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        )
        yield from third_party(node, is_top=is_top and not is_lazy)


def undeclared(top: str) -> list[str]:
    lazily = CORE.union(*(names for e, names in EXTRAS.items() if e not in FOR_DEVELOPMENT))
    wrong = []
    for path in sorted((ROOT / top).rglob("*.py")):
        for name, line, is_top in third_party(ast.parse(path.read_text(encoding="utf-8"))):
            allowed = CORE if is_top else lazily
            if top == "bench":
                allowed = CORE | EXTRAS["bench"]
            if name not in allowed:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {name}")
    return wrong


@pytest.mark.parametrize("top", ["streamload", "bench"])
def test_every_package_that_is_imported_is_declared(top: str) -> None:
    assert not undeclared(top)


def test_the_reader_tells_top_level_imports_from_lazy_ones() -> None:
    text = """
import os, torch.nn
from yaml import safe_load
if TYPE_CHECKING:
    import rich
class A:
    import numpy
    def f(self):
        from huggingface_hub import x
        importlib.import_module("tqdm.auto").tqdm
"""
    assert list(third_party(ast.parse(text))) == [
        ("torch", 2, True),
        ("pyyaml", 3, True),
        ("rich", 5, False),
        ("numpy", 7, True),
        ("huggingface-hub", 9, False),
        ("tqdm", 10, False),
    ]


def test_core_is_what_the_readme_says() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (beyond,) = re.findall(r"Everything beyond ([^.]*?) is an extra", readme, re.DOTALL)
    assert set(re.findall(r"[\w-]+", beyond)) - {"and"} == {n.replace("-", "_") for n in CORE}


def test_the_version_is_said_once() -> None:
    assert streamload.__version__ == PROJECT["version"]
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", cited, re.MULTILINE) == [PROJECT["version"]]


def test_pinned_versions_are_of_declared_packages() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines if line[0] != "#"}
    assert pinned <= CORE.union(*EXTRAS.values())


@pytest.mark.skipif(not (ROOT / ".ci").exists(), reason="not in a clone of the repository")
def test_pre_commit_runs_what_ci_runs() -> None:
    yaml = pytest.importorskip("yaml")
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    commands = [f"{hook['entry']} ." for hook in local["hooks"] if hook["id"] != "mypy"]
    assert "\n".join([*commands, "mypy"]) in (ROOT / ".ci" / "run").read_text("utf-8")
