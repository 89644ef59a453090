"""Reports of training runs: what is drawn is what was recorded, of any run, also of broken ones."""

from __future__ import annotations

import csv
import json
import math
import re
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

import aero_compile
from aero_compile.__main__ import main
from aero_compile.errors import InputError
from aero_compile.reporting import entropy_states
from aero_compile.reporting.entropy_states import Limits, quartile_shares
from aero_compile.reporting.figures import parts_of_name
from aero_compile.reporting.plots import heatmap_over_time, line_chart, log_ticks, stacked_bars, thinned
from aero_compile.reporting.run_report import report
from tests.support.budgets import few
from tests.support.pages import Page
from tests.support.run_folders import CONTEXT, HEADS, LAYERS, entropy, fail, run_folder
from tests.support.tiny_models import transformed

STEPS = list(range(0, 101, 10))


def charts(text: str) -> dict[str, ElementTree.Element]:
    """The drawings of a page by their titles."""
    found = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.S)]
    return {str(tree[0].text): tree for tree in found}


def lines(chart: ElementTree.Element) -> dict[str, list[tuple[float, float]]]:
    """Points of each line of a chart, by its title, in pixels."""
    return {
        str(line[0].text): [(float(x), float(y)) for x, y in (p.split(",") for p in line.attrib["points"].split())]
        for line in chart.iter("polyline")
    }


# -- the page ----------------------------------------------------------------------------------------------


def test_the_page_is_one_sound_file_for_light_and_dark(tmp_path: Path) -> None:
    runs = [run_folder(tmp_path / "a"), run_folder(tmp_path / "b", status="running")]
    fail(runs[0], 101)
    text = report(*runs).html()
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.loads == []
    assert not re.search(r"url\(|@import|https?://", text)
    assert all(image["role"] == "img" and image["aria-labelledby"] for image in page.images)
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids)) > 40
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r'(points|cx|cy|x|y|width|height)="[^"]*(nan|inf)', text)
    assert set(re.findall(r"var\(--(\w+)\)", text)) <= set(re.findall(r"--(\w+):", text))


def test_names_of_runs_and_errors_are_escaped(tmp_path: Path) -> None:
    evil = '"><script>alert(1)</script>'
    run = run_folder(tmp_path / "run", error=evil, census=evil, status=evil)
    settings = json.loads((run / "run.json").read_text())
    settings["identity"]["recipe"] = evil
    (run / "run.json").write_text(json.dumps(settings))
    assert "<script>alert" not in report(run).html()


def test_lines_hold_a_point_for_each_record(tmp_path: Path) -> None:
    drawn = charts(report(run_folder(tmp_path / "run")).html())
    loss = lines(drawn["Loss over steps"])
    assert set(loss) == {"training", "held-out"}
    layers = lines(drawn["Layerwise entropy over training"])
    assert list(layers) == [f"layer {i}" for i in range(LAYERS)]
    for points in [*loss.values(), *layers.values()]:
        assert len(points) == len(STEPS)
        assert [x for x, _ in points] == sorted(x for x, _ in points)
    falling = [y for _, y in loss["held-out"]]  # pixels grow downwards
    assert falling == sorted(falling)
    # Heights are in proportion to what was recorded.
    ys = np.array([y for _, y in layers["layer 2"]])
    means = np.array([np.mean([entropy(2, j, s) for j in range(HEADS)]) for s in STEPS])
    slope, at = np.polyfit(means, ys, 1)
    assert np.abs(slope * means + at - ys).max() < 0.1
    assert slope < 0


