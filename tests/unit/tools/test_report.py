"""The report: every number on the page is one of the run's, what the run did not do is said, what
is broken is named.
"""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path
from threading import Thread
from typing import Any

import plotly.graph_objects
import pytest

from tests.unit.rollout.test_speculation_log import make_pass
from tlt_megatron.config.load import dump_config, load_config
from tlt_megatron.engines.base import PassRecord
from tlt_megatron.rollout.speculation_log import SpeculationLog, add_pass_spans, sum_passes
from tlt_megatron.runtime.metrics import MetricsWriter
from tlt_megatron.runtime.timeline import Timeline
from tools.commands.report import main
from tools.run_report.figure import declared

RANK_0 = "timeline/rank_00000.jsonl"
SUMMARY = {
    "eval_accuracy_first": 0.4375,
    "eval_accuracy_last": 0.8125,
    "num_steps": 3,
    "step_time_s_median": 2.03125,
}


def passes_of(rank: int, step: int) -> list[PassRecord]:
    """Batches of 4 with plain passes, then of 2 and 1 with verify passes, 0.125 s each."""
    plan = [(4, "off"), (4, "off"), (2, "6_1_6"), (1, "6_1_6"), (1, "6_4_16")][
        : 3 + rank + step % 2
    ]
    start_s = 10.0 * step + 1
    return [
        make_pass(
            start_s + 0.125 * number,
            size,
            strategy,
            accepted=() if strategy == "off" else (size, 0),
            seconds=0.125,
        )
        for number, (size, strategy) in enumerate(plan)
    ]


def step_metrics(step: int) -> dict[str, float]:
    """Return metrics that all differ, so that a number on the page tells where it is from."""
    return {
        "critic/rewards/mean": 0.3 + step / 100,
        "response_length/mean": 50.0 + step,
        "response_length/median": 40.0 + step,
        "response_length/max": 600.0 + step,
        "bubble/idle_s": 5.0 + step,
        "timing_s/gen": 1.5 + step / 100,
        "timing_s/wait": 7.25 + step,
        "timing_s/update_actor": 0.75 + step / 100,
        "timing_s/step": 2.5 + step / 10,
    }


def tlt_metrics(step: int) -> dict[str, float]:
    """Return the metrics of speculation and of drafter training in idle time."""
    return {
        "rollout/spec_accept_length": 2.5 + step / 100,
        **{f"rollout/spec_accepted_at/{d}": 0.9 - d / 10 + step / 1000 for d in (1, 2, 10)},
        **{f"spec/accept_length_by_position/{n}": 2 + n / 1e4 + step / 100 for n in (0, 512)},
        "bubble/used_s": 4.0 + step / 100,
        "bubble/stall_s": 0.03125 * step,
        "drafter/loss": 1.1 + step / 100,
        "drafter/accept_length": 3.1 + step / 100,
        "drafter/holdout_accept_length/published": 2.9 + step / 100,
        "rollout/entropy": 0.7 + step / 100,
        "actor/grad_norm": 0.4 + step / 100,
        "response_length/clip_ratio": 0.1 + step / 100,
        "eval/mean_reward": 0.5 + step / 100,
    }


def make_run(folder: Path, *, is_plain: bool = False) -> Path:
    """Write a run of three steps on two ranks with the writers of a run. A plain one keeps no
    trace.
    """
    config = load_config(
        None,
        [
            f"speculation.enabled={not is_plain}",
            f"spot.enabled={not is_plain}",
        ],
    )
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_config(config))
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    metrics = MetricsWriter(folder, {}, resume_step=None)
    metrics.write(0, {"eval/accuracy": 0.4375})
    for step in (1, 2, 3):
        metrics.write(step, step_metrics(step) | ({} if is_plain else tlt_metrics(step)))
        for rank in () if is_plain else (0, 1):
            log = SpeculationLog(folder / "speculation", rank=rank)
            log.write(sum_passes(passes_of(rank, step), step=step, rank=rank))
    metrics.write(3, {"eval/accuracy": 0.8125})
    metrics.close()
    for rank in () if is_plain else (0, 1):
        write_trace(folder, rank)
    return folder


