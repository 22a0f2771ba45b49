"""What a plan decides before a byte moves: fits, misfits, dtypes, devices, memory."""

from __future__ import annotations

import pickle

import pytest
import torch

import streamload
from streamload import Concat, MemorySource, NameMap, Rule, Split, Transpose
from streamload.core.dtypes import BY_NAME, parse_dtype
from streamload.core.options import Settings
from streamload.core.specs import Catalog, Extent, TensorSpec
from streamload.planning.build import build_plan
from streamload.planning.records import Targets, TargetSpec
from tests.support.counting import calls_in


def catalog(**tensors):
    """Stored tensors by name: a shape, or a shape and a dtype."""
    specs, at = {}, 0
    for name, value in tensors.items():
        shape, dtype = value if isinstance(value[-1:], str) or _typed(value) else (value, "F32")
        spec = TensorSpec(name.replace("__", "."), dtype, tuple(shape), "f")
        specs[spec.name] = TensorSpec(
            spec.name, dtype, spec.shape, "f", Extent("f", at, spec.nbytes)
        )
        at += spec.nbytes
    return Catalog(specs)


def _typed(value):
    return len(value) == 2 and isinstance(value[1], str)


def targets(*specs):
    return Targets(tuple(specs))


def param(*names, shape=(2, 3), **options):
    return TargetSpec(names, shape, options.pop("dtype", "F32"), **options)


def test_a_plan_that_holds():
    made = build_plan(catalog(w=(2, 3), b=(3,)), None, targets(param("w"), param("b", shape=(3,))))
    assert made.ok
    assert made.report.summary() == "loaded=2 missing=0 unexpected=0 shape_mismatch=0"
    assert [t.name for t in made.tensors] == ["w", "b"]
    assert made.bytes_to_write == 36
    made.raise_if_refused()


def test_every_problem_is_listed_at_once():
    made = build_plan(
        catalog(a=(2, 3), b=(3, 2), extra=(1,), ints=((2,), "I32")),
        None,
        targets(
            param("a", shape=(3, 3)),
            param("b"),
            param("gone"),
            param("ints", shape=(2,)),
        ),
        Settings(expected_layers=3, device={"a": "cpu"}),
        source="path",
    )
    report = made.report
    assert [m.source for m in report.shape_mismatch] == ["a", "b"]
    assert (report.missing, report.unexpected) == (("gone",), ("extra",))
    text = "; ".join(made.problems)
    for word in ("'a'", "'b'", "'gone'", "'extra'", "I32", "expected_layers=3", "device map"):
        assert word in text
    with pytest.raises(streamload.PlanError, match="path: ") as info:
        made.raise_if_refused()
    assert info.value.report is report


MISFITS = [
    ((13, 4), (16, 4)),
    ((16, 4), (13, 4)),
    ((4, 13), (13, 4)),
    ((1, 4), (4,)),
    ((4, 1), (4,)),
    ((), (4,)),
    ((4,), ()),
    ((1,), ()),
    ((), (1,)),
    ((52,), (13, 4)),
    ((13, 2, 2), (13, 4)),
    ((0,), (13, 4)),
    ((0, 4), (13, 4)),
    ((13, 4), (0, 4)),
]


@pytest.mark.parametrize(("stored", "wanted"), MISFITS)
@pytest.mark.parametrize("strict", [True, False])
def test_shapes_are_never_padded_cut_broadcast_or_reshaped(stored, wanted, strict):
    made = build_plan(
        catalog(w=stored, ok=(1,)),
        None,
        targets(param("w", shape=wanted), param("ok", shape=(1,))),
        Settings(strict=strict),
    )
    (entry,) = made.report.shape_mismatch
    assert (entry.source, entry.stored_shape) == ("w", stored)
    assert (entry.name, entry.shape) == ("w", wanted)
    assert [t.name for t in made.tensors] == ["ok"]
    assert made.report.unfilled == ("w",)
    assert made.ok is not strict


def test_close_names_are_suggested():
    made = build_plan(catalog(lin__wieght=(2, 3)), None, targets(param("lin.weight")))
    assert "(close to 'lin.wieght')" in "; ".join(made.problems)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("stored", [{}, {"x": (3,)}, {"w": (9, 9)}])
