"""How options are read."""

import click
import pytest

from streamload.cli.types import (
    BYTES,
    BYTES_OR_NONE,
    DEVICE,
    DTYPE,
    INDICES,
    SECONDS,
    TOKENS,
    number,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4194304", 4194304),
        ("4MiB", 4 << 20),
        ("4 mi", 4 << 20),
        ("4M", 4_000_000),
        ("1.5GB", 1_500_000_000),
        ("512KiB", 512 << 10),
        ("2tib", 2 << 40),
        ("100B", 100),
    ],
)
def test_sizes(text, nbytes):
    assert BYTES.convert(text, None, None) == nbytes


@pytest.mark.parametrize("text", ["", "x", "-4", "0", "4XB", "4MiBs", "i"])
def test_not_sizes(text):
    with pytest.raises(click.BadParameter, match="not a size"):
        BYTES.convert(text, None, None)


def test_indices():
    assert INDICES.convert("0,1,5-7", None, None) == [0, 1, 5, 6, 7]
    assert INDICES.convert("3, 1 - 2, 1", None, None) == [3, 1, 2]
    for text in ("", "a", "1,,2", "-1"):
        with pytest.raises(click.BadParameter, match="list of indices"):
            INDICES.convert(text, None, None)
    with pytest.raises(click.BadParameter, match="counts down"):
        INDICES.convert("7-5", None, None)


def test_tokens():
    assert TOKENS.convert("1, 2 3", None, None) == [1, 2, 3]
    for text in ("", "1;2", "-1", "x"):
        with pytest.raises(click.BadParameter, match="token ids"):
            TOKENS.convert(text, None, None)


def test_devices():
    assert DEVICE.convert("cuda:0", None, None) == "cuda:0"
    assert DEVICE.convert("a=cpu, b.c=cuda:1", None, None) == {"a": "cpu", "b.c": "cuda:1"}
    with pytest.raises(click.BadParameter, match="mixes"):
        DEVICE.convert("cpu,a=cuda", None, None)


def test_dtypes():
    assert DTYPE.convert("bf16", None, None) == "bfloat16"
    assert DTYPE.convert("torch.float16", None, None) == "float16"
    for text in ("int8", "F4"):
        with pytest.raises(click.BadParameter, match="not a floating-point type"):
            DTYPE.convert(text, None, None)
    with pytest.raises(click.BadParameter, match="unknown dtype"):
        DTYPE.convert("f13", None, None)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "-1", "0", "1e400", "1000000"])
def test_seconds_are_finite_and_positive(text):
    with pytest.raises(click.BadParameter, match="must be more than 0 and less than 1000000"):
        SECONDS.convert(text, None, None)


@pytest.mark.parametrize("text", ["x", ""])
def test_seconds_are_a_number(text):
    with pytest.raises(click.BadParameter, match=f"'{text}' is not a number of seconds"):
        SECONDS.convert(text, None, None)


def test_numbers():
    assert SECONDS.convert("1.5", None, None) == 1.5
    assert number().convert("0", None, None) == 0.0
    assert number(above=0.0, most=1.0).convert("1", None, None) == 1.0
    assert BYTES_OR_NONE.convert("NONE", None, None) == "none"
    assert BYTES_OR_NONE.convert("2GiB", None, None) == 2 << 30
