"""Builds the evaluation of a run, and the sampling of its responses. Called by build.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tlt_megatron.config.schema import RunConfig
from tlt_megatron.data.prompts import PromptSet
from tlt_megatron.data.tokenizer import Tokenizer
from tlt_megatron.rollout.evaluation import Evaluator
from tlt_megatron.trainer.answer_loss import LossEvaluator
from tlt_megatron.trainer.loop import RLTrainer
from tlt_megatron.types import SamplingParams

EVAL_SEED_OFFSET = 0x5EED  # evaluation never samples with the noise of training


def build_evaluator(
    config: RunConfig,
    trainer: RLTrainer,
    tokenizer: Tokenizer,
    held_out: Mapping[str, PromptSet],
) -> Evaluator | LossEvaluator:
    """Return what measures held-out prompts: by drawn responses, or by the loss of answers."""
    about: dict[str, Any] = {
        "worker": trainer.worker,
        "data_sets": {name: each.rows for name, each in held_out.items()},
        "left_out": {name: each.num_left_out for name, each in held_out.items()},
    }
    if config.algorithm.is_sft:
        return LossEvaluator(
            trainer=trainer.policy_trainer, params=sampling_of(config, tokenizer), **about
        )
    params = _eval_sampling(config, tokenizer)
    return Evaluator(params=params, right_score=config.reward.right_score, **about)


def sampling_of(config: RunConfig, tokenizer: Tokenizer) -> SamplingParams:
    """Return the sampling of training."""
    rollout = config.rollout
    return SamplingParams(
        num_samples=1 if config.algorithm.is_sft else rollout.num_samples,
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop_token_ids=tokenizer.stop_token_ids,
        stop=tokenizer.stop_strings(rollout.stop),
        seed=config.run.seed,
    )


def _eval_sampling(config: RunConfig, tokenizer: Tokenizer) -> SamplingParams:
    stop = config.rollout.stop if config.eval.stop is None else config.eval.stop
    return SamplingParams(
        num_samples=config.eval.num_samples,
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.eval.temperature,
        top_p=config.rollout.top_p if config.eval.top_p is None else config.eval.top_p,
        top_k=config.rollout.top_k if config.eval.top_k is None else config.eval.top_k,
        stop_token_ids=tokenizer.stop_token_ids,
        stop=tokenizer.stop_strings(stop),
        seed=config.run.seed + EVAL_SEED_OFFSET,
    )