def test_loading_nothing_is_always_a_failure(strict, stored):
    made = build_plan(catalog(**stored), None, targets(param("w")), Settings(strict=strict))
    assert not made.ok
    assert "nothing would be loaded" in "; ".join(made.problems)


class TestFused:
    """Several stored tensors for one target, one for several, and parts that are lacking."""

    qkv = NameMap((Rule(("q", "k", "v"), "qkv", Concat(0, (4, 2, 2))),))
    split = NameMap((Rule("gu", ("gate", "up"), Split(0)),))

    def test_the_part_that_does_not_fit_is_named(self):
        made = build_plan(
            catalog(q=(4, 3), k=(4, 3), v=(2, 3)), self.qkv, targets(param("qkv", shape=(8, 3)))
        )
        (entry,) = made.report.shape_mismatch
        assert (entry.source, entry.stored_shape, entry.shape) == ("k", (4, 3), (2, 3))

    @pytest.mark.parametrize("strict", [True, False])
    def test_a_lacking_part_leaves_the_target_missing(self, strict):
        made = build_plan(
            catalog(q=(4, 3), v=(2, 3), ok=(1,)),
            NameMap((*self.qkv.rules, Rule("ok", "ok"))),
            targets(param("qkv", shape=(8, 3)), param("ok", shape=(1,))),
            Settings(strict=strict),
        )
        assert made.report.missing == ("qkv",)
        assert made.ok is not strict
        lines = "; ".join((*made.problems, *made.report.notices))
        assert "'q' + 'v' cannot fill 'qkv': 'k' is missing" in lines

    def test_a_target_that_the_module_lacks(self):
        made = build_plan(catalog(gu=(4, 3)), self.split, targets(param("gate")))
        assert not made.ok
        assert "'gu' cannot fill 'gate', 'up'" in "; ".join(made.problems)

    def test_rows_that_cannot_be_cut(self):
        made = build_plan(catalog(gu=(5, 3)), self.split, targets(param("gate"), param("up")))
        assert {m.name for m in made.report.shape_mismatch} == {"gate", "up"}

    def test_parts_of_different_dtypes_meet_in_float32(self):
        made = build_plan(
            catalog(q=((4, 3), "F16"), k=((2, 3), "BF16"), v=((2, 3), "F16")), self.qkv, None
        )
        (planned,) = made.tensors
        assert (planned.dtype, planned.stored_dtype) == ("F32", "F16+BF16")

    def test_parts_of_different_kinds_are_refused(self):
        made = build_plan(
            catalog(q=((4, 3), "F16"), k=((2, 3), "I64"), v=((2, 3), "F16")), self.qkv, None
        )
        assert "F16 and I64" in "; ".join(made.problems)


