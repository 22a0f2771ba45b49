"""What ranks do together, from parts that are bit-equal to loads that end with one of them."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

import streamload
from streamload.engine import workers
from streamload.loading import budget, resolving
from streamload.system.memory import AvailableMemory
from tests.ranks.forked import prepare, run
from tests.ranks.modules import MODELS, Bag, differences, hf, reference, shard, write
from tests.ranks.stored_kinds import stored_kinds

DTYPES = ("float32", "bfloat16")
LAYOUTS = {2: ("fsdp", "tp"), 4: ("fsdp", "tp", "fsdp+tp")}
TIMEOUT_S = 2.0


def main(folder: str, *only: str) -> None:
    """Print what came of the scenarios, all or those named, as JSON."""
    prepare()
    print(json.dumps(everything(Path(folder), list(only))))


def everything(folder: Path, only: list[str]) -> dict[str, Any]:
    """Results by scenario: for each rank what it returned."""
    paths = {name: write(name, folder / name) for name in MODELS}
    found: dict[str, Any] = {}
    if not only or "bits" in only:
        wholes = {(n, d): reference(n, p, d) for n, p in paths.items() for d in DTYPES}
        gc.freeze()
        for world in LAYOUTS:
            found[f"bits{world}"] = run(_bits(paths, wholes), world, folder / f"bits{world}")
    if not only or "export" in only:
        wholes = {(n, d): reference(n, p, d) for n, p in paths.items() for d in DTYPES}
        made = folder / "export"
        found["export"] = run(_export(paths), 4, made)
        found["exported"] = {"0": _loaded_again(made, wholes)}
        again = {name: made / f"{name}-{how}" for name, how in EXPORTS}
        found["export_again"] = run(_bits(again, wholes, ("tp",)), 2, folder / "export_again")
    if not only or "distributed" in only:
        tied = {"hf-qwen3": write("hf-qwen3", folder / "hf-qwen3")}
        found["distributed"] = run(_distributed(paths | tied), 2, folder / "distributed")
    if not only or "kinds" in only:
        kinds = stored_kinds(paths["llama"], folder / "stored")
        found["kinds"] = run(_kinds(kinds), 2, folder / "kinds")
    for name, scenario in faults(paths).items():
        if not only or name in only:
            found[name] = run(scenario, 3, folder / name, limit_s=30)
    if "export_broken" in found:
        found["export_broken_files"] = sorted(os.listdir(folder / "export_broken" / "out"))
    return found


def _kinds(kinds: dict[str, tuple[Path, dict[str, Any]]]) -> Any:
    """What is decoded, merged, in pieces or mapped, against whole loads of the same."""

    def scenario(rank: int, world: int, folder: Path) -> Any:
        said = {}
        for kind, (path, options) in kinds.items():
            whole = MODELS["llama"]()
            streamload.load_into(whole, path, **options)
            state = {n: t.detach() for n, t in whole.named_parameters()}
            for how in LAYOUTS[2]:
                model = shard(MODELS["llama"](), how, world)
                report = streamload.load_into(model, path, timeout_s=60, **options)
                odd = differences(model, state)
                said[f"{kind} {how}"] = {"differences": odd, "ranks": len(report.ranks)}
        return said

    return scenario


def _distributed(paths: dict[str, Path]) -> Any:
    """transformers' own plans, against the whole model of that library."""

    def scenario(rank: int, world: int, folder: Path) -> Any:
        said = {}
        ids = torch.arange(6).view(1, 6)
        for name in ("hf-llama", "hf-qwen3", "hf-qwen3-moe"):
            whole = hf.AutoModelForCausalLM.from_pretrained(paths[name])
            state = {n: t.detach() for n, t in whole.named_parameters()}
            for config in ({"tp_size": 2}, {"fsdp_size": 2}):
                loaded = streamload.load_transformers(
                    paths[name], distributed_config=dict(config), timeout_s=60
                )
                names = len(list(loaded.model.named_parameters())) - len(state)
                gap = (loaded.model(ids).logits - whole(ids).logits).detach().abs().max()
                said[f"{name} {config}"] = {
                    "differences": differences(loaded.model, state),
                    "sharded": sum(isinstance(p, DTensor) for p in loaded.model.parameters()),
                    "gap": float(gap),
                    "ranks": len(loaded.report.ranks),
                    "names": names,
                }
        return said

    return scenario


EXPORTS = (
    ("gpt2", "fsdp"),
    ("gpt2", "fsdp+tp"),
    ("llama", "fsdp+tp"),
    ("hf-llama", "tp"),
    ("hf-qwen3-moe", "fsdp+tp"),
    ("hf-qwen3-moe", "tp"),
    ("bag", "tp"),
)


