"""Settings of verl and slime that are more than another name of ours: for `tools/migrate.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from tlt_megatron.config.other_names import NAMES

Values = Mapping[str, Any]  # theirs, by dotted key of verl or flag of slime (with _)
# Returns our settings; None if the value has no counterpart.
Convert = Callable[[Any, Values], dict[str, Any] | None]
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."


def _word(key: str, **words: str) -> Convert:
    return lambda value, _: {key: words[value]} if value in words else None


def _at_least_0(key: str) -> Convert:
    return lambda value, _: {key: max(0, int(value or 0))}


def _file(key: str) -> Convert:
    def convert(value: Any, _: Values) -> dict[str, Any] | None:
        files = list(map(str, value)) if isinstance(value, list) else [str(value)]
        if len(files) > 1 and key == "data.eval":
            return {key: files}
        return {key: files[0]} if len(files) == 1 else None

    return convert


def _if(switch: str, key: str, **more: Any) -> Convert:
    """Their value counts only with their `switch`; a switch that is off means 0."""
    return lambda value, given: {key: value, **more} if given.get(switch) else {}


def _minibatches(*factors: str) -> Convert:
    """Their value is the size of a minibatch; a batch is the product of these settings of theirs."""

    def convert(size: Any, given: Values) -> dict[str, Any] | None:
        numbers = [given.get(name) for name in factors]
        if not all(isinstance(number, int) and number > 0 for number in (size, *numbers)):
            return None  # a script may leave one open
        return {"algorithm.num_minibatches": max(1, math.prod(numbers) // size)}

    return convert


def _verl_reward(path: Any, given: Values) -> dict[str, Any] | None:
    name = given.get("custom_reward_function.name", "compute_score")
    return {"reward.function": f"{path}:{name}"} if path else {}


def _advantage(value: Any, given: Values) -> dict[str, Any] | None:
    if value == "grpo" and given.get("algorithm.norm_adv_by_std_in_grpo") is False:
        return {"algorithm.advantage": "dr_grpo"}
    if value == "ppo":  # of slime
        return {"algorithm.advantage": "gae"}
    names = ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae")
    if value == "gspo":
        return {"algorithm.loss": "gspo", "algorithm.aggregation": "sequence_mean"}
    return {"algorithm.advantage": value} if value in names else None


def _of_critic(column: int) -> dict[str, str | Convert]:
    """Return our settings of the critic by their name. They count only with one."""

    def with_critic(key: str) -> Convert:
        def convert(value: Any, given: Values) -> dict[str, Any] | None:
            kind = given.get("algorithm.adv_estimator", given.get("advantage_estimator", "gae"))
            return {key: value} if kind in ("gae", "ppo") else {}

        return convert

    keys = ("critic.lr", "critic.weight_decay", "critic.clip_grad", "critic.cliprange_value")
    keys = (*keys, "critic.warmup_steps", "critic.path", "algorithm.gamma", "algorithm.lam")
    found = {NAMES[key][column].replace("-", "_"): with_critic(key) for key in keys}
    return {name: convert for name, convert in found.items() if name}


def _loss(value: Any, _: Values) -> dict[str, Any] | None:
    more = {"algorithm.aggregation": "sequence_mean"} if value == "gspo" else {}
    names = {"vanilla": "ppo", "gspo": "gspo", "cispo": "cispo"}
    return {"algorithm.loss": names[value], **more} if value in names else None


def _set(**settings: Any) -> Convert:
    """Return `settings` (with __ for the dot) where their switch is on, else none."""
    return lambda value, _: {k.replace("__", "."): v for k, v in settings.items()} if value else {}


def _rollout_is(level: Any, given: Values) -> dict[str, Any] | None:
    """verl's truncated importance sampling: a level, and a cap under the same prefix."""
    if level in (None, "null", "None"):
        return {}
    cap = next((v for k, v in given.items() if k.endswith(".rollout_is_threshold")), 2.0)
    if level not in ("token", "sequence", "geometric"):
        return None
    return {"algorithm.rollout_is": level, "algorithm.tis_cap": cap}


def _rollout_rs(level: Any, given: Values) -> dict[str, Any] | None:
    """verl's masked importance sampling: k1 of a token, of the sum or of the mean is our ratio at three levels."""
    if level in (None, "null", "None"):
        return {}
    levels = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}
    level = levels.get(level, level)
    if level not in levels.values():
        return None
    ours: dict[str, Any] = {"algorithm.rollout_rs": level}
    bounds = next((v for k, v in given.items() if k.endswith(".rollout_rs_threshold")), None)
    if bounds not in (None, "null", "None"):  # upper, or lower_upper
        *lower, upper = map(float, str(bounds).split("_"))
        ours["algorithm.rollout_rs_threshold"] = upper
        if lower:
            ours["algorithm.rollout_rs_threshold_lower"] = lower[0]
    return ours