class TestNames:
    def test_two_names_on_one_target(self):
        made = build_plan(catalog(module__w=(2, 3), w=(2, 3)), None, targets(param("w")))
        assert "'module.w' and 'w' both fall on 'w'" in "; ".join(made.problems)

    def test_two_rules_for_one_name(self):
        table = NameMap((Rule("h.{layer}.a", "x.{layer}"), Rule("h.0.a", "y")))
        made = build_plan(catalog(h__0__a=(2, 3)), table, targets(param("y")))
        assert "matches more than one rule" in "; ".join(made.problems)

    def test_layer_1_is_no_layer_10(self):
        names = [f"layers.{i}.w" for i in range(12)]
        made = build_plan(
            catalog(**{n.replace(".", "__"): (2, 3) for n in names}),
            NameMap((Rule("layers.{layer}.w", "blocks.{layer}.w"),)),
            targets(*(param(f"blocks.{i}.w") for i in range(12))),
        )
        assert made.ok
        pairs = [(t.sources[0].split(".")[1], t.name.split(".")[1]) for t in made.tensors]
        assert all(one == two for one, two in pairs)

    def test_numbered_from_one(self):
        made = build_plan(
            catalog(layers__1__w=(2, 3), layers__2__w=(2, 3)),
            None,
            targets(param("layers.0.w"), param("layers.1.w")),
        )
        assert made.report.missing == ("layers.0.w",)
        assert made.report.unexpected == ("layers.2.w",)

    @pytest.mark.parametrize(("expected", "ok"), [(2, True), (1, False), (3, False), (0, False)])
    def test_expected_layers(self, expected, ok):
        made = build_plan(
            catalog(h__0__w=(2, 3), h__1__w=(2, 3)),
            None,
            targets(param("h.0.w"), param("h.1.w")),
            Settings(expected_layers=expected),
        )
        assert made.ok is ok
        if not ok:
            assert "2 layers (0, 1)" in "; ".join(made.problems)

    def test_prefix_takes_part_of_the_file(self):
        stored = catalog(enc__w=(2, 3), dec__w=(9,), encoder__w=(7,))
        for prefix in ("enc", "enc."):
            made = build_plan(stored, None, targets(param("w")), Settings(prefix=prefix))
            assert made.ok
            assert made.report.loaded[0].sources == ("enc.w",)
        made = build_plan(stored, None, targets(param("w")), Settings(prefix="nope"))
        assert "nothing would be loaded" in "; ".join(made.problems)

    def test_layers_choose_blocks(self):
        stored = catalog(h__0__w=(2, 3), h__1__w=(2, 3), emb=(2, 3))
        module = targets(param("h.0.w"), param("h.1.w"), param("emb"))
        made = build_plan(stored, None, module, Settings(layers=frozenset({1})))
        assert made.ok
        assert [t.name for t in made.tensors] == ["h.1.w", "emb"]
        made = build_plan(stored, None, module, Settings(layers=frozenset({1, 7})))
        assert "no block 7" in "; ".join(made.problems)

    def test_a_scale_that_is_not_applied_is_told(self):
        stored = catalog(w=((2, 3), "F8_E4M3"), w_scale_inv=((1,), "F32"))
        for mapper in (None, lambda n: "w" if n == "w" else None):
            made = build_plan(stored, mapper, targets(param("w")), Settings(strict=False))
            assert any("scale 'w_scale_inv' is not applied" in n for n in made.report.notices)
        assert not build_plan(stored, None, targets(param("w"))).ok

    @pytest.mark.parametrize(
        "name",
        [
            "l.scale", "l.scales", "l.scale_weight", "l.input_scale", "l.weight_scale_2",
            "l.weight.absmax", "l.weight_amax", "l.weight_scale_inv", "l.weight.scale", "l.W_SCALE",
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("prefix", [None, "top"])
    def test_whatever_the_scale_is_called(self, name, prefix):
        start = f"{prefix}__" if prefix else ""
        others = {"l__bias": (3,), "m__weight": ((2, 3), "F8_E5M2"), "m__shift": (3,)}
        tensors = {"l__weight": ((2, 3), "F8_E4M3"), name: ((1,), "F32"), **others}
        stored = catalog(**{start + n.replace(".", "__"): t for n, t in tensors.items()})
        options = Settings(strict=False, prefix=prefix)
        full = start.replace("__", ".")
        for mapper in (None, lambda n: n if n in ("l.weight", "m.weight") else None):
            made = build_plan(
                stored, mapper, targets(param("l.weight"), param("m.weight")), options
            )
            assert [n for n in made.report.notices if "not applied" in n] == [
                f"'{full}l.weight' is F8_E4M3 and its scale '{full}{name}' is not applied: "
                "the values are off by that scale"
            ]

    def test_many_scales_are_one_notice(self):
        tensors = {f"l{n}__w": ((2, 3), "F8_E4M3") for n in range(9)}
        scales = {f"l{n}__w_scale_inv": ((1,), "F32") for n in range(9)}
        module = targets(*(param(f"l{n}.w") for n in range(9)))
        made = build_plan(catalog(**tensors, **scales), None, module, Settings(strict=False))
        (notice,) = [n for n in made.report.notices if "not applied" in n]
        assert "'l0.w_scale_inv'" in notice
        assert notice.endswith("off by that scale, and so it is with 8 other weights")

    def test_a_scale_is_its_own_weights_only(self):
        stored = catalog(
            up=((2, 3), "F8_E4M3"), down=((2, 3), "F8_E4M3"), up_scale=(1,), norm__scale=(3,)
        )
        module = targets(param("up"), param("down"))
        made = build_plan(stored, None, module, Settings(strict=False))
        (notice,) = [n for n in made.report.notices if "not applied" in n]
        assert notice.startswith("'up' is F8_E4M3 and its scale 'up_scale'")

    def test_a_mapping_that_gives_no_name_is_a_type_error(self):
        with pytest.raises(TypeError, match="'w'"):
            build_plan(catalog(w=(2,)), lambda name: 7, targets(param("w")))
        with pytest.raises(TypeError, match="mapping must be"):
            build_plan(catalog(w=(2,)), 7, targets(param("w")))


CASTS = [
    # stored, the module's own, on meta?, asked for → the target's dtype, or None: refused
    ("F32", "F32", True, None, "F32"),
    ("F32", "F32", True, "bfloat16", "BF16"),
    ("BF16", "F32", True, None, "BF16"),
    ("F16", "BF16", True, "float32", "F32"),
    ("F64", "F32", True, None, "F64"),
    ("F32", "BF16", False, None, "BF16"),
    ("F32", "F32", False, "float32", "F32"),
    ("F32", "F32", False, "bfloat16", None),
    ("I64", "I64", True, "bfloat16", "I64"),
    ("BOOL", "BOOL", True, "float16", "BOOL"),
    ("C64", "C64", True, "float16", "C64"),
    ("I32", "F32", True, None, None),
    ("I32", "F32", True, "bfloat16", None),
    ("F32", "I64", True, None, None),
    ("I32", "I64", True, None, None),
    ("U8", "BOOL", True, None, None),
    ("C64", "F32", True, None, None),
    ("F32", "C64", False, None, None),
    ("F8_E4M3", "F32", True, None, "F8_E4M3"),
    ("F8_E4M3", "F32", True, "bfloat16", "BF16"),
    ("F8_E4M3", "BF16", False, None, "BF16"),
    ("F4", "F32", True, None, None),
    ("F6_E2M3", "F32", True, "bfloat16", None),
]


@pytest.mark.parametrize(("stored", "own", "meta", "asked", "expected"), CASTS)
def test_only_floats_are_cast_and_kinds_never_change(stored, own, meta, asked, expected):
    made = build_plan(
        catalog(w=((2, 8), stored)),
        None,
        targets(param("w", shape=(2, 8), dtype=own, is_meta=meta)),
        Settings(dtype=parse_dtype(asked)),
    )
    assert made.ok is (expected is not None)
    if expected is None:
        assert stored in "; ".join(made.problems)
    else:
        assert made.tensors[0].dtype == expected
        assert made.tensors[0].is_new is meta


@pytest.mark.parametrize(
    "name", ["inv_freq", "layers.0.rotary_emb.inv_freq", "rope.freqs", "inner.rope.freqs"]
)
def test_rotary_tables_are_never_rounded(name):
    stored = Catalog({name: TensorSpec(name, "F32", (4,), "f", Extent("f", 0, 16))})
    made = build_plan(stored, None, None, Settings(dtype=BY_NAME["BF16"]))
    assert made.tensors[0].dtype == "F32"


class TestTies:
    tied = param("wte", "head")

    @pytest.mark.parametrize("name", ["wte", "head"])
    def test_either_name_fills_both(self, name):
        made = build_plan(catalog(**{name: (2, 3)}), None, targets(self.tied))
        assert made.ok
        assert made.tensors[0].name == "wte"
        assert made.tensors[0].aliases == ("head",)
        assert made.report.tied == (("wte", "head"),)

    @pytest.mark.parametrize("order", [("wte", "head"), ("head", "wte")])
    def test_both_names_are_compared_whatever_their_order(self, order):
        made = build_plan(catalog(**dict.fromkeys(order, (2, 3))), None, targets(self.tied))
        assert made.ok
        (comparison,) = made.comparisons
        assert comparison.kept.sources == ("wte",)
        assert comparison.other.sources == ("head",)
        assert made.tensors[0].sources == ("wte",)

    def test_one_of_two_that_does_not_fit(self):
        made = build_plan(catalog(wte=(2, 3), head=(4, 3)), None, targets(self.tied))
        (entry,) = made.report.shape_mismatch
        assert (entry.source, entry.name) == ("head", "head")
        assert made.report.missing == ()


class TestDevices:
    module = targets(param("emb.w", "head.w"), param("lin.w"), param("lin.b"))
    stored = catalog(emb__w=(2, 3), lin__w=(2, 3), lin__b=(2, 3))

    @pytest.mark.parametrize(
        ("device", "says"),
        [
            ({"emb": "cpu", "head": "cpu"}, "no entry for 'lin.w'"),
            ({"emb": "cpu", "head": "cpu"}, "no entry for 'lin.b'"),
            ({"": "cpu", "nope": "cpu"}, "'nope'"),
            ({"": "cpu", "li": "cpu"}, "'li'"),
            ({"": "cpu", "head": "meta"}, "'emb.w' and 'head.w' are one tensor"),
            ({}, "no entry"),
        ],
    )
    def test_maps_at_fault_are_told(self, device, says):
        made = build_plan(self.stored, None, self.module, Settings(device=device))
        assert says in "; ".join(made.problems)

    def test_the_longest_prefix_counts(self):
        device = {"": "a", "lin": "b", "lin.b": "c"}
        made = build_plan(self.stored, None, self.module, Settings(device=device))
        assert {t.name: t.device for t in made.tensors} == {
            "emb.w": "a",
            "lin.w": "b",
            "lin.b": "c",
        }


class TestInPlace:
    """What cannot be honoured for a tensor that holds data is refused with the way out."""

    module = targets(param("w", is_meta=False, device="cpu", strides=(3, 1)))

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"dtype": BY_NAME["BF16"]}, "dtype=bfloat16"),
            ({"mode": "map"}, "mode='map'"),
            ({"layout": "stored"}, "layout='stored'"),
            ({"device": "cuda:0"}, "device='cuda:0'"),
        ],
    )
    def test_options_that_need_new_tensors(self, options, says):
        made = build_plan(catalog(w=(2, 3)), None, self.module, Settings(**options))
        text = "; ".join(made.problems)
        assert says in text
        assert "empty_weights" in text

    def test_its_own_strides_are_kept(self):
        module = targets(param("w", is_meta=False, strides=(1, 2)))
        made = build_plan(catalog(w=(2, 3)), None, module)
        assert made.tensors[0].strides == (1, 2)
        assert not made.tensors[0].is_new


