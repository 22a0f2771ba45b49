"""Servers that are slow, break off, lie or change: right values, or a refusal in time."""

import time
import traceback

import pytest
import torch

import streamload
from streamload.core.errors import CheckpointError, ReadError, StreamloadError
from streamload.sources.remote import ahead
from tests.support.remote import tree
from tests.support.tiny import bag, same_bits, write

NAMES = [f"part.{n}" for n in range(12)]
EXPECTED = {name: torch.randn(64, 1024) for name in NAMES}  # 256 KiB each
SECRET = "sig=HUSH"


@pytest.fixture(autouse=True)
def _many_requests(monkeypatch):
    monkeypatch.setattr(ahead, "PIECE_BYTES", 64 << 10)


@pytest.fixture
def files(site, tmp_path):
    write(tmp_path / "x.safetensors", EXPECTED)
    site.files = tree(tmp_path)
    site.etags = dict.fromkeys(site.files, '"one"')
    return site


def load(site, **options):
    module = bag(dict.fromkeys(NAMES, (64, 1024)))
    url = f"{site.url}/x.safetensors?{SECRET}"
    streamload.load_into(module, url, **{"timeout_s": 30, "chunk_bytes": 128 << 10, **options})
    return module


def check_loaded(module):
    state = module.state_dict()
    assert all(same_bits(state[name], EXPECTED[name]) for name in NAMES)


def check_refused(site, error, **options):
    """Refused in time, with the address and without what is secret; the module is as it was."""
    module = bag(dict.fromkeys(NAMES, (64, 1024)))
    url = f"{site.url}/x.safetensors?{SECRET}"
    start_s = time.monotonic()
    with pytest.raises(StreamloadError, match=error) as info:
        streamload.load_into(module, url, **{"timeout_s": 1.5, **options})
    assert time.monotonic() - start_s < 10
    assert f"{site.url}/x.safetensors" in str(info.value)
    assert "HUSH" not in "".join(traceback.format_exception(info.value))
    assert "\n" not in str(info.value)
    assert all(p.is_meta for p in module.parameters())
    return info.value


@pytest.mark.parametrize(
    "fault",
    [
        {"cut_share": 0.3},
        {"busy_share": 0.2},
        {"cut_share": 0.3, "busy_share": 0.2},
        {"pause_s": 0.002},
        {"etags": {}},
        {"etags": {"x.safetensors": 'W/"weak"'}},
    ],
    ids=str,
)
def test_what_passes_is_tried_again(files, fault):
    for name, value in fault.items():
        setattr(files, name, value)
    check_loaded(load(files))


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_answers_that_may_pass(files, status):
    files.statuses["x.safetensors"] = [status, status]
    check_loaded(load(files))


def test_a_cut_answer_is_gone_on_with_where_it_broke_off(files):
    files.cuts["x.safetensors"] = [None, None, 40_000]
    check_loaded(load(files, workers=1))
    asked = [wanted for _, path, wanted in files.requests if path == "x.safetensors"]
    starts = [int(wanted.removeprefix("bytes=").partition("-")[0]) for wanted in asked]
    total = sum(int(w.partition("-")[2]) + 1 - s for w, s in zip(asked, starts, strict=True))
    # Of what had arrived nothing is asked for again.
    assert total == len(files.files["x.safetensors"]) + (64 << 10) - 40_000


