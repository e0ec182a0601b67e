"""Trackers: each gets every step, a broken one never stops a run.

Stand-ins take the place of packages that need a server.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tlt_megatron.config.extensions import load_extension
from tlt_megatron.config.load import load_config
from tlt_megatron.runtime.metrics import MetricsWriter
from tlt_megatron.trainer.build import _make_trackers

EXAMPLES = Path(__file__).parents[3] / "examples" / "trackers.py"
LIKE_WANDB = """
def init(**options): calls.append(("init", options))
def log(data, *, step): calls.append(("log", step, data))
def finish(): calls.append(("finish",))
"""
# Each records its calls: name, positional and keyword arguments.
STAND_INS = {
    "wandb": """
class Table:
    def __init__(self, columns, data): self.rows = [dict(zip(columns, row)) for row in data]
class Run:
    def log(self, data, *, step): calls.append(("log", step, data))
    def finish(self, exit_code=0): calls.append(("finish", exit_code))
def init(**options):
    calls.append(("init", options))
    return Run()
""",
    "mlflow": """
from types import SimpleNamespace as Some
entities = Some(Metric=lambda name, value, ms, step: (step, name, value))
class MlflowClient:
    def __init__(self, tracking_uri): calls.append(("init", tracking_uri))
    def get_experiment_by_name(self, name): return None
    def create_experiment(self, name, artifacts): return name
    def create_run(self, experiment, run_name):
        calls.append(("run", experiment, run_name))
        return Some(info=Some(run_id="7"))
    def log_dict(self, run_id, settings, file): calls.append((file, settings["run"]["seed"]))
    def log_batch(self, run_id, metrics): calls.extend(("log", *metric) for metric in metrics)
    def log_table(self, run_id, table, file): calls.append(("table", table, file))
    def set_terminated(self, run_id, status="FINISHED"): calls.append(("finish", status))
""",
    "swanlab": LIKE_WANDB + "Text = str\n",
    "trackio": LIKE_WANDB,
}
ROW = {"prompt": "1+1?", "response": "2", "reward": 1.0, "data_source": "math"}
ROW |= {"logprob_diff": 0.5, "finish_reason": "stop"}


def track(
    run_dir: Path,
    *overrides: str,
    resume_step: int | None = None,
    first: int = 1,
    failed: bool = False,
) -> None:
    """Two steps with a response each."""
    config = load_config(None, ["logging.trackers=[]", *overrides])
    run_dir.mkdir(exist_ok=True)
    trackers = _make_trackers(config, run_dir, resume_step)
    writer = MetricsWriter(run_dir, trackers, resume_step=resume_step)
    for step in (first, first + 1):
        writer.log_responses(step, [ROW])
        writer.write(step, {"val-core/math/acc/mean@4": 0.5 + step, "b": math.nan})
    writer.close(failed=failed)


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stand-ins in place of the packages, also of installed ones."""
    folder = tmp_path / "packages"
    folder.mkdir()
    for name, text in STAND_INS.items():
        (folder / f"{name}.py").write_text(f"calls = []\n{text}")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(folder)
    for name in ("MLFLOW_TRACKING_URI", "SWANLAB_MODE"):
        monkeypatch.delenv(name, raising=False)
    yield folder
    for name in STAND_INS:
        sys.modules.pop(name, None)


def calls_of(name: str) -> list[tuple[Any, ...]]:
    return sys.modules[name].calls


WANDB = ("logging.trackers=['wandb']", "logging.project=p")


def test_wandb_gets_every_step_in_the_same_run_after_a_resume_and_another_run_if_it_is_fresh(
    tmp_path: Path,
) -> None:
    """In the earlier run, wandb would drop all steps that it has already."""
    track(tmp_path / "run", *WANDB)
    track(tmp_path / "run", *WANDB, resume_step=2, first=2)
    (tmp_path / "run").rename(tmp_path / "run.1")
    track(tmp_path / "run", *WANDB)
    track(tmp_path / "run", *WANDB)
    calls = calls_of("wandb")
    assert [call[0] for call in calls] == ["init", *["log"] * 4, "finish"] * 4
    (first, options), resumed, *fresh = [call for call in calls if call[0] == "init"]
    assert (first, options) == resumed
    assert len({call[1]["id"] for call in (resumed, *fresh)}) == 3
    assert (options["project"], options["resume"], options["name"]) == ("p", "allow", "run")
    assert options["config"]["logging"]["project"] == "p"
    assert calls[1][2]["responses"].rows == [ROW]
    assert [call[1] for call in calls if call[0] == "log"][:8] == [1, 1, 2, 2, 2, 2, 3, 3]
    assert calls[2][2]["val-core/math/acc/mean@4"] == 1.5