class TestBuffers:
    def test_what_would_stay_on_meta_is_refused_with_the_way_out(self):
        module = targets(
            param("w"), param("mask", kind="buffer", persistent=False), param("b", kind="buffer")
        )
        made = build_plan(catalog(w=(2, 3)), None, module)
        assert made.report.unfilled == ("mask", "b")
        assert made.report.missing == ("b",)
        text = "; ".join(made.problems)
        assert "'mask'" in text
        assert "empty_weights()" in text

    def test_real_buffers_that_are_not_in_the_file_are_kept(self):
        module = targets(param("w"), param("b", kind="buffer", is_meta=False))
        made = build_plan(catalog(w=(2, 3)), None, module)
        assert made.ok
        assert any("'b'" in n or " b" in n for n in made.report.notices)

    def test_a_real_buffer_in_the_file_becomes_a_new_one_of_its_own_dtype(self):
        module = targets(param("w"), param("b", kind="buffer", is_meta=False))
        made = build_plan(
            catalog(w=(2, 3), b=((2, 3), "BF16")), None, module, Settings(dtype=BY_NAME["F16"])
        )
        planned = {t.name: t for t in made.tensors}
        assert planned["b"].is_new
        assert (planned["w"].dtype, planned["b"].dtype) == ("F16", "F32")


