"""Settings of verl, slime and TRL by ours. Errors of unknown keys quote them, and docs/coming_from.md shows them as a table.

The table names every setting of `algorithm`, `rollout`, `reward`, `eval` and `checkpoint`
(tests/unit/config/test_other_names.py).
"""

from __future__ import annotations

import functools

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
_CORRECTION, _OVERLONG = "algorithm.rollout_correction.", "reward_model.overlong_buffer."

# ours: (verl's key, slime's flag, TRL's argument); "": none
NAMES: dict[str, tuple[str, str, str]] = {
    "model.path": ("actor_rollout_ref.model.path", "hf-checkpoint", ""),
    "data.train": ("data.train_files", "prompt-data", "train_dataset"),
    "data.eval": ("data.val_files", "eval-prompt-data", "eval_dataset"),
    "data.input_key": ("data.prompt_key", "input-key", ""),
    "data.label_key": ("", "label-key", ""),
    "data.apply_chat_template": ("", "apply-chat-template", ""),
    "data.max_prompt_tokens": ("data.max_prompt_length", "rollout-max-prompt-len", ""),
    "data.shuffle": ("data.shuffle", "rollout-shuffle", "shuffle_dataset"),
    "rollout.engine": (f"{_ROLLOUT}name", "", "use_vllm"),
    "rollout.dtype": (f"{_ROLLOUT}dtype", "sglang-dtype", ""),
    "rollout.num_prompts": (
        "data.train_batch_size",
        "rollout-batch-size",
        "generation_batch_size",
    ),
    "rollout.num_samples": (f"{_ROLLOUT}n", "n-samples-per-prompt", "num_generations"),
    "rollout.max_new_tokens": (
        "data.max_response_length",
        "rollout-max-response-len",
        "max_completion_length",
    ),
    "rollout.partial_rollout_tokens": ("", "partial-rollout", ""),
    "rollout.over_sampling_prompts": ("", "over-sampling-batch-size", ""),
    "rollout.temperature": (f"{_ROLLOUT}temperature", "rollout-temperature", "temperature"),
    "rollout.top_p": (f"{_ROLLOUT}top_p", "rollout-top-p", "top_p"),
    "rollout.top_k": (f"{_ROLLOUT}top_k", "rollout-top-k", "top_k"),
    "rollout.max_batch_size": (f"{_ROLLOUT}max_num_seqs", "sglang-max-running-requests", ""),
    "rollout.kv_cache_tokens": ("", "sglang-max-total-tokens", ""),
    "rollout.prefill_chunk_tokens": (
        f"{_ROLLOUT}max_num_batched_tokens",
        "sglang-chunked-prefill-size",
        "",
    ),
    "rollout.cuda_graphs": (f"{_ROLLOUT}enforce_eager", "sglang-disable-cuda-graph", ""),
    "rollout.keep_graphs": (f"{_ROLLOUT}free_cache_engine", "", "vllm_enable_sleep_mode"),
    "rollout.batch_invariant": ("", "sglang-enable-deterministic-inference", ""),
    "rollout.environment": (
        f"{_ROLLOUT}multi_turn.interaction_config_path",
        "custom-generate-function-path",
        "tools",
    ),
    "rollout.environment_timeout_s": ("", "", ""),
    "rollout.max_turns": (
        f"{_ROLLOUT}multi_turn.max_assistant_turns",
        "",
        "max_tool_calling_iterations",
    ),
    "rollout.max_observation_tokens": ("", "", ""),
    "algorithm.advantage": (
        "algorithm.adv_estimator",
        "advantage-estimator",
        "scale_rewards",
    ),
    "algorithm.gamma": ("algorithm.gamma", "gamma", "gamma"),
    "algorithm.lam": ("algorithm.lam", "lambd", "lam"),
    "algorithm.loss": (f"{_ACTOR}policy_loss.loss_mode", "", "importance_sampling_level"),
    "algorithm.clip_low": (f"{_ACTOR}clip_ratio_low", "eps-clip", "epsilon"),
    "algorithm.clip_high": (f"{_ACTOR}clip_ratio_high", "eps-clip-high", "epsilon_high"),
    "algorithm.dual_clip": (f"{_ACTOR}clip_ratio_c", "eps-clip-c", "delta"),
    "algorithm.aggregation": (f"{_ACTOR}loss_agg_mode", "calculate-per-token-loss", "loss_type"),
    "algorithm.entropy_coef": (f"{_ACTOR}entropy_coeff", "entropy-coef", "entropy_coef"),
    "algorithm.kl_coef": (f"{_ACTOR}kl_loss_coef", "kl-loss-coef", "beta"),
    "algorithm.kl_placement": ("algorithm.use_kl_in_reward", "use-kl-loss", ""),
    "algorithm.kl_estimator": (f"{_ACTOR}kl_loss_type", "kl-loss-type", ""),
    "algorithm.tis_cap": (
        f"{_CORRECTION}rollout_is_threshold",
        "tis-clip",
        "vllm_importance_sampling_clip_max",
    ),
    "algorithm.rollout_is": (
        f"{_CORRECTION}rollout_is",
        "",
        "vllm_importance_sampling_mode",
    ),
    "algorithm.rollout_rs": (f"{_CORRECTION}rollout_rs", "", ""),
    "algorithm.rollout_rs_threshold": (f"{_CORRECTION}rollout_rs_threshold", "", ""),
    "algorithm.rollout_rs_threshold_lower": (
        f"{_CORRECTION}rollout_rs_threshold_lower",
        "",
        "vllm_importance_sampling_clip_min",
    ),
    "algorithm.rollout_token_veto_threshold": (
        f"{_CORRECTION}rollout_token_veto_threshold",
        "",
        "",
    ),
    "algorithm.dynamic_sampling": (
        "algorithm.filter_groups.enable",
        "dynamic-sampling-filter-path",
        "",
    ),
    "algorithm.dynamic_sampling_metric": ("algorithm.filter_groups.metric", "", ""),
    "algorithm.max_num_gen_batches": ("algorithm.filter_groups.max_num_gen_batches", "", ""),
    "algorithm.num_minibatches": (
        f"{_ACTOR}ppo_mini_batch_size",
        "num-steps-per-rollout",
        "steps_per_generation",
    ),
    "algorithm.num_epochs": (f"{_ACTOR}ppo_epochs", "", "num_iterations"),
    "algorithm.recompute_log_probs": ("", "", ""),
    "algorithm.skip_zero_advantages": ("", "", ""),
    "algorithm.max_logprob_diff": ("", "ci-train-rollout-logprob-abs-diff-threshold", ""),
    "critic.path": ("critic.model.path", "", ""),
    "critic.lr": ("critic.optim.lr", "critic-lr", ""),
    "critic.weight_decay": ("critic.optim.weight_decay", "", ""),
    "critic.clip_grad": ("critic.grad_clip", "", ""),
    "critic.cliprange_value": ("critic.cliprange_value", "value-clip", "cliprange_value"),
    "critic.warmup_steps": ("trainer.critic_warmup", "num-critic-only-steps", ""),
    "reward.function": ("custom_reward_function.path", "custom-rm-path", "reward_funcs"),
    "reward.functions": ("", "", "reward_weights"),
    "reward.num_workers": ("reward_model.num_workers", "", ""),
    "reward.timeout_s": ("", "", ""),
    "reward.on_error": ("", "", ""),
    "reward.overlong_tokens": (f"{_OVERLONG}len", "", ""),
    "reward.overlong_penalty": (f"{_OVERLONG}penalty_factor", "", ""),
    "optimizer.lr": (f"{_ACTOR}optim.lr", "lr", "learning_rate"),
    "mcore.micro_batch_tokens": (f"{_ACTOR}ppo_max_token_len_per_gpu", "max-tokens-per-gpu", ""),
    "run.num_steps": ("trainer.total_training_steps", "num-rollout", "max_steps"),
    "run.dir": ("trainer.default_local_dir", "save", "output_dir"),
    "checkpoint.interval": ("trainer.save_freq", "save-interval", "save_steps"),
    "checkpoint.keep": ("trainer.max_actor_ckpt_to_keep", "", "save_total_limit"),
    "checkpoint.at_end": ("", "", ""),
    "checkpoint.resume": ("trainer.resume_mode", "load", "resume_from_checkpoint"),
    "checkpoint.export_hf": (f"{_ACTOR}checkpoint.save_contents", "save-hf", ""),
    "eval.interval": ("trainer.test_freq", "eval-interval", "eval_steps"),
    "eval.num_prompts": ("data.val_max_samples", "", ""),
    "eval.num_samples": (
        f"{_ROLLOUT}val_kwargs.n",
        "n-samples-per-eval-prompt",
        "num_generations_eval",
    ),
    "eval.temperature": (f"{_ROLLOUT}val_kwargs.temperature", "eval-temperature", ""),
    "logging.rollouts": ("trainer.rollout_data_dir", "save-debug-rollout-data", "log_completions"),
    "logging.trackers": ("trainer.logger", "use-wandb", "report_to"),
    "logging.project": ("trainer.project_name", "wandb-project", ""),
}