def test_mlflow_gets_names_that_it_allows_and_a_run_of_its_own_after_a_resume(
    tmp_path: Path,
) -> None:
    track(tmp_path / "run", f"logging.trackers=['{EXAMPLES}:MlFlow']", "logging.project=p")
    track(tmp_path / "run", f"logging.trackers=['{EXAMPLES}:MlFlow']", resume_step=2, first=2)
    calls = calls_of("mlflow")
    assert calls[0] == ("init", f"sqlite:///{tmp_path}/run/mlflow.db")
    assert ("config.yaml", 0) in calls
    runs = [call for call in calls if call[0] == "run"]
    assert runs == [("run", "p", "run"), ("run", "tlt_megatron", "run-from-step-2")]
    assert ("log", 2, "val-core/math/acc/mean_4", 2.5) in calls
    table = ("table", {name: [value] for name, value in ROW.items()}, "responses/step_0000001.json")
    assert table in calls


def test_a_failed_run_is_closed_as_failed(tmp_path: Path) -> None:
    both = f"logging.trackers=['wandb', '{EXAMPLES}:MlFlow']"
    track(tmp_path / "good", both)
    track(tmp_path / "bad", both, failed=True)
    ends = {name: [c for c in calls_of(name) if c[0] == "finish"] for name in ("wandb", "mlflow")}
    assert ends["wandb"] == [("finish", 0), ("finish", 1)]
    assert ends["mlflow"] == [("finish", "FINISHED"), ("finish", "FAILED")]


@pytest.mark.parametrize("mode", ["local", "offline"])
def test_swanlab_stays_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Its local mode needs the package of the dashboard."""
    found = None if mode == "offline" else 1
    swanlab = load_extension("logging.trackers", f"{EXAMPLES}:SwanLab")
    monkeypatch.setitem(swanlab.__init__.__globals__, "find_spec", lambda _: found)
    track(tmp_path / "run", f"logging.trackers=['{EXAMPLES}:SwanLab']")
    calls = calls_of("swanlab")
    assert (calls[0][1]["mode"], calls[0][1]["project"]) == (mode, "tlt_megatron")
    assert "response: 2" in calls[1][2]["responses"][0]
    assert [call[0] for call in calls] == ["init", *["log"] * 4, "finish"]


def test_trackio_goes_on_in_the_curves_of_a_run(tmp_path: Path) -> None:
    for number in (None, 2):
        track(tmp_path / "run", f"logging.trackers=['{EXAMPLES}:Trackio']", resume_step=number)
    calls = calls_of("trackio")
    starts = [(each[1]["name"], each[1]["resume"]) for each in calls if each[0] == "init"]
    assert starts == [("run", "never"), ("run", "allow")]
    assert [call[:2] for call in calls if call[0] == "log"][:2] == [("log", 1), ("log", 2)]


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track(tmp_path, "logging.trackers=['tensorboard']")
    track(tmp_path, "logging.trackers=['tensorboard']", resume_step=2, first=2)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    points = [(event.step, event.value) for event in events.Scalars("val-core/math/acc/mean@4")]
    assert points == [(1, 1.5), (2, 2.5), (3, 3.5)]


OWN = """
class Mine:
    def __init__(self, run_dir, project, config, resume_step): self.file = open(run_dir / "mine", "a")
    def log(self, step, metrics):
        print(step, len(metrics), file=self.file)
        raise OSError("no space")
    def log_responses(self, step, rows): print("rows", len(rows), file=self.file)
    def close(self): raise OSError("closed")
"""


def test_a_users_tracker_that_fails_is_reported_once_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    with caplog.at_level(logging.WARNING):
        track(tmp_path, f"logging.trackers=['{tmp_path}/own.py:Mine', 'wandb']")
    found = [record.message for record in caplog.records if "logging.trackers" in record.message]
    assert len(found) == 1
    assert "own.py:Mine failed at step 1 and gets no more metrics: OSError('no space')" in found[0]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert [call[0] for call in calls_of("wandb")] == ["init", *["log"] * 4, "finish"]


def test_a_tracker_that_cannot_start_is_refused_by_name(packages: Path, tmp_path: Path) -> None:
    (packages / "wandb.py").write_text("def init(**options): raise RuntimeError('no login')\n")
    with pytest.raises(ValueError, match=r"logging\.trackers=wandb: cannot start: .*no login"):
        track(tmp_path, "logging.trackers=['wandb']")
    with pytest.raises(ValueError, match=r"logging\.trackers='tensorbord': must be one of tensorb"):
        load_config(None, ["logging.trackers=['tensorbord']"])
    with pytest.raises(
        ValueError, match=r"trackers=\['mlflow'\]: must be examples/trackers\.py:MlFlow"
    ):
        load_config(None, ["logging.trackers=['mlflow']"])
