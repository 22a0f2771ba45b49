"""Buckets: S3 against moto's server, Google's and Azure's against a server that only has files."""

import json
import os
import time
import traceback
import urllib.request

import pytest
import torch

import streamload
from streamload.core.errors import CheckpointError, CheckpointNotFoundError, MissingExtraError
from streamload.sources.remote import ahead
from tests.sources.conformance import SourceConformance
from tests.sources.remote.test_web_source import EXPECTED, write_shards
from tests.support.remote import tree
from tests.support.tiny import gpt2_tensors, same_bits, write, write_gpt2

obstore = pytest.importorskip("obstore")
store = pytest.importorskip("obstore.store")
DATE = "Wed, 21 Oct 2015 07:28:00 GMT"


@pytest.fixture(scope="module")
def server():
    motos = pytest.importorskip("moto.server")
    running = motos.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    yield "http://{}:{}".format(*running.get_host_and_port())
    running.stop()


def put(url, data=b""):
    kind = {"Content-Type": "application/octet-stream"}  # else it is read as a form, for ever
    request = urllib.request.Request(url, data, kind, method="PUT")
    urllib.request.urlopen(request, timeout=10).close()


@pytest.fixture
def bucket(server, monkeypatch, request):
    """A new bucket's address for requests without credentials."""
    settings = {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "HUSHID",
        "AWS_SECRET_ACCESS_KEY": "HUSHKEY",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    bucket = f"b{abs(hash(request.node.nodeid))}"
    put(f"{server}/{bucket}")
    return f"{server}/{bucket}"


def fill(bucket, folder, start=""):
    for name, data in tree(folder, start).items():
        put(f"{bucket}/{urllib.request.pathname2url(name)}", data)
    return f"s3://{bucket.rpartition('/')[2]}"


class TestS3Shards(SourceConformance):
    @pytest.fixture
    def expected(self):
        return EXPECTED

    @pytest.fixture
    def source(self, bucket, tmp_path):
        write_shards(tmp_path)
        address = fill(bucket, tmp_path, "a b/c+d/")
        with streamload.open_checkpoint(f"{address}/a b/c+d") as opened:
            yield opened


class TestS3TorchFile(SourceConformance):
    @pytest.fixture
    def expected(self):
        return EXPECTED

    @pytest.fixture
    def source(self, bucket, tmp_path):
        torch.save(EXPECTED, tmp_path / "any.name.pt")
        with streamload.open_checkpoint(f"{fill(bucket, tmp_path)}/any.name.pt") as opened:
            yield opened


def test_a_bucket_tells_what_is_in_it(bucket, tmp_path):
    """A name that nobody would ask for is found, and a whole set without an index."""
    for at in (1, 2):
        write(tmp_path / f"odd-{at:05d}-of-00002.safetensors", {f"t{at}": torch.ones(3)})
    with streamload.open_checkpoint(fill(bucket, tmp_path)) as source:
        assert set(source.catalog) == {"t1", "t2"}


def test_convert_brings_the_companions_along(bucket, tmp_path):
    write_gpt2(tmp_path / "here")
    (tmp_path / "here" / "tokenizer_config.json").write_text('{"a": 1}')
    (tmp_path / "here" / "notes.txt").write_text("not for us")
    address = fill(bucket, tmp_path / "here", "m/")
    report = streamload.convert(f"{address}/m/", tmp_path / "new", dtype="bfloat16")
    assert sorted(os.listdir(tmp_path / "new")) == [
        "config.json", "model.safetensors", "tokenizer_config.json"
    ]  # fmt: skip
    with streamload.open_checkpoint(tmp_path / "new") as source:
        for name, values in gpt2_tensors().items():
            assert same_bits(source.tensor(name), values.bfloat16())
    assert report.bytes_read == sum(t.nbytes for t in gpt2_tensors().values())


def test_an_object_that_is_replaced_midway(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(ahead, "PIECE_BYTES", 64 << 10)
    write(tmp_path / "x.safetensors", {"t": torch.ones(1 << 18), "u": torch.ones(1 << 18)})
    address = fill(bucket, tmp_path)
    with streamload.open_checkpoint(f"{address}/x.safetensors") as source:
        source.tensor("t")
        data = bytearray((tmp_path / "x.safetensors").read_bytes())
        data[-1] ^= 1
        obstore.put(store.S3Store(bucket.rpartition("/")[2]), "x.safetensors", bytes(data))
        with pytest.raises(OSError, match="changed or replaced on the server") as info:
            read_anew(source)
        assert info.value.tensor == "u"


def read_anew(source):
    """Read what is not held already."""
    source.tensor("u")
    source.tensor("u")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("absent.safetensors", "404"),
        ("absent/", "it is empty"),
        ("absent", "it is empty"),
        ("", "it is empty"),
    ],
)
def test_what_is_not_there(bucket, path, text):
    with pytest.raises(CheckpointNotFoundError, match=text):
        streamload.open_checkpoint(f"s3://{bucket.rpartition('/')[2]}/{path}")