def test_every_picture_of_the_paper_is_there_by_its_number(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    fail(run, 101)
    text = report(run).html()
    for number in ("3", "4", "5", "7 (a)", "11 (a)", "11 (b)", "14 (a)", "14 (b)"):
        assert re.search(rf"<h3>[^<]*Figure {re.escape(number)} of the paper", text), number
    assert "Figures 10, 12 and 16 of the paper" in text


def test_sliders_hold_every_measurement(tmp_path: Path) -> None:
    text = report(run_folder(tmp_path / "run")).html()
    data = [json.loads(d) for d in re.findall(r'<script type="application/json">(.*?)</script>', text, re.S)]
    heads = data[0]
    assert heads["labels"] == [f"step {s:,}" for s in STEPS]
    expected = [[[entropy(i, j, s) for j in range(HEADS)] for i in range(LAYERS)] for s in STEPS]
    assert np.allclose(heads["frames"], expected, atol=5e-4)
    assert heads["top"] == pytest.approx(math.log(CONTEXT))
    assert len(data) == 4  # entropies, distances from thresholds, thresholds, temperatures
    assert text.count('type="range"') == text.count("<label for=") == 4


def test_a_failure_names_the_first_layer_and_the_scale_before_it(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", steps=[0, 10])
    fail(run, 17)
    text = unescape(report(run).html())
    assert "the loss became NaN at step 17" in text
    assert "First values that were not finite: what the FFN gives, layer 1." in text
    assert "what the FFN reads (layer 1) had a root mean square of nan and reached 3e+30" in text
    shares = lines(charts(text)["Figure 7 (a) of the paper: layers with NaN"])
    assert len(shares["what the FFN gives"]) == LAYERS


def test_stages_of_a_removal_are_marked_and_told(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    record = {"event": "stage", "passes": "freeze-layer-norm{layers=0}", "loss_before": 2.0}
    stages = [
        {"step": 30, "stage": 1, "loss_after": 2.5, **record},
        {"step": 60, "stage": 2, "loss_after": 3.5, **record},
    ]
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(stage) + "\n" for stage in [*stages, stages[1]])  # a resumed run tells it again
    text = report(run).html()
    drawn = charts(text)
    assert len(lines(drawn["Held-out loss over the stages"])["after its passes"]) == 2
    told = [str(t.text) for t in drawn["Loss over steps"].iter("title")]
    assert {"stage 1 at step 30", "stage 2 at step 60", "resumed at step 40"} <= set(told)
    assert text.count('<td class="left ops">freeze-layer-norm{layers=0}</td>') == 2
    assert "3.5000" in text
    assert "softmax-temperature,scaled-ffn, then 2 stages" in text


def test_a_notebook_gets_a_frame_and_files(tmp_path: Path) -> None:
    found = aero_compile.report(run_folder(tmp_path / "run"))
    frame = found._repr_html_()
    inside = re.search(r'srcdoc="([^"]*)"', frame)
    assert inside is not None
    assert unescape(inside.group(1)).startswith("<!doctype html>")
    assert found.save(tmp_path / "page.html").read_text().endswith("</html>\n")


# -- what lies in the folder -------------------------------------------------------------------------------


def test_damaged_lines_are_named_and_left_out(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    path = run / "metrics.jsonl"
    good = path.read_text().splitlines()
    bad = [good[0], "{broken", *good[1:4], '{"step": "four"}', '{"step": 4, "loss": "low"}', "[]", *good[4:]]
    path.write_text("\n".join(bad) + '\n{"step": 110, "lo')  # the last one is being written
    found = report(run)
    assert found.runs[0].faults == [f"metrics.jsonl: lines 2, 6, 7, 8 of {len(bad)} damaged, left out"]
    assert len(found.runs[0].metrics) == len(good)
    assert "lines 2, 6, 7, 8" in found.html()

    (run / "run.json").write_text("{")
    with (run / "entropies.jsonl").open("a") as file:
        file.write('{"step": 3, "entropies": [[1.0]]}\n{"step": 3, "entropies": [["a"]]}\n')
    faults = report(run).runs[0].faults
    assert faults[0].startswith("run.json cannot be read (it is no JSON)")
    assert any(f.startswith("entropies.jsonl: line 13 of 13 damaged") for f in faults)
    assert any("other numbers of layers and heads" in f for f in faults)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = run_folder(tmp_path_factory.mktemp("runs") / "run", steps=range(0, 31, 10))
    fail(run, 31)
    return run


_CHANGES = st.tuples(st.integers(0, 4), st.floats(0, 1), st.sampled_from(["cut", "flip", "null", "list", "double"]))


@few(max_examples=20)
@given(st.lists(_CHANGES, min_size=1, max_size=3))
def test_whatever_is_damaged_there_is_a_report(original: Path, changes: list[tuple[int, float, str]]) -> None:
    names = ["run.json", "metrics.jsonl", "entropies.jsonl", "parameters.jsonl", "activations.jsonl"]
    kept = {name: (original / name).read_bytes() for name in names}
    try:
        for number, place, kind in changes:
            path = original / names[number]
            content = path.read_bytes()
            at = int(place * len(content))
            path.write_bytes(
                {
                    "cut": content[:at],
                    "flip": content[:at] + b"\xff\x00" + content[at + 2 :],
                    "null": re.sub(rb"-?\d+\.\d+", b"null", content[:at]) + content[at:],
                    "list": re.sub(rb": \[", b": [[", content[:at], count=1) + content[at:],
                    "double": content[:at] + content,
                }[kind]
            )
        found = report(original)
        assert found.html().endswith("</html>\n")
        assert not re.search(r'points="[^"]*nan', found.html())
    finally:
        for name, content in kept.items():
            (original / name).write_bytes(content)


@pytest.mark.parametrize("place", ["ffn_input", "ffn_output", "stream"])
def test_measurements_without_a_part_are_left_out(place: str, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", steps=[0, 10])
    fail(run, 11)
    path = run / "activations.jsonl"
    good = [json.loads(line) for line in path.read_text().splitlines()]
    bad = [{key: value for key, value in good[0].items() if key != place}]
    bad += [good[0] | {place: {k: v for k, v in good[0][place].items() if k != part}} for part in good[0][place]]
    for spectra in (5, {}, {"before": good[0]["spectra"]["before"]}, good[0]["spectra"] | {"after": {"entropy": [1]}}):
        bad.append(good[0] | {"spectra": spectra})
    bad.append({key: value for key, value in good[-1].items() if key != place})
    path.write_text("".join(json.dumps(line) + "\n" for line in [*good, *bad]))
    found = report(run)
    assert len(found.runs[0].activations) == len(good)
    assert "damaged, left out" in found.html()


@pytest.mark.parametrize("key", ["bytes", "messages", "seconds", "seq_len"])
@pytest.mark.parametrize("value", ["many", None, [1]])
def test_a_damaged_estimate_is_none(key: str, value: Any, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", steps=[0, 10])
    bill = {"bytes": 5, "messages": 4, "seconds": 0.5, "seq_len": 16}
    (run / "estimate.json").write_text(json.dumps(bill))
    assert "4 messages" in report(run).html()
    (run / "estimate.json").write_text(json.dumps(bill | {key: value}))
    assert "not estimated" in report(run).html()


def test_a_run_that_was_killed_does_not_go_on(tmp_path: Path) -> None:
    """`run.json` says "running" for ever; the lock of its process is gone."""
    run = run_folder(tmp_path / "run", status="running")
    (run / "run.lock").touch()
    found = report(run)
    assert not found.going_on
    assert "it was killed, and --resume goes on with it" in found.html()
    with FileLock(run / "run.lock"):
        assert report(run).going_on


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"status": "running", "identity": {"context": 16}}')
    with FileLock(tmp_path / "run" / "run.lock"):
        found = report(tmp_path / "run")
        assert found.going_on
    assert "No held-out perplexity has been measured yet" in found.html()
    assert "NaN" not in found.html().split("</style>")[1].split("<script>")[0]


def test_folders_without_a_run_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(InputError, match=re.escape(str(folder))):
            report(folder)
    with pytest.raises(InputError, match="no run was named"):
        report()
    run = run_folder(tmp_path / "run")
    with pytest.raises(InputError, match="named twice"):
        report(run, run)
    assert main(["report", str(tmp_path / "missing")]) == 2
    assert main(["report", str(run), "--output", str(tmp_path)]) == 2
    assert main(["report", str(run), "--output", str(tmp_path / "page.csv")]) == 2
    assert main(["report", str(run), "--estimate"]) == 2
    (tmp_path / "file").touch()
    assert main(["report", str(run), "--csv", str(tmp_path / "file")]) == 2
    assert main(["report", str(run), "--output", str(tmp_path / "file" / "page.html")]) == 2
    assert main(["report", str(run), "--output", "/proc/page.html"]) == 2
    told = capsys.readouterr().err
    assert told.count("error: ") == 7
    assert "has not finished" in told


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    runs = [run_folder(tmp_path / side / "run") for side in ("a", "b")]
    assert [run.name for run in report(*runs).runs] == ["a/run", "b/run"]


# -- numbers -----------------------------------------------------------------------------------------------


def test_csv_has_every_number(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    fail(run, 101)
    assert main(["report", str(run), "--csv", str(tmp_path / "csv")]) == 0
    assert (run / "report.html").is_file()
    tables = {p.stem: list(csv.DictReader(p.open())) for p in (tmp_path / "csv").iterdir()}
    heads = tables["entropies"]
    assert len(heads) == len(STEPS) * LAYERS * HEADS
    for row in heads:
        assert float(row["entropy_nats"]) == entropy(int(row["layer"]), int(row["head"]), int(row["step"]))
    assert {row["metric"] for row in tables["metrics"]} >= {"loss", "ce_loss", "eval_loss", "perplexity", "penalty"}
    assert len(tables["headwise"]) == 3 * len(STEPS) * LAYERS * HEADS
    assert {row["place"] for row in tables["activations"]} >= {"stream", "ffn_hidden_before", "ffn_hidden_after"}
    assert any(row["event"] == "failure" and row["value"] == "nan" for row in tables["activations"])
    assert tables["layers"][2]["collapsed_since"] == "60"
    assert tables["runs"][0]["state"] == "failed"


@pytest.mark.slow
def test_costs_are_estimated_once(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    aero_compile.save(transformed("gpt2-eager", "SM+R"), run / "artifact")
    assert "not estimated" in report(run).html()
    assert main(["report", str(run), "--estimate"]) == 0
    bill = json.loads((run / "estimate.json").read_text())
    expected = aero_compile.estimate(transformed("gpt2-eager", "SM+R"), CONTEXT, logits="last")
    assert (bill["bytes"], bill["messages"]) == (expected.bytes, expected.messages)
    assert f"{expected.messages:,} messages" in (run / "report.html").read_text()
    (run / "estimate.json").write_text(json.dumps(bill | {"bytes": 5}))
    assert main(["report", str(run), "--estimate"]) == 0
    assert "5 B, " in (run / "report.html").read_text()


@few(max_examples=25)
@given(st.lists(st.lists(st.floats(0, 5), min_size=1, max_size=6), min_size=1, max_size=5))
def test_quartiles_are_those_of_numpy(table: list[list[float]]) -> None:
    flat = np.array([e for row in table for e in row])
    top = flat.max()
    shares = quartile_shares(table)
    assert sum(shares) == pytest.approx(1)
    if top > 1e-3:
        counts, _ = np.histogram(flat / top, bins=[0, 0.25, 0.5, 0.75, 1.0])
        assert shares == pytest.approx((counts / len(flat)).tolist())


def test_overload_and_collapse_begin_where_they_last_to_the_end() -> None:
    def at(*shares: float) -> Any:
        return [(10 * i, [[1.0 if j < 8 * share else 0.5 for j in range(8)]]) for i, share in enumerate(shares)]

    limits = Limits()
    state = entropy_states.overload(at(1, 0.5, 0.25, 0.5, 0.5), 2.0, limits)
    assert (state.value, state.since) == (0.5, 30)
    assert entropy_states.overload(at(1, 1, 0.25), 2.0, limits).since is None
    assert entropy_states.overload(at(1, 1, 1), 2.0, limits).since == 0
    fallen = [(step, [[1.0, 1.0], [low, low]]) for step, low in ((0, 1.0), (5, 0.09), (7, 0.5), (9, 0.01), (11, 0.0))]
    assert entropy_states.layer_collapse(fallen, 1, 2.0, limits).since == 9
    assert entropy_states.layer_collapse(fallen, 0, 2.0, limits).since is None
    # Where all heads have collapsed, the largest of them is no overload.
    assert entropy_states.overload([(0, [[0.01, 0.01]])], 2.0, limits).since is None


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("scaled_ffn.3.alpha", ("scaled_ffn alpha", "layer 3")),
        ("leaky_relu.slope", ("leaky_relu slope", "all layers")),
        ("weight_norm.11.ffn_in.g", ("weight_norm ffn_in g", "layer 11")),
        ("scaled_ffn.0.1.beta", ("scaled_ffn 1 beta", "layer 0")),
        ("odd", ("odd", "all layers")),
    ],
)
def test_learned_scalars_are_grouped_by_layer(name: str, parts: tuple[str, str]) -> None:
    assert parts_of_name(name) == parts


# -- live --------------------------------------------------------------------------------------------------


def test_watching_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_folder(tmp_path / "run", steps=[0, 10], status="running")
    pages = []

    def sleep(seconds: float) -> None:
        pages.append((run / "report.html").read_text())
        assert seconds == 3
        if len(pages) == 2:
            settings = json.loads((run / "run.json").read_text())
            (run / "run.json").write_text(json.dumps(settings | {"status": "finished"}))

    monkeypatch.setattr("time.sleep", sleep)
    with FileLock(run / "run.lock"):
        assert main(["report", str(run), "--watch", "--every", "3"]) == 0
    assert len(pages) == 2
    assert all('http-equiv="refresh" content="3"' in page for page in pages)
    assert "http-equiv" not in (run / "report.html").read_text()


# -- charts ------------------------------------------------------------------------------------------------


@few(max_examples=30)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000), st.integers(4, 400))
def test_thinning_keeps_ends_and_peaks(values: list[float], most: int) -> None:
    points = [(float(i), v) for i, v in enumerate(values)]
    kept = thinned(points, most)
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    assert {max(values), min(values)} <= {v for _, v in kept}
    assert len(kept) <= most + 2
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})


