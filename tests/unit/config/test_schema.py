"""Ranges: each section refuses what is outside, naming the key, and takes what is on the edge."""

from __future__ import annotations

import pytest

from tlt_megatron.config.load import load_config


@pytest.mark.parametrize(
    "overrides, message",
    [
        ("model.dtype=float16", r"model\.dtype='float16': must be one of float32, bfloat16"),
        ("parallel.tensor=0", r"parallel\.tensor=0: must be >= 1"),
        ("parallel.pipeline=-1", r"parallel\.pipeline=-1: must be >= 1"),
        ("data.max_prompt_tokens=0", r"data\.max_prompt_tokens=0: must be >= 1"),
        ("reward.num_workers=0", r"reward\.num_workers=0: must be >= 1"),
        ("reward.timeout_s=0", r"reward\.timeout_s=0\.0: must be > 0"),
        ("reward.on_error=skip", r"reward\.on_error='skip': must be one of raise, zero"),
        ("rollout.engine=vllm", r"rollout\.engine='vllm': must be one of "),
        (
            "rollout.environment=any.py:answer rollout.max_turns=1",
            r"rollout\.max_turns=1: must be > 1 where rollout\.environment is set",
        ),
        ("rollout.environment=calculator", r"rollout\.environment='calculator': must be "),
        ("rollout.dtype=int8", r"rollout\.dtype='int8': must be one of float32, bfloat16, float64"),
        ("rollout.num_prompts=0", r"rollout\.num_prompts=0: must be >= 1"),
        ("rollout.num_samples=0", r"rollout\.num_samples=0: must be >= 1"),
        ("rollout.max_new_tokens=0", r"rollout\.max_new_tokens=0: must be >= 1"),
        ("rollout.max_batch_size=0", r"rollout\.max_batch_size=0: must be >= 1"),
        ("rollout.temperature=0", r"rollout\.temperature=0\.0: must be in \(0, 10\]"),
        ("rollout.temperature=11", r"rollout\.temperature=11\.0: must be in \(0, 10\]"),
        ("rollout.top_p=0", r"rollout\.top_p=0\.0: must be in \(0, 1\]"),
        ("rollout.top_p=1.01", r"rollout\.top_p=1\.01: must be in \(0, 1\]"),
        ("rollout.top_k=-1", r"rollout\.top_k=-1: must be >= 0"),
        ("rollout.kv_cache_tokens=-1", r"rollout\.kv_cache_tokens=-1: must be >= 0"),
        ("algorithm.advantage=vtrace", r"algorithm\.advantage='vtrace': must be one of grpo, "),
        ("algorithm.aggregation=mean", r"algorithm\.aggregation='mean': must be one of "),
        ("algorithm.kl_placement=x", r"algorithm\.kl_placement='x': must be one of loss, reward"),
        ("algorithm.kl_estimator=k4", r"algorithm\.kl_estimator='k4': must be one of k1, k2, k3"),
        ("algorithm.clip_low=0", r"algorithm\.clip_low=0\.0: must be in \(0, 1\]"),
        ("algorithm.clip_low=1.5", r"algorithm\.clip_low=1\.5: must be in \(0, 1\]"),
        ("algorithm.clip_high=0", r"algorithm\.clip_high=0\.0: must be > 0"),
        ("algorithm.dual_clip=1", r"algorithm\.dual_clip=1\.0: must be 0 \(off\) or > 1"),
        ("algorithm.tis_cap=0.5", r"algorithm\.tis_cap=0\.5: must be 0 \(off\) or >= 1"),
        ("algorithm.rollout_is=sequence", r"algorithm\.rollout_is='sequence': must be token where"),
        (
            "rollout.partial_rollout_tokens=64",
            r"rollout\.partial_rollout_tokens=64: must be 0 without a correction .* algorithm\.tis_cap=2",
        ),
        (
            "rollout.partial_rollout_tokens=512 algorithm.tis_cap=2",
            r"rollout\.partial_rollout_tokens=512: must be 0 \(off\), or < rollout\.max_new_tokens=512",
        ),
        (
            "rollout.partial_rollout_tokens=64 algorithm.tis_cap=2 rollout.environment=a.b:C",
            r"rollout\.partial_rollout_tokens=64: must be 0 where rollout\.environment='a\.b:C'",
        ),
        (
            "rollout.over_sampling_prompts=32",
            r"rollout\.over_sampling_prompts=32: must be 0, or >= rollout\.num_prompts=16 with",
        ),
        (
            "rollout.over_sampling_prompts=8 rollout.partial_rollout_tokens=64 algorithm.rollout_rs=token",
            r"rollout\.over_sampling_prompts=8: must be 0, or >= rollout\.num_prompts=16 with",
        ),
        ("algorithm.kl_coef=-1", r"algorithm\.kl_coef=-1\.0: must be >= 0"),
        ("algorithm.num_minibatches=0", r"algorithm\.num_minibatches=0: must be >= 1"),
        ("algorithm.num_epochs=0", r"algorithm\.num_epochs=0: must be >= 1"),
        ("optimizer.lr=0", r"optimizer\.lr=0\.0: must be > 0"),
        ("optimizer.lr=.nan", r"optimizer\.lr=nan: must be a finite number"),
        ("optimizer.min_lr=1", r"optimizer\.min_lr=1\.0: must be in \[0, lr=1e-06\]"),
        ("optimizer.decay=exp", r"optimizer\.decay='exp': must be one of constant, linear, cosine"),
        ("optimizer.warmup_steps=-1", r"optimizer\.warmup_steps=-1: must be >= 0"),
        ("optimizer.weight_decay=-1", r"optimizer\.weight_decay=-1\.0: must be >= 0"),
        ("optimizer.clip_grad=-1", r"optimizer\.clip_grad=-1\.0: must be >= 0"),
        ("optimizer.beta1=1", r"optimizer\.beta1=1\.0: must be in \[0, 1\)"),
        ("optimizer.beta2=-0.1", r"optimizer\.beta2=-0\.1: must be in \[0, 1\)"),
        ("mcore.micro_batch_tokens=0", r"mcore\.micro_batch_tokens=0: must be >= 1"),
        (
            "mcore.offload_in_rollouts=true",
            r"mcore\.offload_in_rollouts=True: must be false where model\.dtype='float32'",
        ),
        ("mcore.recompute=all", r"mcore\.recompute='all': must be one of none, selective, full"),
        (
            'mcore.transformer={"attention_dropout":0.1}',
            r"mcore\.transformer\.attention_dropout=0\.1: not allowed; .* two policies",
        ),
        (
            'mcore.transformer={"hidden_dropout":0.1}',
            r"mcore\.transformer\.hidden_dropout=0\.1: not allowed; .* two policies",
        ),
        (
            "speculation.strategies=[ngram_2,ngram_2]",
            r"speculation\.strategies=\['ngram_2', 'ngram_2'\]: must be not empty, with each strategy",
        ),
        (
            "speculation.draft_vocab_size=255",
            r"speculation\.draft_vocab_size=255: must be 0 or >= 256",
        ),
        (
            "rollout.engine=sglang speculation.draft_vocab_size=8192",
            r"speculation\.draft_vocab_size=8192: must be 0 or None where rollout\.engine='sglang'",
        ),
        ("checkpoint.interval=-1", r"checkpoint\.interval=-1: must be >= 0"),
        ("checkpoint.keep=-1", r"checkpoint\.keep=-1: must be >= 0"),
        ("eval.interval=-1", r"eval\.interval=-1: must be >= 0"),
        ("eval.num_prompts=-1", r"eval\.num_prompts=-1: must be >= 0"),
        ("eval.num_samples=0", r"eval\.num_samples=0: must be >= 1"),
        ("eval.temperature=10.5", r"eval\.temperature=10\.5: must be in \[0, 10\]"),
        ("logging.progress=bar", r"logging\.progress='bar': must be one of auto, live, "),
        ("run.seed=-1", r"run\.seed=-1: must be in \[0, 2\*\*32\)"),
        ("rollout.prefill_chunk_tokens=0", r"rollout\.prefill_chunk_tokens=0: must be >= 1"),
        ("run.seed=4294967296", r"run\.seed=4294967296: must be in \[0, 2\*\*32\)"),
        ("run.num_steps=-1", r"run\.num_steps=-1: must be >= 0"),
        ("run.device=tpu", r"run\.device='tpu': must be one of auto, cpu, cuda"),
        ("run.group_timeout_s=0", r"run\.group_timeout_s=0\.0: must be > 0"),
        (
            "rollout.num_prompts=2 algorithm.num_minibatches=3",
            r"algorithm\.num_minibatches=3: must be <= rollout\.num_prompts=2",
        ),
        ("rollout.num_samples=1", r"rollout\.num_samples=1: must be > 1 where .*'grpo'"),
    ],
)
def test_out_of_range_is_refused_by_name(overrides: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(None, overrides.split())


@pytest.mark.parametrize(
    "overrides",
    [
        "parallel.tensor=2",
        "rollout.temperature=10 rollout.top_p=1 rollout.top_k=0 rollout.kv_cache_tokens=0",
        "algorithm.clip_low=1 algorithm.dual_clip=0 algorithm.tis_cap=1",
        "optimizer.min_lr=1e-6 optimizer.beta1=0 optimizer.clip_grad=0",
        "optimizer.decay=linear optimizer.warmup_steps=4",
        "checkpoint.interval=0 checkpoint.keep=0 run.num_steps=0 eval.temperature=0",
        "rollout.num_prompts=2 algorithm.num_minibatches=2",
        "rollout.num_samples=1 algorithm.advantage=reinforce_plus_plus",
        "rollout.engine=sglang speculation.draft_vocab_size=0",
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
