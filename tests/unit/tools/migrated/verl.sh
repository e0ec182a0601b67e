#!/usr/bin/env bash
set -x
# GRPO on a cluster
folder=${MY_UNSET_FOLDER:-"${MY_UNSET_HOME:-/data}"}
train=$folder/dapo.parquet
length=$((1024 * (2 - 1)))
n=8
ROLLOUT="
  actor_rollout_ref.rollout.name=sglang \
  actor_rollout_ref.rollout.n=$n"
python3 -m verl.trainer.main_ppo --config-name ppo_trainer \
    algorithm.adv_estimator=grpo \
    algorithm.use_kl_in_reward=False \
    data.train_files="['$train']" \
    data.val_files=/data/aime.parquet \
    data.train_batch_size=256 data.max_prompt_length=1024 data.max_response_length=$((length * 4)) \
    actor_rollout_ref.model.path=${MY_UNSET_MODEL:-Qwen/Qwen3-8B} \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size='64' \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.clip_ratio=0.2 \
    actor_rollout_ref.actor.loss_agg_mode="token-mean" \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
    actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \
    actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1 \
    $ROLLOUT actor_rollout_ref.rollout.top_k=-1 actor_rollout_ref.rollout.enforce_eager=True \
    +actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=fa3 critic.optim.lr=2e-5 \
    trainer.default_local_dir=$MY_UNSET_FOLDER/out \
    +actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    custom_reward_function.path=reward.py custom_reward_function.name=score \
    algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc \
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True \
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=$((length / 2)) \
    +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5 \
    algorithm.rollout_correction.rollout_is=sequence algorithm.rollout_correction.rollout_is_threshold=3.0 \
    algorithm.rollout_correction.rollout_rs=seq_mean_k1 \
    algorithm.rollout_correction.rollout_rs_threshold="0.99_1.001" \
    algorithm.rollout_correction.bypass_mode=True \
    actor_rollout_ref.actor.policy_loss.loss_mode=vanilla \
    trainer.n_gpus_per_node=8 trainer.nnodes=2 \
    actor_rollout_ref.rollout.calculate_log_probs=True \
    trainer.logger='["console","wandb"]' \
    trainer.test_freq=-1 trainer.save_freq=20 trainer.total_training_steps=400 $@
