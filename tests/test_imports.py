"""Imports go one way, and listing a checkpoint needs neither torch nor numpy."""

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import streamload

PACKAGE = Path(streamload.__file__).parent
# What each room may import. No room is in a circle with another.
MAY_IMPORT = {
    "core": "",
    "system": "core",
    "mapping": "core",
    "models": "",
    "decoding": "core system",
    "sources": "core system decoding",
    "adapters": "core decoding sources",
    "ranks": "core mapping",
    "planning": "core system mapping ranks",
    "engine": "core system mapping planning decoding sources",
    "module": "core system ranks planning engine",
    "residency": "core system planning sources",
    "hf": "core system mapping planning sources",
    "saving": "core system mapping models ranks planning sources adapters engine module hf",
    "loading": "core system mapping models ranks planning sources adapters engine module "
    "residency hf saving",
    "verifying": "core system mapping planning decoding sources engine loading",
    "downloading": "core system sources saving",
    "generation": "core",
    "synthesis": "core saving mapping",
    "measuring": "core system mapping sources loading",
    "cli": "core system mapping models sources hf saving loading verifying downloading "
    "generation synthesis measuring",
}


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent == PACKAGE and path.stem in ("__init__", "__main__"):
            continue
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        yield ".".join(parts).removesuffix(".__init__"), path


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Every import in the file, lazy ones too; those for type checkers alone aside."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.lineno, node.module or ""


def test_every_room_has_its_place() -> None:
    assert {part_of(name) for name, _ in modules()} == set(MAY_IMPORT)


def test_the_rooms_are_in_no_circle() -> None:
    order = graphlib.TopologicalSorter({room: to.split() for room, to in MAY_IMPORT.items()})
    assert len(list(order.static_order())) == len(MAY_IMPORT)


def test_the_architecture_page_shows_this_graph() -> None:
    page = PACKAGE.parent / "docs" / "architecture.md"
    section = page.read_text("utf-8").partition("<!-- rooms -->")[2].partition("<!-- /rooms -->")[0]
    rows = [line.strip("|").split("|") for line in section.strip().splitlines()[2:]]
    shown = {room.strip(" `"): sorted(re.findall(r"`(\w+)`", to)) for room, _, to in rows}
    assert shown == {room: sorted(to.split()) for room, to in MAY_IMPORT.items()}


def test_the_architecture_page_keeps_to_its_limits() -> None:
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text("utf-8")
    steps = text.partition("<!-- steps -->")[2].partition("<!-- /steps -->")[0]
    words = text.partition("<!-- glossary -->")[2].partition("<!-- /glossary -->")[0]
    assert len(re.findall(r"^\d+\. ", steps, re.MULTILINE)) <= 15
    assert len(words.strip().splitlines()[2:]) <= 18


def test_rooms_import_only_what_they_may() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}: {name} imports {other}"
        for name, path in modules()
        for line, other in imported(path)
        if part_of(other) and other.startswith("streamload.")
        if part_of(other) not in (part_of(name), *MAY_IMPORT[part_of(name)].split())
    ]
    assert not wrong, "\n".join(wrong)


def test_no_folder_holds_more_than_fourteen_files() -> None:
    root = PACKAGE.parent
    tops = [root / name for name in ("streamload", "tests", "bench")]
    folders = [*tops, *(path for top in tops for path in top.rglob("*"))]
    crowded = {
        str(folder.relative_to(root)): len(files)
        for folder in folders
        if folder.is_dir() and len(files := list(folder.glob("*.py"))) > 14
    }
    assert not crowded


def test_the_engine_never_sees_names_of_architectures() -> None:
    for name, path in modules():
        if part_of(name) == "engine":
            text = path.read_text()
            assert not any(word in text.lower() for word in ("gpt2", "llama", "c_attn", "q_proj"))


@pytest.mark.parametrize(
    "statement",
    [
        "import streamload",
        "import streamload.sources.detect",
        "from streamload import open_checkpoint, PlanError, LoadReport, NameMap, Transpose, Plan",
    ],
)
def test_listing_needs_neither_torch_nor_numpy(statement: str) -> None:
    code = f"import sys; {statement}; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_starts_no_thread_and_prints_nothing() -> None:
    code = "import threading, streamload.loading.calls; assert threading.active_count() == 1"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