def _overlong(prefix: str) -> dict[str, str | Convert]:
    """DAPO's soft punishment, which counts only where it is enabled."""
    return {
        f"{prefix}.enable": lambda value, _: {},
        f"{prefix}.log": lambda value, _: {},
        f"{prefix}.len": _if(f"{prefix}.enable", "reward.overlong_tokens"),
        f"{prefix}.penalty_factor": _if(f"{prefix}.enable", "reward.overlong_penalty"),
    }


def _correction(prefix: str) -> dict[str, str | Convert]:
    """Keys of `algorithm.rollout_correction`, which older versions have elsewhere."""
    return {
        f"{prefix}.rollout_is": _rollout_is,
        f"{prefix}.rollout_is_threshold": lambda value, _: {},  # see _rollout_is
        f"{prefix}.rollout_is_batch_normalize": _only(False),
        f"{prefix}.rollout_rs": _rollout_rs,
        f"{prefix}.rollout_rs_threshold": lambda value, _: {},  # see _rollout_rs
        f"{prefix}.rollout_rs_threshold_lower": "algorithm.rollout_rs_threshold_lower",
        f"{prefix}.rollout_token_veto_threshold": "algorithm.rollout_token_veto_threshold",
        f"{prefix}.bypass_mode": _only(False),
        f"{prefix}.loss_type": _only("ppo_clip"),
    }


def _only(value: Any) -> Convert:
    """Their `value` is what happens here; another has no counterpart."""
    return lambda given, _: {} if given == value else None


def _trackers(value: Any, _: Values) -> dict[str, Any] | None:
    names = [name for name in ([value] if isinstance(value, str) else value) if name != "console"]
    known = all(name in ("tensorboard", "wandb", "mlflow", "swanlab") for name in names)
    return {"logging.trackers": names} if known else None


def _same(column: int) -> dict[str, str | Convert]:
    """Return those of our settings by their name that have the same values there."""
    return {NAMES[ours][column].replace("-", "_"): ours for ours in _SAME if NAMES[ours][column]}


