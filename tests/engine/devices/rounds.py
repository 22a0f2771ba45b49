"""One load through a lane on the fake device, checked in every way there is.

``check_round`` draws everything from its seed: slots and readers (1 to 16), sizes of slots and
chunks, casts, whether blocks are handed on as they come, and how long each read takes.
"""

import random
import time
from unittest.mock import patch

import torch

from streamload.core.dtypes import BY_TORCH_NAME
from streamload.core.options import Settings
from streamload.core.specs import Catalog, Extent, TensorSpec
from streamload.engine import on_layer as handing_out
from streamload.engine.execute import execute
from streamload.engine.lanes import device
from streamload.mapping.combining import Concat, Split
from streamload.mapping.rules import NameMap, Rule
from streamload.mapping.transforms import Transpose
from streamload.planning.build import build_plan
from streamload.sources.base import Source
from streamload.sources.blocks import bytes_of
from tests.engine.devices.fake_device import FakeOps

DEVICE = "fake:0"
RULES = NameMap(
    (
        Rule("plain.{layer}", "plain.{layer}"),
        Rule("small.{layer}", "small.{layer}"),
        Rule("turned.{layer}", "turned.{layer}", Transpose()),
        Rule(("q.{layer}", "k.{layer}"), "qk.{layer}", Concat(0)),
        Rule("both.{layer}", ("left.{layer}", "right.{layer}"), Split(1)),
        Rule("flags", "flags"),
        Rule("ids", "ids"),
        Rule("one", "one"),
        Rule("none", "none"),
    ),
    layers=3,
)


def stored_tensors(seed):
    made = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(3):
        tensors[f"plain.{layer}"] = torch.randn(37, 29, generator=made)
        tensors[f"small.{layer}"] = torch.randn(3, generator=made)
        tensors[f"turned.{layer}"] = torch.randn(41, 23, generator=made)
        tensors[f"q.{layer}"] = torch.randn(8, 31, generator=made)
        tensors[f"k.{layer}"] = torch.randn(5, 31, generator=made)
        tensors[f"both.{layer}"] = torch.randn(19, 26, generator=made)
    tensors["flags"] = torch.rand(901, generator=made) > 0.5
    tensors["ids"] = torch.arange(777)
    tensors["one"] = torch.tensor(3.5)
    tensors["none"] = torch.empty(0, 4)
    return tensors


def expected_tensors(stored, dtype):
    made = {name: stored[name] for name in ("flags", "ids", "one", "none")}
    for layer in range(3):
        made[f"plain.{layer}"] = stored[f"plain.{layer}"]
        made[f"small.{layer}"] = stored[f"small.{layer}"]
        made[f"turned.{layer}"] = stored[f"turned.{layer}"].t()
        made[f"qk.{layer}"] = torch.cat([stored[f"q.{layer}"], stored[f"k.{layer}"]])
        made[f"left.{layer}"], made[f"right.{layer}"] = stored[f"both.{layer}"].chunk(2, 1)
    return {n: t.to(dtype) if dtype and t.is_floating_point() else t for n, t in made.items()}


class OneFile(Source):
    """All tensors one after the other, as in a file, with ``gap`` bytes before each.

    Attributes:
        reads: (offset, bytes) of each read so far.
    """

    path = "one.file"

    def __init__(self, tensors, *, gap=0, delay_s=0.0, seed=0):
        self._bytes = bytearray()
        self._random = random.Random(seed)
        self._delay_s = delay_s
        self.reads = []
        specs = {}
        for name, tensor in tensors.items():
            size = tensor.element_size()
            self._bytes += bytes(gap + -(len(self._bytes) + gap) % size)
            dtype = BY_TORCH_NAME[str(tensor.dtype).removeprefix("torch.")].name
            nbytes = tensor.numel() * size
            extent = Extent(self.path, len(self._bytes), nbytes)
            specs[name] = TensorSpec(name, dtype, tuple(tensor.shape), self.path, extent)
            self._bytes += bytes(bytes_of(tensor.contiguous()))
        self.catalog = Catalog(specs, {})

    def read_into(self, extent, buffer, *, tensor=None):
        self.reads.append((extent.offset, extent.nbytes))
        if self._delay_s:
            time.sleep(self._random.random() * self._delay_s)
        assert extent.offset + extent.nbytes <= len(self._bytes)
        buffer[:] = self._bytes[extent.offset : extent.offset + extent.nbytes]

    def tensor(self, name):
        raise AssertionError("nothing is read whole")


def load(ops, stored, *, lane=None, source=None, on_layer=None, dtype=None, **sizes):
    """Load all through ``RULES``; sizes: slots, slot_bytes, panels, workers, chunk_bytes."""
    lane_sizes = {n: sizes[n] for n in ("slots", "slot_bytes", "panels") if n in sizes}
    lane_sizes = {"slots": 1, "slot_bytes": 256} | lane_sizes
    source = source or OneFile(stored)
    options = Settings(
        dtype=None if dtype is None else BY_TORCH_NAME[str(dtype).removeprefix("torch.")],
        device=DEVICE,
        workers=sizes.get("workers", 8),
        chunk_bytes=sizes.get("chunk_bytes", 512),
        staging_bytes=1024,
        overflow=sizes.get("overflow", "report"),
    )
    plan = build_plan(source.catalog, RULES, None, options)
    plan.raise_if_refused()
    lane = (lane or device.DeviceLane)(ops, **lane_sizes)
    # The fake's tensors are the host's, whatever its name.
    with patch.object(handing_out, "_is_on", lambda *_: True):
        return execute(plan, source, lane, on_layer=on_layer)


def check_round(seed, lane=None):
    """One load of ``seed``'s own; raises where anything is not as it should be."""
    draw = random.Random(seed)
    stored = stored_tensors(seed)
    lost = draw.randrange(4)
    stored["plain.1"].view(-1)[:lost] = 1e30
    dtype = draw.choice((None, torch.bfloat16, torch.float16, torch.float16))
    expected = expected_tensors(stored, dtype)
    ops = FakeOps(seed, device=DEVICE, eager=draw.choice((0.0, 0.1, 0.4)))
    seen = set()

    def on_layer(layer, tensors):
        ops.synchronize(ops.record(ops.current()))
        for name, tensor in tensors.items():
            assert torch.equal(tensor, expected[name]), name
            seen.add(name)

    passing = draw.random() < 0.5
    found = load(
        ops,
        stored,
        lane=lane,
        source=OneFile(stored, gap=draw.choice((0, 0, 6)), delay_s=0.0005, seed=seed),
        on_layer=on_layer if passing else None,
        dtype=dtype,
        slots=draw.randint(1, 16),
        slot_bytes=draw.choice((64, 256, 1024, 4096)),
        panels=draw.randint(1, 4),
        workers=draw.randint(1, 16),
        chunk_bytes=draw.choice((128, 512, 2048)),
    )
    assert not ops.queued, "work was under way when the load was over"
    assert not ops.idle_streams(), "the caller's stream does not wait for all"
    assert found.tensors.keys() == expected.keys()
    assert not passing or seen == expected.keys()
    for name, tensor in expected.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor), name
    counted = [f"'plain.1': {lost} finite values overflow F16"] if lost else []
    assert list(found.notices) == (counted if dtype == torch.float16 else [])