def write_trace(folder: Path, rank: int) -> None:
    timeline = Timeline(folder / "timeline" / f"rank_{rank:05d}.jsonl", rank)
    timeline.add_span("SYNC", 0.0, 10.5, version=0)
    for step in (1, 2, 3):
        start = 10.0 * step
        if step == 2:
            timeline.add_span("EVAL", start + 0.5, start + 0.875)
            timeline.add_span("DECODE", start + 0.625, start + 0.75, batch_size=9)
        add_pass_spans(timeline, passes_of(rank, step))
        timeline.add_span("ROLLOUT", start + 1, start + 2)
        times = start + 2, start + 3
        spot = Thread(target=timeline.add_span, args=("DRAFT-TRAIN", *times), name="spot")
        spot.start()
        spot.join()
        timeline.add_span("WAIT", start + 2, start + 4)
        timeline.add_span("UPDATE", start + 4, start + 8)
        timeline.add_span("SYNC", start + 8, start + 10.5, version=step)
    timeline.close()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def page_of(run_dir: Path, *arguments: str) -> str:
    out = run_dir.parent / "page.html"
    assert main([str(run_dir), "--out", str(out), *arguments]) == 0
    return out.read_text(encoding="utf-8")


def figures(page: str) -> dict[str, dict[str, Any]]:
    """Return what is drawn, read back from the page."""
    pattern = r'<script type="application/json" id="figure-(\w+)">(.*?)</script>'
    return {key: json.loads(text) for key, text in re.findall(pattern, page, flags=re.DOTALL)}


def traces(page: str, key: str) -> dict[str, dict[str, Any]]:
    return {trace["name"]: trace for trace in figures(page)[key]["data"]}


def rows_of(run_dir: Path) -> dict[int, dict[str, float]]:
    rows: dict[int, dict[str, float]] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row["step"], {}).update(row)
    return rows


def test_a_curve_shows_its_own_metric(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "critic/rewards/mean": null}\n')  # was not finite: a gap
    page, rows = page_of(run_dir), rows_of(run_dir)
    names = {"timing_s/*": ("gen", "update_actor"), "rollout/spec_accepted_at/*": ("2", "10")}
    names |= {"spec/accept_length_by_position/*": ("0", "512")}
    for row in declared()["over_steps"]:
        for label, pattern in row["metrics"].items():
            for name in names.get(pattern, ("",)):
                metric = pattern.replace("*", name)
                trace = traces(page, row["key"])[label.replace("*", name)]
                written = {step: row[metric] for step, row in rows.items() if metric in row}
                assert dict(zip(trace["x"], trace["y"], strict=True)) == written != {}, metric
    assert traces(page, "step_time").keys() == {"gen", "update_actor"}  # wait is in gen


def test_the_headline_and_the_whole_summary_are_on_the_page(run_dir: Path) -> None:
    page = page_of(run_dir)
    found = re.findall(r"<dt>(.+)</dt><dd>(.+)</dd>", page)
    expected = {"held-out accuracy, before and after": "0.44 → 0.81", "median RL step": "2.03 s"}
    assert dict(found) == expected  # the gain of speculation was not measured
    assert html.escape(json.dumps(SUMMARY)) in page.replace("&#34;", "&quot;")
    assert "prompts × 8 responses a step" in page


@pytest.mark.parametrize(("peak", "verdict"), [(2.43, "above plan"), (2.2, "planned")])
def test_the_memory_that_was_taken_is_compared_with_the_plan(
    run_dir: Path, peak: float, verdict: str
) -> None:
    memory = {"memory_peak_gb": peak, "memory_planned_gb": 2.11}
    (run_dir / "summary.json").write_text(json.dumps(SUMMARY | memory))
    assert f"memory of a rank {peak:.3g} GB, {verdict} (2.11 GB)" in page_of(run_dir)


def test_shares_of_strategies_are_those_of_the_passes(run_dir: Path) -> None:
    bars = traces(page_of(run_dir), "strategies")
    passes = [record for step in (1, 2, 3) for rank in (0, 1) for record in passes_of(rank, step)]
    assert list(bars) == ["off", "6_1_6", "6_4_16"]
    for strategy, bar in bars.items():
        assert bar["x"] == ["1", "2", "3–4"]
        for size, share in zip((1, 2, 4), bar["y"], strict=True):
            at_size = [record for record in passes if record.batch_size == size]
            expected = sum(record.strategy == strategy for record in at_size) / len(at_size)
            assert share == pytest.approx(expected), (strategy, size)