_SAME = (
    *("model.path", "run.dir", "run.num_steps", "optimizer.lr", "mcore.micro_batch_tokens"),
    *("data.input_key", "data.label_key", "data.apply_chat_template", "data.max_prompt_tokens"),
    *("data.shuffle", "rollout.num_prompts", "rollout.num_samples", "rollout.max_new_tokens"),
    *("rollout.temperature", "rollout.top_p", "rollout.max_batch_size", "rollout.kv_cache_tokens"),
    *("rollout.prefill_chunk_tokens", "algorithm.clip_low", "algorithm.clip_high"),
    *("algorithm.dual_clip", "algorithm.entropy_coef", "algorithm.num_epochs"),
    *("algorithm.dynamic_sampling", "algorithm.max_num_gen_batches", "reward.num_workers"),
    *("eval.num_samples", "eval.temperature", "logging.project"),
)
_KL = _word("algorithm.kl_estimator", low_var_kl="k3", k3="k3", mse="k2", k2="k2")
_RESUME = _word("checkpoint.resume", auto="auto", disable="never")
VERL: dict[str, str | Convert] = (
    _same(0)
    | _of_critic(0)
    | {
        "data.train_files": _file("data.train"),
        "data.val_files": _file("data.eval"),
        "custom_reward_function.path": _verl_reward,
        "algorithm.adv_estimator": _advantage,
        "algorithm.norm_adv_by_std_in_grpo": lambda value, _: {},  # see _advantage
        "algorithm.kl_ctrl.kl_coef": _if(
            "algorithm.use_kl_in_reward",
            "algorithm.kl_coef",
            **{"algorithm.kl_placement": "reward"},
        ),
        "algorithm.filter_groups.metric": lambda value, _: {
            "algorithm.dynamic_sampling_metric": value if value == "acc" else "reward"
        },
        **_correction("algorithm.rollout_correction"),
        **_correction("algorithm"),
        **_correction("actor_rollout_ref.rollout"),
        f"{_ACTOR}tis_imp_ratio_cap": lambda value, _: {"algorithm.tis_cap": max(0, value)},
        **_overlong("reward_model.overlong_buffer"),
        **_overlong("reward_model.reward_kwargs.overlong_buffer_cfg"),
        "reward_model.reward_kwargs.max_resp_len": lambda value, _: {},  # the length of responses
        f"{_ROLLOUT}top_k": _at_least_0("rollout.top_k"),
        f"{_ROLLOUT}dtype": _word("rollout.dtype", bfloat16="bfloat16"),
        f"{_ROLLOUT}tensor_model_parallel_size": "sglang.engine_args.tp_size",
        f"{_ROLLOUT}gpu_memory_utilization": "sglang.engine_args.mem_fraction_static",
        f"{_ROLLOUT}name": _word("rollout.engine", sglang="sglang"),
        f"{_ROLLOUT}enforce_eager": lambda value, _: {"rollout.cuda_graphs": not value},
        f"{_ROLLOUT}free_cache_engine": lambda value, _: {"rollout.keep_graphs": not value},
        f"{_ACTOR}policy_loss.loss_mode": _loss,
        f"{_ACTOR}optim.weight_decay": "optimizer.weight_decay",
        f"{_ACTOR}optim.clip_grad": "optimizer.clip_grad",
        f"{_ACTOR}optim.lr_warmup_steps": _at_least_0("optimizer.warmup_steps"),
        f"{_ACTOR}grad_clip": "optimizer.clip_grad",
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
        f"{_ACTOR}kl_loss_coef": _if(f"{_ACTOR}use_kl_loss", "algorithm.kl_coef"),
        f"{_ACTOR}kl_loss_type": _KL,
        f"{_ACTOR}megatron.tensor_model_parallel_size": "parallel.tensor",
        f"{_ACTOR}megatron.pipeline_model_parallel_size": "parallel.pipeline",
        f"{_ACTOR}checkpoint.save_contents": lambda value, _: (
            {"checkpoint.export_hf": True} if "hf_model" in value else {}
        ),
        "trainer.save_freq": _at_least_0("checkpoint.interval"),
        "trainer.max_actor_ckpt_to_keep": _at_least_0("checkpoint.keep"),
        "trainer.test_freq": _at_least_0("eval.interval"),
        "trainer.resume_mode": _RESUME,
        "trainer.logger": _trackers,
        "trainer.rollout_data_dir": _set(logging__rollouts=True),
        "data.val_max_samples": _at_least_0("eval.num_prompts"),
    }
)
SLIME: dict[str, str | Convert] = (
    _same(1)
    | _of_critic(1)
    | {
        "prompt_data": _file("data.train"),
        "eval_prompt_data": lambda value, given: (  # a name, then its file, and so on
            _file("data.eval")(value[1::2], given)
            if isinstance(value, list) and len(value) % 2 == 0
            else None
        ),
        "rollout_top_k": _at_least_0("rollout.top_k"),
        "rollout_num_gpus_per_engine": "sglang.engine_args.tp_size",
        "sglang_mem_fraction_static": "sglang.engine_args.mem_fraction_static",
        "sglang_dtype": _word("rollout.dtype", bfloat16="bfloat16"),
        "sglang_disable_cuda_graph": _set(rollout__cuda_graphs=False),
        # SGLang refuses rollout.batch_invariant
        "sglang_enable_deterministic_inference": _only(False),
        "rm_type": _word("reward.function", math="math", deepscaler="math", dapo="math"),
        "custom_rm_path": lambda value, _: {"reward.function": ":".join(value.rsplit(".", 1))},
        "advantage_estimator": _advantage,
        "dynamic_sampling_filter_path": _set(algorithm__dynamic_sampling=True),
        "global_batch_size": _minibatches("rollout_batch_size", "n_samples_per_prompt"),
        "calculate_per_token_loss": _set(algorithm__aggregation="token_mean"),
        "kl_loss_coef": _if("use_kl_loss", "algorithm.kl_coef"),
        "kl_coef": lambda value, _: (
            {"algorithm.kl_coef": value, "algorithm.kl_placement": "reward"} if value else {}
        ),
        "kl_loss_type": _KL,
        "tis_clip": _if("use_tis", "algorithm.tis_cap"),
        "lr_decay_style": _word("optimizer.decay", constant="constant"),
        "weight_decay": "optimizer.weight_decay",
        "adam_beta1": "optimizer.beta1",
        "adam_beta2": "optimizer.beta2",
        "clip_grad": "optimizer.clip_grad",
        "recompute_granularity": _word("mcore.recompute", full="full", selective="selective"),
        "tensor_model_parallel_size": "parallel.tensor",
        "pipeline_model_parallel_size": "parallel.pipeline",
        "sequence_parallel": lambda value, given: {
            "parallel.sequence": given.get("tensor_model_parallel_size", 1) > 1
        },
        "save_hf": _set(checkpoint__export_hf=True),
        "load": lambda value, given: (  # a folder; ours is that of the run
            {"checkpoint.resume": "auto"} if value == given.get("save") else None
        ),
        "save_debug_rollout_data": _set(logging__rollouts=True),
        "use_wandb": _set(logging__trackers=["wandb"]),
        "use_tensorboard": _set(logging__tensorboard=True),
        "num_steps_per_rollout": "algorithm.num_minibatches",
        "save_interval": "checkpoint.interval",
        "eval_interval": "eval.interval",
    }
)
# Read together with another key.
SWITCHES = {
    "custom_reward_function.name",
    "algorithm.use_kl_in_reward",
    "actor_rollout_ref.actor.use_kl_loss",
    "use_kl_loss",
    "use_tis",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "actor_num_gpus_per_node",
    "actor_num_nodes",
}
GPUS = ("trainer.n_gpus_per_node", "actor_num_gpus_per_node")
NODES = ("trainer.nnodes", "actor_num_nodes")