@pytest.mark.parametrize("span", [(1.0, 1.0), (0.3, 2.2e4), (1e-9, 1e12), (37.0, 38.0), (5.0, 5.0)])
def test_logarithmic_ticks_cover_the_range(span: tuple[float, float]) -> None:
    found = log_ticks(*span)
    assert found == sorted(set(found))
    assert 2 <= len(found) <= 14
    assert found[0] <= span[0] * (1 + 1e-9)
    assert found[-1] >= span[1] * (1 - 1e-9)


def test_series_in_order_have_colours_in_order_and_a_legend() -> None:
    series = {f"layer {i}": [(0.0, float(i)), (1.0, i + 1.0)] for i in range(24)}
    bands = {"layer 0": [(0.0, -1.0, 1.0), (1.0, 0.0, math.nan)]}
    tree = ElementTree.fromstring(line_chart(series, "n", "x", "y", ordered=True, bands=bands, marks={0.5: "here"}))
    tones = [int(re.findall(r"--q(\d+)", line.attrib["style"])[0]) for line in tree.iter("polyline")]
    assert tones == sorted(tones)
    assert (tones[0], tones[-1]) == (0, 15)
    assert len(list(tree.iter("polygon"))) == 1
    assert [t.text for t in tree.iter("title")].count("here") == 1
    told = {t.text for t in tree.iter("text")}
    assert set(series) <= told
    many = ElementTree.fromstring(line_chart(series, "n", "x", "y"))
    looks = {(line.attrib["class"], line.attrib.get("stroke-dasharray")) for line in many.iter("polyline")}
    assert len(looks) == 24  # no two alike


def test_bars_in_a_given_order_keep_it() -> None:
    text = stacked_bars({"x": {"low": 1.0, "middle": 0.0, "high": 5.0}}, "n", "%", ("low", "middle", "high"))
    tips = [t.text for t in ElementTree.fromstring(text).iter("title") if (t.text or "").startswith("x, ")]
    assert tips == ["x, low: 1 %", "x, high: 5 %"]


def test_a_heatmap_of_one_moment_needs_no_slider() -> None:
    assert "range" not in heatmap_over_time([("step 0", [[1.0]])], "n", 2.0, "nats")
    assert "No values" in heatmap_over_time([], "n", 2.0, "nats")
