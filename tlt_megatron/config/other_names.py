"""Keys of verl, slime and TRL, and what they are called here. Unknown-key errors quote it."""

from __future__ import annotations

OURS = {
    # prompts and responses
    "train_files": "data.train",
    "prompt_data": "data.train",
    "val_files": "data.eval",
    "prompt_key": "data.input_key",
    "max_prompt_length": "data.max_prompt_tokens",
    "train_batch_size": "rollout.num_prompts",
    "rollout_batch_size": "rollout.num_prompts",
    "generation_batch_size": "rollout.num_prompts (prompts, not completions)",
    "n": "rollout.num_samples",
    "n_samples_per_prompt": "rollout.num_samples",
    "num_generations": "rollout.num_samples",
    "max_response_length": "rollout.max_new_tokens",
    "rollout_max_response_len": "rollout.max_new_tokens",
    "max_completion_length": "rollout.max_new_tokens",
    "custom_reward_function": "reward.function=path/to/file.py:name",
    "custom_rm_path": "reward.function=path/to/file.py:name",
    "reward_funcs": "reward.function=path/to/file.py:name, or several in reward.functions",
    "reward_weights": "reward.functions={path/to/file.py:name: weight}",
    # algorithm
    "adv_estimator": "algorithm.advantage",
    "advantage_estimator": "algorithm.advantage",
    "ppo_mini_batch_size": "algorithm.num_minibatches (a count, not a size)",
    "num_steps_per_rollout": "algorithm.num_minibatches",
    "steps_per_generation": "algorithm.num_minibatches",
    "ppo_epochs": "algorithm.num_epochs",
    "num_iterations": "algorithm.num_epochs",
    "clip_ratio": "algorithm.clip_low and algorithm.clip_high",
    "clip_ratio_low": "algorithm.clip_low",
    "eps_clip": "algorithm.clip_low",
    "epsilon": "algorithm.clip_low",
    "clip_ratio_high": "algorithm.clip_high",
    "eps_clip_high": "algorithm.clip_high",
    "epsilon_high": "algorithm.clip_high",
    "clip_ratio_c": "algorithm.dual_clip",
    "eps_clip_c": "algorithm.dual_clip",
    "delta": "algorithm.dual_clip",
    "loss_agg_mode": "algorithm.aggregation",
    "calculate_per_token_loss": "algorithm.aggregation=token_mean",
    "loss_type": "algorithm.aggregation",
    "kl_loss_coef": "algorithm.kl_coef (with algorithm.kl_placement)",
    "kl_ctrl": "algorithm.kl_coef and algorithm.kl_placement=reward",
    "beta": "algorithm.kl_coef",
    "kl_loss_type": "algorithm.kl_estimator",
    "entropy_coeff": "algorithm.entropy_coef",
    "rollout_is_threshold": "algorithm.tis_cap",
    "tis_clip": "algorithm.tis_cap",
    "vllm_importance_sampling_clip_max": "algorithm.tis_cap",
    # the run
    "ppo_max_token_len_per_gpu": "mcore.micro_batch_tokens",
    "max_tokens_per_gpu": "mcore.micro_batch_tokens",
    "total_training_steps": "run.num_steps",
    "num_rollout": "run.num_steps",
    "max_steps": "run.num_steps",
    "save_freq": "checkpoint.interval",
    "save_interval": "checkpoint.interval",
    "save_steps": "checkpoint.interval",
    "max_actor_ckpt_to_keep": "checkpoint.keep",
    "save_total_limit": "checkpoint.keep",
    "resume_mode": "checkpoint.resume",
    "resume_from_checkpoint": "checkpoint.resume",
    "load": "checkpoint.resume",
    "test_freq": "eval.interval",
    "eval_interval": "eval.interval",
    "rollout_data_dir": "logging.rollouts",
    "save_debug_rollout_data": "logging.rollouts",
    "log_completions": "logging.rollouts",
    # names of earlier versions, and a name that has another meaning there
    "drafter.path": "speculation.drafter",
    "model.drafter": "speculation.drafter",
    "optimizer.epsilon": "optimizer.eps",
}


def our_name(key: str) -> str | None:
    """Return our name of the dotted `key`, in any section, with - or _; None if it is unknown."""
    key = key.replace("-", "_")
    return OURS.get(key) or OURS.get(key.rpartition(".")[2])
