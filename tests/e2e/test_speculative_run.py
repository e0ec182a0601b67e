"""Speculation in a whole RL run: the same tokens, rewards and weights as without it, and refusals of wrong drafters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.tiny_models import make_tiny_hf
from tests.tiny_task import answers, metric_rows, rollouts, run, run_forked, weights
from tlt_megatron.drafter.eagle_folder import save_drafter
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.draft_model import DraftModel, make_draft_config
from tlt_megatron.models.hf_io import HfReader

pytestmark = pytest.mark.e2e


def make_drafter(model: Path, out: Path) -> Path:
    """Random weights, in the layout of a trained one."""
    reader = HfReader(model)
    embedding, head = reader["model.embed_tokens.weight"], reader["lm_head.weight"]
    config = make_draft_config(load_model_config(model), "eagle", embedding)
    save_drafter(out, DraftModel(config, embedding_VD=embedding, lm_head_VD=head))
    return out


def test_five_steps_with_speculation_are_five_steps_without(config: Path, tmp_path: Path) -> None:
    drafter = make_drafter(config.parent / "model", tmp_path / "drafter")
    common = ["run.num_steps=5", "data.eval=", "logging.trackers=[]"]
    run(2, config, tmp_path / "off", *common)
    on = [
        "speculation.enabled=true",
        f"speculation.drafter={drafter}",
        "speculation.selector=beg_mab",
    ]
    on += ["speculation.strategies=['3_1_3', '4_4_12']"]
    run(2, config, tmp_path / "on", *common, *on)
    assert answers(tmp_path / "on") == answers(tmp_path / "off")
    for name, tensor in weights(tmp_path / "off").items():
        assert torch.equal(weights(tmp_path / "on")[name], tensor), name
    rows = metric_rows(tmp_path / "on")
    assert all(row["rollout/spec_accept_length"] > 1 for row in rows)
    # both ranks after every update; the first step has the weights that the drafter was built with
    trace = json.loads((tmp_path / "on" / "trace.json").read_text())
    assert [event["name"] for event in trace["traceEvents"]].count("REFRESH-DRAFTER") == 2 * 4
    assert any(event["name"] == "KV tokens" for event in trace["traceEvents"])
    assert not any("rollout/spec_accept_length" in row for row in metric_rows(tmp_path / "off"))
    assert rows[0]["memory/planned_gb/update"] > 0
    for name in ("on", "off"):
        for row in rollouts(tmp_path / name):
            assert len(row["verify_starts"]) == len(row["accept_lengths"])
            assert bool(row["verify_starts"]) == (name == "on") or len(row["token_ids"]) == 1
            assert row["logprob_diff"] is None or 0 <= row["logprob_diff"] < 1e-4
        assert any(row["logprob_diff"] is not None for row in rollouts(tmp_path / name))


def test_a_drafter_of_another_policy_is_refused(config: Path, tmp_path: Path) -> None:
    other = make_tiny_hf(tmp_path / "other", "qwen2", vocab_size=48, num_layers=2, seed=5)
    drafter = make_drafter(other, tmp_path / "drafter")
    arguments = ["--config", config, f"run.dir={tmp_path / 'run'}", "logging.progress=none"]
    arguments += ["speculation.enabled=true", f"speculation.drafter={drafter}"]
    [(code, stderr)] = run_forked(1, *arguments)
    assert code == 2
    assert "the drafter belongs to another target" in stderr
