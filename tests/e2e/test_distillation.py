"""Whole runs with a second model: a distillation without reward, and a reference that is
replaced.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.mcore_policy import check_same_bits
from tests.tiny_models import change_json
from tests.tiny_task import (
    check_same_run,
    make_tiny_task,
    metric_rows,
    run,
    run_ending,
    write_teacher,
)
from tlt_megatron.models.hf_io import HfReader

pytestmark = pytest.mark.e2e

SHORT = ("data.eval=", "logging.trackers=[]", "rollout.max_new_tokens=8")
KL = ("algorithm.kl_coef=0.1", "reference.refresh_steps=2")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a task with a teacher, whose rows have no labels."""
    folder = tmp_path_factory.mktemp("task")
    config = make_tiny_task(folder)
    write_teacher(folder)
    file = folder / "train.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows))
    return config


def test_a_student_comes_near_its_teacher_without_a_reward(task: Path, tmp_path: Path) -> None:
    teacher = f"reference.path={task.parent}/teacher"
    distill = ("algorithm.distill_coef=1", "reward.function=none", teacher, *SHORT)
    run(2, task, tmp_path, *distill, "run.num_steps=12", "optimizer.lr=2e-3", "parallel.tensor=2")
    rows = metric_rows(tmp_path)
    assert all(row["critic/rewards/max"] == row["critic/rewards/min"] == 0 for row in rows)
    assert all(row["actor/skipped_response_share"] == 0 for row in rows)
    kls = [row["actor/reverse_kl"] for row in rows]
    assert sum(kls[-3:]) < 0.7 * sum(kls[:3])
    log = (tmp_path / "logs" / "node_0000" / "rank_00000.log").read_text()
    assert "nothing to learn from" not in log


@pytest.mark.parametrize("further", [(), ("model.lora_rank=4",)], ids=("all weights", "LoRA"))
def test_a_resumed_run_has_the_refreshed_reference(
    config: Path, tmp_path: Path, further: tuple[str, ...]
) -> None:
    """It stops one step after the first refresh, and goes on to the second."""
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    settings = (*KL, *SHORT, *further)
    run(2, config, straight, *settings, "run.num_steps=5")
    rows = metric_rows(straight)
    assert [row["actor/kl_loss"] < 1e-9 for row in rows] == [True, False, True, False, True]
    run(2, config, resumed, *settings, "run.num_steps=3")
    said = run_ending(
        2, 2, config, resumed, *settings, "--resume=auto", "reference.refresh_steps=3"
    )
    assert "replaced every 2 steps' -> " in said
    run(2, config, resumed, *settings, "--resume=auto", "run.num_steps=5")
    check_same_run(resumed, straight)
    checkpoints = straight / "checkpoints" / "iter_0000005"
    assert (checkpoints / "reference" / ".metadata").is_file()


def test_another_teacher_is_refused_at_a_resume(config: Path, tmp_path: Path) -> None:
    task = tmp_path / "task"
    shutil.copytree(config.parent, task)
    teacher = write_teacher(task)
    settings = (*SHORT, "algorithm.kl_coef=0.1", f"reference.path={teacher}")
    run(1, config, tmp_path / "run", *settings, "run.num_steps=1")
    assert metric_rows(tmp_path / "run")[0]["actor/kl_loss"] > 0.1
    before = dict(HfReader(teacher).items())
    shutil.rmtree(teacher)
    other = dict(HfReader(write_teacher(task, seed=6)).items())
    with pytest.raises(AssertionError):
        check_same_bits(before, other)
    said = run_ending(2, 1, config, tmp_path / "run", *settings, "--resume=auto")
    assert "belongs to another run: weights in model.path (the KL reference)" in said


def test_a_teacher_with_another_tokenizer_is_refused(task: Path, tmp_path: Path) -> None:
    """Also if it has as many tokens. Further tokens of the teacher do no harm."""
    shutil.copytree(task.parent, tmp_path / "task")
    teacher = tmp_path / "task" / "teacher"
    file = teacher / "tokenizer.json"
    settings = (*SHORT, "algorithm.kl_coef=0.1", f"reference.path={teacher}", "run.num_steps=1")

    def vocabulary(**changes: int) -> None:
        text = json.loads((task.parent / "model" / "tokenizer.json").read_text())
        text["model"]["vocab"] |= changes
        file.write_text(json.dumps(text))

    vocabulary(further=45)
    config = task.parent / "config.yaml"
    run(1, config, tmp_path / "run", "reward.function=exact", "data.label_key=prompt", *settings)
    vocabulary(a=25, b=24)
    said = run_ending(2, 1, config, tmp_path / "no", *settings)
    assert "must have the policy's tokenizer: the token 'a' is 24 in the policy's, and 25 there" in said  # fmt: skip
    vocabulary()
    change_json(teacher / "config.json", vocab_size=40)
    said = run_ending(2, 1, config, tmp_path / "no", *settings)
    assert "reference.path=" in said
