"""Mutated headers and configurations of quantised checkpoints: exact values, or an error of ours.

``python -m tests.fuzz.test_quantised SEED COUNT`` runs other seeds.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from random import Random

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

import streamload
from tests.decoding.quantised import CASES, spread
from tests.fuzz import texts
from tests.fuzz.files import mutated_safetensors
from tests.fuzz.judge import at_most, limit_bytes, limit_s
from tests.reliability import record

FILES = 2000
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def by_hand(
    stored: dict[str, torch.Tensor], config: dict[str, object]
) -> dict[str, torch.Tensor] | None:
    """What FP8 in blocks means by plain arithmetic; None if it is not just that."""
    found = {}
    block = config.get("weight_block_size")
    if config.get("quant_method") != "fp8" or not isinstance(block, list) or len(block) != 2:
        return None
    for name, q in stored.items():
        scale = stored.get(f"{name}_scale_inv")
        if q.dtype not in FP8 or scale is None or q.dim() < 2:
            continue
        if not all(type(size) is int and size > 0 for size in block) or scale.dtype == torch.uint8:
            return None
        values = q.float().double() * spread(scale, *block, tuple(q.shape))
        found[name] = values.float()
    return found


def judged(folder: Path, original: bytes, config: dict[str, object]) -> tuple[str, str]:
    """(what became of it, a failure's words)."""
    size = (folder / "model.safetensors").stat().st_size
    start_s = time.process_time()
    try:
        with warnings.catch_warnings(), at_most(limit_bytes(size)):
            warnings.simplefilter("ignore")
            found = streamload.load_state_dict(folder, dtype="float32", workers=1)
    except streamload.StreamloadError as error:
        str(error).encode("utf-8")
        return "refused", ""
    except Exception as error:
        return "foreign", f"{type(error).__name__}: {error}"[:300]
    if time.process_time() - start_s > limit_s(size):
        return "slow", f"{time.process_time() - start_s:.2f} s"
    try:
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        return "laxer", str(error)
    fields = json.loads((folder / "config.json").read_text()).get("quantization_config")
    if fields == config["config"]:
        seed = config["values"]
        if all(n in stored and same(stored[n], t) for n, t in config["stored"].items()):
            for name, values in seed.items():
                if name in stored and name not in config["stored"]:
                    continue
                if name not in found or not same(found[name], values.float()):
                    return "values", f"{name} is not the seed's"
    expected = by_hand(stored, fields) if isinstance(fields, dict) else None
    for name, values in (expected or {}).items():
        if name in found and not same(found[name], values):
            return "values", f"{name} differs from plain arithmetic"
    return "taken", ""


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    if one.dtype == torch.float32:
        return torch.equal(one.nan_to_num(), two.nan_to_num())
    flat = [t.contiguous().view(-1) for t in (one, two)]
    return torch.equal(*(t.view(torch.uint8) if t.numel() else t for t in flat))


def run(seed: int, count: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """Judge so many files, a share of each format."""
    rng = Random(seed)
    cases = {kind: make() for kind, make in CASES.items()}
    files = {kind: save(case.stored) for kind, case in cases.items()}
    kinds, counts, failures = list(cases), Counter[str](), []
    for at in range(count):
        kind = kinds[at % len(kinds)]
        case, data = cases[kind], files[kind]
        text = texts.written(texts.parsed(json.dumps(case.config)))
        which = rng.random()
        if which < 0.7:
            data = mutated_safetensors(data, rng)
        if which > 0.5:
            text = texts.written(texts.mutated(texts.parsed(text), rng))
        (folder / "model.safetensors").write_bytes(data)
        whole = '{"model_type": "none", "quantization_config": ' + text + "}"
        (folder / "config.json").write_bytes(whole.encode("utf-8", "surrogatepass"))
        facts = {"config": case.config, "stored": case.stored, "values": case.values}
        verdict, words = judged(folder, files[kind], facts)
        counts[verdict] += 1
        if words:
            failures.append(f"{kind}, file {at} of seed {seed}: {verdict}: {words}; {text[:200]}")
    return counts, failures


def test_every_file_gives_exact_values_or_our_error(tmp_path):
    counts, failures = run(1, FILES, tmp_path)
    assert not failures, "\n".join(failures[:20])
    assert counts["refused"] > FILES // 4
    assert counts["taken"] > FILES // 10
    record("mutated files: quantised", FILES)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        found, faults = run(int(sys.argv[1]), int(sys.argv[2]), Path(made))
        print(dict(found), *faults, sep="\n")
