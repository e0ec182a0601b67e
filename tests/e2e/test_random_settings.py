"""Whole runs with settings drawn at random: speculation, spot training and a resume change no token
and no weight.

`RANDOM_SETTINGS=100 .venv/bin/python -m pytest tests/e2e/test_random_settings.py` draws a hundred
of them.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.tiny_task import (
    check_same_run,
    check_same_weights,
    make_tiny_task,
    run,
    write_environment,
)
from tlt_megatron.config.layout import check_layout
from tlt_megatron.config.load import load_config

pytestmark = pytest.mark.e2e

NUM_DRAWS = int(os.environ.get("RANDOM_SETTINGS", "2"))
LAYOUTS = ((1, 1), (1, 1), (1, 1), (2, 1), (1, 2), (2, 2))  # tensor, pipeline
# A setting is left out more often than it is drawn.
SETTINGS = {
    "model.dtype": ("bfloat16",),
    "data.shuffle": ("false",),
    "rollout.num_prompts": (1, 2, 3, 5, 7),
    "rollout.num_samples": (1, 2, 3, 6),
    "rollout.max_new_tokens": (1, 2, 5, 17, 64, 65, 130),
    "rollout.temperature": (0.3, 1.7),
    "rollout.top_p": (0.5, 0.9),
    "rollout.top_k": (1, 3, 10),
    "rollout.prefill_chunk_tokens": (1, 3, 7, 30),
    "rollout.max_batch_size": (1, 2, 5),
    "rollout.kv_cache_tokens": (128, 192, 256, 320),
    "rollout.batch_invariant": ("true",),
    "rollout.partial_rollout_tokens": (1, 5, 16),
    "rollout.environment": ("environment.py:answer",),
    "rollout.max_turns": (2, 3, 6),
    "algorithm.advantage": ("dr_grpo", "rloo", "reinforce_plus_plus", "gae"),
    "algorithm.loss": ("gspo", "cispo"),
    "algorithm.aggregation": ("sequence_mean", "sequence_sum"),
    "algorithm.entropy_coef": (0.01,),
    "algorithm.kl_coef": (0.1,),
    "algorithm.kl_placement": ("reward",),
    "algorithm.tis_cap": (2,),
    "algorithm.rollout_rs": ("token", "sequence", "geometric"),
    "algorithm.filter_groups": ("score",),
    "algorithm.num_minibatches": (2, 3),
    "algorithm.num_epochs": (2,),
    "critic.warmup_steps": (1, 2),
    "reward.overlong_tokens": (3, 10),
    "mcore.micro_batch_tokens": (16, 40, 1000),
    "mcore.recompute": ("selective", "full"),
    "eval.interval": (1, 2),
    "eval.num_samples": (2,),
}
TLT = {
    "speculation.selector": ("fixed", "beg_mab"),
    "speculation.measure_gain": ("true",),
    "drafter.algorithm": ("hass", "eagle3"),
    "drafter.batch_tokens": (8, 40, 200),
    "spot.keep_steps": (2, 3),
    "spot.data_bytes": (1, 3000, 20000),
}
STRATEGIES = ("1_1_1", "4_1_4", "4_2_8", "6_4_16", "2_2_6", "ngram_5")


@pytest.mark.parametrize("number", range(NUM_DRAWS))
def test_speculation_and_a_resume_change_nothing(number: int, tmp_path: Path) -> None:
    config = make_tiny_task(tmp_path, kind=("llama", "qwen3")[number % 2], num_layers=4)
    write_environment(config.parent)
    num_ranks, plain, tlt = draw_run(config, random.Random(number))
    print(num_ranks, *plain, *tlt)  # pytest shows it if the test fails
    keep_all = ("checkpoint.interval=1", "checkpoint.keep=0")
    run(num_ranks, config, tmp_path / "plain", *plain, *keep_all)
    run(num_ranks, config, tmp_path / "tlt", *plain, *tlt, *keep_all)
    check_same_run(tmp_path / "tlt", tmp_path / "plain")
    first = tmp_path / "tlt" / "checkpoints" / "iter_0000001"
    run(num_ranks, config, tmp_path / "resumed", *plain, *tlt, f"checkpoint.resume={first}")
    check_same_weights(tmp_path / "resumed", tmp_path / "plain")


def draw_run(config: Path, draw: random.Random) -> tuple[int, list[str], list[str]]:
    """Return ranks, the settings of a plain run, and those of speculation and spot training, until
    a draw is allowed.
    """
    while True:
        tensor, pipeline = draw.choice(LAYOUTS)
        num_ranks = tensor * pipeline * draw.choice((1, 2, 3) if tensor * pipeline == 1 else (1, 2))
        layout = [f"parallel.tensor={tensor}", f"parallel.pipeline={pipeline}"]
        plain = [*layout, "rollout.max_observation_tokens=9", *_draw_some(SETTINGS, draw)]
        plain = [
            word.replace("environment.py", f"{config.parent}/environment.py") for word in plain
        ]
        strategies = ",".join(draw.sample(STRATEGIES, draw.randint(1, 4)))
        tlt = [f"speculation.strategies=[{strategies}]", "speculation.enabled=true"]
        tlt += ["spot.enabled=true", *_draw_some(TLT, draw)]
        try:
            for words in (plain, plain + tlt):
                check_layout(load_config(str(config), words), num_ranks)
        except ValueError:  # a combination that is refused
            continue
        return num_ranks, plain, tlt


def _draw_some(settings: dict[str, tuple], draw: random.Random) -> list[str]:
    return [
        f"{key}={draw.choice(values)}" for key, values in settings.items() if draw.random() < 0.2
    ]