def test_an_empty_object(bucket):
    put(f"{bucket}/x.safetensors")
    with pytest.raises(CheckpointError, match="empty"):
        streamload.open_checkpoint(f"s3://{bucket.rpartition('/')[2]}/x.safetensors")


def test_no_such_bucket(bucket):
    with pytest.raises(CheckpointNotFoundError, match="no such bucket"):
        streamload.open_checkpoint("s3://no-such-bucket-here/x.safetensors")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"AWS_ALLOW_HTTP": None}, "AWS_ALLOW_HTTP"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "gave up after"),
        ({"AWS_ENDPOINT_URL": "nonsense"}, "."),
    ],
)
def test_settings_that_do_not_work(bucket, monkeypatch, settings, text):
    for name, value in settings.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    start_s = time.monotonic()
    with pytest.raises(CheckpointError, match=text) as info:
        streamload.open_checkpoint(f"s3://{bucket.rpartition('/')[2]}/x.safetensors", timeout_s=1)
    assert time.monotonic() - start_s < 8
    shown = "".join(traceback.format_exception(info.value))
    assert "HUSH" not in shown
    assert "Debug source" not in shown  # that library's own text
    assert len(str(info.value).splitlines()) == 1


def test_no_credentials(monkeypatch, site):
    """The machine's metadata service is that library's own last resort; here it has none."""
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", site.url)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    with pytest.raises(CheckpointError, match=r"no credentials: set AWS_\*") as info:
        streamload.open_checkpoint("s3://some-bucket/x.safetensors", timeout_s=1)
    assert len(str(info.value).splitlines()) == 1


@pytest.mark.parametrize("fault", [{"busy_share": 0.2}, {"cut_share": 0.3}, {"etags": {}}], ids=str)
def test_faults_that_pass(site, tmp_path, monkeypatch, fault):
    """Against a server that has files and no more, which is all that reading S3 needs."""
    monkeypatch.setattr(ahead, "PIECE_BYTES", 64 << 10)
    monkeypatch.setenv("AWS_ENDPOINT_URL", site.url)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    values = {f"t{n}": torch.randn(1 << 16) for n in range(8)}
    write(tmp_path / "x.safetensors", values)
    site.files = tree(tmp_path, "bucket/")
    site.etags = dict.fromkeys(site.files, '"one"')
    for name, value in fault.items():
        setattr(site, name, value)
    with streamload.open_checkpoint("s3://bucket/x.safetensors") as source:
        assert all(same_bits(source.tensor(name), values[name]) for name in values)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"statuses": [403]}, "403"),
        ({"statuses": [301]}, "AWS_REGION"),
        ({"ranges": False}, "ranges"),
        ({"lengths": {"bucket/x.safetensors": 100}}, "cut off|broke"),
        ({"lengths": {"bucket/x.safetensors": 99999}}, "broke|nothing came"),
        ({"content_range": "bytes 7-{1}/{2}".format}, "another range"),
        ({"before": lambda path: time.sleep(3)}, "nothing came|broke"),
    ],
    ids=str,
)
def test_faults_that_do_not(site, tmp_path, monkeypatch, change, text):
    monkeypatch.setenv("AWS_ENDPOINT_URL", site.url)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    write(tmp_path / "x.safetensors", {"t": torch.randn(1 << 19)})
    site.files = tree(tmp_path, "bucket/")
    for name, value in change.items():
        if name == "statuses":
            site.statuses["bucket/x.safetensors"] = value
        else:
            setattr(site, name, value)
    start_s = time.monotonic()
    with pytest.raises(CheckpointError, match=text) as info:
        streamload.open_checkpoint("s3://bucket/x.safetensors", timeout_s=1)
    assert time.monotonic() - start_s < 8
    assert str(info.value).startswith("s3://bucket/x.safetensors: ")
    assert len(str(info.value).splitlines()) == 1


