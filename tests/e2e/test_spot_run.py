"""Spot training in a whole RL run: what is learned does not change, the drafter does, and a resumed
run goes on with it.
"""

from __future__ import annotations

import json
import shutil
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.documented_metrics import METRICS
from tests.tiny_models import make_tiny_hf
from tests.tiny_task import (
    TLT,
    answers,
    check_same_run,
    check_same_tokens,
    check_same_weights,
    metric_rows,
    patient_engine,
    rollouts,
    run,
    run_ending,
)
from tlt_megatron.drafter.eagle_folder import load_drafter, save_drafter
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.draft_model import DraftModel, make_draft_config
from tlt_megatron.models.hf_io import HfReader

pytestmark = pytest.mark.e2e


# Rank 0 has twice the work of rank 1, in two waves, so there is idle time for more than one step of
# the drafter.
UNEVEN = ("rollout.num_prompts=3", "rollout.max_batch_size=4", "rollout.max_new_tokens=40")
SPOT = (
    *UNEVEN,
    *TLT,
    "drafter.algorithm=hass",
    "data.eval=",
    "logging.trackers=[]",
)


def check_second_half(resumed: Path, straight: Path, checkpoint: Path) -> None:
    """Check that a run resumed half-way equals the straight run, and its drafter went on."""
    assert answers(resumed) == answers(straight)[len(answers(straight)) // 2 :]
    check_same_weights(resumed, straight)
    saved = load_file(checkpoint / "drafter" / "training" / "state.safetensors")
    rows = metric_rows(resumed)
    made = sum(row["spot/updates"] for row in rows)
    assert rows[-1]["drafter/num_updates"] == int(saved["num_updates"]) + made > 0


@pytest.fixture(scope="module")
def straight(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps from a drafter with random weights, checkpointed after each."""
    run_dir = tmp_path_factory.mktemp("straight")
    engine = patient_engine(tmp_path_factory.mktemp("engine"), "embedded")
    extra = [engine, "checkpoint.interval=1", "checkpoint.keep=0", "speculation.measure_gain=true"]
    run(2, config, run_dir, "run.num_steps=4", *SPOT, *extra)
    return run_dir


def test_full_tlt_changes_no_token_no_reward_and_no_weight(
    config: Path, straight: Path, tmp_path: Path
) -> None:
    plain = ["run.num_steps=4", "data.eval=", "logging.trackers=[]", *UNEVEN]
    run(2, config, tmp_path / "off", *plain)
    check_same_run(straight, tmp_path / "off")
    for run_dir in (straight, tmp_path / "off"):
        found = rollouts(run_dir)
        for row in found:
            assert row["logprob_diff"] is None or 0 <= row["logprob_diff"] < 1e-4
        assert any(row["logprob_diff"] is not None for row in found)
        assert any(row["accept_lengths"] for row in found) == (run_dir == straight)
        has_lengths = any("rollout/spec_accept_length" in row for row in metric_rows(run_dir))
        assert has_lengths == (run_dir == straight)


def test_the_run_leaves_its_drafter_and_says_what_became_of_the_idle_time(
    config: Path, straight: Path
) -> None:
    rows = metric_rows(straight)
    assert all(row["bubble/idle_s"] >= row["bubble/used_s"] >= 0 for row in rows)
    assert rows[-1]["drafter/num_updates"] == sum(row["spot/updates"] for row in rows) > 0
    # whether a candidate of these few seconds accepts clearly more depends on the machine
    assert rows[-1]["drafter/version"] + rows[-1]["drafter/num_refused"] >= 1
    files = sorted((straight / "speculation").glob("rank_*.jsonl"))
    passes = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert {row["step"] for row in passes} == {1, 2, 3, 4}
    trace = json.loads((straight / "trace.json").read_text())["traceEvents"]
    assert "REFRESH-DRAFTER" in {event["name"] for event in trace}
    assert rows[0]["memory/planned_gb/update"] > 0
    assert {row["rank"] for row in passes} == {0, 1}
    summary = json.loads((straight / "summary.json").read_text())
    assert summary["idle_used_s"] <= summary["idle_s"]
    assert summary["responses_differing"] == 0
    assert summary["rollout_speedup"] > 0
    reader = HfReader(straight / "hf")
    embedding, head = reader["model.embed_tokens.weight"], reader["lm_head.weight"]
    load_drafter(straight / "hf_drafter", embedding_VD=embedding, lm_head_VD=head)


def test_resuming_a_finished_run_keeps_the_speedup_it_measured(
    config: Path, straight: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    shutil.copytree(straight, again)
    extra = ["checkpoint.keep=0", "speculation.measure_gain=true", "checkpoint.resume=auto"]
    run(2, config, again, "run.num_steps=4", *SPOT, *extra)
    before, after = (json.loads((each / "summary.json").read_text()) for each in (straight, again))
    measured = ("rollout_speedup", "step_speedup", "responses_differing")
    assert {name: after.get(name) for name in measured} == {name: before[name] for name in measured}
    assert after["num_steps"] == before["num_steps"]


def test_every_metric_is_documented(straight: Path) -> None:
    written = {name for row in metric_rows(straight) for name in row}
    assert [n for n in written if not any(fnmatchcase(n, each) for each in METRICS)] == []


def test_a_resumed_run_goes_on_with_drafter_data_and_policy(
    config: Path, straight: Path, tmp_path: Path
) -> None:
    first = straight / "checkpoints" / "iter_0000002"
    run(2, config, tmp_path / "resumed", "run.num_steps=4", *SPOT, f"checkpoint.resume={first}")
    check_second_half(tmp_path / "resumed", straight, first)


def test_context_parallel_ranks_draw_the_same_tokens_and_resume_without_them(
    config: Path, straight: Path, tmp_path: Path
) -> None:
    settings = ["run.num_steps=4", *SPOT, "checkpoint.interval=2", "parallel.context=2"]
    run(2, config, tmp_path / "whole", *settings)
    check_same_tokens(tmp_path / "whole", straight)
    resume = f"checkpoint.resume={tmp_path}/whole/checkpoints/iter_0000002"
    run(2, config, tmp_path / "other", *settings, resume, "parallel.context=1")
    assert answers(tmp_path / "other") == answers(straight)[len(answers(straight)) // 2 :]
    for row in metric_rows(tmp_path / "whole"):
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-4
    losses = [
        [row["actor/pg_loss"] for row in metric_rows(each)]
        for each in (tmp_path / "whole", straight)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-6)


def test_a_drafter_of_another_policy_is_refused(config: Path, tmp_path: Path) -> None:
    other = make_tiny_hf(tmp_path / "other", "qwen2", vocab_size=48, num_layers=2, seed=5)
    reader = HfReader(other)
    embedding, head = reader["model.embed_tokens.weight"], reader["lm_head.weight"]
    about = make_draft_config(load_model_config(other), "eagle", embedding)
    save_drafter(tmp_path / "it", DraftModel(about, embedding_VD=embedding, lm_head_VD=head))
    named = ("speculation.enabled=true", f"speculation.drafter={tmp_path / 'it'}")
    assert "belongs to another target" in run_ending(2, 1, config, tmp_path / "run", *named)
