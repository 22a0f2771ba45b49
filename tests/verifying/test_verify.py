"""``verify``: odd values, digests, and comparisons across formats and names."""

import hashlib
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import streamload
from streamload.core.errors import CheckpointError
from streamload.synthesis import synthesize
from streamload.verifying import verify


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return synthesize("gpt2-tiny", tmp_path_factory.mktemp("verify") / "gpt2").path


def save(path, tensors):
    save_file(tensors, path)
    return path


class TestValues:
    def test_not_finite_and_all_zero_are_counted(self, tmp_path):
        odd = torch.ones(100, 33)
        odd[3, 4], odd[99, 32], odd[50, 0] = float("nan"), float("inf"), float("-inf")
        path = save(
            tmp_path / "x.safetensors",
            {
                "odd": odd,
                "zero": torch.zeros(9),
                "minus_zero": torch.tensor([-0.0]),
                "late": torch.cat([torch.zeros(9999), torch.ones(1)]),
                "empty": torch.zeros(0),
                "half": torch.full((7,), float("nan"), dtype=torch.bfloat16),
                "f8": torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn),
                "complex": torch.tensor([complex(float("inf"), 0)]),
                "ids": torch.arange(3),
                "flags": torch.tensor([False]),
            },
        )
        report = verify(path, chunk_bytes=4096, workers=3)
        found = {v.name: (v.nan, v.inf) for v in report.non_finite}
        assert found == {"odd": (1, 2), "half": (7, 0), "f8": (1, 0), "complex": (0, 1)}
        assert set(report.all_zero) == {"zero", "minus_zero", "flags"}
        assert report.ok
        assert report.tensors == 10
        assert report.bytes_read == sum(t.nbytes for t in load_file(path).values())
        assert report.files == {str(path): report.bytes_read}

    def test_misaligned_tensors(self, tmp_path):
        import json

        header = {
            "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
        }
        text = json.dumps(header).encode()
        data = b"\0\0\0" + torch.tensor([float("inf"), 1]).numpy().tobytes()
        path = tmp_path / "x.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)
        report = verify(path)
        assert [(v.name, v.inf) for v in report.non_finite] == [("b", 1)]
        assert report.all_zero == ("a",)

    def test_torch_files(self, tmp_path):
        base = torch.arange(12.0).reshape(3, 4)
        base[0, 0] = float("nan")
        tensors = {"t": base.t(), "row": base[1], "all": base, "step": base[:, ::2]}
        torch.save(tensors, tmp_path / "zip.bin")
        torch.save(tensors, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
        for name in ("zip.bin", "old.bin"):
            report = verify(tmp_path / name)
            assert {v.name: v.nan for v in report.non_finite} == {"t": 1, "all": 1, "step": 1}
            assert report.ok

    def test_progress_and_errors_reach_the_caller(self, gpt2, tmp_path):
        told = []
        verify(gpt2, progress=lambda *args: told.append(args))
        assert told[-1][0] == told[-1][1] > 0
        with pytest.raises(ZeroDivisionError):
            verify(gpt2, progress=lambda *args: 1 / 0)
        with pytest.raises(CheckpointError):
            verify(tmp_path / "absent")


class TestDigests:
    def hub(self, gpt2, folder):
        blobs, snapshot = folder / "blobs", folder / "snapshots" / "c0"
        blobs.mkdir(parents=True)
        snapshot.mkdir(parents=True)
        for name in ("model.safetensors", "config.json"):
            with open(f"{gpt2}/{name}", "rb") as file:
                data = file.read()
            if name == "config.json":
                digest = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            else:
                digest = hashlib.sha256(data).hexdigest()
            (blobs / digest).write_bytes(data)
            (snapshot / name).symlink_to(os.path.join("..", "..", "blobs", digest))
        return snapshot

    def test_names_in_a_hub_cache(self, gpt2, tmp_path):
        snapshot = self.hub(gpt2, tmp_path / "models--o--n")
        report = verify(snapshot, chunk_bytes=1000)
        assert [(os.path.basename(d.what), d.kind) for d in report.digests] == [
            ("config.json", "git-sha1"),
            ("model.safetensors", "sha256"),
        ]
        assert report.ok
        assert "2 of 2 digests fit" in report.to_text()
        assert report.tensors == 30

    @pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
    def test_a_flipped_bit(self, gpt2, tmp_path, name):
        snapshot = self.hub(gpt2, tmp_path / "models--o--n")
        path = os.path.realpath(snapshot / name)
        with open(path, "r+b") as file:
            file.seek(-2, os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-2, os.SEEK_END)
            file.write(bytes([byte ^ 1 if name == "model.safetensors" else 0x20]))
        report = verify(snapshot)
        assert not report.ok
        assert [os.path.basename(d.what) for d in report.digests if not d.ok] == [name]

    def test_checksums_of_torch_archives(self, tmp_path):
        torch.save({"a": torch.ones(3000), "b": torch.ones(5)}, tmp_path / "x.bin")
        report = verify(tmp_path / "x.bin")
        assert [d.kind for d in report.digests] == ["crc32", "crc32"]
        assert report.ok
        data = bytearray((tmp_path / "x.bin").read_bytes())
        at = data.index(torch.ones(3000).numpy().tobytes()) + 400
        data[at] ^= 1
        (tmp_path / "x.bin").write_bytes(data)
        report = verify(tmp_path / "x.bin")
        (wrong,) = [d for d in report.digests if not d.ok]
        assert "'a'" in wrong.what
        assert "damaged (1)" in report.to_text()

    def fetched(self, gpt2, folder, name="model.safetensors"):
        """A folder as ``--local-dir`` leaves it; returns the file of the note."""
        shutil.copytree(gpt2, folder)
        (folder / name).parent.mkdir(exist_ok=True)
        if name != "model.safetensors":
            (folder / "model.safetensors").rename(folder / name)
        note = folder / ".cache" / "huggingface" / "download" / f"{name}.metadata"
        note.parent.mkdir(parents=True)
        digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        note.write_text(f"{'0' * 40}\n{digest}\n1700000000.0\n")
        return note

    @pytest.mark.parametrize("name", ["model.safetensors", "sub/model.safetensors"])
    def test_of_a_download_to_a_folder(self, gpt2, tmp_path, name):
        self.fetched(gpt2, tmp_path / "m", name)
        path = tmp_path / "m" / os.path.dirname(name)
        (digest,) = verify(path).digests
        assert (digest.kind, digest.ok) == ("sha256", True)
        file = tmp_path / "m" / name
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        report = verify(path)
        assert not report.ok
        assert not report.digests[0].ok

    @pytest.mark.parametrize("text", ["", "x", f"a\n{'0' * 40}\n1.0\n", 'a\nW/"tag"\n1.0\n'])
    def test_notes_without_a_digest(self, gpt2, tmp_path, text):
        self.fetched(gpt2, tmp_path / "m").write_text(text)
        assert verify(tmp_path / "m").digests == ()

    def test_nothing_to_check_is_a_failure(self, tmp_path):
        report = verify(save(tmp_path / "x.safetensors", {}))
        assert not report.ok
        assert report.to_text().startswith("nothing was read: there are no tensors")

    def test_none(self, gpt2):
        assert "no digests to compare with" in verify(gpt2).to_text()


class TestAgainst:
    def test_a_conversion_has_the_same_values(self, gpt2, tmp_path):
        streamload.convert(gpt2, tmp_path / "local", names="local")
        report = verify(gpt2, against=tmp_path / "local")
        assert report.ok, report.to_text()
        assert report.tensors == 28
        assert "no difference" in report.to_text()
        assert any("2 stored buffers" in notice for notice in report.notices)

    def test_after_a_cast(self, gpt2, tmp_path):
        streamload.convert(gpt2, tmp_path / "half", dtype="bfloat16")
        plain = verify(tmp_path / "half", against=gpt2)
        assert {d.kind for d in plain.differences} == {"dtype"}
        assert len(plain.differences) == 28
        assert verify(tmp_path / "half", against=gpt2, dtype="bfloat16").ok

    def test_where_and_how_much(self, gpt2, tmp_path):
        shutil.copytree(gpt2, tmp_path / "other")
        path = tmp_path / "other" / "model.safetensors"
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        tensors["h.1.attn.c_attn.weight"][5, 7] += 0.5
        tensors["h.1.attn.c_attn.weight"][9, 2] += 0.25
        del tensors["ln_f.bias"]
        tensors["v_head.weight"] = torch.ones(2)
        tensors["h.0.mlp.c_fc.bias"] = torch.ones(3)
        save_file(tensors, path)
        report = verify(tmp_path / "other", against=gpt2)
        assert report.only_here == ("v_head.weight",)
        assert report.only_there == ("final_ln.shift",)
        found = {d.name: d for d in report.differences}
        assert set(found) == {"blocks.1.attn.qkv.weight", "blocks.0.mlp.fc1.bias"}
        assert found["blocks.0.mlp.fc1.bias"].kind == "shape"
        values = found["blocks.1.attn.qkv.weight"]
        assert (values.elements, values.first) == (2, (2, 9))
        assert values.largest == pytest.approx(0.5)
        assert values.sources == ("h.1.attn.c_attn.weight",)

    def test_a_tied_name_stands_for_the_other(self, gpt2, tmp_path):
        shutil.copytree(gpt2, tmp_path / "tied")
        path = tmp_path / "tied" / "model.safetensors"
        tensors = load_file(path)
        tensors["lm_head.weight"] = tensors["wte.weight"].clone()
        save_file(tensors, path)
        assert verify(tmp_path / "tied", against=gpt2).ok
        tensors["lm_head.weight"][0, 0] += 1
        save_file(tensors, path)
        (difference,) = verify(gpt2, against=tmp_path / "tied").differences
        assert difference.others == ("lm_head.weight",)

    @pytest.mark.parametrize("turned", [False, True])
    def test_tensors_that_are_cut(self, tmp_path, turned):
        """Above the size of a slab, also with one side in another order of memory."""
        values = torch.arange(3000 * 3100, dtype=torch.float32).reshape(3000, 3100)
        save(tmp_path / "a.safetensors", {"x": values})
        other = values.clone()
        other[2999, 3099] = -1
        if turned:
            torch.save({"x": other.t().contiguous().t()}, tmp_path / "b.bin")
        else:
            torch.save({"x": other}, tmp_path / "b.bin")
        report = verify(tmp_path / "a.safetensors", against=tmp_path / "b.bin")
        (difference,) = report.differences
        assert (difference.elements, difference.first) == (1, (2999, 3099))

    def test_nan_and_signs(self, tmp_path):
        one = torch.tensor([float("nan"), 0.0, 1.0])
        two = one.clone()
        two.view(torch.int32)[0] ^= 1
        save(tmp_path / "a.safetensors", {"x": one})
        save(tmp_path / "b.safetensors", {"x": two})
        (difference,) = verify(
            tmp_path / "a.safetensors", against=tmp_path / "b.safetensors"
        ).differences
        assert (difference.elements, difference.largest) == (1, None)
        assert verify(
            tmp_path / "a.safetensors", against=tmp_path / "b.safetensors", dtype="float32"
        ).ok
        two[0], two[1] = one[0], -0.0
        save(tmp_path / "b.safetensors", {"x": two})
        assert not verify(tmp_path / "a.safetensors", against=tmp_path / "b.safetensors").ok

    def test_nothing_to_compare_is_a_failure(self, gpt2, tmp_path):
        empty = save(tmp_path / "x.safetensors", {})
        report = verify(empty, against=empty)
        assert not report.ok
        assert report.to_text().startswith("nothing was compared: no tensor is in both")
        assert verify(gpt2, against=empty).to_text().startswith("nothing was compared")

    @pytest.mark.parametrize("turned", [False, True])
    def test_each_byte_of_a_file_counts_once(self, tmp_path, turned):
        """However often it is read: a transposed tensor is, and views of one storage are."""
        base = torch.arange(12.0).reshape(3, 4)
        other = base.t().contiguous().t() if turned else base
        torch.save({"all": other, "row": base[1]}, tmp_path / "a.bin")
        save(tmp_path / "b.safetensors", {"all": base, "row": base[1].clone()})
        a, b = str(tmp_path / "a.bin"), str(tmp_path / "b.safetensors")
        report = verify(a, against=b)
        assert report.ok, report
        size = 64 if turned else 48  # else the row lies inside of the other's bytes
        assert report.files == {a: size, b: 64}
        assert f"compared 2 tensors, {64 + size} B in" in report.to_text()
        assert f"  {a}: {size} B" in report.to_text()
        assert report.to_dict()["files"] == report.files

    def test_dtype_needs_another(self, gpt2):
        with pytest.raises(ValueError, match="against"):
            verify(gpt2, dtype="float16")
