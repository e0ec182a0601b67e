"""Which settings `algorithm.stream_update` refuses, by name."""

from __future__ import annotations

import pytest

from tlt_megatron.config.load import load_config

SPOT = "speculation.enabled=true spot.enabled=true algorithm.stream_update=true"


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo"])
def test_advantages_of_siblings_are_allowed(advantage: str) -> None:
    config = load_config(None, [*SPOT.split(), f"algorithm.advantage={advantage}"])
    assert config.algorithm.stream_update


@pytest.mark.parametrize(
    ("settings", "found", "allowed"),
    [
        ("spot.enabled=false speculation.drafter=x", r"spot\.enabled=False", "True"),
        ("algorithm.num_epochs=2", r"algorithm\.num_epochs=2", "1"),
        ("algorithm.num_minibatches=2", r"algorithm\.num_minibatches=2", "1"),
        ("algorithm.recompute_log_probs=always", r"recompute_log_probs='always'", "'auto'"),
        ("algorithm.kl_coef=0.1", r"algorithm\.kl_coef=0\.1", r"0\.0"),
        ("algorithm.kl_coef=0.1 algorithm.kl_placement=reward", r"kl_coef=0\.1", r"0\.0"),
        ("algorithm.dynamic_sampling=true", r"algorithm\.dynamic_sampling=True", "False"),
        (
            "rollout.partial_rollout_tokens=64 algorithm.tis_cap=2",
            r"rollout\.partial_rollout_tokens=64",
            "0",
        ),
        ("rollout.engine=sglang", r"rollout\.engine='sglang'", "'embedded'"),
        (
            "model.dtype=bfloat16 mcore.offload_in_rollouts=true",
            r"mcore\.offload_in_rollouts=True",
            "False",
        ),
        ("algorithm.advantage=gae", "advantage='gae'", "grpo, dr_grpo, rloo"),
        (
            "algorithm.advantage=reinforce_plus_plus",
            "advantage='reinforce_plus_plus'",
            "grpo, dr_grpo, rloo",
        ),
        ("algorithm.advantage=my.module:f", r"advantage='my\.module:f'", "grpo, dr_grpo, rloo"),
    ],
)
def test_what_needs_the_whole_batch_is_refused(settings: str, found: str, allowed: str) -> None:
    expected = (
        rf"algorithm\.stream_update=True: must be false where .*{found} .*must be {allowed}: "
    )
    with pytest.raises(ValueError, match=expected):
        load_config(None, [*SPOT.split(), *settings.split()])
