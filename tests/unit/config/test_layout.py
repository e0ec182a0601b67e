"""Runs that cannot start are refused before anything expensive, by key, value and what is
allowed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tlt_megatron.config.layout import check_layout, draft_slack
from tlt_megatron.config.load import load_config

SIZES = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "vocab_size": 512,
    "intermediate_size": 160,
    "max_position_embeddings": 512,
}

FIRST, LAST = (f"num_layers_in_{which}_pipeline_stage" for which in ("first", "last"))


def check(tmp_path: Path, overrides: str = "", world_size: int = 1, **sizes: Any) -> None:
    model = tmp_path / "model"
    model.mkdir()
    kept = {name: value for name, value in (SIZES | sizes).items() if value is not None}
    (model / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    train = tmp_path / "train.jsonl"
    train.write_text("{}\n", encoding="utf-8")
    base = [
        f"model.path={model}",
        f"data.train={train}",
        "data.max_prompt_tokens=128",
        "rollout.max_new_tokens=384",
    ]
    check_layout(load_config(None, [*base, *overrides.split()]), world_size)


MIXTURE = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}

GLM = {"model_type": "glm4_moe", "n_routed_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    "overrides, world_size, sizes",
    [
        ("", 1, {}),
        ("parallel.tensor=2", 2, {}),
        ("parallel.tensor=8", 8, {"num_key_value_heads": None}),  # as many as query heads
        ("parallel.tensor=4 parallel.pipeline=2", 16, {}),
        ("parallel.tensor=2 parallel.context=3 parallel.pipeline=2", 12, {}),
        ("parallel.tensor=2 parallel.expert=4 parallel.pipeline=2", 8, MIXTURE),
        ("rollout.kv_cache_tokens=512", 1, {}),
        ("rollout.kv_cache_tokens=500 rollout.max_new_tokens=390 data.max_prompt_tokens=98 rollout.engine=sglang", 1, {}),
        ("rollout.max_observation_tokens=10", 1, {}),
        (f"parallel.pipeline=3 mcore.transformer.{FIRST}=2", 3, {}),
        (f"parallel.pipeline=4 mcore.transformer.{FIRST}=1 mcore.transformer.{LAST}=1", 4, {}),
        ("rollout.engine=sglang rollout.max_new_tokens=380", 1, {}),
    ],
)  # fmt: skip
def test_layouts_that_fit_are_allowed(
    tmp_path: Path, overrides: str, world_size: int, sizes: dict[str, Any]
) -> None:
    check(tmp_path, overrides, world_size, **sizes)


@pytest.mark.parametrize(
    ("overrides", "world_size", "sizes", "message"),
    [
        ("parallel.tensor=2", 2, {"vocab_size": 511}, "parallel.tensor=2 does not divide vocab_size=511"),
        ("parallel.tensor=2", 2, {"intermediate_size": 161}, "parallel.tensor=2 does not divide intermediate_size=161"),
        ("parallel.expert=2", 2, {}, "parallel.expert=2 does not divide num_experts=1 of"),
        ("parallel.expert=3", 3, MIXTURE, "parallel.expert=3 does not divide num_experts=8 of"),
        ("parallel.expert=4 parallel.pipeline=2", 4, MIXTURE, "parallel.expert=4 does not divide the 2 ranks of a pipeline stage"),
        (
            "parallel.pipeline=2",
            2,
            MIXTURE | {"mlp_only_layers": [0, 1]},
            r"parallel.pipeline=2 makes a stage of the layers \[0, 1\] of .* none of which has experts",
        ),
        ("mcore.transformer.moe_aux_loss_coeff=0.1", 1, {}, "moe_aux_loss_coeff=0.1: must be 0, .* has no"),
        (
            "mcore.transformer.moe_aux_loss_coeff=0.1 algorithm.aggregation=sequence_mean",
            1,
            MIXTURE,
            "mcore.transformer.moe_aux_loss_coeff=0.1: must be 0 where algorithm.aggregation is not token_mean",
        ),
        ("parallel.tensor=2", 2, MIXTURE, "parallel.expert=1 with parallel.tensor=2: must be > 1"),
        ("", 1, MIXTURE | {"num_experts_per_tok": 9}, "num_experts_per_tok=9: must be <= num_exp"),
        ("", 1, MIXTURE | {"num_experts_per_tok": 1, "norm_topk_prob": True}, "norm_topk_prob=True: must be false where num_experts_per_tok=1"),
        ("", 1, GLM | {"num_experts_per_tok": 1}, "num_experts_per_tok=1: must be > 1 with norm_topk_prob=true"),
        ("", 1, GLM | {"n_group": 2}, "n_group=2 is not supported; only 1"),
        ("", 1, GLM | {"norm_topk_prob": False}, "norm_topk_prob=False is not supported; only True"),
        ("", 1, GLM | {"first_k_dense_replace": 4}, r"first_k_dense_replace=4: must be in 0\.\.3"),
        (
            "",
            1,
            GLM | {"partial_rotary_factor": 0.25},
            r"partial_rotary_factor=0\.25: must be 0\.5",
        ),
        ("", 1, MIXTURE | {"mlp_only_layers": [4]}, r"mlp_only_layers=\[4\]: must be a list of"),
        ("", 1, MIXTURE | {"decoder_sparse_step": 5}, "leave no layer with experts"),
        ("rollout.engine=sglang", 1, MIXTURE | {"mlp_only_layers": [0]}, "rollout.engine=sglang: takes all layers of .* for mixtures, but 1 are dense"),
        ("rollout.engine=sglang sglang.engine_args.ep_size=2", 1, MIXTURE, "sglang.engine_args.ep_size=2: must be 1"),
        ("parallel.tensor=2 parallel.pipeline=2", 6, {}, r"parallel\.tensor=2 x parallel\.pipeline=2 = 4 does not divide the 6 ranks"),
        ("parallel.tensor=2 parallel.context=2", 6, {}, r"parallel\.tensor=2 x parallel\.context=2 x parallel\.pipeline=1 = 4 does not divide the 6 ranks"),
        ("rollout.engine=sglang sglang.engine_args.tp_size=4", 6, {}, r"sglang\.engine_args\.tp_size=4 does not divide the 6 ranks"),
        ("rollout.engine=sglang sglang.engine_args.tp_size='4'", 4, {}, r"sglang\.engine_args\.tp_size='4': must be an integer >= 1"),
        ("parallel.tensor=3", 3, {}, r"parallel\.tensor=3 does not divide num_attention_heads=8"),
        ("parallel.tensor=8", 8, {}, r"parallel\.tensor=8 does not divide num_key_value_heads=4"),
        ("parallel.pipeline=3", 3, {}, r"parallel\.pipeline=3 does not divide num_hidden_layers=4"),
        (f"parallel.pipeline=3 mcore.transformer.{FIRST}=1", 3, {}, rf"parallel\.pipeline=3 and mcore\.transformer\.{FIRST}=1 leave 3 of num_hidden_layers=4 .* for 2 stages"),
        (f"parallel.pipeline=2 mcore.transformer.{FIRST}=4", 2, {}, rf"{FIRST}=4 leave 0 of num_hidden_layers=4 .* for 1 stages"),
        (f"mcore.transformer.{LAST}=4", 1, {}, rf"mcore\.transformer\.{LAST}=4: must be null with parallel\.pipeline=1"),
        (f"parallel.pipeline=2 mcore.transformer.{FIRST}=0", 2, {}, rf"mcore\.transformer\.{FIRST}=0: must be an integer >= 1"),
        ("rollout.max_new_tokens=385", 1, {}, r"data\.max_prompt_tokens=128 \+ rollout\.max_new_tokens=385 = 513 exceeds max_position_embeddings=512"),
        (
            "rollout.environment=any.py:answer rollout.max_observation_tokens=10",
            1,
            {},
            r"rollout\.max_new_tokens=384 [+] rollout\.max_observation_tokens=10 = 522 exceeds "
            r"max_position_embeddings=512",
        ),
        ("rollout.kv_cache_tokens=511", 1, {}, r"rollout\.kv_cache_tokens=511: must be 0 or >= 512"),
        (
            "rollout.kv_cache_tokens=512 rollout.max_new_tokens=390 data.max_prompt_tokens=100",
            1,  # a prompt of 65 tokens takes 2 pages, a response of 390 takes 7
            {},
            r"rollout\.kv_cache_tokens=512: must be 0 or >= 576 \(one full sequence of 490 tokens\)",
        ),
        ("rollout.kv_cache_tokens=575 rollout.partial_rollout_tokens=64 algorithm.tis_cap=2", 1, {}, r"rollout\.kv_cache_tokens=575: must be 0 or >= 576"),
        (
            "rollout.kv_cache_tokens=575 rollout.max_new_tokens=284"
            " rollout.environment=any.py:answer rollout.max_observation_tokens=100",
            1,
            {},
            r"rollout\.kv_cache_tokens=575: must be 0 or >= 576",
        ),
        (
            'rollout.engine=sglang speculation.enabled=true spot.enabled=true speculation.strategies=["4_1_4","6_1_6"]',
            1,
            {},
            r"rollout.max_new_tokens=384 [+] 18 of sglang's slack = 530 exceeds max_position_embeddings=512",
        ),
    ],
)  # fmt: skip
def test_a_run_that_cannot_be_is_refused_by_name(
    tmp_path: Path, overrides: str, world_size: int, sizes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check(tmp_path, overrides, world_size, **sizes)


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"num_hidden_layers": 3}, "pipeline=2 does not divide num_hidden_layers=3 of .*critic"),
        ({"max_position_embeddings": 511}, "= 512 exceeds max_position_embeddings=511 of .*critic"),
    ],
)
def test_a_critic_that_does_not_fit_is_refused(
    tmp_path: Path, sizes: dict[str, int], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES | sizes))
    (tmp_path / "critic").symlink_to(tmp_path)
    overrides = f"parallel.pipeline=2 critic.path={tmp_path}/critic algorithm.advantage=gae"
    with pytest.raises(ValueError, match=message):
        check(tmp_path, overrides, 2)


@pytest.mark.parametrize(
    "strategies, slack",
    [
        ([], 4),
        (["off"], 4),
        (["2_1_2", "6_1_6", "off"], 18),
        (["4_2_8"], 22),
        (["6_4_16"], 52),
        (["ngram_8"], 22),
    ],
)
def test_the_slack_covers_the_widest_and_the_deepest_draft(
    strategies: list[str], slack: int
) -> None:
    assert draft_slack(strategies) == slack
