"""``mode="auto"``, the default of ``load``: views of the file where that is safe, else copies."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import save_model

import streamload
from streamload.system import filesystems
from tests.support.tiny import bag_of, gpt2_tensors, same_bits, values, write, write_gpt2

FOREIGN = ("nfs4", "cifs", "smb3", "fuse.sshfs", "fuseblk", "9p", "lustre", "ceph", "virtiofs")


def mapped_share(report):
    return report.bytes_mapped / (report.bytes_mapped + report.bytes_written)


def check_equals_streamed(loaded, folder, **options):
    expected = streamload.load(folder, mode="stream", **options).model.state_dict()
    found = loaded.model.state_dict()
    assert list(found) == list(expected)
    for name, tensor in found.items():
        assert same_bits(tensor.contiguous(), expected[name]), name


@pytest.mark.parametrize("mode", [{}, {"mode": None}, {"mode": "auto"}])
def test_what_is_stored_as_wanted_is_mapped(tmp_path, mode):
    folder = write_gpt2(tmp_path, gpt2_tensors())
    loaded = streamload.load(folder, **mode)
    assert (loaded.report.mode, loaded.report.layout) == ("map", "stored")
    assert (loaded.report.bytes_read, loaded.report.notices) == (0, ())
    check_equals_streamed(loaded, folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_transposed_matrices_are_copied_since_they_compute_slowly(tmp_path, dtype):
    tensors = {name: tensor.to(dtype) for name, tensor in gpt2_tensors().items()}
    folder = write_gpt2(tmp_path, tensors)
    loaded = streamload.load(folder)
    assert (loaded.report.mode, loaded.report.layout) == ("map", "contiguous")
    assert all(p.is_contiguous() for p in loaded.model.parameters())
    (notice,) = loaded.report.notices
    assert notice.startswith("8 of ")
    assert 0 < mapped_share(loaded.report) < 1
    check_equals_streamed(loaded, folder)


def test_a_layout_that_is_asked_for_is_kept(tmp_path):
    folder = write_gpt2(tmp_path, gpt2_tensors())
    contiguous = streamload.load(folder, layout="contiguous")
    assert all(p.is_contiguous() for p in contiguous.model.parameters())
    assert 0 < mapped_share(contiguous.report) < 1
    stored = streamload.load(folder, layout="stored")
    assert mapped_share(stored.report) == 1
    for loaded in (contiguous, stored):
        check_equals_streamed(loaded, folder)


def test_a_cast_streams_and_has_nothing_to_tell(tmp_path):
    folder = write_gpt2(tmp_path, gpt2_tensors())
    report = streamload.load(folder, dtype="bfloat16").report
    assert (report.mode, report.layout, report.notices) == ("stream", "contiguous", ())
    assert report.bytes_mapped == 0


@pytest.mark.parametrize("kind", FOREIGN)
def test_files_across_a_network_are_read(tmp_path, monkeypatch, kind):
    folder = write_gpt2(tmp_path, gpt2_tensors())
    monkeypatch.setattr(filesystems, "_mounts", lambda: [("/", "ext4"), (folder, kind)])
    report = streamload.load(folder).report
    assert (report.mode, report.bytes_mapped) == ("stream", 0)
    (notice,) = report.notices
    assert notice.startswith("streamed and not mapped: ")
    assert f"file system of kind {kind}" in notice
    assert streamload.load(folder, mode="map").report.bytes_read == 0


def test_this_machines_file_systems_are_known():
    if not os.path.exists("/proc/self/mountinfo"):
        pytest.skip("needs Linux's table of mounts")
    assert filesystems.filesystem_of("/proc/self/status") == "proc"


def test_a_file_that_somebody_writes_is_read(tmp_path):
    folder = write_gpt2(tmp_path, gpt2_tensors())
    with open(f"{folder}/model.safetensors", "r+b") as writer:
        with open(f"{folder}/model.safetensors", "rb") as reader:
            if not filesystems._is_written(reader.fileno()):
                pytest.skip("this file system does not tell who writes")
        report = streamload.load(folder).report
        assert (report.mode, report.bytes_mapped) == ("stream", 0)
        assert "open for writing" in report.notices[0]
        assert writer.writable()
    assert streamload.load(folder).report.mode == "map"


def test_what_torch_save_wrote_is_read_since_it_writes_over_it(tmp_path):
    folder = write_gpt2(tmp_path, gpt2_tensors())
    os.unlink(f"{folder}/model.safetensors")
    torch.save(gpt2_tensors(), f"{folder}/pytorch_model.bin")
    loaded = streamload.load(folder)
    assert (loaded.report.mode, loaded.report.notices) == ("stream", ())
    expected = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    torch.save(loaded.model.state_dict(), f"{folder}/pytorch_model.bin")
    saved = torch.load(f"{folder}/pytorch_model.bin")
    assert all(same_bits(saved[name], expected[name]) for name in expected)


def test_a_mapped_model_may_be_saved_over_its_own_file(tmp_path):
    folder = write_gpt2(tmp_path, gpt2_tensors())
    model = streamload.load(folder).model
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_model(model, f"{folder}/model.safetensors")
    streamload.export(model, folder)
    assert all(same_bits(t, expected[name]) for name, t in model.state_dict().items())
    again = streamload.load(folder).model.state_dict()
    assert all(same_bits(tensor.contiguous(), expected[name]) for name, tensor in again.items())


def test_a_writer_who_comes_meanwhile_is_not_kept_waiting(tmp_path):
    path = write(tmp_path / "x.safetensors", {"a": values(1, 3)})
    with open(path, "rb") as reader:
        assert not filesystems._is_written(reader.fileno())
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # refused while a lease is held
        os.close(descriptor)


def test_what_changes_blocks_on_the_way_streams(tmp_path):
    folder = write_gpt2(tmp_path, gpt2_tensors())
    report = streamload.load(folder, on_layer=lambda *_: None).report
    assert (report.mode, report.bytes_mapped) == ("stream", 0)


def test_calls_for_training_and_rewriting_stream(tmp_path):
    tensors = {"a": values(1, 4, 4), "b": values(2, 3)}
    path = write(tmp_path / "x.safetensors", tensors)
    assert streamload.load_into(bag_of(tensors), path).bytes_mapped == 0
    found = streamload.load_state_dict(path)
    os.unlink(path)
    write(path, {name: tensor * 0 for name, tensor in tensors.items()})
    assert all(same_bits(found[name], tensors[name]) for name in tensors)
    module = bag_of(tensors)
    assert streamload.load_into(module, path, mode="auto").bytes_read == 0


def test_a_module_that_holds_data_is_overwritten_in_place(tmp_path):
    tensors = {"a": values(1, 4, 4), "b": values(2, 3)}
    path = write(tmp_path / "x.safetensors", tensors)
    module = bag_of(tensors, device="cpu")
    before = module.a.data_ptr()
    report = streamload.load_into(module, path, mode="auto")
    assert (report.mode, report.bytes_mapped) == ("stream", 0)
    assert module.a.data_ptr() == before
    assert same_bits(module.a.detach(), tensors["a"])


def test_plan_says_what_load_would_do(tmp_path):
    from streamload.loading.calls import plan_checkpoint

    folder = write_gpt2(tmp_path, gpt2_tensors())
    for options in ({}, {"dtype": "bfloat16"}, {"layout": "contiguous"}):
        planned = plan_checkpoint(folder, **options).report
        loaded = streamload.load(folder, **options).report
        assert (planned.mode, planned.layout) == (loaded.mode, loaded.layout)
