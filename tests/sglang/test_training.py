"""The program as users start it, with SGLang: the same run as with the embedded engine."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.tiny_models import make_tiny_hf
from tests.tiny_task import (
    FEATURES,
    REPO,
    answers,
    launch,
    make_tiny_task,
    metric_rows,
    patient_engine,
    rollouts,
    write_environment,
)

STAND_INS = REPO / "tests" / "sglang" / "stand_ins"
SGLANG = ("rollout.engine=sglang",)
DRAFTING = (
    "speculation.enabled=true",
    'speculation.strategies=["3_1_3"]',
    "speculation.selector=fixed",
    "spot.enabled=true",
    "drafter.batch_tokens=64",
)
NUM_STEPS = 3
# Rank 0 has twice the work of rank 1, in two waves, so there is idle time for a step of the
# drafter.
SETTINGS = (
    f"run.num_steps={NUM_STEPS}",
    "rollout.dtype=float32",
    "rollout.num_prompts=3",
    "rollout.max_batch_size=4",
    "rollout.max_new_tokens=40",
    "data.eval=",
    "logging.trackers=[]",
)
PARTIAL = (
    *("rollout.num_samples=2", "rollout.over_sampling_prompts=5", "algorithm.tis_cap=2"),
    "rollout.partial_rollout_tokens=6",
)
TURNS = ("rollout.max_turns=3", "rollout.max_observation_tokens=12")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = make_tiny_task(tmp_path_factory.mktemp("task"))
    # The same model, of a width that SGLang can halve on a CPU.
    sizes = {"vocab_size": 48, "num_layers": 2, "intermediate_size": 192}
    make_tiny_hf(config.parent / "model", "qwen2", eos_token_id=1, pad_token_id=0, **sizes)
    return config


@pytest.fixture(scope="module")
def short(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The task with more stop tokens: most responses have fewer than 16 tokens."""
    folder = tmp_path_factory.mktemp("short")
    shutil.copytree(config.parent, folder, dirs_exist_ok=True)
    write_environment(folder)
    path = folder / "config.yaml"
    path.write_text(config.read_text().replace(str(config.parent), str(folder)))
    return path


@pytest.fixture(scope="module")
def embedded(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that the others are to repeat."""
    run_dir = tmp_path_factory.mktemp("embedded")
    run(config, run_dir)
    return run_dir


def run(config: Path, run_dir: Path, *arguments: str, num_ranks: int = 2) -> None:
    """The run of SETTINGS, to its end."""
    words = ("--config", config, f"run.dir={run_dir}", *SETTINGS, *arguments)
    done = launch(num_ranks, *words, timeout_s=900, PYTHONPATH=f"{REPO}:{STAND_INS}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]


def run_both(config: Path, folder: Path, *settings: str, num_ranks: int = 2) -> None:
    """Runs with each engine below `folder`, at the same time."""
    engines = {"embedded": (), "sglang": SGLANG}

    def run_with(name: str) -> None:
        run(config, folder / name, *settings, *engines[name], num_ranks=num_ranks)

    with ThreadPoolExecutor() as pool:
        list(pool.map(run_with, engines))  # raises what a run has raised


def steps(run_dir: Path) -> list[dict]:
    return [row for row in metric_rows(run_dir) if "actor/pg_loss" in row]


def check_same(run_dir: Path, embedded: Path) -> list[dict]:
    """Every token and reward, and what followed from them."""
    assert answers(run_dir) == answers(embedded)
    ours, theirs = steps(run_dir), steps(embedded)
    assert len(ours) == len(theirs) == NUM_STEPS
    for row, expected in zip(ours, theirs, strict=True):
        for name in ("critic/rewards/mean", "actor/grad_norm", "response_length/mean"):
            assert row[name] == pytest.approx(expected[name], rel=1e-4)
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-4
    return ours


def test_a_run_with_a_drafter_in_training_is_the_embedded_engines_plain_run(
    config: Path, embedded: Path, tmp_path: Path
) -> None:
    run(config, tmp_path, patient_engine(tmp_path, "sglang"), *DRAFTING)
    rows = check_same(tmp_path, embedded)
    assert all(row["rollout/spec_accept_length"] >= 1.0 for row in rows)
    assert rows[-1]["drafter/num_updates"] == sum(row["spot/updates"] for row in rows) > 0


def test_one_engine_over_two_ranks_gives_the_same_run(
    config: Path, embedded: Path, tmp_path: Path
) -> None:
    run(config, tmp_path, *SGLANG, 'sglang.engine_args={"tp_size": 2}')
    check_same(tmp_path, embedded)


def test_rollouts_with_adapters_are_those_of_the_embedded_engine(
    config: Path, tmp_path: Path
) -> None:
    """Both engines get the merged weights of all steps."""
    lora = ("model.lora_rank=4", "optimizer.lr=0.01", "parallel.tensor=2")
    run_both(config, tmp_path, *lora)
    check_same(tmp_path / "sglang", tmp_path / "embedded")
    assert (tmp_path / "sglang" / "hf_adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("name", ["partial", "turns", "class"])
def test_responses_in_parts_are_those_of_the_embedded_engine(
    short: Path, tmp_path: Path, name: str
) -> None:
    """Responses that are carried to later steps, and conversations with an environment: a function,
    or a class with rewards and stop strings of turns.
    """
    environment = write_environment(short.parent)
    own = f"{FEATURES['environment']} {FEATURES['stop strings']}"
    settings = {
        "partial": PARTIAL,
        "turns": (*TURNS, environment),
        "class": own.replace("{task}", str(short.parent)).split(),
    }[name]
    run_both(short, tmp_path, *settings, num_ranks=1)
    check_same(tmp_path / "sglang", tmp_path / "embedded")
    found = rollouts(tmp_path / "sglang")
    if name == "partial":
        assert max(len(row.get("versions", ())) for row in found) >= 2
    else:
        assert {row["num_turns"] for row in found} == {1, 2, 3}
    if name == "class":
        credits = [
            [
                (row["turn_lengths"], row["turn_rewards"], row["end"])
                for row in rollouts(tmp_path / e)
            ]
            for e in ("embedded", "sglang")
        ]
        assert credits[0] == credits[1]
        assert len({reward for _, rewards, _ in credits[0] for reward in rewards}) > 2
