"""Models larger than memory: right in every case, and read no more than what does not fit."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import threading
import time

import pytest
import torch

import streamload
from streamload.loading.calls import plan_checkpoint
from streamload.residency import reader as reading
from streamload.residency import streamer as streaming
from streamload.residency.direct import AgainFile
from streamload.synthesis import synthesize
from tests.residency.squeezed import logits, squeezed, streamer_of, tokens

LAYERS = 7


@pytest.fixture(scope="module", params=["gpt2-tiny", "llama-tiny", "neox-tiny"])
def any_folder(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp(request.param) / "model"
    synthesize(request.param, folder, layers=LAYERS, masks=False)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("one") / "model"
    synthesize("gpt2-tiny", made, layers=LAYERS, masks=False)
    return str(made)


@pytest.fixture(scope="module")
def expected(folder):
    model = streamload.load(folder, mode="map").model
    return tokens(model), logits(model)


@pytest.mark.parametrize("blocks", [0, 1, 3, LAYERS - 3])
def test_the_same_tokens_and_no_more_is_read_than_does_not_fit(any_folder, monkeypatch, blocks):
    whole = streamload.load(any_folder).model
    with squeezed(monkeypatch, any_folder, blocks) as room:
        loaded = streamload.load(any_folder)
        memory = loaded.report.memory
        assert (memory.blocks, memory.resident_blocks) == (LAYERS, blocks)
        assert memory.streamed_bytes < room.pass_bytes or not blocks
        (notice,) = loaded.report.notices
        assert f"about {blocks} of {LAYERS} blocks stay" in notice
        assert tokens(loaded.model) == tokens(whole)
        assert torch.equal(logits(loaded.model), logits(whole))
        streamer = streamer_of(loaded.model)
        passes = 5
        settle(streamer)
        before = len(room.reads)
        for _ in range(passes):
            logits(loaded.model)
        settle(streamer)
        read = sum(nbytes for _, nbytes in room.reads[before:])
        assert read == passes * memory.streamed_bytes
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, whole.state_dict()[name]), name


def settle(streamer):
    """Wait until nothing is being read."""
    reader = streamer._reader
    with reader._changed:
        assert reader._changed.wait_for(
            lambda: all(fill.is_done for fill in reader._fills.values()), timeout=20
        )


def test_the_plan_says_so_beforehand(folder, monkeypatch):
    with squeezed(monkeypatch, folder, 2) as room:
        plan = plan_checkpoint(folder)
        assert plan.ok
        memory = plan.memory
        assert (memory.blocks, memory.resident_blocks) == (LAYERS, 2)
        assert memory.streamed_bytes == (LAYERS - 2) * room.block_bytes
        (notice,) = plan.notices
        assert notice.startswith("larger than memory: ")


@pytest.mark.parametrize(
    ("blocks", "options"),
    [(LAYERS + 1, {}), (2, {"check_memory": False}), (-2, {}), (99, {"mode": "stream"})],
    ids=["it fits", "not asked", "hardly anything fits", "nothing is mapped"],
)
def test_nothing_is_hooked(folder, monkeypatch, expected, blocks, options):
    with squeezed(monkeypatch, folder, blocks):
        loaded = streamload.load(folder, **options)
    assert loaded.report.memory.blocks == 0
    assert loaded.report.notices == ()
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in loaded.model.modules())
    assert tokens(loaded.model) == expected[0]


def test_blocks_in_any_order_and_apart(folder, monkeypatch):
    plain = streamload.load(folder).model
    with squeezed(monkeypatch, folder, 1):
        model = streamload.load(folder).model
    x = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for at in (5, 5, 0, 3, 1, 6, 2, 0, 4, 4, 0, 6):
            assert torch.equal(run(model, at, x), run(plain, at, x)), at
        # What is inside of a block may be called alone: it lies in the file then.
        assert torch.equal(model.blocks[2].mlp(x), plain.blocks[2].mlp(x))


def run(model, at, x):
    return model.blocks[at](x, model._span(0, x.shape[1]), None)


def test_gradients_are_those_of_the_model_in_memory(folder, monkeypatch):
    grads = []
    with squeezed(monkeypatch, folder, 2):
        for model in (streamload.load(folder).model, streamload.load(folder, mode="map").model):
            tokens(model)
            model(torch.tensor([[1, 2, 3]])).sum().backward()
            tokens(model)
            grads.append({name: p.grad for name, p in model.named_parameters()})
    assert all(torch.equal(grad, grads[1][name]) for name, grad in grads[0].items())


def change_in_place(model):
    with torch.no_grad():
        for block in model.blocks:
            block.mlp.fc1.weight.mul_(0.5)


def change_behind_torch(model):
    for block in model.blocks:
        block.mlp.fc2.weight.data += 0.25  # counts no version, as in many a merge of adapters
        block.mlp.fc2.bias.data[3] = 1.0


def change_dtype(model):
    model.double()


def change_tensors(model):
    for block in model.blocks:
        block.attn.out_proj.weight = torch.nn.Parameter(block.attn.out_proj.weight * 2)


@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.parametrize(
    "change", [change_in_place, change_behind_torch, change_dtype, change_tensors]
)
def test_what_a_user_changes_is_kept(folder, monkeypatch, change, used_before):
    plain = streamload.load(folder).model
    change(plain)
    with squeezed(monkeypatch, folder, 3) as room:
        model = streamload.load(folder).model
        if used_before:
            tokens(model)
        change(model)
        assert torch.equal(logits(model), logits(plain))
        room.blocks = 0  # what stays no longer must not lose the change
        assert torch.equal(logits(model), logits(plain))
        assert tokens(model) == tokens(plain)


def test_more_and_less_memory_as_time_goes_on(folder, monkeypatch, expected):
    with squeezed(monkeypatch, folder, 2) as room:
        model = streamload.load(folder).model
        streamer = streamer_of(model)
        for blocks in (2, 0, 4, LAYERS, 1, LAYERS + 5, 0, 3):
            room.blocks = blocks
            for _ in range(2):
                assert torch.equal(logits(model), expected[1])
            settle(streamer)
            held = sum(block.memory is not None for block in streamer._blocks)
            assert held == min(blocks, LAYERS)


@pytest.mark.parametrize("error", [OSError(5, "no"), RuntimeError("odd"), MemoryError()])
def test_a_file_that_cannot_be_read_is_used_where_it_is_mapped(
    folder, monkeypatch, expected, error
):
    with squeezed(monkeypatch, folder, 2):
        model = streamload.load(folder).model
        calls = []

        def fail(*_args, **_named):
            calls.append(1)
            raise error

        monkeypatch.setattr(AgainFile, "read", fail)
        assert tokens(model) == expected[0]
    assert calls


def test_another_file_at_the_same_place_is_not_read(tmp_path, monkeypatch):
    folder, other = tmp_path / "a", tmp_path / "b"
    synthesize("gpt2-tiny", folder, layers=LAYERS, masks=False)
    synthesize("gpt2-tiny", other, layers=LAYERS, masks=False, seed=1)
    plain = logits(streamload.load(folder).model)
    with squeezed(monkeypatch, folder, 2):
        model = streamload.load(folder).model
        os.replace(other / "model.safetensors", folder / "model.safetensors")
        assert torch.equal(logits(model), plain)
        # Even if the descriptors were closed since others needed theirs.
        for file in streamer_of(model)._reader._files.values():
            for one in (file._plain, file._direct):
                if one is not None:
                    one._let_go()
        assert torch.equal(logits(model), plain)


def test_copies_are_whole_models_without_hooks(folder, monkeypatch, expected):
    with squeezed(monkeypatch, folder, 3):
        model = streamload.load(folder).model
        tokens(model)
        copied = copy.deepcopy(model)
        pickled = pickle.loads(pickle.dumps(model))
        saved = io.BytesIO()
        torch.save(model.blocks[0].state_dict(), saved)
    del model
    gc.collect()
    assert tokens(copied) == tokens(pickled) == expected[0]
    held = sum(t.nbytes for t in copied.blocks[0].state_dict().values())
    assert saved.tell() < held + (64 << 10)  # each tensor has a storage of its own range


class Stop(BaseException):
    pass


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, Stop])
def test_a_forward_that_was_broken_off_leaves_nothing_behind(folder, monkeypatch, expected, error):
    with squeezed(monkeypatch, folder, 2):
        model = streamload.load(folder).model
        for at in (0, 3, 3, 6, 2, 1, 5):

            def fail(*_args):
                raise error

            handle = model.blocks[at].mlp.register_forward_hook(fail)
            with pytest.raises(error):
                logits(model)
            handle.remove()
        assert tokens(model) == expected[0]
        settle(streamer_of(model))
        assert all(not block.users for block in streamer_of(model)._blocks)


def test_several_threads_at_once(folder, monkeypatch, expected):
    with squeezed(monkeypatch, folder, 2) as room:
        model = streamload.load(folder).model
        found = []

        def work(at):
            for _ in range(3):
                room.blocks = at
                found.append(tokens(model))

        threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [expected[0]] * 12


def test_the_next_block_is_read_while_one_computes(folder, monkeypatch):
    with squeezed(monkeypatch, folder, 0) as room:
        model = streamload.load(folder).model
        logits(model)
        for at, block in enumerate(model.blocks):
            following = room.starts[(at + 1) % LAYERS]  # after the last one the first, for the next
            block.mlp.register_forward_hook(lambda *_, offset=following: wait_for(room, offset))
        settle(streamer_of(model))
        room.reads.clear()
        logits(model)


def wait_for(room, offset):
    """Go on once the block there has been asked for; the forward that waits has not ended."""
    end_s = time.monotonic() + 10
    # The first two were read before the pass began.
    while offset not in [*room.starts[:2], *(at for at, _ in room.reads)]:
        assert time.monotonic() < end_s, "the next block is not read"
        time.sleep(0.001)


def test_an_output_that_is_a_view_of_a_weight_outlives_the_buffer(folder, monkeypatch):
    with squeezed(monkeypatch, folder, 0):
        model = streamload.load(folder).model
        inside = []
        for block in model.blocks:
            block.register_forward_hook(lambda m, *_: (m.ln1.scale[:3], [m.ln1.shift]))
            block._forward_hooks.move_to_end(list(block._forward_hooks)[-1], last=False)
        with torch.no_grad():
            for at in range(LAYERS):
                inside.append(run(model, at, torch.zeros(1, 2, 64)))
        for block, (scale, (shift,)) in zip(model.blocks, inside, strict=True):
            assert torch.equal(scale, block.ln1.scale[:3])
            assert torch.equal(shift, block.ln1.shift)


def test_threads_end_with_the_model(folder, monkeypatch):
    before = set(threading.enumerate())

    def running():
        new = set(threading.enumerate()) - before
        return [thread for thread in new if thread.name.startswith("streamload-blocks")]

    with squeezed(monkeypatch, folder, 2):
        model = streamload.load(folder).model
        assert not running()  # none before it is used
        tokens(model)
        assert running()
        del model
        gc.collect()
    end_s = time.monotonic() + 20
    while running() and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not running()


def test_a_child_process_uses_the_mapping(folder, monkeypatch, expected):
    with squeezed(monkeypatch, folder, 2) as room:
        model = streamload.load(folder).model
        tokens(model)
        settle(streamer_of(model))
        count = len(room.reads)
        monkeypatch.setattr(streaming.os, "getpid", lambda: -1)
        assert tokens(model) == expected[0]
        assert len(room.reads) == count


def test_buffers_that_others_hold_are_not_waited_for_for_ever(folder, monkeypatch, expected):
    monkeypatch.setattr(reading, "_PATIENCE_S", 0.01)
    with squeezed(monkeypatch, folder, 0):
        model = streamload.load(folder).model
        held = [streamer_of(model)._reader.take(at) for at in range(2)]
        assert tokens(model, 1) == expected[0][:1]
        for fill in held:
            streamer_of(model)._reader.give_back(fill)
        assert tokens(model) == expected[0]


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny", "neox-tiny"])
def test_classes_of_transformers(tmp_path, monkeypatch, name):
    pytest.importorskip("transformers")
    folder = tmp_path / "model"
    synthesize(name, folder, layers=LAYERS, masks=False, dtype="float32")
    plain = streamload.load_transformers(folder).model
    with squeezed(monkeypatch, folder, 2):
        loaded = streamload.load_transformers(folder)
        assert (loaded.report.memory.blocks, loaded.report.memory.resident_blocks) == (LAYERS, 2)
        for _ in range(2):
            assert torch.equal(logits(loaded.model), logits(plain))
        assert tokens(loaded.model) == tokens(plain)
        ids = torch.tensor([[5, 3, 11, 7]])
        theirs = [m.generate(ids, max_new_tokens=4, do_sample=False) for m in (loaded.model, plain)]
        assert torch.equal(*theirs)