@pytest.mark.parametrize(
    ("change", "kind", "error"),
    [
        ({"statuses": [403]}, CheckpointError, "answers 403 Forbidden"),
        ({"statuses": [404]}, CheckpointError, "answers 404 Not Found"),
        ({"statuses": [401]}, CheckpointError, "answers 401"),
        ({"statuses": [503] * 50}, CheckpointError, r"answers 503.*gave up after \d+ attempts"),
        ({"ranges": False}, CheckpointError, "does not send ranges of a file"),
        ({"lengths": {"x.safetensors": 9999}}, CheckpointError, "announces 9999 bytes"),
        ({"lengths": {"x.safetensors": 7}}, CheckpointError, "announces 7 bytes"),
        ({"content_range": "bytes 5-{1}/{2}".format}, CheckpointError, "sends 'bytes 5-"),
        ({"content_range": "bytes {0}-{1}/*".format}, CheckpointError, "says it is"),
        ({"content_range": "nonsense".format}, CheckpointError, "says it is 'nonsense'"),
        ({"content_range": "bytes {0}-{1}/100".format}, CheckpointError, "sends 'bytes 0-"),
        ({"content_range": "bytes {0}-{1}/99999999".format}, CheckpointError, "left over|hole"),
        ({"content_range": "bytes {0}-{1}/9999".format}, CheckpointError, "cut short"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_refused_when_it_is_opened(files, change, kind, error):
    for name, value in change.items():
        if name == "statuses":
            files.statuses["x.safetensors"] = list(value)
        else:
            setattr(files, name, value)
    assert isinstance(check_refused(files, error), kind)


def midway(site, change, after=8):
    """Have ``change`` done after a few answers."""
    seen = []

    def before(path):
        seen.append(path)
        if len(seen) == after:
            change()

    site.before = before


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"etags": {"x.safetensors": '"two"'}}, "changed or replaced on the server"),
        ({"etags": {}}, "changed or replaced on the server"),
        ({"files": {"x.safetensors": b"shorter" * 100_000}}, "sends 'bytes|changed"),
        ({"files": {}}, "answers 404"),
        ({"ranges": False}, "ceased to send ranges"),
        ({"content_range": "bytes 0-{1}/{2}".format}, "sends 'bytes 0-"),
        ({"busy_share": 1.0}, r"503.*gave up.*timeout_s=1.5"),
        ({"cut_share": 1.0, "random": type("No", (), {"random": lambda s: 0.0,
              "randrange": lambda s, n: 0})()}, "503|cut off.*gave up"),
        ({"pause_s": 60.0}, "nothing came from the server; gave up after"),
        ({"rate": 20_000.0}, "gave up after|comes too slowly"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)  # fmt: skip
def test_refused_midway(files, change, error):
    def happen():
        for name, value in change.items():
            setattr(files, name, value)

    midway(files, happen)
    found = check_refused(files, error)
    assert isinstance(found, ReadError)
    assert found.tensor in NAMES


def test_an_interrupt_does_not_wait_for_a_silent_server(files):
    """What ``progress`` raises, or Ctrl-C, ends reads that would wait for a minute."""
    midway(files, lambda: setattr(files, "pause_s", 60.0))

    def progress(done, total, name):
        if len(files.requests) >= 8:
            raise KeyboardInterrupt

    start_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        load(files, timeout_s=120, progress=progress)
    assert time.monotonic() - start_s < 5


def test_values_in_place_say_what_was_overwritten(files):
    midway(files, lambda: setattr(files, "etags", {"x.safetensors": '"two"'}), after=30)
    module = bag(dict.fromkeys(NAMES, (64, 1024)), device="cpu")
    with pytest.raises(ReadError, match="already overwritten"):
        streamload.load_into(module, f"{files.url}/x.safetensors", workers=1)


def test_a_server_that_is_not_there():
    start_s = time.monotonic()
    with pytest.raises(CheckpointError, match=r"no connection: it was refused; gave up"):
        streamload.open_checkpoint("http://127.0.0.1:9/x.safetensors", timeout_s=0.5)
    assert time.monotonic() - start_s < 5


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), True, "5"])
def test_timeouts_that_are_none(timeout_s):
    with pytest.raises((TypeError, ValueError), match="timeout_s"):
        streamload.load("http://127.0.0.1:9/x", timeout_s=timeout_s)


def test_requests_under_way_are_bounded(files):
    at_once, most = [0], [0]

    def before(path):
        at_once[0] += 1
        most[0] = max(most[0], at_once[0])
        time.sleep(0.01)
        at_once[0] -= 1

    files.before = before
    check_loaded(load(files, workers=2))
    assert 3 <= most[0] <= ahead.MOST_PIECES + 2
