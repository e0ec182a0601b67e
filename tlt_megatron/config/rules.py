"""Rules that join settings: what is refused, what is warned of, and what has no effect.

Types and ranges of single settings stand beside them in schema.py, and `layout.py` has the rules
for ranks and models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import fields
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tlt_megatron.config.extensions import check_extension, named_code

RunConfig = Any  # of schema.py, which imports this file


class Rule(NamedTuple):
    """A setting, whether its value fits the others, and what it must be, or "needs" to have."""

    key: str
    holds: Callable[[RunConfig], object]
    allowed: str | Callable[[RunConfig], str]  # {c} of a text is the configuration


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _is_around_1(bounds: float | list[float]) -> bool:
    if isinstance(bounds, list):
        return len(bounds) == 2 and 0 < bounds[0] < 1 < bounds[1]
    return bounds > 1


def _has_each_once(values: list[str]) -> bool:
    return len({*values}) == len(values)


def _is_positive(size: object) -> bool:
    return type(size) is int and size >= 1


_SIBLINGS = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")
RULES = (
    Rule("sglang.engine_args.tp_size", lambda c: _is_positive(c.ranks_per_engine), "an integer >= 1"),
    Rule("parallel.virtual_pipeline", lambda c: c.parallel.pipeline > 1 or c.parallel.virtual_pipeline == 1, "1 where parallel.pipeline=1"),
    Rule("algorithm.advantage", lambda c: not c.model.lora_rank or not c.algorithm.has_critic, "one without critic where model.lora_rank={c.model.lora_rank}"),
    *(
        Rule(key, lambda c, key=key: not c.algorithm.is_sft or not _value(c, key), f"{off} where algorithm.advantage='sft' (nothing is generated)")
        for key, off in (("speculation.enabled", "false"), ("rollout.environment", "empty"), ("rollout.tools", "[]"), ("rollout.partial_rollout_tokens", "0"), ("rollout.routing_replay", "false"), ("algorithm.distill_coef", "0"), ("algorithm.tis_cap", "0"), ("algorithm.mask_truncated", "false"), ("algorithm.dual_clip", "0"))
    ),
    Rule("algorithm.kl_placement", lambda c: not c.algorithm.is_sft or not c.algorithm.has_kl_reward, "loss where algorithm.advantage='sft' (there is no reward)"),
    Rule("algorithm.rollout_rs", lambda c: not c.algorithm.is_sft or c.algorithm.rollout_rs == "none", "none where algorithm.advantage='sft' (nothing is generated)"),
    Rule("algorithm.filter_groups", lambda c: not c.algorithm.is_sft or c.algorithm.filter_groups == "none", "none where algorithm.advantage='sft' (nothing is generated)"),
    Rule("mcore.transformer", lambda c: not c.model.lora_rank or "fp8" not in c.mcore.transformer, "without fp8 where model.lora_rank={c.model.lora_rank}"),
    Rule("data.template_date", lambda c: not c.data.template_date or _is_date(c.data.template_date), "YYYY-MM-DD"),
    Rule("run.dir", lambda c: not re.match(r"~|.*(\$\{?[A-Za-z_]|[\0-\x1f])", c.run.dir, re.S), "a path as it is on disk: of a shell's words only ~/ is replaced in it"),
    Rule("data.eval", lambda c: all(c.data.eval), "a file or a list of files"),
    Rule("data.eval", lambda c: isinstance(c.data.eval, str) or len(c.data.eval_files) == len(c.data.eval), "files with different names, or in folders with different names"),
    Rule("reward.function", lambda c: _has_each_once(c.reward.names), "functions with different names, not {c.reward.names}"),
    Rule("reward.function", lambda c: any(c.reward.weights.values()), "functions of which one has a weight that is not 0"),
    Rule("reward.function", lambda c: "environment" not in c.reward.weights or c.rollout.has_conversations, "without 'environment' where rollout.environment is empty (it is the sum of an environment's rewards)"),
    Rule("reward.function", lambda c: not c.reward.is_none or c.algorithm.distill_coef or c.algorithm.is_sft or not c.run.num_steps, "a function where algorithm.distill_coef=0: without one nothing is learned"),
    Rule("algorithm.filter_groups", lambda c: not c.reward.is_none or c.algorithm.filter_groups == "none", "none where reward.function='none' (no group would be left)"),
    Rule("data.eval", lambda c: not c.reward.is_none or not c.data.eval or c.algorithm.is_sft, "empty where reward.function='none' (tlt evaluate RUN reward.function=exact scores a run)"),
    Rule("reward.overlong_tokens", lambda c: c.reward.overlong_tokens < c.rollout.max_new_tokens, "< rollout.max_new_tokens={c.rollout.max_new_tokens}"),
    Rule("reward.function", lambda c: not c.rollout.tools or any(weight for name, weight in c.reward.weights.items() if name != "environment"), "more than 'environment' where rollout.environment is empty: tools give no rewards"),
    Rule("rollout.tools", lambda c: not (c.rollout.tools and c.rollout.environment), "[] where rollout.environment={c.rollout.environment!r}, which has tools of its own (a class with `tools` gets their calls)"),
    Rule("rollout.tools", lambda c: _has_each_once(c.rollout.tools), "each tool once"),
    Rule("rollout.max_turns", lambda c: not c.rollout.has_conversations or c.rollout.max_turns > 1, "> 1 where rollout.environment or rollout.tools is set"),
    Rule("rollout.num_samples", lambda c: c.rollout.num_samples > 1 or c.algorithm.advantage not in _SIBLINGS, "> 1 where algorithm.advantage={c.algorithm.advantage!r} (it compares siblings)"),
    Rule("rollout.partial_rollout_tokens", lambda c: c.rollout.partial_rollout_tokens < c.rollout.max_new_tokens, "0 (off), or < rollout.max_new_tokens={c.rollout.max_new_tokens}"),
    Rule("rollout.partial_rollout_tokens", lambda c: not c.rollout.partial_rollout_tokens or c.algorithm.has_correction, "0 without a correction for tokens of earlier policies: set algorithm.tis_cap=2 (truncated importance sampling) or algorithm.rollout_rs=token (masked)"),
    Rule("rollout.partial_rollout_tokens", lambda c: not c.rollout.partial_rollout_tokens or not c.rollout.has_conversations, lambda c: f"0 where rollout.environment={c.rollout.environment!r} (conversations are not cut)" if c.rollout.environment else f"0 where rollout.tools={c.rollout.tools!r} (conversations are not cut)"),
    Rule("rollout.over_sampling_prompts", lambda c: not c.rollout.over_sampling_prompts or (c.rollout.over_sampling_prompts >= c.rollout.num_prompts and c.rollout.partial_rollout_tokens), "0, or >= rollout.num_prompts={c.rollout.num_prompts} with rollout.partial_rollout_tokens > 0"),
    Rule("rollout.batch_invariant", lambda c: c.algorithm.is_sft or c.rollout.engine == "embedded" or not c.rollout.batch_invariant, "false where rollout.engine={c.rollout.engine!r}"),
    Rule("algorithm.filter_groups", lambda c: c.algorithm.filter_groups, "a name"),
    Rule("algorithm.filter_groups", lambda c: c.rollout.num_samples > 1 or c.algorithm.filter_groups == "none", "none where rollout.num_samples=1 (it compares siblings)"),
    Rule("algorithm.filter_groups", lambda c: c.sampling_metric in ("", *c.reward.numbers) or c.reward.may_return(c.sampling_metric), lambda c: f"one of none, {', '.join(c.reward.numbers)}, or a further number of {', '.join(c.reward.weights)}"),
    Rule("algorithm.kl_estimator", lambda c: c.algorithm.kl_estimator != "k1" or c.algorithm.kl_placement == "reward", "k2 or k3 where algorithm.kl_placement='loss' (the gradient of k1 is zero on average), or set algorithm.kl_placement=reward"),
    Rule("algorithm.advantage_args", lambda c: not c.algorithm.advantage_args or ":" in c.algorithm.advantage, "{{}} where algorithm.advantage={c.algorithm.advantage!r} (they are keywords of a function of yours)"),
    Rule("algorithm.loss_args", lambda c: not c.algorithm.loss_args or ":" in c.algorithm.loss, "{{}} where algorithm.loss={c.algorithm.loss!r} (they are keywords of a function of yours)"),
    Rule("algorithm.dual_clip", lambda c: c.algorithm.dual_clip == 0 or c.algorithm.dual_clip > 1, "0 (off) or > 1"),
    Rule("algorithm.dual_clip", lambda c: c.algorithm.dual_clip == 0 or c.algorithm.loss not in ("gspo", "cispo"), "0 where algorithm.loss={c.algorithm.loss!r}"),
    Rule("algorithm.aggregation", lambda c: c.algorithm.loss != "gspo" or c.algorithm.aggregation == "sequence_mean", "sequence_mean where algorithm.loss='gspo' (its ratio is that of a whole response)"),
    Rule("algorithm.tis_cap", lambda c: c.algorithm.tis_cap == 0 or c.algorithm.tis_cap >= 1, "0 (off) or >= 1"),
    Rule("algorithm.rollout_is", lambda c: c.algorithm.rollout_is == "token" or c.algorithm.tis_cap > 0, "token where algorithm.tis_cap=0 (off), or set algorithm.tis_cap=2"),
    Rule("algorithm.rollout_rs_threshold", lambda c: _is_around_1(c.algorithm.rollout_rs_threshold), "> 1, or [lower, upper] around 1"),
    Rule("algorithm.num_minibatches", lambda c: c.algorithm.num_minibatches <= c.rollout.num_prompts, "<= rollout.num_prompts={c.rollout.num_prompts}"),
    Rule("optimizer.betas", lambda c: len(c.optimizer.betas) == 2 and all(0 <= beta < 1 for beta in c.optimizer.betas), "two numbers in [0, 1)"),
    Rule("optimizer.min_lr", lambda c: c.optimizer.min_lr <= c.optimizer.lr, "in [0, lr={c.optimizer.lr}]"),
    Rule("mcore.transformer.recompute_modules", lambda c: "recompute_modules" not in c.mcore.transformer or c.mcore.recompute == "selective", "needs mcore.recompute=selective"),
    Rule("mcore.transformer.fp8_recipe", lambda c: "fp8_recipe" not in c.mcore.transformer or "fp8" in c.mcore.transformer, "needs mcore.transformer.fp8=hybrid or e4m3"),
    Rule("mcore.transformer.moe_aux_loss_coeff", lambda c: c.mcore.moe_aux_loss_coeff == 0 or c.algorithm.aggregation == "token_mean", "0 where algorithm.aggregation is not token_mean: it is a mean over tokens"),
    Rule("mcore.offload_in_rollouts", lambda c: c.model.dtype != "float32" or not c.mcore.offload_in_rollouts, "false where model.dtype='float32' (the optimizer has no weights of its own to move)"),
    Rule("eval.interval", lambda c: c.eval.interval == 0 or c.data.eval, "0 where data.eval is empty (there is nothing to evaluate)"),
    Rule("speculation.draft_vocab_size", lambda c: not c.speculation.draft_vocab_size or c.speculation.draft_vocab_size >= 256, "0 or >= 256"),
    Rule("speculation.draft_vocab_size", lambda c: c.rollout.engine == "embedded" or not c.speculation.draft_vocab_size, "0 or None where rollout.engine={c.rollout.engine!r} (tlt export-drafter writes drafters with a reduced vocabulary for SGLang)"),
    Rule("speculation.strategies", lambda c: c.speculation.strategies and _has_each_once(c.speculation.strategies), "not empty, with each strategy once"),
    Rule("speculation.drafter", lambda c: c.speculation.drafter or not c.needs_drafter or c.spot.enabled, "the folder of a drafter where a strategy needs one and spot.enabled, which trains one, is false"),
    Rule("spot.enabled", lambda c: c.needs_drafter or not c.spot.enabled, "false where speculation is off, or none of its strategies uses a learned drafter"),
    Rule("eval.top_p", lambda c: c.eval.top_p is None or 0 < c.eval.top_p <= 1, "in (0, 1] or null"),
    Rule("eval.top_k", lambda c: c.eval.top_k is None or c.eval.top_k >= 0, ">= 0 or null"),
    Rule("algorithm.max_logprob_diff", lambda c: c.algorithm.max_logprob_diff is None or c.algorithm.max_logprob_diff > 0, "> 0 (null: by dtype)"),
    Rule("logging.trackers", lambda c: not {"mlflow", "swanlab"} & {*c.logging.trackers}, "examples/trackers.py:MlFlow or examples/trackers.py:SwanLab for these"),
    Rule("logging.trackers", lambda c: _has_each_once(c.logging.trackers), "each tracker once"),
)  # fmt: skip
# Allowed, but harms learning or messages.
WARNINGS: tuple[tuple[Callable[[RunConfig], object], str], ...] = (
    (lambda c: c.algorithm.has_kl_reward and c.algorithm.used_kl_estimator != "k1", "algorithm.kl_estimator={c.algorithm.kl_estimator!r} with algorithm.kl_placement='reward' hardly pulls towards the reference: its gradient as a reward vanishes near it. Set algorithm.kl_estimator=k1"),
    (lambda c: c.rollout.partial_rollout_tokens, "rollout.partial_rollout_tokens={c.rollout.partial_rollout_tokens}: partial rollouts are not lossless. Responses have tokens of several policies, and what a step trains on depends on their lengths. Set it to 0 for a lossless run"),
    (lambda c: c.run.group_timeout_s <= c.run.heartbeat_timeout_s, "run.group_timeout_s={c.run.group_timeout_s:g} is not above run.heartbeat_timeout_s={c.run.heartbeat_timeout_s:g}: a rank that freezes ends the run before it is known which one it is"),
    (lambda c: c.eval.temperature == 0 and c.eval.num_samples > 1 and c.data.eval, "eval.temperature={c.eval.temperature} with eval.num_samples={c.eval.num_samples}: all samples of a prompt are equal. Set eval.num_samples=1, or a temperature"),
    (lambda c: c.data.train_in_eval and c.run.num_steps, "data.eval={c.data.train_in_eval!r} is data.train: its scores are those of prompts that are trained on"),
    (lambda c: c.has_critic and c.critic.warmup_steps >= c.run.num_steps, "critic.warmup_steps={c.critic.warmup_steps} is not below run.num_steps={c.run.num_steps}: the policy is never updated"),
)  # fmt: skip


def check_rules(config: RunConfig) -> None:
    """Raise ValueError of one line for the first rule that does not hold."""
    for key, holds, allowed in RULES:
        if not holds(config):
            text = allowed.format(c=config) if isinstance(allowed, str) else allowed(config)
            must_be = "" if text.startswith("needs ") else "must be "
            raise ValueError(f"{key}={_value(config, key)!r}: {must_be}{text}")
    for key, spec in named_code(config):
        check_extension(key, spec)


def warnings_of(config: RunConfig, given: Collection[str] = ()) -> list[str]:
    """Return a line for each setting that harms, and one of all settings that have no effect.

    `given` are the settings of the command line: what it turns off may be set in a file. A run of 0
    steps, an evaluation, may have those too: it takes the settings of a training run.
    """
    found = [text.format(c=config) for is_risky, text in WARNINGS if is_risky(config)]
    default, by_need, named = type(config)(), [], set()
    rows = yaml.safe_load(Path(__file__).with_name("needs.yaml").read_text(encoding="utf-8"))
    for names, need, *shown in rows if config.run.num_steps else ():
        keys = [key for name in names for key in _keys(default, name) if key not in named]
        is_turned_off = need.partition("=")[0].removesuffix("!") in given
        changed = [
            key
            for key in keys
            if _value(config, key) != _value(default, key) and (key in given or not is_turned_off)
        ]
        if changed and not _has_need(config, need):
            by_need.append(f"{', '.join(changed)} (need {shown[0] if shown else need})")
            named.update(changed)
    return [*found, f"settings without effect: {'; '.join(by_need)}"] if by_need else found


def _value(config: RunConfig, key: str) -> Any:
    """Return the value of a setting, or of an entry of a setting that is a table."""
    section, name, *entry = key.split(".", 2)
    value = getattr(getattr(config, section), name)
    return value.get(entry[0]) if entry else value


def _keys(config: RunConfig, name: str) -> list[str]:
    """Return a setting, or all settings of a section."""
    if "." in name:
        return [name]
    return [f"{name}.{field.name}" for field in fields(getattr(config, name))]


def _has_need(config: RunConfig, need: str) -> bool:
    """Return whether a condition of needs.yaml holds: `key`, `key=value or value`, `key!=value`."""
    key, equals, values = need.partition("=")
    value = _value(config, key.removesuffix("!"))
    if not equals:
        return bool(value)
    return (value in values.split(" or ")) != key.endswith("!")
