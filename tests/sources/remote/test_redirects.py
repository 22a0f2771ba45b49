"""Where servers lead: what is secret stays at home, and nobody is led into a private network."""

import socket

import pytest

import streamload
from streamload.core.errors import CheckpointError
from streamload.sources.remote.guarding import is_public
from tests.support.loopback import Site, serve
from tests.support.remote import tree
from tests.support.tiny import gpt2_tensors, write

FILE = "x.safetensors"
SECRETS = "http://user:HUSH@"


@pytest.fixture
def other(tmp_path):
    """Where the file is."""
    write(tmp_path / FILE, gpt2_tensors(vocab=3000))
    with serve(Site(files=tree(tmp_path))) as running:
        yield running


@pytest.fixture
def led(site, other):
    """A server that leads there, under another name of this machine."""
    site.redirects[FILE] = f"{other.url}/{FILE}?X-Signature=THEIRS"
    return site


def with_secrets(site):
    return f"{SECRETS}{site.url.removeprefix('http://')}/{FILE}?sig=HUSH"


def read_all(url):
    with streamload.open_checkpoint(url) as source:
        return {name: source.tensor(name) for name in source.catalog}


def test_credentials_go_to_the_address_that_was_given(site, other):
    site.files = other.files
    read_all(with_secrets(site))
    assert all(h["Authorization"] == "Basic dXNlcjpIVVNI" for h in site.headers)
    assert all(h["path"].endswith("?sig=HUSH") for h in site.headers)


def test_credentials_do_not_go_where_the_server_leads(led, other):
    assert len(read_all(with_secrets(led))) == len(gpt2_tensors())
    assert led.headers[0]["Authorization"]
    assert other.headers
    for sent in other.headers:
        assert "Authorization" not in sent
        assert "HUSH" not in str(sent)
        assert sent["path"].endswith("X-Signature=THEIRS")


def test_the_way_is_asked_for_once(led, other):
    read_all(f"{led.url}/{FILE}")
    assert len([path for _, path, _ in led.requests if path == FILE]) == 1
    assert len(other.requests) > 1


def test_the_way_is_asked_for_again_when_what_it_led_to_has_ended(led, other):
    with streamload.open_checkpoint(f"{led.url}/{FILE}") as source:
        other.statuses[FILE] = [403]
        for name in source.catalog:
            source.tensor(name)
    assert len([path for _, path, _ in led.requests if path == FILE]) == 2


@pytest.mark.parametrize(
    ("location", "text"),
    [
        (f"/{FILE}", "redirects more than"),
        ("", "no address of a web server"),
        ("ftp://host/x", "no address of a web server"),
        ("file:///etc/passwd", "no address of a web server"),
        ("http://[::1", "no address of a web server"),
        ("http://h:port/", "no address of a web server"),
    ],
)
def test_redirects_that_lead_nowhere(site, location, text):
    site.redirects[FILE] = location
    with pytest.raises(CheckpointError, match=text):
        streamload.open_checkpoint(f"{site.url}/{FILE}")
    assert len(site.requests) < 10


@pytest.mark.parametrize(
    "host",
    ["127.0.0.2", "localhost", "10.0.0.1", "192.168.1.1", "169.254.169.254", "[::1]", "0.0.0.0",
     "[::ffff:10.0.0.1]", "[64:ff9b::a00:1]", "[fd00::1]", "[fe80::1]", "2130706433", "100.64.0.1"],
)  # fmt: skip
def test_no_private_address_is_contacted_that_was_not_named(site, monkeypatch, host):
    site.redirects[FILE] = f"http://{host}:9/secret"
    contacted = []
    connect = socket.socket.connect

    def noting(sock, address):
        contacted.append(address[0])
        connect(sock, address)

    monkeypatch.setattr(socket.socket, "connect", noting)
    with pytest.raises(CheckpointError, match="leads to a private address") as info:
        streamload.open_checkpoint(f"{site.url}/{FILE}")
    assert set(contacted) == {"127.0.0.1"}
    assert "secret" not in str(info.value)


def test_a_name_that_becomes_private_is_not_followed(site, other, monkeypatch):
    """What was public when it was first looked up may not lead inwards later."""
    site.files = other.files
    port = int(site.url.rpartition(":")[2])
    places = ["93.184.216.34"]
    asked = socket.getaddrinfo

    def lookup(host, *args, **options):
        if host != "files.example":
            return asked(host, *args, **options)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (places[0], port))]

    connect = socket.socket.connect
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    # The public address is this machine, for the test.
    monkeypatch.setattr(
        socket.socket, "connect", lambda sock, at: connect(sock, ("127.0.0.1", at[1]))
    )
    with streamload.open_checkpoint(f"http://files.example:{port}/{FILE}") as source:
        first = next(iter(source.catalog))
        source.tensor(first)
        places[0] = "10.0.0.1"
        for file in source._files.values():  # what a server does after a while
            for _, connection in file.site._transport._idle:
                connection.cut()
        with pytest.raises(OSError, match="leads to a private address"):
            {name: source.tensor(name) for name in source.catalog}


def test_a_private_address_that_the_user_named_is_read(site, other):
    site.files = other.files
    assert read_all(f"{site.url.replace('127.0.0.1', 'localhost')}/{FILE}")


@pytest.mark.parametrize(
    ("address", "expected"),
    [("8.8.8.8", True), ("2606:4700::1111", True), ("::ffff:8.8.8.8", True), ("10.1.2.3", False),
     ("::ffff:127.0.0.1", False), ("64:ff9b::7f00:1", False), ("2002:7f00:1::", False),
     ("224.0.0.1", False), ("240.0.0.1", False), ("::", False), ("fe80::1%eth0", False),
     ("nonsense", False)],
)  # fmt: skip
def test_which_addresses_are_public(address, expected):
    assert is_public(address) is expected


def test_a_proxy_of_the_environment_is_used(site, other, monkeypatch):
    """Which looks names up by itself; it gets the whole address, as proxies do."""
    site.files = {f"http://files.example/{FILE}": other.files[FILE]}
    monkeypatch.setenv("http_proxy", site.url)
    assert read_all(f"http://files.example/{FILE}")
    assert site.headers[0]["Host"] == "files.example"
