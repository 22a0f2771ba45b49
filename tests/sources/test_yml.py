"""Settings out of YAML: what PyYAML makes of plain values; nothing is built or followed."""

from __future__ import annotations

import pytest

from streamload.core.errors import CheckpointError
from streamload.sources.config.yml import read_settings

yaml = pytest.importorskip("yaml")

WANTED = ("num_layers", "rotary_pct", "norm", "no_weight_tying", "activation")
TEXTS = {
    "block": "num-layers: 44\nrotary-pct: 0.25\nnorm: layernorm\nno-weight-tying: true\n",
    "flow": '{ "num-layers": 44, "rotary_pct": 1.0, "norm": "layernorm", }',
    "signs": "num_layers: -3\nrotary-pct: 1.e-3\nnorm: ~\nactivation:\n",
    "text that looks like a number": "num-layers: '44'\nnorm: !!str 12\nactivation: 1_0.0x",
    "words": "no-weight-tying: yes\nnorm: Off\nactivation: null\nrotary-pct: .inf\n",
    "others beside": "a: {b: [1, {c: 2}], num_layers: 9}\nnum-layers: 2\nlist: [norm, x]\n",
    "comments": "# x\n---\nnum-layers: 2 # two\n...\n",
    "keys of other kinds": "1: x\n? [a, b]\n: c\n2.5: y\nnum-layers: 2\n",
    "no mapping": "[1, 2]",
    "empty": "",
    "text": "num-layers",
    "an alias that is not wanted": "a: &a 1\nb: *a\nnum-layers: 2\n",
    "unicode": "norm: 'é 重み'\n",
}


def read(tmp_path, text):
    (tmp_path / "x.yml").write_text(text, encoding="utf-8")
    return read_settings(str(tmp_path / "x.yml"), WANTED)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_plain_values_are_those_of_pyyaml(tmp_path, text):
    try:
        expected = yaml.safe_load(text)
    except yaml.YAMLError:  # a list as a key
        expected = {"num-layers": 2}
    pairs = expected.items() if isinstance(expected, dict) else ()
    named = {str(key).replace("-", "_"): value for key, value in pairs}
    assert read(tmp_path, text) == {key: value for key, value in named.items() if key in WANTED}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x: &a 2\nnum-layers: *a\n", "num_layers is an alias"),
        ("x: &a {num-layers: 2}\n<<: *a\n", "merges other settings"),
        ("num-layers: 1:30\n", "'1:30', expected a decimal number"),
        ("num-layers: 0x10\n", "'0x10', expected a decimal number"),
        ("num-layers: " + "9" * 19, "at most 18 digits"),
        ("num-layers: " + "9" * 999, "999 characters"),
        ("num-layers: [1]\n", "a list or a mapping"),
        ("num-layers: 1\nnum_layers: 2\n", "'num_layers' twice"),
        ("num-layers: 2020-01-01\n", "timestamp"),
        ("num-layers: !!python/name:os.system x\n", "python"),
        ("other: !own x\n", "!own"),
        ("a: " + "[" * 99, "nested"),
        ("num-layers: [", "YAML"),
        ("\x00", "YAML"),
        ("*a : 1", "alias|YAML"),
        ("# " + "x" * 40_000, "expected at most"),
    ],
)
def test_what_is_not_followed_or_built_is_refused(tmp_path, text, words):
    with pytest.raises(CheckpointError, match=words) as caught:
        read(tmp_path, text)
    assert caught.value.path == str(tmp_path / "x.yml")
