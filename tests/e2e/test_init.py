"""`tlt init`: what it writes for CPUs runs, and what it writes for GPUs passes the checks, with the
smallest layout that fits.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from launch import pretrain_rl
from tests.qwen_shapes import QWEN_1_7B, QWEN_7B, QWEN_30B_A3B, QWEN_32B
from tests.tiny_task import metric_rows, run
from tlt_megatron.config.load import load_config
from tlt_megatron.runtime.typed_command import tlt_command
from tools.commands.init_run import REWARD, main

pytestmark = pytest.mark.e2e


def init(task: Path, out: Path, *options: object, model: Path | None = None) -> None:
    given = ["--model", model or task / "model", "--data", task / "train.jsonl", "--out", out]
    main([str(word) for word in (*given, *options)])


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        ("7 + 4 = 11\n#### 11.", "11", 1),
        ("so 11", "1", 0),
        ("in New York", "New York", 1),
        ("", "1", 0),
    ],
)
def test_the_reward_template_compares_the_last_words(
    response: str, label: str, reward: float
) -> None:
    place: dict = {}
    exec(REWARD, place)
    assert place["compute_score"]("", response, label) == reward


def test_a_cpu_run_starts_with_what_is_written(
    config: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    held_out = [config.parent / "eval.jsonl", config.parent / "train.jsonl"]
    init(config.parent, tmp_path, "--gpus", 0, "--eval", *held_out)
    last = capfd.readouterr().out.splitlines()[-1]
    assert last == tlt_command("train", f"{tmp_path}/config.yaml", "--nproc-per-node", 2)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.yaml", "reward.py"]
    written = load_config(tmp_path / "config.yaml")
    assert written.run.dir == f"runs/{tmp_path.name}"
    assert written.data.eval == [str(path) for path in held_out]
    shorter = ("eval.num_prompts=1", "rollout.max_new_tokens=16", "run.num_steps=1")
    run(2, tmp_path / "config.yaml", tmp_path / "run", *shorter)
    assert metric_rows(tmp_path / "run")[-1]["step"] == 1
    with pytest.raises(ValueError, match=r"holds config.yaml already"):
        init(config.parent, tmp_path, "--gpus", 0)


@pytest.mark.parametrize(
    ("sizes", "gpus", "tensor", "expert", "start"),
    [
        (QWEN_7B, 8, 1, 1, "tlt train {}/config.yaml --nproc-per-node 8"),
        (QWEN_7B, 4, 2, 1, "tlt train {}/config.yaml --nproc-per-node 4"),
        (QWEN_32B, 32, 8, 1, "sbatch {}/train.sbatch"),
        (QWEN_30B_A3B, 16, 2, 8, "sbatch {}/train.sbatch"),
    ],
)
def test_gpus_get_the_smallest_layout_that_fits(
    config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    sizes: dict[str, object],
    gpus: int,
    tensor: int,
    expert: int,
    start: str,
) -> None:
    model = tmp_path / "model"
    shutil.copytree(config.parent / "model", model, ignore=shutil.ignore_patterns("*.safetensors"))
    (model / "config.json").write_text(json.dumps(sizes))
    init(config.parent, tmp_path, "--gpus", gpus, model=model)
    assert capsys.readouterr().out.splitlines()[-1].endswith(start.format(tmp_path))
    assert pretrain_rl.main(["--config", f"{tmp_path}/config.yaml", "--print-config"]) == 0
    written = load_config(tmp_path / "config.yaml")
    layout = written.parallel
    assert (layout.tensor, layout.pipeline, layout.expert) == (tensor, 1, expert)
    script = tmp_path / "train.sbatch"
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    text = script.read_text()
    assert f"#SBATCH --nodes={max(1, gpus // 8)}\n" in text
    assert f"#SBATCH --gpus-per-node={min(8, gpus)}\n" in text
    assert f"config={tmp_path}/config.yaml\n" in text
    assert " launch/" not in text


@pytest.mark.parametrize(
    ("sizes", "gpus", "memory", "rank", "new_tokens"),
    [
        (QWEN_1_7B, 1, 80, 0, 4096),
        (QWEN_1_7B, 1, 24, 32, 2048),
        (QWEN_7B, 1, 80, 32, 4096),
        (QWEN_7B, 2, 40, 32, 4096),
    ],
)
def test_one_engine_gets_what_fits_and_no_spot_training(
    config: Path,
    tmp_path: Path,
    sizes: dict[str, object],
    gpus: int,
    memory: int,
    rank: int,
    new_tokens: int,
) -> None:
    """Adapters where all weights do not fit. No rank of one engine is idle."""
    model = tmp_path / "model"
    shutil.copytree(config.parent / "model", model, ignore=shutil.ignore_patterns("*.safetensors"))
    (model / "config.json").write_text(json.dumps(sizes))
    init(config.parent, tmp_path, "--gpus", gpus, "--gpu-memory", memory, model=model)
    written = load_config(tmp_path / "config.yaml")
    assert (written.model.lora_rank, written.parallel.tensor) == (rank, gpus)
    assert written.optimizer.lr == (1e-5 if rank else 1e-6)
    assert not written.spot.enabled
    assert written.speculation.strategies == ["ngram_8"]
    rollout = written.rollout
    assert rollout.num_prompts * rollout.num_samples <= 128
    assert rollout.max_new_tokens == new_tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gpus", -1), r"--gpus -1: must be 0, at most 8, or a multiple of it"),
        (("--gpus", 0, "--eval", "absent.jsonl"), r"absent\.jsonl: no such file"),
        (("--gpus", 1), r"does not fit into 1 GPU of 80 GiB: memory: .* MiB"),
    ],
)
def test_what_cannot_be_or_fit_is_refused_and_nothing_is_written(
    config: Path, tmp_path: Path, options: tuple[object, ...], message: str
) -> None:
    weights = shutil.ignore_patterns("*.safetensors")
    model = shutil.copytree(config.parent / "model", tmp_path / "model", ignore=weights)
    (model / "config.json").write_text(json.dumps(QWEN_32B))
    with pytest.raises(ValueError, match=message):
        init(config.parent, tmp_path / "out", *options, model=model)
    assert not (tmp_path / "out").exists()