def test_memory_is_the_new_tensors_and_the_buffers():
    options = Settings(workers=2, chunk_bytes=8, dtype=BY_NAME["BF16"])
    made = build_plan(catalog(w=(2, 3)), None, targets(param("w")), options)
    assert made.memory.needed_bytes == 12 + 2 * 8
    made = build_plan(
        catalog(w=(2, 3)),
        NameMap((Rule("w", "w", Transpose()),)),
        targets(param("w", shape=(3, 2))),
    )
    assert made.memory.staging_bytes == 2 * (24 + 24)
    made = build_plan(catalog(w=(2, 3)), None, targets(param("w")), Settings(mode="map"))
    assert made.memory.needed_bytes == 0


def test_a_plan_can_be_pickled():
    made = build_plan(catalog(w=(2, 3)), None, targets(param("w")), Settings(dtype=BY_NAME["BF16"]))
    again = pickle.loads(pickle.dumps(made))
    assert again.report == made.report
    assert again.tensors == made.tensors


def test_planning_is_linear_in_the_number_of_tensors():
    """Counted in calls; seconds are measured in bench/test_speed.py."""

    def calls(count):
        names = [f"h.{i // 10}.t{i % 10}.weight" for i in range(count)]
        stored = Catalog({n: TensorSpec(n, "F32", (2,), "f", Extent("f", 0, 8)) for n in names})
        module = targets(*(param(n, shape=(2,)) for n in names))
        return calls_in(lambda: build_plan(stored, None, module).raise_if_refused())

    calls(100)
    small, large = calls(2000), calls(20000)
    assert large < 11 * small, f"{small} calls for 2,000 tensors, {large} for 20,000"