# What differs besides the name, and names that the table does not have.
_NOTES = {
    "generation_batch_size": "rollout.num_prompts (prompts, not completions)",
    "custom_reward_function": "reward.function=path/to/file.py:name",
    "custom_rm_path": "reward.function=path/to/file.py:name",
    "reward_funcs": "reward.function=path/to/file.py:name, or several in reward.functions",
    "reward_weights": "reward.functions={path/to/file.py:name: weight}",
    "ppo_mini_batch_size": "algorithm.num_minibatches (a count, not a size)",
    "filter_groups": "algorithm.dynamic_sampling",
    "overlong_buffer": "reward.overlong_tokens and reward.overlong_penalty",
    "overlong_buffer_cfg": "reward.overlong_tokens and reward.overlong_penalty",
    "clip_ratio": "algorithm.clip_low and algorithm.clip_high",
    "calculate_per_token_loss": "algorithm.aggregation=token_mean",
    "kl_loss_coef": "algorithm.kl_coef (with algorithm.kl_placement)",
    "kl_ctrl": "algorithm.kl_coef and algorithm.kl_placement=reward",
    "kl_coef": "algorithm.kl_coef",
    "rollout_is": "algorithm.rollout_is (with algorithm.tis_cap)",
    "enforce_eager": "rollout.cuda_graphs (the opposite)",
    # names of earlier versions, and a name that has another meaning there
    "drafter.path": "speculation.drafter",
    "model.drafter": "speculation.drafter",
    "optimizer.epsilon": "optimizer.eps",
}
# Last parts of dotted keys that say too little without the parts before them.
_VAGUE = ("name", "path", "len", "enable", "metric")


def our_name(key: str) -> str | None:
    """Return our name of the dotted `key`, in any section, with - or _; None if it is unknown."""
    key, known = key.replace("-", "_"), by_their_name()
    return known.get(key) or known.get(key.rpartition(".")[2])


@functools.cache
def by_their_name() -> dict[str, str]:
    """Return what to say of each of their names, by the whole key and by its last part, with _."""
    found: dict[str, str] = {}
    for ours, theirs in NAMES.items():
        for key in filter(None, theirs):
            whole = key.replace("-", "_")
            last = whole.rpartition(".")[2]
            found[whole] = ours
            if last not in _VAGUE:
                found.setdefault(last, ours)
    return found | _NOTES
