"""Settings of verl and slime that are more than another name of ours: for `tools/migrate.py`."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from tlt_megatron.config.mcore_fields import read_fields
from tlt_megatron.config.other_names import PROJECTS, rows

Values = Mapping[str, Any]  # theirs, by dotted key of verl or flag of slime (with _)
# Returns our settings; None if the value has no counterpart.
Convert = Callable[[Any, Values], dict[str, Any] | None]
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
_CORRECTION = "algorithm.rollout_correction."
_KL_IN_REWARD, _KL_IN_LOSS = "algorithm.use_kl_in_reward", f"{_ACTOR}use_kl_loss"
# An open value of these is taken over, and the checks refuse it: no default may replace it.
NEVER_DEFAULT = ("algorithm.adv_estimator", "advantage_estimator", f"{_ACTOR}policy_loss.loss_mode")


def passed_on(key: str, value: Any) -> dict[str, Any] | None:
    """Return an option that goes unchanged to SGLang or Megatron; None for other keys."""
    if (option := key.removeprefix(f"{_ROLLOUT}engine_kwargs.sglang.")) != key:
        return {f"sglang.engine_args.{option}": value}
    option = key.removeprefix(f"{_ACTOR}megatron.override_transformer_config.")
    return {f"mcore.transformer.{option}": value} if option in read_fields().allowed else None


def _same(project: str) -> dict[str, Convert]:
    """Return the settings that differ in nothing but the name, by their name."""
    column = PROJECTS.index(project)
    given = [(row.theirs[column].replace("-", "_"), row) for row in rows() if row.theirs[column]]
    counts = Counter(name for name, _ in given)
    return {name: _to(row.ours) for name, row in given if not row.note and counts[name] == 1}


def _to(key: str, here: Callable[[Any], Any] = lambda value: value) -> Convert:
    """Return `key` with the value that `here` returns for theirs; None there: no counterpart."""

    def convert(value: Any, _: Values) -> dict[str, Any] | None:
        ours = here(value)
        return None if ours is None else {key: ours}

    return convert


def _word(key: str, *words: str, **other_words: str) -> Convert:
    return _to(key, (dict(zip(words, words, strict=True)) | other_words).get)


def _at_least_0(key: str) -> Convert:
    return _to(key, lambda value: max(0, int(value or 0)))


def _set(key: str, here: Any = True) -> Convert:
    """Return `key` with the value `here` where their switch is on, else nothing."""
    return lambda value, _: {key: here} if value else {}


def _if(switch: str, convert: Convert) -> Convert:
    """Their value has an effect only where their `switch` is on."""
    return lambda value, given: convert(value, given) if given.get(switch) else {}


def _unless(switch: str, convert: Convert) -> Convert:
    """Here is no counterpart where their `switch` is on too."""
    return lambda value, given: None if given.get(switch) else convert(value, given)


def _if_not(other: str) -> Convert:
    """Their value has no effect where `other` of theirs is given, and else no counterpart."""
    return lambda _, given: {} if given.get(other) else None


def _files(value: Any) -> str | list[str]:
    files = [str(file) for file in value] if isinstance(value, list) else [str(value)]
    return files[0] if len(files) == 1 else files


def _file(value: Any) -> str | None:
    files = _files(value)
    return files if isinstance(files, str) else None


def _named_files(words: Any) -> str | list[str] | None:
    is_complete = isinstance(words, list) and len(words) % 2 == 0  # a name, its file, and so on
    return _files(words[1::2]) if is_complete else None


def _minibatches(*factors: str) -> Convert:
    """Their value is the size of a minibatch; a batch is the product of these settings of theirs."""
    return lambda size, given: {
        "algorithm.num_minibatches": max(1, math.prod(given[name] for name in factors) // size)
    }


def _advantage(value: Any, given: Values) -> dict[str, Any]:
    without_std = given.get("algorithm.norm_adv_by_std_in_grpo") is False
    if value == "grpo" and (without_std or given.get("disable_grpo_std_normalization")):
        value = "dr_grpo"
    if value in ("gspo", "cispo"):  # of slime
        return {"algorithm.loss": value}
    same = {"ppo": "gae", "grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
    return {"algorithm.advantage": same.get(value, value)}  # the checks refuse an unknown one


def _kl(placement: str, coefficient: str) -> Convert:
    """Return KL at `placement`. verl's coefficient is 0.001 by default."""
    return lambda _, given: {
        "algorithm.kl_placement": placement,
        "algorithm.kl_coef": given.get(coefficient, 0.001),
    }


def _number(value: Any) -> Any:
    return value if isinstance(value, int | float) else None  # newer versions: two bounds as text


def _trackers(value: Any) -> list[str] | None:
    names = [name for name in ([value] if isinstance(value, str) else value) if name != "console"]
    known = all(name in ("tensorboard", "wandb") for name in names)
    return names if known else None


