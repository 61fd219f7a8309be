"""The pages of a benchmark's record and of a training run: they parse, hold the figures of their JSON, and need nothing else."""

import html.parser
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET

import pytest

from dflash_mlx.tools import bench, bench_page, bench_record, svg
from dflash_mlx.train.curves import write_curves

SOURCES = {"drafter": {"rounds": 9, "accepted": 0}, "prompt_lookup": {"rounds": 0, "accepted": 0}}


def run_of(kind, temp, speedup, widths, accepted, order, memory):
    side = {"prompt_tokens": 5, "tokens": 20, "ttft_s": 0.5, "decode_s": 1.0, "peak_memory_gb": 1.25, "decode_tps": 10.0}
    committed = sum((int(n) + 1) * count for n, count in accepted.items())
    ours = side | {
        "decode_tps": 10.0 * speedup,
        "peak_memory_gb": memory,
        "committed": committed,
        "rounds": sum(widths.values()),
        "drafting_rounds": sum(accepted.values()),
        "widths": widths,
        "accepted": accepted,
        "width_order": order,
        "sources": SOURCES,
        "width_reason": "10 % of passes checked no drafts: <dear>",
    }
    return {"kind": kind, "temp": temp, "context": 0, "trial": 0, "mlx_lm": side, "dflash": ours} | {
        "speedup": speedup,
        "late_speedup": None,
        "differs_at": None,
        "loops": False,
    }


@pytest.fixture
def record():
    runs = [
        run_of("code", 0.0, 2.125, {"0": 1, "3": 4}, {"0": 1, "1": 1, "3": 2}, [3, 3, 0, 3, 3], 1.5),
        run_of("chat", 0.0, 0.875, {"1": 2}, {"0": 1, "1": 1}, [1, 1], 1.75),
        run_of("code", 1.0, 1.5, {"2": 3}, {"0": 3}, [2, 2, 2], 1.5),
    ]
    return {
        "model": "org/</script><b>&model",
        "draft_model": "org/drafter",
        "weights": {"bits": [4], "dtype": "float16", "gb": 2.5},
        "machine": bench.machine(),
        "versions": {"mlx": "0.32.4", "mlx-lm": "0.32.2"},
        "date": "2026-01-02T03:04:05",
        "settings": {"trials": 1},
        "cold": {},
        "ended": "complete",
        "runs": runs,
        "summary": bench_record.summarise(runs),
    }


class Page(html.parser.HTMLParser):
    """What stands in a page: tags with attributes, texts by the element that they are in."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts = [], [], {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "rect", "line", "circle", "polyline"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in ("rect", "circle"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)


def whole(text):
    """A page that was checked to parse and to need nothing else."""
    page = Page(text)
    assert not page.open and text.count("<svg") == text.count("</svg>") > 0
    # What is wider than a phone scrolls by itself.
    assert text.count('<div class="wide"><') == text.count("<svg") + text.count("<table")
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ET.fromstring(drawing)
    assert not any(name in ("src", "href", "xlink:href", "action", "data") for _, given in page.tags for name in given)
    assert {tag for tag, _ in page.tags}.isdisjoint({"link", "img", "iframe", "object", "embed", "base"})
    assert "http" not in "".join(page.texts["style"]) and "url(" not in text and "@import" not in text
    return page


def test_a_page_parses_needs_nothing_else_and_holds_the_figures_of_its_json(record):
    page = whole(bench_page.page(record))
    assert json.loads("".join(page.texts["script"])) == record
    shown = page.texts["td"]
    for row in record["summary"]:
        wanted = [row["kind"], f"{row['temp']:g}", "0", f"{row['speedup']:.2f}"]
        assert any(shown[i : i + 4] == wanted for i in range(len(shown))), wanted
    titles = [text for text in page.texts["title"] if ", " in text]
    for row in record["summary"]:
        assert f"{row['kind']}, temperature {row['temp']:g}: {row['speedup']:.4g}" in titles
    assert {"code, DFlash: 1.5", "chat, DFlash: 1.75", "code, mlx-lm: 1.25"} <= {*titles}
    assert record["machine"]["chip"] in shown and "0.32.4" in shown
    assert "org/</script><b>&model with org/drafter" in page.texts["h1"]


def test_bars_are_as_high_as_their_figures(record):
    drawing = re.findall(r"<svg.*?</svg>", bench_page.page(record), re.DOTALL)[0]
    heights = {}
    for bar in ET.fromstring(drawing).iter("rect"):
        if (title := bar.find("title")) is not None:
            heights[title.text] = float(bar.get("height"))
    one = heights["code, temperature 0: 2.125"] / 2.125
    assert heights["chat, temperature 0: 0.875"] == pytest.approx(0.875 * one, abs=0.2)


def test_acceptance_by_position_and_width_over_time_are_counted_from_the_runs(record):
    first = record["runs"][:2]
    # Position 1: 6 drafts verified, 4 kept. Positions 2 and 3: 4 verified, 2 kept.
    assert bench_page.acceptance_by_position(first) == [(1, 4 / 6), (2, 0.5), (3, 0.5)]
    assert bench_page.width_over_time(first) == [(1, 2.0), (2, 2.0), (3, 0.0), (4, 3.0), (5, 3.0)]
    for run in record["runs"]:
        del run["dflash"]["width_order"]
    assert "Drafts over time: not in this record." in bench_page.page(record)
    long = {"dflash": {"width_order": [4] * 1000}}
    points = bench_page.width_over_time([long])
    assert len(points) <= 120 and {y for _, y in points} == {4} and points[-1][0] <= 1000


def test_ticks_are_round_numbers_within_the_axis():
    assert svg.ticks(0, 2.3) == [0, 0.5, 1, 1.5, 2]
    assert svg.ticks(0, 0.04) == [0, 0.01, 0.02, 0.03, 0.04]
    assert svg.ticks(3, 3) and svg.ticks(0, 1e6)[-1] == 1e6


def test_the_curves_of_a_training_run_are_a_page(tmp_path):
    found = [
        {"step": 10, "loss": 3.5, "run": 1.25, "hits": [0.5, 0.25], "lr": 1e-3},
        {"step": 20, "loss": 2.5, "run": 1.5, "hits": [0.625, 0.375], "lr": 5e-4},
        {"step": 20, "tau_heldout": 1.375},
    ]
    write_curves(tmp_path, tmp_path / "none.html")
    assert not (tmp_path / "none.html").exists()
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in found))
    write_curves(tmp_path, tmp_path / "page.html")
    page = whole((tmp_path / "page.html").read_text())
    assert {"training, 20: 2.5", "held-out text, 20: 1.375", "last line, 2: 0.375"} <= {*page.texts["title"]}
    assert {"3.5", "1.375", "20"} <= {*page.texts["td"]}


@pytest.mark.full
def test_a_browser_draws_the_page(record, tmp_path):
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not browser:
        pytest.skip("chromium: not installed")
    (tmp_path / "page.html").write_text(bench_page.page(record))
    words = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--screenshot=p.png", "--window-size=800,2400", "page.html"]
    subprocess.run(words, cwd=tmp_path, check=True, timeout=120, capture_output=True)
    assert (tmp_path / "p.png").stat().st_size > 20_000
