"""What a run is warned of: settings that are allowed, but harm learning or have no effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from tlt_megatron.config.load import load_config
from tlt_megatron.config.rules import warnings_of

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
KL_REWARD = "algorithm.kl_placement=reward algorithm.kl_coef=0.1"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("rollout.partial_rollout_tokens=64 algorithm.rollout_rs=token", "rollout.partial_rollout_tokens=64: partial rollouts are not lossless"),
        (f"{KL_REWARD} algorithm.kl_estimator=k3", "algorithm.kl_estimator='k3' with algorithm.kl_placement='reward'"),
        (f"{KL_REWARD} algorithm.kl_estimator=k1", None),
        (KL_REWARD, None),
        ("algorithm.kl_coef=0.1", None),
        ("run.group_timeout_s=60", "run.group_timeout_s=60 is not above run.heartbeat_timeout_s=60"),
        ("run.group_timeout_s=60 run.heartbeat_timeout_s=30", None),
        ("eval.temperature=0 eval.num_samples=4 data.eval=a.jsonl", "eval.temperature=0.0 with eval.num_samples=4: all samples of a prompt are equal"),
        ("data.train=a.jsonl data.eval=[b.jsonl,./a.jsonl]", "data.eval='./a.jsonl' is data.train: its scores are those of prompts that are trained on"),
        ("algorithm.advantage=gae critic.warmup_steps=5 run.num_steps=5", "critic.warmup_steps=5 is not below run.num_steps=5: the policy is never updated"),
    ],
)  # fmt: skip
def test_what_harms_learning_or_means_nothing_is_named(overrides: str, line: str | None) -> None:
    found = warnings_of(load_config(None, overrides.split()))
    assert len(found) == (line is not None)
    assert line is None or found[0].startswith(line)


def test_settings_without_effect_are_listed_once_with_what_they_need() -> None:
    ignored = {
        "algorithm.lam=0.9": "algorithm.advantage=gae",
        "critic.path=rm": "algorithm.advantage=gae",
        "algorithm.kl_estimator=k2": "algorithm.kl_coef",
        "algorithm.rollout_rs_threshold=3": "algorithm.rollout_rs!=none",
        "reward.overlong_penalty=0.5": "reward.overlong_tokens",
        "speculation.draft_vocab_size=512": "speculation.enabled",
        "optimizer.min_lr=1e-7": "optimizer.decay!=constant",
        "sglang.request_timeout_s=5": "rollout.engine!=embedded",
    }
    defaults = ["algorithm.gamma=1.0", "spot.keep_steps=1"]
    (line,) = warnings_of(load_config(None, [*ignored, *defaults]))
    assert line.startswith("settings without effect: ")
    for setting, need in ignored.items():
        assert setting.partition("=")[0] in line
        assert f"need {need}" in line
    assert line.count("need algorithm.advantage=gae") == 1
    assert not any(setting.partition("=")[0] in line for setting in defaults)
    drafts = ["speculation.enabled=true", "speculation.strategies=[ngram_4]"]
    (line,) = warnings_of(load_config(None, [*drafts, "speculation.draft_vocab_size=512"]))
    assert line.endswith("speculation.draft_vocab_size (need a strategy with a learned drafter)")
    sft = ["algorithm.advantage=sft", "rollout.stop=[a]", "eval.stop=[a]"]
    (line,) = warnings_of(load_config(None, sft))
    assert "rollout.stop, eval.stop (need algorithm.advantage!=sft)" in line
    used = ["algorithm.advantage=gae", "algorithm.lam=0.9", "critic.path=rm", "critic.lr=1e-4"]
    assert not warnings_of(load_config(None, used))
    assert not warnings_of(load_config(None, [*ignored, "run.num_steps=0"]))  # an evaluation


def test_a_command_line_may_turn_off_what_a_file_has_set() -> None:
    off = ["speculation.enabled=false", "spot.enabled=false", "rollout.engine=embedded"]
    for path in ("quickstart.yaml", "qwen2_5_7b_8gpu.yaml"):
        config = load_config(EXAMPLES / path, off)
        keys = [word.partition("=")[0] for word in off]
        assert "speculation.strategies" in str(warnings_of(config))
        assert not warnings_of(config, keys)
        assert "drafter.algorithm" in str(warnings_of(config, [*keys, "drafter.algorithm"]))


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_setting_of_an_example_has_an_effect(path: Path) -> None:
    is_of_a_run = path.stem not in ("bench_step", "tiny_drafter")
    switches = [] if is_of_a_run else ["speculation.enabled=true", "spot.enabled=true"]
    assert "without effect" not in str(warnings_of(load_config(path, switches)))
