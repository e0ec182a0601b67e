"""Warnings of settings that are allowed, but harm learning or have no effect. The first rank logs
them at the start.
"""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from pathlib import Path

import yaml

from tlt_megatron.config.schema import RunConfig


def risky_settings(config: RunConfig) -> list[str]:
    """Return a warning for each setting that is allowed but harms learning or messages."""
    rollout, run, found = config.rollout, config.run, []
    algorithm = config.algorithm
    if algorithm.has_kl_reward and algorithm.used_kl_estimator != "k1":
        found.append(
            f"algorithm.kl_estimator={algorithm.kl_estimator!r} with algorithm.kl_placement='reward' hardly pulls towards the"
            " reference: its gradient as a reward vanishes near it. Set algorithm.kl_estimator=k1"
        )
    if rollout.partial_rollout_tokens:
        found.append(
            f"rollout.partial_rollout_tokens={rollout.partial_rollout_tokens}: partial rollouts are not lossless. Responses have"
            " tokens of several policies, and what a step trains on depends on their lengths. Set it to 0 for a lossless run"
        )
    if run.group_timeout_s <= run.heartbeat_timeout_s:
        found.append(
            f"run.group_timeout_s={run.group_timeout_s:g} is not above run.heartbeat_timeout_s={run.heartbeat_timeout_s:g}:"
            " a rank that freezes ends the run before it is known which one it is"
        )
    found += _meaningless(config)
    if ignored := _without_effect(config):
        found.append(f"settings without effect: {ignored}")
    return found


def _meaningless(config: RunConfig) -> list[str]:
    evaluation, train, found = config.eval, config.data.train, []
    if evaluation.temperature == 0 and evaluation.num_samples > 1 and config.data.eval:
        found.append(
            f"eval.temperature={evaluation.temperature} with eval.num_samples={evaluation.num_samples}: all samples of a prompt"
            " are equal. Set eval.num_samples=1, or a temperature"
        )
    for file in config.data.eval_files.values():
        if train and config.run.num_steps and Path(file).resolve() == Path(train).resolve():
            found.append(
                f"data.eval={file!r} is data.train: its scores are those of prompts that are trained on"
            )
    num_warmup, num_steps = config.critic.warmup_steps, config.run.num_steps
    if config.has_critic and num_warmup >= num_steps:
        found.append(
            f"critic.warmup_steps={num_warmup} is not below run.num_steps={num_steps}: the policy is never updated"
        )
    return found


def _without_effect(config: RunConfig) -> str:
    """Return the settings that differ from their default and have no effect.

    A run of 0 steps, an evaluation, gets no warning: it takes the settings of a training run.
    """
    default, by_need, named = RunConfig(), [], set()
    text = Path(__file__).with_name("needs.yaml").read_text(encoding="utf-8")
    for names, need, *shown in yaml.safe_load(text):
        keys = [key for name in names for key in _keys(default, name) if key not in named]
        changed = [k for k in keys if attrgetter(k)(config) != attrgetter(k)(default)]
        if changed and not _holds(config, need):
            by_need.append(f"{', '.join(changed)} (need {shown[0] if shown else need})")
            named.update(changed)
    return "; ".join(by_need) if config.run.num_steps else ""


def _holds(config: RunConfig, need: str) -> bool:
    """Return whether a condition of needs.yaml holds: `key`, `key=value or value`, `key!=value`."""
    key, equals, values = need.partition("=")
    value = attrgetter(key.removesuffix("!"))(config)
    if not equals:
        return bool(value)
    return (value in values.split(" or ")) != key.endswith("!")


def _keys(default: RunConfig, name: str) -> list[str]:
    if "." in name:
        return [name]
    return [f"{name}.{field.name}" for field in fields(getattr(default, name))]
