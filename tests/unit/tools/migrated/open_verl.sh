data.train_batch_size=$OPEN actor_rollout_ref.actor.ppo_mini_batch_size=64 trainer.total_training_steps=7
algorithm.use_kl_in_reward=True actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.02
