"""``streamload download``."""

import json

from streamload.downloading import neox_files
from tests.support.loopback import Site, serve


def test_neox(run, tmp_path):
    needed, unused = neox_files([0])
    with serve(Site(dict.fromkeys((*needed, *unused), b"x"))) as site:
        args = ("download", "neox-20b", tmp_path / "n", "--base-url", site.url, "--layers", "0")
        result = run(*args)
        assert result.exit_code == 0
        assert f"to load it: streamload load {tmp_path / 'n'}" in result.stdout
        report = json.loads(run(*args, "--json").stdout)
    assert len(report["skipped"]) == len(needed) + len(unused)


def test_a_refusal_is_one_line(run, tmp_path):
    with serve(Site()) as site:
        result = run("download", "neox-20b", tmp_path, "--base-url", site.url)
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "404" in result.stderr


def test_what_it_does_not_know(run):
    assert run("download", "gpt2").exit_code == 1
