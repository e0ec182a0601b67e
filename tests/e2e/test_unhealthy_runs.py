"""Training that goes wrong stops with exit code 1, one line and the last good checkpoint, by the
user's own doors.
"""

from __future__ import annotations

import html
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.tiny_task import checkpoints, metric_rows, run, run_ending
from tools.commands.report import main as report
from tools.run_report.live import LiveRun

pytestmark = pytest.mark.e2e

ENGINE = """
from tlt_megatron.models.hf_io import checksum_tensors
from tlt_megatron.trainer.build_embedded import build_embedded_engine


def engine(config, device, run_dir, world):
    engine = build_embedded_engine(config, device, run_dir, world)
    load = engine.load_weights

    def load_others(tensors, *, version, checksum):
        others = [(name, tensor * 1.01) for name, tensor in tensors]
        load(others, version=version, checksum=lambda: checksum_tensors(others))

    engine.load_weights = load_others
    return engine
"""
EVERY_STEP = ("checkpoint.interval=1", "checkpoint.keep=0", "data.eval=")


def errors(stderr: str) -> list[str]:
    """The error lines of all ranks."""
    return [line for line in stderr.splitlines() if " ERROR " in line]


def test_weights_that_are_not_finite_end_the_run_and_are_not_saved(
    config: Path, tmp_path: Path
) -> None:
    run(2, config, tmp_path, "run.num_steps=1", *EVERY_STEP)
    fast = ("optimizer.lr=1e37", "optimizer.weight_decay=100", "run.num_steps=9")
    (line,) = errors(run_ending(1, 2, config, tmp_path, "--resume", "auto", *EVERY_STEP, *fast))
    assert "step 2: weights of the policy are NaN or infinite" in line
    assert "Check optimizer.lr" in line
    assert checkpoints(tmp_path) == ["iter_0000001"]
    pointer = tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert pointer.read_text() == "1"


def test_updates_skipped_in_a_row_end_the_run_and_keep_the_good_checkpoints(
    config: Path, tmp_path: Path
) -> None:
    """Weights of 1e15 are finite, but what is computed with them is not: every further update is
    skipped.
    """
    layout = "parallel.pipeline=2"
    run(2, config, tmp_path, layout, "run.num_steps=1", *EVERY_STEP)
    again = ("--resume", "auto", "checkpoint.interval=1", "checkpoint.keep=2", "data.eval=")
    fast = ("optimizer.lr=1e15", "run.num_steps=99")
    (line,) = errors(run_ending(1, 2, config, tmp_path, layout, *again, *fast))
    assert "step 5: 3 updates in a row were skipped or not finite" in line
    assert "gradient norm nan" in line
    assert checkpoints(tmp_path) == ["iter_0000001", "iter_0000002"]
    rows = {row["step"]: row for row in metric_rows(tmp_path)}
    assert rows[2]["actor/num_skipped_updates"] == 0
    assert rows[3]["actor/num_skipped_updates"] == 1
    assert rows[3]["train/train_rollout_logprob_abs_diff_max"] is None, "NaN is not hidden"


def test_a_model_with_nan_in_it_is_refused_before_the_first_step(
    config: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(config.parent / "model", model)
    (shard,) = model.glob("*.safetensors")
    tensors = load_file(shard)
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, shard, metadata={"format": "pt"})
    stderr = run_ending(1, 1, config, tmp_path / "run", f"model.path={model}")
    assert "step 0: weights of the policy are NaN or infinite, model.norm.weight" in stderr
    assert checkpoints(tmp_path / "run") == []
    (state,) = LiveRun(tmp_path / "run").states()  # `tlt watch` quotes what the terminal says
    (line,) = errors(stderr)
    assert state.alarm == f"The run has failed: {line.partition('launch.pretrain_rl: ')[2]}"
    assert state.sentence == "0 of ? RL steps are done."
    assert report([str(tmp_path / "run")]) == 0
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert f"<li>{html.escape(state.alarm, quote=False)}</li>" in page


# Without a log-prob pass before the update, and with one.
@pytest.mark.parametrize(
    ("num_epochs", "layout"), [(1, "parallel.tensor=1"), (2, "parallel.pipeline=2")]
)
def test_engine_with_other_weights_is_noticed_before_the_first_update(
    config: Path, tmp_path: Path, num_epochs: int, layout: str
) -> None:
    (tmp_path / "mine.py").write_text(ENGINE)
    own = (f"rollout.engine={tmp_path}/mine.py:engine", f"algorithm.num_epochs={num_epochs}")
    (line,) = errors(run_ending(1, 2, config, tmp_path / "run", layout, "data.eval=", *own))
    assert "step 1: training and rollout log-probs of " in line
    assert "differ by max" in line
    assert "rope" in line
    assert checkpoints(tmp_path / "run") == []
    assert metric_rows(tmp_path / "run") == []


def test_a_difference_above_the_users_bound_ends_the_run_and_its_trackers_as_failed(
    config: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(
        "class Mine:\n"
        "    def __init__(self, run_dir, **_): self.path = run_dir / 'ends'\n"
        "    def log(self, step, metrics): pass\n"
        "    def log_responses(self, step, rows): pass\n"
        "    def close(self, failed=False):\n"
        "        with self.path.open('a') as file: print(failed, file=file)\n"
    )
    tracked = (f"logging.trackers=['{tmp_path}/own.py:Mine']", *EVERY_STEP, "run.num_steps=1")
    failing = ("rollout.dtype=bfloat16", "algorithm.max_logprob_diff=1e-5")
    for name, more, code in (("failed", failing, 1), ("ended", (), 0)):
        said = run_ending(code, 1, config, tmp_path / name, *tracked, *more)
        assert (tmp_path / name / "ends").read_text() == f"{name == 'failed'}\n"
        allowed = "allowed is mean 1e-05 (model.dtype=float32, rollout.dtype=bfloat16)"
        assert (allowed in said) == (name == "failed")
        assert bool(checkpoints(tmp_path / name)) == (name == "ended")


def test_rewards_that_cannot_be_compared_are_refused_with_their_prompt(
    config: Path, tmp_path: Path
) -> None:
    """A reward of 1e200 made every advantage 0, and the run learned nothing without a word."""
    (tmp_path / "huge.py").write_text(
        "def huge(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    print('a word of the reward function')\n"
        "    return 1e200 * len(solution_str)\n"
    )
    zero = ("reward.on_error=zero", "run.num_steps=1", "data.eval=")
    stderr = run_ending(0, 1, config, tmp_path, f"reward.function={tmp_path}/huge.py:huge", *zero)
    assert "prompt_id='train:" in stderr
    assert "must be a finite number from -1e+06 to 1e+06" in stderr
    (row,) = metric_rows(tmp_path)
    assert row["reward/num_errors"] == 16
    log = (tmp_path / "logs" / "node_0000" / "rank_00000.log").read_text()
    assert "a word of the reward function" in log
    assert "a word of the reward function" not in stderr


def test_reward_that_fails_to_load_is_said_once_in_one_line(config: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    broken = f"reward.function={tmp_path}/broken.py:act"
    said = run_ending(2, 2, config, tmp_path / "run", broken)
    assert said.count("no_such_package") == 1, said
    assert not (tmp_path / "run").exists()  # a refused run leaves no folder
