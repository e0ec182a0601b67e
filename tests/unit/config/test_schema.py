"""Ranges: each section refuses what is outside, naming the key, and takes what is on the edge."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from tlt_megatron.config.load import load_config
from tlt_megatron.config.ranges import _ranges
from tlt_megatron.config.schema import RunConfig

JUST_OUTSIDE = {
    ">= 0": [-1],
    ">= 1": [0],
    "> 0": [0],
    "in (0, 1]": [0, 1.1],
    "in [0, 1]": [-0.1, 1.1],
    "in (0, 10]": [0, 10.1],
    "in [0, 10]": [-0.1, 10.5],
    ">= 1 and finite": [0.5],
    "in [0, 2**32)": [-1, 2**32],
}
OUTSIDE = [
    (f"{section.name}.{key}", value, ranges[0].allowed)
    for section in fields(RunConfig)
    for key, ranges in _ranges(type(getattr(RunConfig(), section.name))).items()
    if ranges
    for value in JUST_OUTSIDE.get(ranges[0].allowed, ["other"])
]


@pytest.mark.parametrize(("key", "value", "allowed"), OUTSIDE)
def test_a_value_outside_its_range_is_refused_with_key_value_and_what_is_allowed(
    key: str, value: object, allowed: str
) -> None:
    with pytest.raises(ValueError, match=rf"{key}={value!r}[.0]*: must be {re.escape(allowed)}$"):
        load_config(None, [f"{key}={value}"])


@pytest.mark.parametrize(
    "overrides, message",
    [
        ("speculation.selector=bandit", r"selector='bandit': must be one of cost_model, beg_mab, "),
        ("rollout.environment=any.py:answer rollout.max_turns=1", r"rollout\.max_turns=1: must be > 1 where rollout\.environment or rollout\.tools is set"),
        ("rollout.environment=calculator", r"rollout\.environment='calculator': must be "),
        ("rollout.temperature=0", r"rollout\.temperature=0\.0: must be in \(0, 10\]"),
        ("algorithm.dual_clip=1", r"algorithm\.dual_clip=1\.0: must be 0 \(off\) or > 1"),
        ("algorithm.loss=gspo", r"algorithm\.aggregation='token_mean': must be sequence_mean"),
        ("algorithm.loss=cispo algorithm.dual_clip=3", r"algorithm\.dual_clip=3\.0: must be 0"),
        ("algorithm.rollout_rs_threshold=1", r"rollout_rs_threshold=1\.0: must be > 1"),
        ("algorithm.rollout_rs_threshold=[1,2]", r"rollout_rs_threshold=\[1\.0, 2\.0\]: must be > 1, or \[lower, upper\] around 1"),
        ("algorithm.loss_args.delta=4", r"algorithm\.loss_args=\{'delta': 4\}: must be \{\} where algorithm\.loss='ppo'"),
        ("algorithm.advantage_args.power=4", r"advantage_args=\{'power': 4\}: must be \{\} where algorithm\.advantage='grpo'"),
        ("algorithm.tis_cap=0.5", r"algorithm\.tis_cap=0\.5: must be 0 \(off\) or >= 1"),
        ("algorithm.rollout_is=sequence", r"algorithm\.rollout_is='sequence': must be token where"),
        ("rollout.partial_rollout_tokens=64", r"rollout\.partial_rollout_tokens=64: must be 0 without a correction .* algorithm\.tis_cap=2"),
        ("rollout.partial_rollout_tokens=512 algorithm.tis_cap=2", r"rollout\.partial_rollout_tokens=512: must be 0 \(off\), or < rollout\.max_new_tokens=512"),
        (
            "rollout.partial_rollout_tokens=64 algorithm.tis_cap=2 rollout.environment=a.b:C",
            r"rollout\.partial_rollout_tokens=64: must be 0 where rollout\.environment='a\.b:C'",
        ),
        ("rollout.over_sampling_prompts=32", r"rollout\.over_sampling_prompts=32: must be 0, or >= rollout\.num_prompts=16 with"),
        (
            "rollout.over_sampling_prompts=8 rollout.partial_rollout_tokens=64 algorithm.rollout_rs=token",
            r"rollout\.over_sampling_prompts=8: must be 0, or >= rollout\.num_prompts=16 with",
        ),
        ("optimizer.betas=[0.9]", r"optimizer\.betas=\[0\.9\]: must be two numbers in \[0, 1\)"),
        ("optimizer.min_lr=1", r"optimizer\.min_lr=1\.0: must be in \[0, lr=1e-06\]"),
        ("mcore.offload_in_rollouts=true", r"mcore\.offload_in_rollouts=True: must be false where model\.dtype='float32'"),
        ("speculation.strategies=[ngram_2,ngram_2]", r"speculation\.strategies=\['ngram_2', 'ngram_2'\]: must be not empty, with each strategy"),
        ("speculation.draft_vocab_size=255", r"speculation\.draft_vocab_size=255: must be 0 or >= 256"),
        ("rollout.engine=sglang speculation.draft_vocab_size=8192", r"speculation\.draft_vocab_size=8192: must be 0 or None where rollout\.engine='sglang'"),
        ("eval.temperature=10.5", r"eval\.temperature=10\.5: must be in \[0, 10\]"),
        ("rollout.num_prompts=2 algorithm.num_minibatches=3", r"algorithm\.num_minibatches=3: must be <= rollout\.num_prompts=2"),
        ("rollout.num_samples=1", r"rollout\.num_samples=1: must be > 1 where .*'grpo'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_refused_by_name(overrides: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(None, overrides.split())


@pytest.mark.parametrize(
    "overrides",
    [
        "rollout.temperature=10 rollout.top_p=1 rollout.top_k=0 rollout.kv_cache_tokens=0",
        "algorithm.clip_low=1 algorithm.dual_clip=0 algorithm.tis_cap=1 algorithm.lam=0",
        "optimizer.min_lr=1e-6 optimizer.betas=[0,0] optimizer.clip_grad=0 run.seed=4294967295",
        "checkpoint.interval=0 checkpoint.keep=0 run.num_steps=0 eval.temperature=0",
        "rollout.num_prompts=2 algorithm.num_minibatches=2",
        "rollout.num_samples=1 algorithm.advantage=reinforce_plus_plus",
        "rollout.engine=sglang speculation.draft_vocab_size=0",
        "algorithm.kl_estimator=k1 algorithm.kl_placement=reward",
        "eval.interval=2 data.eval=x.jsonl mcore.transformer.tp_comm_overlap=true",
    ],
)
def test_the_edge_of_a_range_is_allowed(overrides: str) -> None:
    load_config(None, overrides.split())


@pytest.mark.parametrize(
    ("setting", "vocab_size", "num_ids"),
    [
        ("null", 151_936, 8192),
        ("null", 32_768, 8192),
        ("null", 32_767, 0),
        ("0", 151_936, 0),
        ("4096", 16_000, 4096),
        ("4096", 4096, 0),
    ],
)
def test_a_small_vocabulary_is_drafted_whole(setting: str, vocab_size: int, num_ids: int) -> None:
    section = load_config(None, [f"speculation.draft_vocab_size={setting}"]).speculation
    assert section.num_draft_ids(vocab_size) == num_ids