def test_building_a_plan_makes_no_tensor(monkeypatch):
    source = MemorySource({"w": torch.ones(2, 3)})
    for name in ("empty", "empty_strided", "zeros"):
        monkeypatch.setattr(torch, name, None)
    assert build_plan(source.catalog, None, targets(param("w"))).ok


class TestMessages:
    """The one line says the cause; the report has every problem."""

    def test_one_reason_of_many_tensors_is_said_once(self):
        names = [f"blocks.{i}.some.long.name.weight" for i in range(60)]
        module = targets(*(param(n, is_meta=False, strides=(3, 1)) for n in names))
        stored = catalog(**dict.fromkeys(names, (2, 3)))
        for options in (Settings(mode="map"), Settings(dtype=BY_NAME["BF16"])):
            made = build_plan(stored, None, module, options)
            with pytest.raises(streamload.PlanError, match="each of 60 tensors") as caught:
                made.raise_if_refused()
            assert len(str(caught.value)) < 600
            assert names[0] in str(caught.value)
            assert sum("overwritten in place" in p for p in caught.value.report.problems) == 60

    def test_where_only_shapes_do_not_fit_the_names_are_not_blamed(self):
        loose = Settings(strict=False)
        made = build_plan(catalog(w=(2, 4)), None, targets(param("w")), loose)
        assert made.problems == (
            "nothing would be loaded: names fit, shapes do not (1); "
            "the first: 'w' has shape [2, 4], 'w' needs [2, 3]",
        )
        made = build_plan(catalog(lin__weigth=(2, 3)), None, targets(param("lin.weight")), loose)
        assert "'lin.weigth' (close to 'lin.weight') has no place" in made.problems[0]

    def test_a_transposed_weight_is_told_its_shape_as_stored(self):
        table = NameMap((Rule("w", "v", Transpose()),))
        made = build_plan(catalog(w=(3, 5)), table, targets(param("v", shape=(6, 3))))
        assert "needs [6, 3] ([3, 6] as stored, before transpose)" in made.problems[0]
        assert made.report.shape_mismatch[0].stored_shape == (3, 5)
        assert made.report.shape_mismatch[0].shape == (6, 3)

    def test_what_stays_on_meta_is_counted_last(self):
        module = targets(param("w"), param("gone"))
        made = build_plan(catalog(w=(2, 3)), None, module, Settings(strict=False))
        counts = "loaded=1 missing=1 unexpected=0 shape_mismatch=0 unfilled=1"
        assert made.report.summary() == counts


def test_a_tensor_without_a_name_fits_its_like():
    made = build_plan(Catalog({"": TensorSpec("", "F32", (2, 3), "f")}), None, targets(param("")))
    assert made.ok
    assert [t.sources for t in made.tensors] == [("",)]