def _export(paths: dict[str, Path]) -> Any:
    def scenario(rank: int, world: int, folder: Path) -> Any:
        said = []
        for name, how in EXPORTS:
            model = shard(MODELS[name](), how, world)
            streamload.load_into(model, paths[name])
            to = folder / f"{name}-{how}"
            bound = 50_000 if name != "bag" else None
            report = streamload.export(model, to, max_shard_bytes=bound)
            said.append([name, how, len(report.files), report.bytes_written])
            if name == "bag":  # and cast, in one file
                streamload.export(model, folder / "cast.safetensors", dtype="bfloat16")
        return said

    return scenario


def _loaded_again(made: Path, wholes: Any) -> Any:
    """Names of tensors that are not bit for bit what was loaded first, by one process."""
    odd = {}
    for name, how in EXPORTS:
        again = reference(name, made / f"{name}-{how}", "float32")
        whole = wholes[name, "float32"]
        odd[f"{name} {how}"] = [n for n in whole if not torch.equal(whole[n], again[n])]
        odd[f"{name} {how}"] += sorted(whole.keys() ^ again.keys())
    cast = streamload.load_state_dict(made / "cast.safetensors")
    whole = wholes["bag", "float32"]
    odd["cast"] = [n for n, t in cast.items() if not torch.equal(t, whole[n].bfloat16())]
    return odd


def _bits(paths: dict[str, Path], wholes: Any, only: tuple[str, ...] = ()) -> Any:
    def scenario(rank: int, world: int, folder: Path) -> Any:
        del rank, folder
        said = []
        for name, path in paths.items():
            for how in only or LAYOUTS[world]:
                for dtype in DTYPES:
                    if name == "bag" and how == "fsdp+tp":
                        continue
                    said.append(_one(name, path, how, dtype, world, wholes[name, dtype]))
        return said

    return scenario


def _one(name: str, path: Path, how: str, dtype: str, world: int, whole: Any) -> dict[str, Any]:
    model = shard(MODELS[name](), how, world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolving, "GAP_BYTES", 64)
        report = streamload.load_into(model, path, dtype=dtype)
    parameters = list(model.parameters())
    return {
        "model": name,
        "how": how,
        "dtype": dtype,
        "differences": differences(model, whole),
        "on_meta": [n for n, p in model.named_parameters() if p.is_meta],
        "sharded": sum(isinstance(p, DTensor) for p in parameters),
        "read": report.bytes_read,
        "unwanted": report.bytes_unwanted,
        "held_in_f32": sum(_local(p).numel() * 4 for p in _once(parameters)),
        "whole_in_f32": sum(p.numel() * 4 for p in _once(parameters)),
        "ranks": [share.bytes_read for share in report.ranks],
        "notices": list(report.notices),
        "whole": sum(_local(p).shape == p.shape for p in _once(parameters)),
    }