def test_the_timeline_adds_up_to_the_spans(run_dir: Path) -> None:
    phases = traces(page_of(run_dir, "--steps", "2"), "timeline")
    seconds = {name: sum(trace["x"]) for name, trace in phases.items() if trace["type"] == "bar"}
    assert seconds == pytest.approx(
        {
            "EVAL": 2 * 0.375,  # and nothing of what is decoded inside it
            "DECODE": 2 * 2 * 0.125,
            "VERIFY": (1 + 2) * 0.125,
            "ROLLOUT": 2 * 1.0 - (3 + 4) * 0.125,
            "DRAFT-TRAIN": 2 * 1.0,
            "WAIT": 2 * 2.0,
            "UPDATE": 2 * 4.0,
            "SYNC": 2 * 2.5,
        }
    )
    assert phases["VERIFY"]["customdata"][0].split(": ")[0] == "VERIFY(6_1_6)"
    assert phases["DRAFT-TRAIN"]["y"] == ["rank 0 · spot", "rank 1 · spot"]
    assert phases["UPDATE"]["base"] == pytest.approx([3.5, 3.5])


def test_running_requests_follow_the_passes(run_dir: Path) -> None:
    """Below the timeline, on its time axis. What an evaluation decodes is not counted."""
    curve = traces(page_of(run_dir, "--steps", "2"), "timeline")["running on rank 0"]
    assert curve["yaxis"] == "y2"
    assert curve["y"] == [0, 4, 2, 0]
    assert curve["x"] == pytest.approx([0, 0.5, 0.75, 1.5])


def test_plotly_knows_every_setting_of_every_figure(run_dir: Path) -> None:
    found = figures(page_of(run_dir))
    assert len(found) == 10
    for figure in found.values():
        plotly.graph_objects.Figure(data=figure["data"], layout=figure["layout"])


def test_the_page_loads_nothing(run_dir: Path) -> None:
    page = page_of(run_dir)
    own = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)  # plotly.js itself left out
    assert not re.search(r"(src|href)\s*=(?!\"data:)|@import|url\(", own)
    assert "Plotly.newPlot" in page


def test_a_name_cannot_break_the_page(run_dir: Path) -> None:
    timeline = Timeline(run_dir / "timeline" / "rank_00000.jsonl", 0)
    timeline.add_span("ODD</script><b>", 38.0, 38.5)
    timeline.close()
    assert "ODD</script><b>" in traces(page_of(run_dir), "timeline")


def test_a_plain_run_says_what_it_did_not_do(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run", is_plain=True))
    assert set(figures(page)) == {"bubble", "step_time", "rewards", "lengths"}
    assert list(traces(page, "bubble")) == ["idle"]
    listed = dict(re.findall(r"<li>([^:]+): (.+)</li>", page))
    assert listed == {
        "Timeline": "The trace holds no complete step.",
        "Accepted tokens by depth": "Speculation was off (speculation.enabled=false).",
        "Strategy by batch size": "Speculation was off (speculation.enabled=false).",
        "Accept length": "Speculation was off (speculation.enabled=false).",
        "Accept length by position": "Speculation was off (speculation.enabled=false).",
        "Entropy, gradient norm, and responses that were cut": "The run wrote no rollout/entropy.",
    }


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "summary.json", "config.yaml", "speculation/rank_00001.jsonl"]
)
def test_a_run_that_lacks_a_file_has_a_report(run_dir: Path, name: str) -> None:
    (run_dir / name).unlink()
    assert "What every rank did" in page_of(run_dir)


def test_lines_that_were_cut_off_by_a_kill_are_left_out(run_dir: Path) -> None:
    """A resumed run ends the line of the trace that a killed rank had left."""
    before = figures(page_of(run_dir))
    path = run_dir / RANK_0
    path.write_text('{"ph": "X", "name": "SYNC"\n' + path.read_text())
    for name in (RANK_0, "metrics.jsonl", "speculation/rank_00001.jsonl"):
        with (run_dir / name).open("a") as file:
            file.write('{"step": 4, "na')
    assert figures(page_of(run_dir)) == before
    shutil.rmtree(run_dir / "timeline")
    assert "<li>Timeline: The trace holds no complete step.</li>" in page_of(run_dir)


def test_steps_that_the_trace_lacks_are_refused(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="--steps 3-4: the trace holds steps 1 to 3"):
        main([str(run_dir), "--steps", "3-4"])
    with pytest.raises(SystemExit):
        main([str(run_dir), "--steps", "all"])
    assert "'all': expected a step such as 7" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--steps: only the report of one run has a timeline"):
        main([str(run_dir), str(run_dir), "--steps", "1"])
