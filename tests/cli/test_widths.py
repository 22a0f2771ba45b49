"""Every command in real terminals of several widths: no table and no bar takes a second line."""

from __future__ import annotations

import json
import re
import shlex
import sys
import textwrap
import time

import pytest

from streamload.cli.group import main
from streamload.synthesis import synthesize
from tests.support.tmux import Terminal

WIDTHS = (40, 60, 80, 120)
# All commands, run in one process for each width; what measures or fetches answers at once.
RUN = textwrap.dedent("""
    import json, os, sys
    import streamload.downloading, streamload.measuring.modes
    from streamload.cli.group import main
    from streamload.downloading import DownloadReport

    jobs, found, folder = json.load(open(sys.argv[1]))
    os.chdir(folder)
    streamload.measuring.modes.measure = lambda *args, **options: found
    streamload.downloading.download = lambda what, folder, progress, **options: DownloadReport(
        "d", "d", tuple(f"model-{at:05d}-of-00099.safetensors" for at in range(99)),
        ("a",), ("b",), 12_345_678_901, ("left out: " + "word " * 30,), 1234.5)
    for arguments in jobs:
        print("=====", arguments[0], flush=True)
        try:
            main(arguments, prog_name="streamload")
        except SystemExit as end:
            print("exit", end.code, flush=True)
    print("=====END", flush=True)
""")
FIGURES = {
    "ok": True, "load_s": 12.34, "first_use_s": 0.001, "total_s": 12.34,
    "total_range_s": [12.3, 14.56], "bytes_per_s": 1.5e9, "floor_reached": 0.97,
    "floor": "read + cast", "peak_rss_bytes": 3 << 30, "held_back_by": "memory bandwidth",
    "evidence": "it moved at least 6.00 GiB through memory, where plain copying reaches more",
}  # fmt: skip
MEASURED = {
    "ok": True, "path": "m", "read_bytes": 6 << 30, "dtype": "bfloat16", "workers": 8, "rounds": 3,
    "cache": {"asked": "cold", "worked": True, "how": "dropped and looked at again"},
    "machine": {"cpu": "a processor with a long name", "cpus": 16, "filesystem": "ext4",
                "versions": {"torch": "2.13.0", "safetensors": "0.8.0"}},
    "floor": {"read": FIGURES, "read + cast": FIGURES},
    "modes": {"stream": FIGURES, "stored": FIGURES, "map": {**FIGURES, "ok": False, "reason": "x"}},
    "notes": ["The machine was busy: in 2 of 18 measurements other processes used 1.5 CPUs."],
}  # fmt: skip
JOBS = {
    "demo": [["demo", "demo-1"]],
    "inspect": [["inspect", "m"], ["inspect", "m", "--all"], ["inspect", "m", "wte.weight"],
                ["inspect", "m", "h.0.attn.c_atn.weight"]],
    "plan": [["plan", "m", "--dtype", "bfloat16"], ["plan", "m", "--shard", "tp", "--ranks", "4"],
             ["plan", "misfit"]],
    "load": [["load", "m", "--cache"], ["load", "m", "-v", "--dtype", "float16"],
             ["load", "misfit"]],
    "generate": [["generate", "m", "--prompt", "The ship", "--max-new-tokens", "5", "-v"],
                 ["generate", "m", "--tokens", "1,2", "--max-new-tokens", "4"]],
    "convert": [["convert", "m", "out", "--dtype", "bfloat16", "--names", "local"]],
    "verify": [["verify", "m"], ["verify", "m", "--against", "out"]],
    "download": [["download", "hf:org/name"]],
    "cache": [["cache"], ["cache", "verify"], ["cache", "clear"]],
    "bench": [["bench", "m"]],
    "synth": [["synth", "gpt2-tiny", "s", "--force"]],
}  # fmt: skip
HELP = [[name, "--help"] for name in JOBS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("widths")
    synthesize("gpt2-tiny", made / "m")
    synthesize("gpt2-tiny", made / "misfit")
    synthesize("gpt2-stub", made / "demo-1")
    config = json.loads((made / "misfit" / "config.json").read_text())
    (made / "misfit" / "config.json").write_text(json.dumps({**config, "vocab_size": 400}))
    return made


def test_no_command_is_left_out():
    assert set(JOBS) == set(main.list_commands(None))


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_takes_a_second_line(folder, tmp_path, width):
    jobs = [job for several in JOBS.values() for job in several]
    jobs += HELP if width > 40 else []  # there the lists in it have no room
    (tmp_path / "jobs.json").write_text(json.dumps([jobs, MEASURED, str(folder)]))
    code = (sys.executable, "-c", RUN, tmp_path / "jobs.json")
    environment = f"PYTHONPATH={shlex.quote(':'.join(sys.path))} STREAMLOAD_CACHE=c"
    with Terminal(tmp_path, width) as terminal:
        terminal.run(f"env -u NO_COLOR -u COLUMNS {environment} {shlex.join(map(str, code))}")
        terminal.wait_for("=====END")
        shown, broken = terminal.lines(), terminal.broken()
    assert broken == []
    assert not any("Traceback" in line for line in shown)
    endings = [line for line in shown if line.startswith("exit ")]
    # As meant: a wrong name, a misfit in plan and load, a conversion that was cast.
    assert endings.count("exit 1") == 4, "\n".join(shown)
    assert endings.count("exit 0") == len(jobs) - 4
    check_tables("\n".join(shown), width)


def check_tables(text: str, width: int) -> None:
    """Numbers stay whole and stand in a column, at its right; names are cut in their middle."""
    listing = text.partition("===== inspect")[2].partition("\nexit")[0]
    sizes = [re.search(r"  [\d.]+ (KiB|B)$", line) for line in listing.splitlines()]
    ends = {len(line) for line, size in zip(listing.splitlines(), sizes, strict=True) if size}
    rows = [size for size in sizes if size]
    assert len(rows) > 12
    assert len({match.end() for match in rows}) == 1, listing
    assert max(ends) <= width
    assert ("no room here for: " in listing) == (width == 40), listing
    bench = text.partition("===== bench")[2]
    assert "12.34 (12.30-14.56)" in bench
    shown = re.sub(r"\(no room here for:.*?\)", "", bench, flags=re.DOTALL)
    assert ("  of the floor" in shown) == (width >= 80), bench


BAR = textwrap.dedent("""
    import time
    from streamload.cli.render.progress import progress_bar
    with progress_bar("loading") as show:
        for at in range(0, 101, 5):
            show(at << 25, 100 << 25, f"model.layers.{at}.self_attn.a_long_projection_name.weight")
            time.sleep(0.05)
    print("END", flush=True)
""")


@pytest.mark.parametrize("width", WIDTHS)
def test_the_bar_is_one_line_with_numbers_first(tmp_path, width):
    seen = set()
    code = shlex.join((sys.executable, "-c", BAR))
    with Terminal(tmp_path, width) as terminal:
        terminal.run(f"env -u COLUMNS PYTHONPATH={shlex.quote(':'.join(sys.path))} {code}")
        until = time.monotonic() + 60
        while "END" not in (screen := terminal.screen()):
            assert time.monotonic() < until, screen
            assert len(screen) <= 1, screen
            seen.update(screen)
        assert terminal.screen()[0] == "END", "it disappears when all is done"
    drawn = [line for line in seen if "%" in line]
    assert len(drawn) > 2
    for line in drawn:
        found = re.fullmatch(r"loading +\d+%  [ \d.]+/3\.12 GiB(.*)", line)
        assert found, line
        assert ("model.layers" in found[1]) == (width >= 80) or "…" in found[1], line