def _once(tensors: list[nn.Parameter]) -> Iterator[nn.Parameter]:
    yield from {id(t): t for t in tensors}.values()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def faults(paths: dict[str, Path]) -> dict[str, Callable[[int, int, Path], Any]]:
    """Three ranks each; rank 1 is the odd one out."""
    path = paths["llama"]

    def load(rank: int, where: Path, **options: Any) -> dict[str, Any]:
        model = shard(MODELS["llama"](), "fsdp", 3)
        before = {n: id(t) for n, t in model.named_parameters()}
        options = {"timeout_s": TIMEOUT_S, **options}
        try:
            report = streamload.load_into(model, where, **options)
        except BaseException as error:
            same = {n: id(t) for n, t in model.named_parameters()} == before
            error.args = (f"{error} [untouched: {same}]",)
            raise
        return {"read": report.bytes_read, "text": report.to_text()}

    def fine(rank: int, world: int, folder: Path) -> Any:
        return load(rank, path)

    def other_values(rank: int, world: int, folder: Path) -> Any:
        if rank == 1:
            _copy(path, folder / "other", shift=1)
        return load(rank, folder / "other" if rank == 1 else path)

    def other_names(rank: int, world: int, folder: Path) -> Any:
        return load(rank, paths["gpt2"] if rank == 1 else path)

    def no_file(rank: int, world: int, folder: Path) -> Any:
        return load(rank, folder / "nothing" if rank == 1 else path)

    def killed(rank: int, world: int, folder: Path) -> Any:
        def progress(*_: object) -> None:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        return load(rank, path, progress=progress)

    def tcp_host_killed(rank: int, world: int, folder: Path) -> Any:
        """The rank that is killed holds the store by which ranks talk."""

        def progress(*_: object) -> None:
            if rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.3)

        return load(rank, path, progress=progress)

    def absent(rank: int, world: int, folder: Path) -> Any:
        return load(rank, path) if rank != 1 else time.sleep(3 * TIMEOUT_S)

    def slow(rank: int, world: int, folder: Path) -> Any:
        """Slower than the timeout, but at work."""
        carry = workers.send

        def slowly(*arguments: Any) -> None:
            time.sleep(0.15)
            carry(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(workers, "send", slowly)
            return load(rank, path, workers=1, chunk_bytes=4096, timeout_s=1.0)

    def out_of_memory(rank: int, world: int, folder: Path) -> Any:
        if rank == 1:
            budget.available_memory = lambda: AvailableMemory(1000, "cgroup")
        return load(rank, path)

    def together_too_large(rank: int, world: int, folder: Path) -> Any:
        """Each rank fits; all of them on one host do not."""
        model = shard(MODELS["llama"](), "fsdp", 3)
        needed = streamload.plan(model, path).memory.needed_bytes
        budget.available_memory = lambda: AvailableMemory(2 * needed, "machine")
        return load(rank, path)

    def memory_error(rank: int, world: int, folder: Path) -> Any:
        def progress(*_: object) -> None:
            if rank == 1:
                raise MemoryError("cannot allocate 12 GiB")

        return load(rank, path, progress=progress)

    def at_commit(rank: int, world: int, folder: Path) -> Any:
        def on_assign(stored: str, name: str) -> None:
            if rank == 1 and name.startswith("blocks.1"):
                raise ValueError("not this one")

        return load(rank, path, on_assign=on_assign)

    def other_options(rank: int, world: int, folder: Path) -> Any:
        return load(rank, path, dtype="float16" if rank == 1 else None)

    def wrong_option(rank: int, world: int, folder: Path) -> Any:
        """Refused before anything is opened, by a rank that others wait for."""
        return load(rank, path, timeout_s=float("nan") if rank == 1 else 60.0)

    def interrupted(rank: int, world: int, folder: Path) -> Any:
        def progress(*_: object) -> None:
            if rank == 1:
                raise KeyboardInterrupt

        return load(rank, path, progress=progress, timeout_s=60.0)

    def partial(rank: int, world: int, folder: Path) -> Any:
        bag = shard(MODELS["bag"](), "tp", 3)
        mesh = init_device_mesh("cpu", (3,))
        local = torch.empty(7, 5, device="meta")
        bag.rows = nn.Parameter(DTensor.from_local(local, mesh, [Partial()], run_check=False))
        return {"read": streamload.load_into(bag, paths["bag"], timeout_s=TIMEOUT_S).bytes_read}

    def in_place(rank: int, world: int, folder: Path) -> Any:
        """DTensors that hold data are overwritten where they are."""
        bag = shard(MODELS["bag"](), "tp", 3)
        streamload.load_into(bag, paths["bag"])
        for name in (*Bag.SHAPES, "table"):
            getattr(bag, name).to_local().detach().zero_()
        objects = {n: getattr(bag, n) for n in Bag.SHAPES}
        places = {n: t.to_local().data_ptr() for n, t in objects.items()}
        streamload.load_into(bag, paths["bag"])
        same = all(getattr(bag, n) is t for n, t in objects.items())
        same &= all(t.to_local().data_ptr() == places[n] for n, t in objects.items())
        whole = reference("bag", paths["bag"], "float32")
        return {"same": same, "differences": differences(bag, whole)}

    def again(rank: int, world: int, folder: Path) -> Any:
        """After a load that failed, the next one is a load of its own."""
        try:
            load(rank, folder / "nothing" if rank == 2 else path)
        except streamload.StreamloadError:
            return load(rank, path)
        raise AssertionError("the first one holds")

    def export_broken(rank: int, world: int, folder: Path) -> Any:
        """The second rank cannot write midway: nobody's files are put in place."""
        from streamload.saving import parts

        model = shard(MODELS["llama"](), "fsdp", 3)
        streamload.load_into(model, path)
        to = folder / "out"
        to.mkdir(exist_ok=True)
        (to / "old.txt").write_text("old")
        if rank == 1:

            def full(*_: object) -> None:
                raise OSError(28, "no space left")

            parts._write_runs = full
        return streamload.export(model, to).summary()

    def trains(rank: int, world: int, folder: Path) -> Any:
        """A fully sharded module computes what the whole one does, and takes a step."""
        whole = streamload.load(path, mode="stream").model
        model = shard(MODELS["llama"](), "fsdp", 3)
        streamload.load_into(model, path)
        ids = torch.arange(6).view(1, 6)
        logits = model(ids)
        gap = float((logits - whole(ids)).detach().abs().max())
        logits.sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        grads = [p.grad is not None for p in model.parameters() if p.requires_grad]
        return {"gap": gap, "all_have_gradients": all(grads) and bool(grads)}

    return {
        name: found
        for name, found in locals().items()
        if name not in ("paths", "path", "load") and callable(found)
    }


def _copy(path: Path, to: Path, *, shift: float) -> None:
    """The same checkpoint with the same headers and other values."""
    from safetensors.torch import load_file, save_file

    to.mkdir()
    (to / "config.json").write_text((path / "config.json").read_text())
    for file in path.glob("*.safetensors"):
        save_file({n: t + shift for n, t in load_file(file).items()}, to / file.name)


if __name__ == "__main__":
    main(*sys.argv[1:])
