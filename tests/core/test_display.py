"""What reports, plans, sources and tables show of themselves, in a terminal and in a notebook."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

import streamload
from streamload.core.display.curve import memory_curve
from streamload.core.options import settings_from
from streamload.core.report import LoadReport, MemoryReport, MemorySample, ShapeMismatch
from streamload.core.specs import Catalog, Extent, TensorSpec
from streamload.planning.build import build_plan
from streamload.system.peaks import PeakSampler
from tests.support.tiny import LAYERS, bag, gpt2_tensors, meta_gpt2, with_masks, write, write_gpt2

HOSTILE = "<script>alert('x')</script>\x1b[31m\u202e\"&"
VOID = {"br", "progress", "line", "polyline"}


class Page(HTMLParser):
    """Reads HTML strictly: every element is closed by its own end."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.seen = ""  # what is in sight without opening anything
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if "details" not in self.open or "summary" in self.open:
            self.seen += data


def shows(thing) -> tuple[str, Page]:
    """Its repr and its page, which keep to the rules that hold for all of them."""
    text, html = repr(thing), thing._repr_html_()
    lines = text.split("\n")
    assert len(lines) <= 12, text
    assert all(len(line) <= 80 for line in lines), text
    assert all(line.isprintable() for line in lines), "nothing that a terminal would obey"
    page = Page(html)
    assert len(html) < 60_000
    assert not {"script", "style", "link", "img", "iframe"}.intersection(page.tags)
    assert all(not name.startswith("on") and "url(" not in str(v) for name, v in page.attributes)
    for value in (v for name, v in page.attributes if name == "style"):
        assert not re.search(r"(?<!-)color:(?!inherit)", str(value)), "colours are the page's own"
    assert page.text.replace("\n", "").isprintable()
    return text, page


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpt2")
    return write_gpt2(path, with_masks(gpt2_tensors(), torch.float32))


