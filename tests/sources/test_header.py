"""Safetensors containers that are damaged, odd or merely unusual: refused by name, or exact."""

import json
import re
import struct
import time
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import streamload
from streamload.loading import calls  # noqa: F401 the first test's time is not the imports'
from streamload.sources.safetensors import header
from tests.support.counting import work_done
from tests.support.tiny import bag, container, entry, refused, same_bits

A, B = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([5.0, 6.0])
BODY = bytes(A.view(torch.uint8).flatten().tolist()) + bytes(B.view(torch.uint8).tolist())
GOOD = {"a": entry("F32", [2, 2], 0, 16), "b": entry("F32", [2], 16, 24)}
WHOLE = container(GOOD, BODY)


def with_b(**changes):
    """The good header with another entry for b; None leaves a key out."""
    changed = {**GOOD["b"], **changes}
    return container({**GOOD, "b": {k: v for k, v in changed.items() if v is not ...}}, BODY)


def b(shape, *offsets, dtype="F32"):
    return with_b(shape=shape, data_offsets=list(offsets), dtype=dtype)


def one(shape, begin, end, body, dtype="F32"):
    return container({"x": entry(dtype, shape, begin, end)}, body)


def meta(text):
    return container('{"__metadata__":' + text + "," + json.dumps(GOOD)[1:], BODY)


