"""``download``, against servers on loopback that break off, lie and refuse."""

import json
import os
import socket
import subprocess
import sys

import pytest

from streamload.core.errors import DownloadError, MissingExtraError
from streamload.downloading import download, downloads, neox_files, neox_folder
from streamload.downloading.fetching import fetch
from streamload.downloading.picking import pick_files
from tests.support.loopback import Site, serve

DATA = bytes(range(256)) * 1000


@pytest.fixture
def site():
    with serve(Site({"x.pt": DATA})) as running:
        yield running


def get(site, path, name="x.pt", **options):
    return fetch(f"{site.url}/{name}", str(path), **{"pause_s": 0.0, **options})


def gets(site):
    return [wanted for method, _, wanted in site.requests if method == "GET"]


class TestFetch:
    def test_whole(self, site, tmp_path):
        told = []
        done = get(site, tmp_path / "a" / "x.pt", progress=lambda *args: told.append(args))
        assert (tmp_path / "a" / "x.pt").read_bytes() == DATA
        assert os.listdir(tmp_path / "a") == ["x.pt"]
        assert done.received_bytes == len(DATA)
        assert told[-1] == (len(DATA), len(DATA), "x.pt")

    def test_what_is_whole_is_skipped(self, site, tmp_path):
        (tmp_path / "x.pt").write_bytes(DATA)
        assert get(site, tmp_path / "x.pt").was_there
        assert gets(site) == []

    def test_another_length_is_fetched_again(self, site, tmp_path):
        (tmp_path / "x.pt").write_bytes(DATA[:-1])
        assert not get(site, tmp_path / "x.pt").was_there
        assert (tmp_path / "x.pt").read_bytes() == DATA

    def test_a_server_without_head_leaves_what_is_there(self, site, tmp_path):
        site.head = False
        (tmp_path / "x.pt").write_bytes(b"trusted by its name")
        assert get(site, tmp_path / "x.pt").was_there

    @pytest.mark.parametrize("etag", [None, '"v1"', 'W/"v1"'])
    def test_broken_connections_are_resumed(self, site, tmp_path, etag):
        site.etags = {"x.pt": etag} if etag else {}
        site.cuts["x.pt"] = [70_000, 30_000, 1]
        done = get(site, tmp_path / "x.pt")
        assert (tmp_path / "x.pt").read_bytes() == DATA
        assert gets(site) == [None, "bytes=70000-", "bytes=100000-", "bytes=100001-"]
        assert done.received_bytes == len(DATA)

    def test_tries_are_bounded_and_keep_what_arrived(self, site, tmp_path):
        site.cuts["x.pt"] = [50_000] + [0] * 20
        with pytest.raises(DownloadError, match=r"50000 bytes are kept"):
            get(site, tmp_path / "x.pt", attempts=3)
        assert len(gets(site)) == 4
        assert not (tmp_path / "x.pt").exists()
        assert (tmp_path / "x.pt.part").read_bytes() == DATA[:50_000]
        site.cuts.clear()
        site.requests.clear()
        assert get(site, tmp_path / "x.pt").resumed
        assert gets(site) == ["bytes=50000-"]
        assert (tmp_path / "x.pt").read_bytes() == DATA
        assert os.listdir(tmp_path) == ["x.pt"]

    def test_a_server_without_ranges(self, site, tmp_path):
        site.ranges = False
        site.cuts["x.pt"] = [50_000]
        assert get(site, tmp_path / "x.pt").received_bytes == len(DATA) + 50_000
        assert (tmp_path / "x.pt").read_bytes() == DATA

    def test_too_long_a_length(self, site, tmp_path):
        site.lengths["x.pt"] = len(DATA) + 10
        site.ranges = False
        with pytest.raises(DownloadError, match=rf"announced {len(DATA) + 10} bytes and sent"):
            get(site, tmp_path / "x.pt", attempts=2)
        assert not (tmp_path / "x.pt").exists()

    def test_too_long_a_length_and_ranges(self, site, tmp_path):
        """Going on behind the true end is answered by 416 with another total."""
        site.lengths["x.pt"] = len(DATA) + 10
        with pytest.raises(DownloadError, match=r"announced|started over"):
            get(site, tmp_path / "x.pt", attempts=3)
        assert not (tmp_path / "x.pt").exists()

    def test_a_part_that_is_whole_already(self, site, tmp_path):
        (tmp_path / "x.pt.part").write_bytes(DATA)
        assert get(site, tmp_path / "x.pt").received_bytes == 0
        assert (tmp_path / "x.pt").read_bytes() == DATA

    def test_a_part_that_is_too_long(self, site, tmp_path):
        (tmp_path / "x.pt.part").write_bytes(DATA + b"!")
        get(site, tmp_path / "x.pt")
        assert (tmp_path / "x.pt").read_bytes() == DATA

    @pytest.mark.parametrize("etag", ['"v1"', None])
    def test_a_file_that_changed_is_not_mixed(self, site, tmp_path, etag):
        site.etags = {"x.pt": etag} if etag else {}
        site.cuts["x.pt"] = [50_000, 0, 0, 0]
        with pytest.raises(DownloadError):
            get(site, tmp_path / "x.pt", attempts=1)
        site.cuts.clear()
        changed = bytes(reversed(DATA)) + (b"" if etag else b"!")
        site.files["x.pt"], site.etags = changed, {"x.pt": '"v2"'} if etag else {}
        get(site, tmp_path / "x.pt")
        assert (tmp_path / "x.pt").read_bytes() == changed

    @pytest.mark.parametrize("status", [401, 403, 404, 410])
    def test_a_refusal_ends_it_at_once(self, site, tmp_path, status):
        site.statuses["x.pt"] = [status] * 9
        with pytest.raises(DownloadError, match=rf"x\.pt: the server answers {status}"):
            get(site, tmp_path / "x.pt")
        assert len(gets(site)) == 1
        assert not (tmp_path / "x.pt").exists()

    def test_what_may_pass_is_tried_again(self, site, tmp_path):
        site.statuses["x.pt"] = [500, 503, 429]
        get(site, tmp_path / "x.pt")
        assert (tmp_path / "x.pt").read_bytes() == DATA
        site.statuses["x.pt"] = [500] * 9
        os.unlink(tmp_path / "x.pt")
        with pytest.raises(DownloadError, match="answers 500"):
            get(site, tmp_path / "x.pt", attempts=3)
        assert len(gets(site)) == 4 + 3

    def test_a_web_page_is_no_checkpoint(self, site, tmp_path):
        site.kind = "text/html; charset=utf-8"
        with pytest.raises(DownloadError, match="web page"):
            get(site, tmp_path / "x.pt")

    def test_nobody_listens(self, tmp_path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with pytest.raises(DownloadError, match="no connection"):
            fetch(f"http://127.0.0.1:{port}/x", str(tmp_path / "x"), attempts=2, pause_s=0)

    @pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://x/y", "x.pt"])
    def test_other_addresses(self, tmp_path, url):
        with pytest.raises(DownloadError, match="http"):
            fetch(url, str(tmp_path / "x"))

    def test_a_second_process_is_refused(self, site, tmp_path):
        fcntl = pytest.importorskip("fcntl")
        with open(tmp_path / "x.pt.part", "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with pytest.raises(DownloadError, match="another process"):
                get(site, tmp_path / "x.pt")

    def test_ctrl_c_keeps_what_arrived(self, site, tmp_path):
        def stop(*args):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            get(site, tmp_path / "x.pt", progress=stop)
        assert (tmp_path / "x.pt.part").stat().st_size > 0
        get(site, tmp_path / "x.pt")
        assert (tmp_path / "x.pt").read_bytes() == DATA


class TestNeoX:
    def files(self, layers=None):
        needed, unused = neox_files(layers)
        return {f"slim/{name}": name.encode() * 50 for name in (*needed, *unused)}

    def test_the_list(self):
        needed, unused = neox_files()
        assert len(needed) == 3 + 94
        assert len(unused) == 8
        step = "global_step150000"
        assert needed[:3] == ("20B_tokenizer.json", "configs/20B.yml", "latest")
        assert needed[3] == f"{step}/layer_00-model_00-model_states.pt"
        assert needed[5] == f"{step}/layer_02-model_00-model_states.pt"
        assert needed[-1] == f"{step}/layer_48-model_01-model_states.pt"
        for absent in ("layer_01", "layer_46"):
            assert not any(absent in name for name in needed)

    def test_all_of_it(self, site, tmp_path):
        site.files = self.files()
        report = download("neox-20b", tmp_path / "neox", base_url=f"{site.url}/slim/")
        assert len(report.files) == 105
        assert report.path == str(tmp_path / "neox")
        for name in report.files:
            assert (tmp_path / "neox" / name).read_bytes() == name.encode() * 50
        again = download("neox-20b", tmp_path / "neox", base_url=f"{site.url}/slim")
        assert again.skipped == again.files == report.files
        assert again.received_bytes == 0

    def test_chosen_layers_without_the_unused_files(self, site, tmp_path):
        site.files = {k: v for k, v in self.files([0, 1]).items() if "mp_rank" not in k}
        report = download("neox-20b", tmp_path, base_url=f"{site.url}/slim", layers=[1, 0])
        assert len(report.files) == 3 + 2 * 5
        assert len(report.notices) == 8
        with pytest.raises(ValueError, match="44"):
            neox_files([44])

    def test_a_missing_file_ends_it(self, site, tmp_path):
        site.files = self.files([0])
        del site.files["slim/global_step150000/layer_02-model_01-model_states.pt"]
        with pytest.raises(DownloadError, match=r"layer_02-model_01.*404"):
            download("neox-20b", tmp_path, base_url=f"{site.url}/slim", layers=[0])

    def test_where(self, site, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("STREAMLOAD_DATA", raising=False)
        monkeypatch.setenv("STREAMLOAD_NEOX_URL", f"{site.url}/slim")
        site.files = self.files([0])
        assert neox_folder("d") == os.path.join("d", "neox")
        assert download("neox-20b", layers=[0]).folder == os.path.join("data", "neox")
        os.makedirs("data/neox_fast")
        assert neox_folder("data") == os.path.join("data", "neox_fast")
        assert download("neox-20b", layers=[0]).folder == os.path.join("data", "neox_fast")

    def test_no_address(self, tmp_path, monkeypatch):
        monkeypatch.delenv("STREAMLOAD_NEOX_URL", raising=False)
        with pytest.raises(ValueError, match="base_url"):
            download("neox-20b", tmp_path)


class TestPick:
    def pick(self, *names, shards=()):
        return pick_files(names, lambda index: shards)

    def test_safetensors_before_bin(self):
        found = self.pick(
            "README.md",
            "config.json",
            "model.safetensors",
            "pytorch_model.bin",
            "tf_model.h5",
            "rust_model.ot",
            "onnx/model.onnx",
            "tokenizer.json",
            "model.gguf",
            "flax_model.msgpack",
        )
        assert found == ("config.json", "tokenizer.json", "model.safetensors")

    def test_an_index_and_its_shards_alone(self):
        shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        found = self.pick(
            "model.safetensors.index.json",
            *shards,
            "consolidated.safetensors",
            "model-00001-of-00003.safetensors",
            "pytorch_model.bin.index.json",
            "x.bin",
            shards=[*shards, shards[0]],
        )
        assert found == ("model.safetensors.index.json", *shards)

    @pytest.mark.parametrize(
        ("names", "expected"),
        [
            (("pytorch_model.bin", "training_args.bin"), ("pytorch_model.bin",)),
            (("odd.safetensors", "adapter_model.safetensors"), ("odd.safetensors",)),
            (("consolidated.safetensors",), ("consolidated.safetensors",)),
            (
                ("consolidated.00.pth", "consolidated.01.pth", "params.json"),
                ("params.json", "consolidated.00.pth", "consolidated.01.pth"),
            ),
            (
                ("m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"),
                ("m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"),
            ),
            (("config.json", "model.gguf", "original/consolidated.00.pth"), ()),
        ],
    )
    def test_other_repositories(self, names, expected):
        assert self.pick(*names) == expected


class TestHub:
    """The hub's own client is replaced: no network, and its protocol is its own business."""

    @pytest.fixture
    def hub(self, tmp_path, monkeypatch):
        hub = pytest.importorskip("huggingface_hub")
        calls = []
        files = {
            "config.json": b"{}",
            "model.safetensors.index.json": json.dumps(
                {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
            ).encode(),
            "model-00001-of-00002.safetensors": b"1",
            "model-00002-of-00002.safetensors": b"2",
            "pytorch_model.bin": b"3",
        }

        class Api:
            def list_repo_files(self, repo, *, revision=None):
                calls.append(("list", repo, revision))
                return list(files)

        def place(options):
            return str(options["local_dir"] or tmp_path / "snapshot")

        def one(*, filename, **options):
            os.makedirs(place(options), exist_ok=True)
            path = os.path.join(place(options), filename)
            with open(path, "wb") as file:
                file.write(files[filename])
            return path

        def snapshot(*, allow_patterns, **options):
            calls.append(("fetch", options["repo_id"], options["revision"], allow_patterns))
            return place(options)

        monkeypatch.setattr(hub, "HfApi", Api)
        monkeypatch.setattr(hub, "hf_hub_download", one)
        monkeypatch.setattr(hub, "snapshot_download", snapshot)
        hub.calls, hub.files = calls, files
        return hub

    def test_what_is_fetched(self, hub, tmp_path):
        report = download("hf:org/name@v1.0", tmp_path / "here")
        assert hub.calls == [
            ("list", "org/name", "v1.0"),
            (
                "fetch",
                "org/name",
                "v1.0",
                ["config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"],
            ),
        ]
        assert report.path == str(tmp_path / "here")
        assert "streamload load" in report.to_text()
        assert download("hf:gpt2").path == "hf:gpt2"

    def test_nothing_to_read(self, hub):
        hub.files.clear()
        hub.files["model.gguf"] = b""
        with pytest.raises(DownloadError, match=r"hf:org/name: holds no weights.*gguf"):
            download("hf:org/name")

    def test_its_errors_are_ours(self, hub, monkeypatch):
        def refused(self, repo, *, revision=None):
            raise OSError("401\n gated")

        monkeypatch.setattr(hub.HfApi, "list_repo_files", refused)
        with pytest.raises(DownloadError, match="hf:org/name: the hub: 401 gated"):
            download("hf:org/name")

    def test_without_the_package(self, monkeypatch):
        monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
        with pytest.raises(MissingExtraError, match=r"streamload\[hub\]"):
            download("hf:org/name")

    def test_the_real_client(self, tmp_path):
        pytest.importorskip("huggingface_hub")
        hidden = ("HF_", "HUGGINGFACE_", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.fake_hub", str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=120,
            env={k: v for k, v in os.environ.items() if not k.startswith(hidden)},
            cwd=os.path.dirname(os.path.dirname(os.path.dirname(__file__))),
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stderr == "", "no progress bar without progress="

    def test_quiet(self):
        pytest.importorskip("huggingface_hub")
        assert downloads._quiet_bar()(total=3).disable

    def test_a_bar_that_draws_nothing_tells_of_bytes(self, capfd):
        pytest.importorskip("huggingface_hub")
        told = []
        kind = downloads._quiet_bar(lambda *args: told.append(args), "hf:a/b")
        files, chunks = kind(total=3), kind(total=9, unit="B", name="x.transfer")
        whole = kind(total=0, unit="B", unit_scale=True, name="x")
        whole.total += 40
        for bar, count in ((files, 1), (chunks, 5), (whole, 30), (whole, 10)):
            bar.update(count)
            bar.refresh()
        assert told == [(30, 40, "hf:a/b"), (40, 40, "hf:a/b")]
        assert capfd.readouterr() == ("", "")

    def test_attempts_are_not_logged(self, hub, monkeypatch, capfd):
        import logging

        before = logging.getLogger("huggingface_hub").level
        logger = logging.getLogger("huggingface_hub.utils")
        monkeypatch.setattr(
            hub.HfApi, "list_repo_files", lambda *_, **__: logger.warning("Retrying in 1s") or []
        )
        with pytest.raises(DownloadError, match="holds no weights"):
            download("hf:org/name")
        assert "Retrying" not in capfd.readouterr().err
        assert logging.getLogger("huggingface_hub").level == before

    @pytest.mark.parametrize("what", ["gpt2", "hf:", "hf:a/b/c", "hf:a b", "neox"])
    def test_other_names(self, what):
        with pytest.raises(ValueError, match="cannot download"):
            download(what)
