"""The live page: it follows the files of a run, shows responses as text, and refuses what is no
run.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.tools.test_report import RANK_0, figures, make_run, rows_of, traces
from tlt_megatron.config.schema import RunConfig
from tools.commands.report import main as report
from tools.commands.watch import WatchServer, main
from tools.run_report.alarms import find_alarms
from tools.run_report.data import distinct_names, runs_below
from tools.run_report.figure import declared
from tools.run_report.live import LiveRun


@contextmanager
def serving(*run_dirs: Path) -> Iterator[str]:
    runs = [LiveRun(*each) for each in zip(run_dirs, distinct_names(run_dirs), strict=True)]
    with WatchServer(runs, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.port}"
        finally:
            server.shutdown()
            thread.join()


def get(url: str, **headers: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, headers=headers)) as answer:
        return answer.read().decode()


def test_the_page_follows_the_run(tmp_path: Path) -> None:
    """Two folders of the same name are told apart by their parents."""
    run_dir = make_run(tmp_path / "one" / "run")
    (run_dir / "summary.json").unlink()  # written at the end
    before = sorted(path for path in run_dir.rglob("*"))
    other = shutil.copytree(run_dir, tmp_path / "other" / "run")
    with serving(run_dir, other) as url:
        page, version = get(f"{url}/0/"), json.loads(get(f"{url}/0/version"))["version"]
        assert f"3 of {RunConfig().run.num_steps} RL steps are done" in page
        assert 'id="figure-timeline"' in page
        assert '<a href="/0/">one/run</a>' in page
        assert '<a href="/1/">other/run</a>' in page
        assert f'"{version}"' in page
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write('{"step": 4, "timing_s/step": 2.0, "critic/rewards/mean": null}\n{"st')
        new = json.loads(get(f"{url}/0/version"))["version"]
        page = get(f"{url}/0/")
        assert new != version
        assert f'"{new}"' in page
        assert f"4 of {RunConfig().run.num_steps} RL steps are done" in page
        assert "Step 4 has values that are not finite: critic/rewards/mean." in page
        both = get(url)  # the first page compares several runs
        assert 'id="figure-critic_rewards_mean"' in both
        assert '"name": "other/run"' in both
        assert "one/run: Step 4 has values that are not finite: critic/rewards/mean." in both
        all_version = json.loads(get(f"{url}/all/version"))
        assert all_version["version"].startswith(new)
        assert "<b>one/run</b>: 4 of " in all_version["states"]
        assert "<b>other/run</b>: 3 of " in all_version["states"]
        for path in ("/2/", "/0/x", "/../etc/passwd", "/0/metrics.jsonl"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                get(url + path)
        with pytest.raises(urllib.error.HTTPError, match="403"):  # a page of another site
            get(f"{url}/0/", Host="example.com")
        assert (
            get(f"{url}/0/", Host="127.0.0.1") == page
        )  # a browser leaves out the number of port 80
    assert sorted(path for path in run_dir.rglob("*")) == before


def test_200_clients_at_once_are_all_served(tmp_path: Path) -> None:
    """The page is rendered once for all of them, and again when its files have changed."""
    run_dir = make_run(tmp_path / "run")
    run = LiveRun(run_dir)
    reads: list[Path] = []
    read = run.read
    run.read = lambda: reads.append(run_dir) or read()
    with WatchServer([run], 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.port}/0/"
            with ThreadPoolExecutor(200) as pool:
                pages = list(pool.map(lambda _: get(url), range(200)))
                versions = list(pool.map(lambda _: get(f"{url}version"), range(200)))
        finally:
            server.shutdown()
            thread.join()
    assert all("RL steps are done" in page for page in (*pages, *versions))
    assert len(reads) < 100


def test_several_runs_are_drawn_in_the_same_figures(tmp_path: Path) -> None:
    run_dirs = [make_run(tmp_path / name) for name in ("one", "other")]
    out = tmp_path / "page.html"
    assert report([*map(str, run_dirs), "--out", str(out)]) == 0
    page = out.read_text(encoding="utf-8")
    metrics = list(declared()["compared"])
    assert list(figures(page)) == [metric.replace("/", "_") for metric in metrics]
    for metric in metrics:
        curves = traces(page, metric.replace("/", "_"))
        assert list(curves) == ["one", "other"]
        written = [row[metric] for row in rows_of(run_dirs[1]).values() if metric in row]
        assert curves["other"]["y"] == written
    assert "All settings of the run" not in page


def test_a_run_that_starts_says_so(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    run = LiveRun(tmp_path)
    assert "The run is starting" in run.page([])
    (tmp_path / "metrics.jsonl").write_text('{"step": 1')  # the first row is being written
    assert "The run is starting" in run.page([])
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "timing_s/step": 2.0}\n')
    assert "1 of ? RL steps are done" in run.page([])


def test_what_is_no_run_and_no_port_is_refused(tmp_path: Path) -> None:
    message = f"{tmp_path}: is no run folder and holds none: a run has lock or config.yaml"
    with pytest.raises(ValueError, match=re.escape(message)):
        main([str(tmp_path), "--port", "0"])
    (tmp_path / "lock").touch()
    with pytest.raises(ValueError, match="--port 65536: "):
        main([str(tmp_path), "--port", "65536"])


def test_a_folder_of_runs_stands_for_the_runs_below_it(tmp_path: Path) -> None:
    """Runs at depth 1 and 2 are found, and a folder that no run has written is left out."""
    names = ["one", "sweep/other"]
    for name in names:
        make_run(tmp_path / name, is_plain=True)
    (tmp_path / "notes").mkdir()
    runs = runs_below(tmp_path)
    assert sorted(distinct_names(runs)) == names
    assert runs_below(runs[0]) == runs[:1]
    with serving(*runs) as url:
        page = get(url)
        for name in names:
            assert f">{name}</a>" in page
            assert f"<b>{name}</b>: The run has ended. 3 of " in page


def spoil(run_dir: Path, name: str, text: str) -> None:
    """Put a pipe, a folder or `text` in place of a file of a run."""
    path = run_dir / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if text == "a pipe":
        os.mkfifo(path)
    elif text == "a folder":
        path.mkdir()
    else:
        path.write_text(f"{text}\n")


CONFIG, METRICS, SUMMARY = "config.yaml", "metrics.jsonl", "summary.json"
PASSES = "speculation/rank_00000.jsonl"
RESPONSES, STATUS = "rollouts/step_0000001.rank_00000.jsonl", "status/rank_00000.json"
SPAN = '{"name": "SYNC", "lane": "MainThread", "start_ns": 1, "dur_ns": 1, "args": '
DEEP = "[" * 100_000
# Ten lines of aliases that stand for 10^10 values.
EXPANDING = "a: &a [1]\n" + "".join(
    f"{b}: &{b} [{', '.join(['*' + a] * 10)}]\n" for a, b in itertools.pairwise("abcdefghijk")
)
RESPONSE = '{"reward": 1, "token_ids": [1, 2], "prompt": "p", "response": "ab", '
NOT_WRITTEN_SO = "is not as a run writes it: "


@pytest.mark.parametrize(
    "name, text, said",
    [
        *((name, "a pipe", "") for name in (CONFIG, METRICS, SUMMARY, PASSES, RESPONSES, STATUS)),
        (METRICS, "a folder", ""),
        (METRICS, f'{{"step": {DEEP}', ""),
        (METRICS, '{"st', "cannot be read as JSON: '{\"st'"),
        (METRICS, '{"step": "x"}', "step='x' must be a whole number"),
        (METRICS, '{"step": 1, "a": "b"}', "a='b' must be a finite number"),
        (METRICS, '{"step": 4, "timing_s/step": NaN}', ""),
        (METRICS, '{"step": 4, "critic/rewards/mean": 1e999}', "must be a finite number"),
        (SUMMARY, "[1]", "must hold a JSON object, not a list"),
        (CONFIG, DEEP, ""),
        (CONFIG, "a: [", "is not YAML: while parsing"),
        (CONFIG, "text", "must hold a mapping of sections"),
        (CONFIG, "a: 1", "must hold the sections of a run"),
        (CONFIG, EXPANDING, "is not YAML: its aliases stand for 211111 values"),
        (PASSES, '{"step": 4, "rank": [], "strategy": 3, "batch_size": "x"}', NOT_WRITTEN_SO),
        (PASSES, '{"step": 1}', NOT_WRITTEN_SO + "KeyError: 'strategy'"),
        (RANK_0, '{"name": "SYNC"}', NOT_WRITTEN_SO + "KeyError: 'args'"),
        (RANK_0, f"{SPAN}3}}", ""),
        (RANK_0, f"{SPAN}{DEEP}", ""),
        ("timeline/rank_x.jsonl", "", ""),
        (STATUS, '{"rank": 0}', ""),
        (STATUS, '{"rank": "0", "num_ranks": [], "host": 1, "changed_s": 1, "num_tokens": "x"}', ""),
        (RESPONSES, RESPONSE + '"logprob_diff": "x"}', ""),
        (RESPONSES, '{"reward": 1}', NOT_WRITTEN_SO + "KeyError: 'token_ids'"),
    ],
    ids=lambda text: text[:60],
)  # fmt: skip
def test_a_run_that_holds_anything_takes_no_other_run_along(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    """Every page answers, and one line says what is wrong with that run.

    The report refuses it in one line, which names the file.
    """
    run_dir, other = make_run(tmp_path / "spoiled"), make_run(tmp_path / "other", is_plain=True)
    spoil(run_dir, name, text)
    if name == STATUS:  # is shown of a run that goes on
        (run_dir / SUMMARY).unlink()
    with serving(run_dir, other) as url:
        for path in ("/0/", "/0/version"):
            answer = get(url + path)
            assert answer.count("cannot be shown: ") == 1
            assert str(run_dir) in answer
        for path in ("/1/", "/all/"):
            assert '"name": "other"' in get(url + path) or path == "/1/"
        assert "<b>other</b>: The run has ended. 3 of " in get(f"{url}/all/version")
    if name != STATUS:  # the report does not read it
        named = run_dir if "rank_x" in name else run_dir / name
        with pytest.raises(ValueError, match=re.escape(f"{named}: ") + ".*" + re.escape(said)):
            report([str(run_dir)])
        assert not (run_dir / "report.html").exists()


def test_a_report_does_not_follow_a_link_in_the_run_folder(tmp_path: Path) -> None:
    run_dir, precious = make_run(tmp_path / "run"), tmp_path / "precious"
    precious.write_text("mine")
    (run_dir / "report.html").symlink_to(precious)
    assert report([str(run_dir)]) == 0
    assert precious.read_text() == "mine"
    assert (run_dir / "report.html").stat().st_size > 1000


FLOAT32 = {"model": {"dtype": "float32"}, "rollout": {"dtype": "float32"}}
BFLOAT16 = {"model": {"dtype": "float32"}, "rollout": {"dtype": "bfloat16"}}
DIFF = "train/train_rollout_logprob_abs_diff"
SLOW_RANK = {
    "perf/slowest_rank/rank": 7.0,
    "perf/slowest_rank/slowdown": 3.0,
    "perf/slowest_rank/cost_s": 0.5,
}
HEALTHY = {
    "critic/rewards/mean": 0.8,
    "critic/rewards/min": 0.0,
    "critic/rewards/max": 1.0,
    "rollout/entropy": 0.3,
    DIFF: 0.0001,
    f"{DIFF}_max": 0.0002,
    "bubble/stall_s": 0.01,
    "timing_s/step": 2.0,
}


@pytest.mark.parametrize(
    "change, num_steps, config, expected",
    [
        ({}, 5, FLOAT32, []),
        ({"actor/grad_norm": None}, 1, FLOAT32, ["Step 10 has values that are not finite: actor/grad_norm."]),
        ({"b": None}, 3, FLOAT32, ["finite: b. Before it 2 steps had such values"]),
        ({"critic/rewards/mean": 0.3}, 5, FLOAT32, ["last 5 steps is 0.3. It was 0.8 before"]),
        ({"critic/rewards/mean": 0.3}, 3, FLOAT32, []),
        ({"critic/rewards/mean": 0.5}, 5, FLOAT32, []),
        ({"critic/rewards/max": 0.0}, 5, FLOAT32, ["same reward for 5 steps (now 0)"]),
        ({"critic/rewards/min": 1.0}, 5, FLOAT32, ["same reward for 5 steps (now 1)"]),
        ({"rollout/entropy": 0.0002}, 5, FLOAT32, ["now 0.0002"]),
        ({f"{DIFF}_max": 0.002}, 1, FLOAT32, [f"0.002 nats ({DIFF}_max); allowed is 0.001"]),
        ({f"{DIFF}_max": 0.9, DIFF: 0.05}, 1, BFLOAT16, []),
        ({DIFF: 0.2}, 1, BFLOAT16, [f"0.2 nats ({DIFF}); allowed is 0.1"]),
        ({DIFF: 0.2}, 1, BFLOAT16 | {"algorithm": {"max_logprob_diff": 0.3}}, []),
        ({"bubble/stall_s": 0.5}, 5, FLOAT32, ["for 25% of their time"]),
        (SLOW_RANK, 5, FLOAT32, ["last 5 steps rank 7 decodes 3.0 times as slow"]),
        (SLOW_RANK, 4, FLOAT32, []),
    ],
)  # fmt: skip
def test_alarms_say_what_goes_wrong(
    change: dict[str, float | None],
    num_steps: int,
    config: dict[str, dict[str, object]],
    expected: list[str],
) -> None:
    """`change` holds for the last `num_steps` of ten steps."""
    rows = [{"step": step, **HEALTHY, **(change if step > 10 - num_steps else {})} for step in range(1, 11)]  # fmt: skip
    alarms = find_alarms(rows, config)
    assert len(alarms) == len(expected)
    assert all(part in alarm for part, alarm in zip(expected, alarms, strict=True))