# a learning rate that falls needs the number of steps, which they derive
_DECAY = _word("optimizer.decay", "constant")
_RECOMPUTE = _word("mcore.recompute", "full", "selective")
_KL = _word("algorithm.kl_estimator", "k2", "k3", low_var_kl="k3", mse="k2")
_REWARD_KL = _word("algorithm.kl_estimator", "k1", "k2", "k3", kl="k1", low_var_kl="k3", mse="k2")
_LEVELS = ("token", "sequence", "geometric")
_OVERLONG = ("reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg")
VERL: dict[str, Convert] = _same("verl") | {
    "data.train_files": _to("data.train", _file),
    "data.val_files": _to("data.eval", _files),
    "data.val_max_samples": _at_least_0("eval.num_prompts"),
    "custom_reward_function.path": lambda path, given: {
        "reward.function": f"{path}:{given.get('custom_reward_function.name', 'compute_score')}"
    },
    "algorithm.adv_estimator": _advantage,
    "algorithm.kl_ctrl.kl_coef": _if(_KL_IN_REWARD, _to("algorithm.kl_coef")),
    "algorithm.kl_penalty": _if(_KL_IN_REWARD, _REWARD_KL),
    _KL_IN_REWARD: _if(_KL_IN_REWARD, _kl("reward", "algorithm.kl_ctrl.kl_coef")),
    "algorithm.filter_groups.metric": _to(
        "algorithm.dynamic_sampling_metric",
        lambda name: "reward" if name in ("seq_reward", "seq_final_reward") else name,
    ),
    f"{_CORRECTION}rollout_is": _word("algorithm.rollout_is", *_LEVELS),
    f"{_CORRECTION}rollout_is_threshold": _if(f"{_CORRECTION}rollout_is", _to("algorithm.tis_cap")),
    f"{_CORRECTION}rollout_rs": _word("algorithm.rollout_rs", *_LEVELS),
    f"{_CORRECTION}rollout_rs_threshold": _to("algorithm.rollout_rs_threshold", _number),
    f"{_CORRECTION}rollout_rs_threshold_lower": _to("algorithm.rollout_rs_threshold_lower"),
    f"{_ACTOR}tis_imp_ratio_cap": _to("algorithm.tis_cap", lambda value: max(0, value)),
    **{
        f"{buffer}.{name}": _if(f"{buffer}.enable", _to(f"reward.{ours}"))
        for buffer in _OVERLONG
        for name, ours in (("len", "overlong_tokens"), ("penalty_factor", "overlong_penalty"))
    },
    f"{_ROLLOUT}top_k": _at_least_0("rollout.top_k"),
    f"{_ROLLOUT}dtype": _word("rollout.dtype", "bfloat16"),
    f"{_ROLLOUT}name": _word("rollout.engine", "sglang"),
    f"{_ROLLOUT}enforce_eager": _set("sglang.engine_args.disable_cuda_graph"),
    f"{_ROLLOUT}free_cache_engine": _to("rollout.keep_graphs", operator.not_),
    f"{_ACTOR}policy_loss.loss_mode": _to(
        "algorithm.loss", lambda name: "ppo" if name == "vanilla" else name
    ),
    f"{_ACTOR}optim.betas": lambda betas, _: {
        f"optimizer.beta{n}": beta for n, beta in enumerate(betas, start=1)
    },
    f"{_ACTOR}optim.lr_warmup_steps": _at_least_0("optimizer.warmup_steps"),
    f"{_ACTOR}optim.lr_decay_style": _DECAY,
    f"{_ACTOR}optim.lr_scheduler_type": _DECAY,
    f"{_ACTOR}ppo_mini_batch_size": _minibatches("data.train_batch_size"),
    f"{_ACTOR}clip_ratio": lambda value, given: {
        "algorithm.clip_low": given.get(f"{_ACTOR}clip_ratio_low", value),
        "algorithm.clip_high": given.get(f"{_ACTOR}clip_ratio_high", value),
    },
    f"{_ACTOR}loss_agg_mode": _word(
        "algorithm.aggregation",
        **{"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"},
        **{"seq-mean-token-sum-norm": "sequence_sum"},
    ),
    f"{_ACTOR}kl_loss_coef": _unless(_KL_IN_REWARD, _if(_KL_IN_LOSS, _to("algorithm.kl_coef"))),
    f"{_ACTOR}kl_loss_type": _unless(_KL_IN_REWARD, _if(_KL_IN_LOSS, _KL)),
    _KL_IN_LOSS: _if(_KL_IN_LOSS, _unless(_KL_IN_REWARD, _kl("loss", f"{_ACTOR}kl_loss_coef"))),
    f"{_ACTOR}megatron.dtype": _word("model.dtype", "bfloat16"),
    f"{_ACTOR}fsdp_config.dtype": _word("model.dtype", "bfloat16"),
    f"{_ACTOR}megatron.override_transformer_config.recompute_granularity": _RECOMPUTE,
    "actor_rollout_ref.model.enable_gradient_checkpointing": _set("mcore.recompute", "full"),
    "trainer.device": _word("run.device", "cuda", "cpu"),
    "trainer.total_epochs": _if_not("trainer.total_training_steps"),
    "trainer.save_freq": _at_least_0("checkpoint.interval"),
    "trainer.max_actor_ckpt_to_keep": _at_least_0("checkpoint.keep"),
    "trainer.test_freq": _at_least_0("eval.interval"),
    "trainer.resume_mode": _word("checkpoint.resume", "auto", disable="never"),
    "trainer.logger": _to("logging.trackers", _trackers),
    "trainer.rollout_data_dir": _set("logging.rollouts"),
}
SLIME: dict[str, Convert] = _same("slime") | {
    "prompt_data": _to("data.train", _file),
    "num_epoch": _if_not("num_rollout"),
    "eval_prompt_data": _to("data.eval", _named_files),
    "rollout_seed": lambda value, _: {"run.seed": value},
    "rollout_temperature": lambda value, given: {
        "rollout.temperature": value,
        **({} if "eval_temperature" in given else {"eval.temperature": value}),
    },
    "rollout_top_k": _at_least_0("rollout.top_k"),
    "sglang_dtype": _word("rollout.dtype", "bfloat16"),
    "sglang_disable_cuda_graph": _set("sglang.engine_args.disable_cuda_graph"),
    "rm_type": _word("reward.function", "math", deepscaler="math", dapo="math"),
    "custom_rm_path": _to("reward.function", lambda path: ":".join(path.rsplit(".", 1))),
    "advantage_estimator": _advantage,
    "critic_lr": _to("critic.lr"),
    "dynamic_sampling_filter_path": _set("algorithm.dynamic_sampling"),
    "global_batch_size": _minibatches("rollout_batch_size", "n_samples_per_prompt"),
    "calculate_per_token_loss": _set("algorithm.aggregation", "token_mean"),
    "kl_loss_coef": _if("use_kl_loss", _to("algorithm.kl_coef")),
    "kl_coef": lambda value, _: (
        {"algorithm.kl_coef": value, "algorithm.kl_placement": "reward"} if value else {}
    ),
    "kl_loss_type": _if("use_kl_loss", _if("kl_loss_coef", _KL)),
    "tis_clip": _if("use_tis", _to("algorithm.tis_cap")),
    "lr_decay_style": _DECAY,
    "recompute_granularity": _RECOMPUTE,
    "load": lambda value, given: (  # a folder; ours is that of the run
        {"checkpoint.resume": "auto"} if value == given.get("save") else None
    ),
    "save_debug_rollout_data": _set("logging.rollouts"),
    "use_wandb": _set("logging.trackers", ["wandb"]),
    "wandb_project": _if("use_wandb", _to("logging.project")),
}
# Their value of a key that is not given, where ours does another thing.
VERL_IMPLIED = {
    "data.train_batch_size": 1024,
    f"{_ACTOR}ppo_mini_batch_size": 256,
    f"{_ROLLOUT}n": 1,
    f"{_CORRECTION}rollout_is_threshold": 2.0,
}
SLIME_IMPLIED = {
    "n_samples_per_prompt": 1,
    "rollout_shuffle": False,
    "kl_loss_type": "k1",
    "tis_clip": 2.0,
}
# The same in our settings.
_DEFAULTS = {"rollout.engine": "sglang", "model.dtype": "bfloat16", "rollout.dtype": "bfloat16"}
VERL_DEFAULTS = _DEFAULTS | {
    "algorithm.advantage": "gae",
    "algorithm.dual_clip": 3.0,
    "data.max_prompt_tokens": 512,
    "eval.temperature": 0.0,
    "optimizer.beta2": 0.999,
}
SLIME_DEFAULTS = _DEFAULTS | {
    "algorithm.aggregation": "sequence_mean",
    "critic.cliprange_value": 0.2,
    "data.input_key": "input",
    "optimizer.beta2": 0.999,
}
# Read together with another key, or what happens here by default.
_SWITCHES = """
    custom_reward_function.name algorithm.norm_adv_by_std_in_grpo
    reward_model.overlong_buffer.enable reward_model.overlong_buffer.log
    reward_model.reward_kwargs.overlong_buffer_cfg.enable reward_model.reward_kwargs.overlong_buffer_cfg.log
    reward_model.reward_kwargs.max_resp_len
    actor_rollout_ref.actor.checkpoint.save_contents
    actor_rollout_ref.actor.megatron.sequence_parallel trainer.n_gpus_per_node trainer.nnodes
    sequence_parallel apply_chat_template
    disable_grpo_std_normalization use_kl_loss use_tis bf16 save_hf actor_num_gpus_per_node actor_num_nodes
"""
SWITCHES = frozenset(_SWITCHES.split())
GPUS = ("trainer.n_gpus_per_node", "actor_num_gpus_per_node")
NODES = ("trainer.nnodes", "actor_num_nodes")