class TestWhatIsShown:
    def test_a_load(self, folder):
        loaded = streamload.load(folder, dtype="bf16", mode="stream")
        parameters = sum(p.numel() for p in loaded.model.parameters())
        for thing in (loaded, loaded.report):
            text, page = shows(thing)
            assert text.startswith(f"{type(thing).__name__}: ")
            for part in ("(gpt2) to bfloat16 on cpu, mode stream", "28 loaded, 1 tie, 4 ignored"):
                assert part in text
                assert part in page.seen
            assert re.search(r"read \S+ KiB in \d+\.\d\d s", text)
            assert re.search(r"peak \S+ \S+ over the start", text)
        assert f"GPT, {parameters:,} parameters" in repr(loaded)

    def test_the_full_lists_are_folded_away(self, folder):
        _, page = shows(streamload.load(folder, dtype="bf16", mode="stream").report)
        assert "attn.qkv.weight" not in page.seen
        assert "assignments (28)" in page.seen
        assert "attn.qkv.weight← h.N.attn.c_attn.weight[12, 4]float32 → bfloat16transpose" in (
            page.text.replace("\n", "")
        )
        assert f"h.{{0…{LAYERS - 1}}}.attn.bias" in page.text, "what is ignored"

    def test_a_plan_says_what_it_would_do(self, folder):
        text, page = shows(streamload.plan(folder, mode="stream"))
        assert text.startswith("Plan: ")
        assert "28 to load, 1 tie, 4 ignored" in text
        assert re.search(r"memory: \S+ \S+ needed, \S+ GiB available", text)
        assert "assignments (28)" in page.seen
        assert "map 2" in repr(streamload.plan(folder, mode="map"))

    def test_problems_come_first(self, folder):
        module = meta_gpt2(vocab=14)
        plan = streamload.plan(module, folder)
        with pytest.raises(streamload.PlanError) as info:
            streamload.load_into(module, folder)
        for thing in (plan, info.value.report):
            text, page = shows(thing)
            assert "(refused: 1 problem)" in text.split("\n")[0]
            assert text.split("\n")[1].startswith("  problem: shape mismatch: 'wte.weight'")
            assert "[14, 4]" in page.seen

    def test_counts_are_whole_however_many(self, tmp_path):
        missing = tuple(f"m{n}" for n in range(772))
        unexpected = tuple(f"u{n}" for n in range(580))
        report = LoadReport(
            source="x", missing=missing, unexpected=unexpected, unfilled=missing, ignored=missing
        )
        text = shows(report)[0]
        joined = re.sub(r"\n +", " ", text)
        assert "772 missing, 580 unexpected, 772 unfilled, 772 ignored" in joined
        assert max(map(len, text.split("\n"))) <= 80

    def test_an_export(self, folder, tmp_path):
        model = streamload.load(folder).model
        report = streamload.export(model, tmp_path / "out", dtype="bf16")
        text, page = shows(report)
        assert "ExportReport: " in text
        assert "1 file" in text
        assert re.search(r"wrote: 28 tensors, \S+ KiB in", text)
        assert "dtype: bfloat16" in text
        assert "model.safetensors" in page.text

    def test_sources_and_catalogs(self, folder):
        with streamload.open_checkpoint(folder) as source:
            for thing in (source, source.catalog):
                text, page = shows(thing)
                assert "32 tensors, " in text
                assert "dtypes: float32" in text
                assert "tensors (32)" in page.seen
                assert "attn.c_attn.weight" not in page.seen
                assert "attn.c_attn.weight" in page.text
        assert "SafetensorsSource" in repr(source)
        memory = streamload.MemorySource({"w": torch.zeros(3), "n": torch.zeros(2).int()})
        assert "float32 1, int32 1" in shows(memory)[0]

    def test_a_source_shows_itself_while_it_is_made(self):
        class Half(streamload.MemorySource):
            def __init__(self):
                self.shown = repr(self)

        assert Half().shown == "Half"

    def test_name_tables(self):
        table = streamload.mapping_for("gpt2", {"n_layer": 48})
        text, page = shows(table)
        assert text.startswith("NameMap of gpt2: 19 rules, 48 layers")
        assert "h.{layer}.attn.c_attn.weight → blocks.{layer}.attn.qkv.weight [transpose]" in text
        assert "… and 11 more in .rules" in text
        assert "(ignored)" in page.text
        assert shows(streamload.NameMap([streamload.Rule("a", "b")]))[0].endswith("a → b")

    def test_an_address_shows_no_secret(self):
        report = LoadReport(source="https://me:secret@example.org/model.safetensors?sig=secret")
        text, page = shows(report)
        assert "model.safetensors" in text
        assert "secret" not in text + page.text

    def test_nothing_prints_by_itself(self, folder):
        code = (
            "import streamload, sys\n"
            f"loaded = streamload.load({str(folder)!r})\n"
            f"streamload.plan({str(folder)!r})._repr_html_(), repr(loaded), loaded._repr_html_()"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        assert (done.stdout, done.stderr) == (b"", b"")


class TestWhatBecameOfTheMissing:
    @pytest.fixture
    def path(self, tmp_path):
        return write(tmp_path / "x.safetensors", {"a": torch.zeros(2)})

    @pytest.mark.parametrize(
        ("device", "fate"), [("cpu", "left unchanged"), ("meta", "left on meta without values")]
    )
    def test_it_is_told(self, path, device, fate):
        module = bag({"a": (2,), "b": (3,)}, device=device)
        plan = streamload.plan(module, path, strict=False)
        report = streamload.load_into(module, path, strict=False)
        assert plan.missing_are == report.missing_are == fate
        assert f"missing (1), {fate}: 'b'" in repr(report)
        assert f"missing (1), {fate}:\n  b" in report.to_text()
        assert report.to_dict()["missing_are"] == fate

    def test_nothing_becomes_of_it_where_that_refuses(self, path):
        plan = streamload.plan(bag({"a": (2,), "b": (3,)}), path)
        assert plan.missing == ("b",)
        assert plan.missing_are == ""


class TestHostileAndLarge:
    def test_names_are_escaped(self, tmp_path):
        name = HOSTILE.replace("\x1b", "\x07")
        path = write(tmp_path / "x.safetensors", {name: torch.zeros(2), "a": torch.zeros(1)})
        with streamload.open_checkpoint(path) as source:
            things = [source, source.catalog]
        things.append(streamload.plan(bag({"a": (1,)}), path))
        things.append(streamload.plan(bag({"a": (1,)}), path, strict=False).report)
        for thing in things:
            _, page = shows(thing)
            assert "<script>alert('x')</script>\\x07[31m\\u202e" in page.text

    @pytest.mark.parametrize(
        "field", ["missing", "unexpected", "unfilled", "ignored", "problems", "notices", "tied"]
    )
    @pytest.mark.parametrize("count", [1, 5000])
    def test_every_list_keeps_to_its_room(self, field, count):
        rows = tuple(f"{HOSTILE * 40}{n}" for n in range(count))
        values = tuple((row, row) for row in rows) if field == "tied" else rows
        report = replace(LoadReport(source=HOSTILE, dtype=HOSTILE), **{field: values})
        shows(report)

    def test_all_lists_at_once(self):
        rows = tuple(f"{HOSTILE * 40}{n}" for n in range(500))
        odd = tuple(ShapeMismatch(row, (1,), row, (2,)) for row in rows)
        lists = dict.fromkeys(("missing", "unexpected", "unfilled", "problems", "notices"), rows)
        samples = tuple(MemorySample(n, n, n, n) for n in range(256))
        report = LoadReport(source="x", shape_mismatch=odd, elapsed_s=1.0, trace=samples, **lists)
        shows(report)

    def test_a_hundred_thousand_tensors_show_at_once(self):
        specs = {}
        for n in range(100_000):
            name = f"layers.{n // 20}.m{n % 20}.weight"
            extent = Extent("f", n * 512, 32 * (8 + n % 3))
            specs[name] = TensorSpec(name, "F32", (8, 8 + n % 3), "f", extent)
        catalog = Catalog(specs)
        plan = build_plan(catalog, None, None, settings_from({}), source="x")
        for thing in (catalog, plan):
            start_s = time.process_time()
            text, _ = shows(thing)
            assert time.process_time() - start_s < 3  # a fifth of it here
            assert "100000 " in text


class TestMemoryOverTime:
    SAMPLES = tuple(MemorySample(n / 10, n << 20, n << 19, n << 18) for n in range(11))

    def test_a_load_has_its_curve(self, tmp_path):
        held = torch.zeros(9 << 20)  # kept: its memory must not be what the load is given
        path = write(tmp_path / "x.safetensors", {"w": held})
        report = streamload.load_into(bag({"w": (9 << 20,)}), path)
        assert 2 <= len(report.trace) <= 257
        assert report.trace[0][1:] == (0, 0, 0)
        assert max(s.rss_bytes for s in report.trace) <= report.memory.peak_rss_bytes
        assert max(s.rss_bytes for s in report.trace) > 32 << 20
        times = [sample.elapsed_s for sample in report.trace]
        assert times == sorted(times)
        assert times[-1] <= report.elapsed_s

    def test_it_is_no_part_of_what_scripts_read(self):
        report = LoadReport(trace=self.SAMPLES)
        assert "trace" not in report.to_dict()
        assert report == LoadReport()

    def test_the_lines_are_where_the_figures_are(self):
        svg = memory_curve(self.SAMPLES, 10 << 20)
        Page(svg)
        assert "peak 10.0 MiB over the start" in svg
        lines = re.findall(r'points="([^"]+)"', svg)
        assert len(lines) == 3
        ends = [float(line.split()[-1].split(",")[1]) for line in lines]
        starts = {line.split()[0] for line in lines}
        assert starts == {"4.0,102.0"}, "all begin at nothing"
        file, anonymous, resident = (102 - end for end in ends)
        assert resident == pytest.approx(2 * anonymous) == pytest.approx(4 * file)

    def test_labels_do_not_cover_each_other(self):
        samples = [MemorySample(n, 5, 5, 5) for n in range(4)]
        heights = sorted(
            float(y)
            for y, label in re.findall(r'y="([\d.]+)"[^>]*>(\w+)<', memory_curve(samples))
            if label in ("resident", "anonymous", "file")
        )
        assert len(heights) == 3
        assert heights[1] - heights[0] >= 11.9
        assert heights[2] - heights[1] >= 11.9
        assert heights[0] > 0
        assert heights[-1] < 120

    @pytest.mark.parametrize("samples", [(), SAMPLES[:2]])
    def test_no_picture_of_nothing(self, samples):
        assert memory_curve(samples) == ""
        assert "<svg" not in replace(LoadReport(), trace=tuple(samples))._repr_html_()

    @pytest.mark.parametrize("most", [4, 64])
    def test_a_long_load_keeps_few_samples(self, most):
        with PeakSampler(interval_s=0.0005, most=most) as sampler:
            time.sleep(0.3)
        assert most // 2 <= len(sampler.samples) <= most + 2
        times = [at for at, _ in sampler.samples]
        assert times == sorted(times)
        assert times[0] < 0.05
        assert times[-1] > 0.29


def test_an_old_memory_report_needs_no_memory_line():
    assert "memory:" not in repr(LoadReport())
    assert "memory: 1.0 KiB needed" in repr(
        LoadReport(memory=MemoryReport(needed_bytes=1024, available_bytes=4096))
    )
