"""The program as users start it: what a run leaves, and what is refused."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
import torch

from tests.tiny_task import (
    TLT,
    answers,
    make_tiny_task,
    metric_rows,
    python,
    run,
    run_ending,
    run_forked,
    weights,
)
from tlt_megatron.models.hf_io import HfReader

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def straight(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps at DP2 without a break."""
    run_dir = tmp_path_factory.mktemp("straight")
    run(2, config, run_dir, "checkpoint.interval=1", "checkpoint.keep=0")
    return run_dir


def test_a_run_leaves_all_it_promises(straight: Path) -> None:
    summary = json.loads((straight / "summary.json").read_text())
    assert summary["num_steps"] == 3
    assert 0 <= summary["eval_accuracy_first"] <= 1
    assert summary["rollout_tokens_per_s"] > 0
    rows = metric_rows(straight)
    assert [row["step"] for row in rows if "actor/pg_loss" in row] == [1, 2, 3]
    assert all(
        row["train/train_rollout_logprob_abs_diff"] < 1e-4 for row in rows if "actor/pg_loss" in row
    )
    assert len(answers(straight)) == 3 * 4 * 4
    assert list((straight / "tensorboard").iterdir())
    trace = json.loads((straight / "trace.json").read_text())["traceEvents"]
    spans = {(event["pid"], event["name"]) for event in trace if event["ph"] == "X"}
    for rank in (0, 1):
        assert {
            (rank, n) for n in ("DECODE", "REWARD", "WAIT", "LOGPROB", "UPDATE", "SYNC")
        } <= spans
    assert (straight / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "3"


# verl's trainer has these; docs/coming_from.md says which are not written
VERL_NAMES = """
actor/{pg_loss,pg_clipfrac,ppo_kl,entropy,grad_norm,lr}
critic/{score,rewards,advantages,returns}/{mean,max,min}
response_length/{mean,max,min,clip_ratio} prompt_length/{mean,max,min,clip_ratio}
timing_s/{gen,reward,old_log_prob,update_actor,update_weights,step} timing_per_token_ms/{gen,update_actor}
perf/{throughput,time_per_step,total_num_tokens,cpu_memory_used_gb}
training/{global_step,epoch,rollout_probs_diff_mean,rollout_probs_diff_max,rollout_probs_diff_std}
"""


def test_metrics_have_the_names_of_verl(straight: Path) -> None:
    for row in (row for row in metric_rows(straight) if "actor/pg_loss" in row):
        for pattern in VERL_NAMES.split():
            choices = [part.split(",") for part in re.findall(r"{(.*?)}", pattern)]
            for chosen in itertools.product(*choices):
                name = re.sub(r"{.*?}", "%s", pattern) % chosen
                assert isinstance(row.get(name), float), name


def test_training_changed_the_weights_and_transformers_loads_them(
    straight: Path, config: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    before = dict(HfReader(config.parent / "model").items())
    after = weights(straight)
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    model = AutoModelForCausalLM.from_pretrained(straight / "hf")
    for name, tensor in model.state_dict().items():
        if name in after:
            assert torch.equal(tensor, after[name])
    assert AutoTokenizer.from_pretrained(straight / "hf").eos_token == "<eos>"


def test_one_rank_rolls_out_what_two_ranks_do(straight: Path, config: Path, tmp_path: Path) -> None:
    run(1, config, tmp_path, "run.num_steps=1", "data.eval=")
    assert answers(tmp_path) == answers(straight)[: 4 * 4]


@pytest.mark.parametrize("layout", ["parallel.tensor=2", "parallel.pipeline=2"])
def test_other_layouts_train_to_the_same_weights(
    straight: Path, config: Path, tmp_path: Path, layout: str
) -> None:
    run(2, config, tmp_path, layout, "run.num_steps=3", "data.eval=")
    for name, tensor in weights(straight).items():
        torch.testing.assert_close(weights(tmp_path)[name], tensor, rtol=1e-3, atol=1e-4)


def test_a_virtual_pipeline_changes_no_answer(tmp_path: Path) -> None:
    """With the drafter's tap on layers of both stages, and a resume without it."""
    config = make_tiny_task(tmp_path, num_layers=4)
    settings = ("data.eval=", "parallel.pipeline=2", *TLT, "drafter.algorithm=eagle3")
    plain, virtual = tmp_path / "plain", tmp_path / "virtual"
    run(2, config, plain, *settings)
    run(2, config, virtual, *settings, "parallel.virtual_pipeline=2", "run.num_steps=2")
    run(2, config, virtual, *settings, "checkpoint.resume=auto")
    assert answers(virtual) == answers(plain)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.max_prompt_tokens=2", "all 24 prompts are longer than data.max_prompt_tokens=2"),
        ("rollout.max_batch_size=100000000", "change rollout.max_batch_size=100000000"),
        (
            "mcore.transformer.fp8=hybrid",
            "mcore.transformer.fp8='hybrid': must be absent without a GPU, transformer-engine",
        ),
    ],
)
def test_what_only_data_and_the_machine_show_is_refused(
    config: Path, tmp_path: Path, override: str, message: str
) -> None:
    assert message in run_ending(2, 1, config, tmp_path, override)


def test_a_risky_setting_is_warned_of_and_an_unusable_row_is_named_once(
    config: Path, tmp_path: Path
) -> None:
    rows = ['{"prompt": "a=", "label": 42.0}', '{"prompt": "b=", "label": NaN}']
    train = tmp_path / "train.jsonl"
    train.write_text("\n".join(rows))
    overrides = ("run.group_timeout_s=60", f"data.train={train}", "logging.progress=none")
    results = run_forked(2, "--config", config, f"run.dir={tmp_path}/run", *overrides)
    assert [code for code, _ in results] == [2, 2]
    assert "run.group_timeout_s=60 is not above run.heartbeat_timeout_s" in results[0][1]
    assert "run.group_timeout_s=60" not in results[1][1]
    said = "".join(stderr for _, stderr in results)
    assert said.count(f"{train} row 2: label=nan must be a finite number") == 1
    assert "Traceback" not in said


def test_printed_config_is_a_config(config: Path, tmp_path: Path) -> None:
    printed = []
    for path in (config, tmp_path / "printed.yaml"):
        printed.append(python("launch/pretrain_rl.py", "--print-config", "--config", path).stdout)
        (tmp_path / "printed.yaml").write_text(printed[0])
    assert printed[0] == printed[1]
    assert "num_samples: 4" in printed[0]
