"""Every example in the README and in docs/ runs, and every link leads somewhere."""

from __future__ import annotations

import re
import urllib.request
import uuid
import warnings
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, Session, blocks, pages, runnable
from tests.docs.stand_ins import Servers, prepare, small
from tests.support.remote import nothing_of_the_users, site, tree

__all__ = ["nothing_of_the_users", "site"]

_LINK = re.compile(r"\[[^\]]*\]\((?![a-z]+:|#)([^)#\s]+)")


@pytest.fixture
def servers(site, tmp_path_factory, monkeypatch):
    """A bucket in moto, the rest on a server that only has files."""
    pytest.importorskip("obstore")
    motos = pytest.importorskip("moto.server")
    running = motos.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    url = "http://{}:{}".format(*running.get_host_and_port())
    for name, value in {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "key",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path_factory.mktemp("served")
    bucket = f"b{uuid.uuid4().hex}"  # moto's are of the whole process
    found = Servers(site, f"s3://{bucket}", folder, monkeypatch)
    kind = {"Content-Type": "application/octet-stream"}
    for name, data in {"": b"", **tree(folder, "models/gpt2-xl/")}.items():
        request = urllib.request.Request(f"{url}/{bucket}/{name}", data, kind, method="PUT")
        urllib.request.urlopen(request, timeout=10).close()
    yield found
    running.stop()


@pytest.mark.parametrize("page", [page for page in pages() if blocks(page)])
def test_all_examples_run_in_order(page, tmp_path, monkeypatch, request):
    run = list(runnable(page))
    text = "".join(block.text for block in run)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STREAMLOAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("BENCH_DIR", str(tmp_path / "bench"))
    prepare(text, tmp_path)
    stand_in = small
    if "://" in text:
        far = request.getfixturevalue("servers").stand_in

        def stand_in(text):
            return small(far(text))

    session = Session(page, stand_in)
    with warnings.catch_warnings():
        for block in run:
            session.run(block)


def test_there_are_examples_of_both_kinds():
    kinds = [block.language for block in runnable("README.md")]
    assert kinds.count("python") >= 2
    assert kinds.count("bash") >= 2


def test_the_set_up_commands_stand_as_they_are_run():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.partition("<!-- set-up -->")[2].partition("<!-- /set-up -->")[0]
    commands = [line for line in section.splitlines() if line.startswith("pip install")]
    assert commands == [
        "pip install -c constraints.txt . && streamload demo",
        "pip install -c constraints.txt -e '.[test]' && pytest",
    ]


@pytest.mark.parametrize("page", [*pages(), "CONTRIBUTING.md", "bench/README.md"])
def test_links_lead_to_files_of_the_repository(page):
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    folder = Path(ROOT / page).parent
    broken = [target for target in _LINK.findall(text) if not (folder / target).exists()]
    assert not broken


def test_every_command_is_on_its_page():
    from streamload.cli import main

    text = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    shown = re.findall(r"^<!-- help: (\w+) -->$", text, re.MULTILINE)
    assert sorted(shown) == sorted(main.list_commands(None))