def test_google(site, tmp_path, monkeypatch):
    account = {
        "gcs_base_url": site.url, "disable_oauth": True, "client_email": "", "private_key": "",
        "private_key_id": "",
    }  # fmt: skip
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account))
    monkeypatch.setenv("GOOGLE_ALLOW_HTTP", "true")
    write(tmp_path / "x.safetensors", EXPECTED)
    site.files, site.date = tree(tmp_path, "bucket/m/"), DATE
    site.etags = dict.fromkeys(site.files, '"one"')
    with streamload.open_checkpoint("gs://bucket/m/x.safetensors") as source:
        assert same_bits(source.tensor("f32"), EXPECTED["f32"])


def test_convert_where_files_may_be_read_and_not_listed(site, tmp_path, monkeypatch):
    """As with a key for objects alone, to which the server refuses what is absent, too."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", site.url)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    write_gpt2(tmp_path / "m")
    site.files = tree(tmp_path / "m", "bucket/m/")
    site.etags, site.date = dict.fromkeys(site.files, '"one"'), DATE
    asked = []

    def refuse(path):
        asked.append(path)
        if path not in site.files:
            site.statuses[path] = [403]

    site.before = refuse
    streamload.convert("s3://bucket/m/model.safetensors", tmp_path / "here")
    found, expected = dict(streamload.iter_tensors(tmp_path / "here")), gpt2_tensors()
    assert found.keys() == expected.keys()
    assert all(same_bits(found[name], expected[name]) for name in expected)
    assert (tmp_path / "here" / "config.json").exists()
    assert "bucket/m/tokenizer.json" in asked


def test_azure(site, tmp_path, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sv=2020&sig=HUSH")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", site.url)
    monkeypatch.setenv("AZURE_ALLOW_HTTP", "true")
    write(tmp_path / "x.safetensors", EXPECTED)
    site.files, site.date = tree(tmp_path, "container/m/"), DATE
    site.etags = dict.fromkeys(site.files, '"one"')
    with streamload.open_checkpoint("az://container/m/x.safetensors") as source:
        assert same_bits(source.tensor("f32"), EXPECTED["f32"])
    assert "sig=HUSH" in site.headers[0]["path"]  # found by that library's own conventions
    site.files.clear()
    with pytest.raises(CheckpointError, match="404") as info:
        streamload.open_checkpoint("az://container/m/x.safetensors")
    assert "HUSH" not in "".join(traceback.format_exception(info.value))


@pytest.mark.parametrize("address", ["gs://bucket/x.safetensors", "az://container/x.safetensors"])
def test_settings_that_are_missing(monkeypatch, site, address):
    monkeypatch.setenv("GCE_METADATA_HOST", site.url.removeprefix("http://"))
    with pytest.raises(CheckpointError, match=r"no credentials|cannot be used") as info:
        streamload.open_checkpoint(address, timeout_s=1)
    assert len(str(info.value).splitlines()) == 1


def test_without_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(MissingExtraError, match=r"streamload\[remote\]"):
        streamload.open_checkpoint("s3://bucket/x.safetensors")