# What is in the file, and what the message says of it.
DAMAGED = {
    # not a checkpoint at all
    "lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n",
        "git-lfs pointer",
    ),
    "html": (b"<!DOCTYPE html><html>403</html>\n", "web page"),
    "html, lower case, blanks first": (b"\n  <html><body>no</body>", "web page"),
    "xml": (b"<?xml version='1.0'?><Error>AccessDenied</Error>", "web page"),
    "json alone": (json.dumps(GOOD).encode(), "not a safetensors file"),
    "zeros": (bytes(64), "0 bytes long"),
    "noise": (b"\x93NUMPY\x01\x00v\x00{'descr': '<f4'}" + bytes(100), "not a safetensors file"),
    "ggml": (b"lmgg\x03\0\0\0" + bytes(100), "not a safetensors file"),
    # cut short
    "empty": (b"", "empty"),
    "one byte": (WHOLE[:1], "1 bytes"),
    "4 bytes": (WHOLE[:4], "4 bytes"),
    "7 bytes": (WHOLE[:7], "7 bytes"),
    "length only": (WHOLE[:8], "8 bytes in all"),
    "cut in the header": (WHOLE[:40], "40 bytes in all"),
    "last byte of the header gone": (WHOLE[: len(WHOLE) - 25], "cut short"),
    "all data gone": (WHOLE[:-24], "only 0 bytes are there"),
    "one byte short": (WHOLE[:-1], "only 23 bytes are there"),
    "last tensor gone": (WHOLE[:-8], "'b'"),
    "length 0": (struct.pack("<Q", 0) + BODY, "0 bytes long"),
    # absurd lengths
    "length 2**63": (container(GOOD, BODY, length=1 << 63), str(1 << 63)),
    "length 2**64-1": (container(GOOD, BODY, length=(1 << 64) - 1), str((1 << 64) - 1)),
    "length 100 MB + 1": (container(GOOD, BODY, length=100_000_001), "100000001"),
    "length of the file": (container(GOOD, BODY, length=len(WHOLE)), "in all"),
    "length one too many": (container(GOOD, BODY, length=len(WHOLE) - 7), "in all"),
    "length one too few": (container(GOOD, BODY, length=len(WHOLE) - 33), "JSON"),
    "length 1": (container(GOOD, BODY, length=1), "JSON"),
    # an entry that contradicts itself or the file
    "shape over the bytes": (b([1000, 1000], 16, 24), "tensor 'b'"),
    "shape under the bytes": (b([1], 16, 24), "tensor 'b'"),
    "end past the file": (b([4], 16, 32), "tensor 'b'"),
    "begin after end": (b([2], 24, 16), "tensor 'b'"),
    "negative begin": (b([2], -8, 0), "tensor 'b'"),
    "negative both": (b([2], -16, -8), "tensor 'b'"),
    "end wraps in u64": (b([2], 2**64 - 8, 2**64), "tensor 'b'"),
    "offsets over u64": (b([2], 2**70, 2**70 + 8), "tensor 'b'"),
    "product over u64": (b([2**32, 2**32, 2], 16, 24), "tensor 'b'"),
    "product wraps right": (b([2**61 + 1, 8], 16, 24, dtype="U8"), "tensor 'b'"),
    "product wraps to 0": (b([2**32, 2**32], 24, 24, dtype="U8"), "tensor 'b'"),
    "size over u64": (b([2**64, 0], 24, 24), "tensor 'b'"),
    "negative sizes": (b([-1, -2], 16, 24), "tensor 'b'"),
    "one offset": (with_b(data_offsets=[16]), "tensor 'b'"),
    "three offsets": (with_b(data_offsets=[16, 24, 24]), "tensor 'b'"),
    "no offsets": (with_b(data_offsets=...), "tensor 'b'"),
    "offsets null": (with_b(data_offsets=None), "tensor 'b'"),
    "offsets object": (with_b(data_offsets={"begin": 16, "end": 24}), "tensor 'b'"),
    "float offsets": (b([2], 16.0, 24.0), "tensor 'b'"),
    "text offsets": (b([2], "16", "24"), "tensor 'b'"),
    "bool offsets": (b([0], False, False), "tensor 'b'"),
    "bool in shape": (b([True, 2], 16, 24), "tensor 'b'"),
    "float in shape": (b([2.0], 16, 24), "tensor 'b'"),
    "text in shape": (b(["2"], 16, 24), "tensor 'b'"),
    "list in shape": (b([[2]], 16, 24), "tensor 'b'"),
    "null in shape": (b([None, 2], 16, 24), "tensor 'b'"),
    "infinite size": (container(json.dumps(GOOD).replace("[2]", "[1e999]"), BODY), "tensor 'b'"),
    "NaN size": (container(json.dumps(GOOD).replace("[2]", "[NaN]"), BODY), "NaN"),
    "no shape": (with_b(shape=...), "tensor 'b'"),
    "shape null": (with_b(shape=None), "tensor 'b'"),
    "shape a number": (with_b(shape=2), "tensor 'b'"),
    "no dtype": (with_b(dtype=...), "tensor 'b'"),
    "dtype null": (with_b(dtype=None), "tensor 'b'"),
    "dtype a number": (with_b(dtype=32), "tensor 'b'"),
    "unknown dtype in bounds": (b([4], 16, 24, dtype="F13"), "unknown dtype 'F13'"),
    "unknown dtype out of bounds": (b([4], 900, 999, dtype="F13"), "unknown dtype 'F13'"),
    "lower case dtype": (b([2], 16, 24, dtype="f32"), "'f32'"),
    "dtype with a blank": (b([2], 16, 24, dtype="F32 "), "'F32 '"),
    "half a byte": (b([1], 24, 24, dtype="F4"), "tensor 'b'"),
    "scalar without bytes": (one([], 0, 0, b""), "tensor 'x'"),
    "one element, no bytes": (one([1], 0, 0, b""), "tensor 'x'"),
    "no elements, some bytes": (one([0], 0, 4, bytes(4)), "tensor 'x'"),
    "entry text": (container('{"a":"oops"}', BODY), "tensor 'a'"),
    "entry list": (container('{"a":[1]}', BODY), "tensor 'a'"),
    "entry null": (container('{"a":null}', BODY), "tensor 'a'"),
    "entry number": (container('{"a":1}', BODY), "tensor 'a'"),
    # the header as a whole
    "header a list": (container("[1,2,3]", BODY), "not a safetensors file"),
    "header a number": (container("123", BODY), "not a safetensors file"),
    "header not JSON": (container("{not json", BODY), "not valid JSON"),
    "header not closed": (container(json.dumps(GOOD)[:-1], BODY), "not valid JSON"),
    "header and more": (container(json.dumps(GOOD) + "{}", BODY), "not valid JSON"),
    "header not UTF-8": (container(b'{"\xff\xfe":1}', BODY), "not valid JSON"),
    "header UTF-16": (container(json.dumps(GOOD).encode("utf-16-le"), BODY), "not valid JSON"),
    "header with a mark": (container(b"\xef\xbb\xbf{}", b""), "not a safetensors file"),
    "blanks before the header": (container(" " + json.dumps(GOOD), BODY), "not a safetensors"),
    "padded with NUL": (
        container(json.dumps(GOOD).encode().ljust(160, b"\0"), BODY, pad=1),
        "not valid JSON",
    ),
    "nested too deep": (container('{"a":' + "[" * 5000 + "]" * 5000 + "}"), "JSON"),
    "nested deeper than the reference goes": (
        container('{"a":' + "[" * 128 + "]" * 128 + "}"),
        "not valid JSON: nested more than 128 levels deep",
    ),
    "a number of 5000 digits": (container('{"a":' + "9" * 5000 + "}"), "JSON"),
    "lone surrogate in a name": (
        container('{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
        "not valid Unicode",
    ),
    "a name twice": (
        container(f'{json.dumps(GOOD)[:-1]},"a":{json.dumps(GOOD["a"])}}}', BODY),
        "'a'",
    ),
    "a key twice in an entry": (
        container(json.dumps(GOOD).replace('"dtype"', '"dtype": "F64", "dtype"', 1), BODY),
        "duplicate key 'dtype'",
    ),
    # ranges that overlap, leave a hole or bytes over
    "one range, two names": (
        container({"k": entry("F32", [4], 0, 16), "v": entry("F32", [4], 0, 16)}, BODY[:16]),
        "'v'.*'k'",
    ),
    "partial overlap": (
        container({**GOOD, "b": entry("F32", [2], 12, 20)}, BODY[:20]),
        "tensor 'b'.*overlaps 'a'",
    ),
    "one inside the other": (
        container({"a": entry("F32", [6], 0, 24), "b": entry("F32", [2], 8, 16)}, BODY),
        "tensor 'b'.*overlaps 'a'",
    ),
    "hole in the middle": (
        container({**GOOD, "b": entry("F32", [2], 20, 28)}, BODY + bytes(4)),
        "tensor 'b'.*hole after 'a'",
    ),
    "hole in front": (one([4], 8, 24, bytes(24)), "tensor 'x'.*hole"),
    "hole before an empty one": (
        container({"a": entry("F32", [1], 0, 4), "e": entry("F32", [0], 8, 8)}, bytes(8)),
        "hole|left over",
    ),
    "bytes left over": (WHOLE + bytes(5), "5 bytes are left over"),
    "one byte left over": (WHOLE + b"\n", "1 bytes are left over"),
    "a file behind the file": (WHOLE + WHOLE, "left over"),
    "no tensors, some bytes": (container("{}", bytes(8)), "left over"),
    # the metadata map
    "metadata number": (meta('{"step":0}'), "'step'"),
    "metadata nested": (meta('{"config":{"a":"b"}}'), "'config'"),
    "metadata value null": (meta('{"k":null}'), "'k'"),
    "metadata list": (meta('["pt"]'), "__metadata__"),
    "metadata text": (meta('"pt"'), "__metadata__"),
    "metadata true": (meta("true"), "__metadata__"),
    "metadata surrogate": (meta('{"k":"\\udcff"}'), "__metadata__"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_refused(tmp_path, name):
    content, says = DAMAGED[name]
    path = tmp_path / f"{name.replace(' ', '_').replace('*', '')}.safetensors"
    path.write_bytes(content)
    module = bag({"a": (2, 2), "b": (2,)})
    start = time.process_time()
    with work_done() as work, refused(path, module, streamload.CheckpointError) as caught:
        streamload.load_into(module, path)
    assert work.bytes_read <= 8 * len(content) + 4096, "what a header claims is not read"
    assert work.peak_bytes < 4 << 20, "nor allocated"
    assert time.process_time() - start < 0.5
    assert caught[0].path == str(path)
    assert re.search(says, str(caught[0])), str(caught[0])
    with refused(path, kind=streamload.CheckpointError):
        streamload.open_checkpoint(path)
    with refused(path, kind=streamload.CheckpointError):
        next(streamload.iter_tensors(path))


def test_every_tensor_at_fault_is_listed(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(
        container(
            {
                "a": entry("F32", [9], 0, 16),
                "b": entry("F13", [2], 16, 24),
                "c": entry("F32", [1], 24, 28),
                "d": "oops",
            },
            bytes(28),
        )
    )
    with refused(path, kind=streamload.CheckpointError) as caught:
        streamload.open_checkpoint(path)
    assert [p.split(":")[0] for p in caught[0].problems] == [f"tensor {n!r}" for n in "abd"]
    assert caught[0].tensor == "a"


def test_a_length_is_compared_before_anything_is_allocated(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(container(GOOD, BODY, length=(1 << 40)))
    tracemalloc.start()
    with pytest.raises(streamload.CheckpointError):
        streamload.open_checkpoint(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_legal_header_over_the_limit_is_told_which_limit(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    path.write_bytes(WHOLE)
    monkeypatch.setattr(header, "MAX_HEADER_BYTES", 64)
    with pytest.raises(streamload.CheckpointError, match="over the format's limit of 64"):
        streamload.open_checkpoint(path)


PECULIAR = {
    "as the reference writes it": WHOLE,
    "entries out of order": container(dict(reversed(GOOD.items())), BODY),
    "header of odd length": container(GOOD, BODY, pad=1)
    if len(json.dumps(GOOD)) % 2
    else container(json.dumps(GOOD) + " ", BODY, pad=1),
    "blanks, tabs, line ends": container(json.dumps(GOOD, indent="\t") + "\r\n ", BODY),
    "keys in another order": container(
        {n: dict(reversed(e.items())) for n, e in GOOD.items()}, BODY
    ),
    "unknown keys": container({**GOOD, "b": {**GOOD["b"], "note": "x"}}, BODY),
    "escaped names": container(json.dumps(GOOD).replace('"a"', '"\\u0061"'), BODY),
    "metadata empty": meta("{}"),
    "metadata without format": meta('{"made_by":"x"}'),
    "metadata mlx": meta('{"format":"mlx"}'),
    "metadata np": meta('{"format":"np"}'),
    "metadata null": meta("null"),
    "metadata in other alphabets": meta('{"auteur":"é","作者":"\\u4f5c"}'),
    "metadata last": container({**GOOD, "__metadata__": {"format": "pt"}}, BODY),
}


@pytest.mark.parametrize("name", PECULIAR)
@pytest.mark.parametrize("mode", ["stream", "map"])
def test_peculiar_files_load_exactly(tmp_path, name, mode):
    path = tmp_path / "x.safetensors"
    path.write_bytes(PECULIAR[name])
    found = streamload.load_state_dict(path, mode=mode)
    assert set(found) == {"a", "b"}
    assert same_bits(found["a"], A)
    assert same_bits(found["b"], B)
    assert all(t.data_ptr() % 4 == 0 for t in found.values())


@pytest.mark.parametrize("text", ["{}", '{"__metadata__":{"k":"v"}}', '{"__metadata__":null}'])
def test_a_file_without_tensors_opens_and_leaves_everything_missing(tmp_path, text):
    path = tmp_path / "x.safetensors"
    path.write_bytes(container(text))
    with streamload.open_checkpoint(path) as source:
        assert len(source.catalog) == 0
    for strict in (True, False):
        module = bag({"a": (2, 2)})
        with refused(path, module) as caught:
            streamload.load_into(module, path, strict=strict)
        assert caught[0].report.missing == ("a",)
        assert "nothing would be loaded" in str(caught[0])


def test_metadata_is_given_out(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(meta('{"format":"pt","step":"7"}'))
    with streamload.open_checkpoint(path) as source:
        assert source.metadata == {"format": "pt", "step": "7"}
        source.metadata["step"] = "8"  # a copy
        assert source.metadata["step"] == "7"


NAMES = [
    "",
    " ",
    "a b.c",
    "größe",
    "🙂",
    'x"y\\z',
    "tab\there",
    "new\nline",
    ".",
    "..",
    "a..b",
    "\x7f",
]


def test_names_come_back_exactly(tmp_path):
    path = tmp_path / "x.safetensors"
    entries = {name: entry("U8", [1], i, i + 1) for i, name in enumerate(NAMES)}
    for text in (json.dumps(entries), json.dumps(entries, ensure_ascii=False)):
        path.write_bytes(container(text, bytes(range(len(NAMES)))))
        found = streamload.load_state_dict(path)
        assert {name: t.item() for name, t in found.items()} == {
            name: i for i, name in enumerate(NAMES)
        }
        with refused(path) as caught:
            streamload.load_into(bag({"w": (1,)}), path)
        str(caught[0]).encode("utf-8")


def reference_values(data: bytes) -> dict[str, torch.Tensor] | None:
    """An independent reading: safetensors' own, or None if it refuses."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(data)
    except (SafetensorError, ValueError, KeyError, RuntimeError):
        return None


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_mutated_files_give_exact_values_or_our_error(tmp_path_factory, data):
    """At least as strict as the reference reader: what it refuses, so do we."""
    raw = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        match data.draw(st.sampled_from(["set", "cut", "insert", "drop"])):
            case "set":
                raw[at] = data.draw(st.integers(0, 255))
            case "insert":
                raw[at:at] = data.draw(st.binary(min_size=1, max_size=4))
            case "drop":
                del raw[at : at + data.draw(st.integers(1, 8))]
            case "cut":
                del raw[at:]
        if not raw:
            break
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    path.write_bytes(raw)
    try:
        found = streamload.load_state_dict(path)
    except streamload.StreamloadError:
        return
    expected = reference_values(bytes(raw))
    assert expected is not None
    assert found.keys() == expected.keys()
    assert all(same_bits(found[name], t) for name, t in expected.items())
