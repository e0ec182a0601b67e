"""`tlt migrate`: settings of verl and slime become ours, pass the checks, and what has no
counterpart is listed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tlt_megatron.config.load import load_config
from tools.migrate import main


class Migrated(NamedTuple):
    """What a migration wrote and said."""

    code: int
    out: Path
    printed: str
    error: str

    def check(self, expected: str) -> None:
        """The config has these settings, written as `a.b=value ...`."""
        assert self.code == 0, self.error
        config = load_config(self.out)
        for item in expected.split():
            key, _, value = item.partition("=")
            section, field = key.split(".")
            assert str(getattr(getattr(config, section), field)).replace(" ", "") == value, key


Migrate = Callable[..., Migrated]


@pytest.fixture
def migrate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Migrate:
    """Migrate a script or a YAML. One that says nothing of its length runs 7 steps."""

    def run(source: str, name: str = "run.sh", *, steps: int | None = 7) -> Migrated:
        if steps and not any(word in source for word in ("total_training_steps", "num-rollout")):
            flag = "--num-rollout " if "\n--" in f"\n{source}" else "trainer.total_training_steps="
            source += f"\n{flag}{steps}"
        (tmp_path / name).write_text(source)
        out = tmp_path / "ours.yaml"
        out.unlink(missing_ok=True)
        code = main([str(tmp_path / name), "--out", str(out)])
        return Migrated(code, out, *capsys.readouterr())

    return run


VERL_SCRIPT = """#!/usr/bin/env bash
set -x
# GRPO on a cluster
folder=${MY_UNSET_FOLDER:-"${MY_UNSET_HOME:-/data}"}
train=$folder/dapo.parquet
length=$((1024 * (2 - 1)))
n=8
ROLLOUT="
  actor_rollout_ref.rollout.name=sglang \\
  actor_rollout_ref.rollout.n=$n"
python3 -m verl.trainer.main_ppo --config-name ppo_trainer \\
    algorithm.adv_estimator=grpo \\
    algorithm.use_kl_in_reward=False \\
    data.train_files="['$train']" \\
    data.val_files=/data/aime.parquet \\
    data.train_batch_size=256 data.max_prompt_length=1024 data.max_response_length=$((length * 4)) \\
    actor_rollout_ref.model.path=${MY_UNSET_MODEL:-Qwen/Qwen3-8B} \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size='64' \\
    actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.actor.clip_ratio=0.2 \\
    actor_rollout_ref.actor.loss_agg_mode="token-mean" \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \\
    actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \\
    actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1 \\
    $ROLLOUT actor_rollout_ref.rollout.top_k=-1 actor_rollout_ref.rollout.enforce_eager=True \\
    +actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=fa3 critic.optim.lr=2e-5 \\
    trainer.default_local_dir=$MY_UNSET_FOLDER/out \\
    +actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    custom_reward_function.path=reward.py custom_reward_function.name=score \\
    algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=$((length / 2)) \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5 \\
    algorithm.rollout_correction.rollout_is=sequence algorithm.rollout_correction.rollout_is_threshold=3.0 \\
    algorithm.rollout_correction.rollout_rs=seq_mean_k1 \\
    algorithm.rollout_correction.rollout_rs_threshold="0.99_1.001" \\
    algorithm.rollout_correction.bypass_mode=True \\
    actor_rollout_ref.actor.policy_loss.loss_mode=vanilla \\
    trainer.n_gpus_per_node=8 trainer.nnodes=2 \\
    actor_rollout_ref.rollout.calculate_log_probs=True \\
    trainer.logger='["console","wandb"]' \\
    trainer.test_freq=-1 trainer.save_freq=20 trainer.total_training_steps=400 $@
"""
VERL_YAML = """
data: {train_files: /data/train.parquet, val_files: [a.jsonl, b.parquet], train_batch_size: 64, max_prompt_length: 512}
algorithm:
  {adv_estimator: grpo, norm_adv_by_std_in_grpo: false, gamma: 1.0,
   rollout_correction: {rollout_is: null, rollout_rs: token_k3, rollout_token_veto_threshold: 1.0e-4}, filter_groups: {enable: false, metric: seq_reward}}
reward_model: {overlong_buffer: {enable: false, len: 512, penalty_factor: 1.0}}
actor_rollout_ref:
  model: {path: /models/policy}
  actor: {use_kl_loss: false, clip_ratio_c: 3.0, clip_ratio_low: 10, policy_loss: {loss_mode: cispo}, kl_loss_coef: 0.001,
    loss_agg_mode: seq-mean-token-sum, optim: {lr: 2.0e-6, betas: 0.9}, tis_imp_ratio_cap: none, ppo_mini_batch_size: many}
  rollout: {name: vllm, n: 4, prompt_length: "${data.max_prompt_length}",
    multi_turn: {enable: true, interaction_config_path: a.yaml}}
trainer: {total_training_steps: 10, resume_mode: disable, save_freq: after_each_epoch}
"""
SLIME_SCRIPT = """#!/bin/bash
pkill -9 sglang
source "${SCRIPT_DIR}/models/qwen3-4B.sh"
BASE=/data
CKPT_ARGS=(
   --hf-checkpoint ${BASE}/Qwen3-4B
   --load ${BASE}/Qwen3-4B_slime/
   --save-interval 20
)
ROLLOUT_ARGS=(
   --prompt-data $BASE/dapo-math-17k.jsonl
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rm-type deepscaler
   --num-rollout 3000
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --rollout-temperature 0.8

   --global-batch-size 128
   --balance-data
)
EVAL_ARGS=(
   --eval-interval 20
   --eval-prompt-data aime ${BASE}/aime-2024.jsonl gpqa b.parquet
   --n-samples-per-eval-prompt 16
)
PERF_ARGS=(--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full --max-tokens-per-gpu 9216 --sglang-disable-cuda-graph)
GRPO_ARGS=(--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --eps-clip 0.2 --eps-clip-high=0.28)
OPTIMIZER_ARGS=(--lr 1e-6 --adam-beta2 0.98)
ray stop --force
pkill -9 python
ray job submit --address="http://127.0.0.1:8265" -- python3 train.py --actor-num-nodes 1 \\
   --actor-num-gpus-per-node 4 --colocate ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]}
"""
# A script that leaves values open, and values without a counterpart.
OPEN_VERL = """
data.train_batch_size=$OPEN actor_rollout_ref.actor.ppo_mini_batch_size=64 trainer.total_training_steps=7
algorithm.use_kl_in_reward=True actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.02
"""
OPEN_SLIME = """
none=0
--rollout-batch-size $OPEN --n-samples-per-prompt $OPEN --global-batch-size 8 --num-rollout 7 --seed $((1 + 08))
--use-kl-loss --kl-loss-coef 0.01 --lr $((1 / none)) --eval-prompt-data aime a.jsonl gpqa
"""
VERL_OURS = """
model.path=Qwen/Qwen3-8B data.train=/data/dapo.parquet data.eval=/data/aime.parquet data.max_prompt_tokens=1024
rollout.num_prompts=256 rollout.num_samples=8 rollout.max_new_tokens=4096 rollout.top_k=0 rollout.engine=sglang
rollout.dtype=bfloat16 algorithm.num_minibatches=4 algorithm.clip_low=0.2 algorithm.clip_high=0.28
algorithm.kl_coef=0.001 algorithm.kl_placement=loss algorithm.aggregation=token_mean parallel.tensor=2
algorithm.tis_cap=3.0 algorithm.rollout_is=sequence algorithm.rollout_rs=none algorithm.dynamic_sampling=True
algorithm.dynamic_sampling_metric=acc reward.overlong_tokens=512 reward.overlong_penalty=0.5
logging.trackers=['wandb'] optimizer.lr=1e-06 reward.function=reward.py:score eval.interval=0 checkpoint.interval=20
run.num_steps=400 mcore.recompute=full mcore.transformer={'recompute_num_layers':1} critic.lr=1e-05
sglang.engine_args={'disable_cuda_graph':True,'attention_backend':'fa3','tp_size':2}
"""
YAML_OURS = """
model.path=/models/policy data.train=/data/train.parquet rollout.num_prompts=64 rollout.num_samples=4
algorithm.advantage=dr_grpo algorithm.clip_low=1.0 algorithm.loss=cispo algorithm.tis_cap=0.0 reward.overlong_tokens=0
algorithm.dynamic_sampling=False algorithm.dynamic_sampling_metric=reward algorithm.kl_coef=0.0 optimizer.lr=2e-06
checkpoint.resume=never data.eval=['a.jsonl','b.parquet']
"""
SLIME_OURS = """
model.path=/data/Qwen3-4B data.train=/data/dapo-math-17k.jsonl data.label_key=label reward.function=math
run.num_steps=3000 rollout.num_prompts=32 rollout.num_samples=8 rollout.max_new_tokens=8192 rollout.temperature=0.8
algorithm.num_minibatches=2 algorithm.clip_high=0.28 algorithm.kl_coef=0.0 algorithm.aggregation=sequence_mean
data.eval=['/data/aime-2024.jsonl','b.parquet'] eval.interval=20 eval.num_samples=16 parallel.tensor=2 mcore.recompute=full
mcore.micro_batch_tokens=9216 optimizer.lr=1e-06 optimizer.beta2=0.98 checkpoint.interval=20
sglang.engine_args={'disable_cuda_graph':True}
"""


VERL_LISTED = (
    "actor_rollout_ref.rollout.calculate_log_probs: True",
    "trainer.default_local_dir: '$MY_UNSET_FOLDER/out'",
    "algorithm.rollout_correction.bypass_mode: True",
    "algorithm.rollout_correction.rollout_rs: 'seq_mean_k1'; see algorithm.rollout_rs",
    "rollout_rs_threshold: '0.99_1.001'; see algorithm.rollout_rs_threshold (there lower_upper",
)
YAML_LISTED = (
    "algorithm.rollout_correction.rollout_rs: 'token_k3'; see algorithm.rollout_rs",
    "algorithm.rollout_correction.rollout_token_veto_threshold: 0.0001",
    "loss_agg_mode: 'seq-mean-token-sum'",
    "rollout.name: 'vllm'",
    "rollout.prompt_length: '${data.max_prompt_length}'",
    "actor.ppo_mini_batch_size: 'many'",
    "trainer.save_freq: 'after_each_epoch'",
    "actor.optim.betas: 0.9",
    "actor.tis_imp_ratio_cap: 'none'",
    "multi_turn.enable: True; see rollout.environment (here empty for one turn)",
    "multi_turn.interaction_config_path: 'a.yaml'; see rollout.environment (path/to/file.py:name)",
)
SLIME_LISTED = (
    "balance_data: True",
    "load: '/data/Qwen3-4B_slime/'; see checkpoint.resume (here auto, never or a folder)",
    "force: True",  # without the words of the next line
)
OPEN_VERL_LISTED = ("train_batch_size: '$OPEN'", "ppo_mini_batch_size: 64", "kl_loss_coef: 0.02")
OPEN_SLIME_LISTED = (
    "rollout_batch_size: '$OPEN'",
    "global_batch_size: 8",
    "kl_loss_type: 'k1'",
    "lr: '$[1/0]'",
    "seed: '$[1+08]'",
    "eval_prompt_data: ['aime', 'a.jsonl', 'gpqa']",
)


@pytest.mark.parametrize(
    ("name", "source", "expected", "ranks", "listed"),
    [
        ("run.sh", VERL_SCRIPT, VERL_OURS, "8 --nnodes 2", VERL_LISTED),
        ("ppo.yaml", VERL_YAML, YAML_OURS, "N", YAML_LISTED),
        ("slime.sh", SLIME_SCRIPT, SLIME_OURS, "4", SLIME_LISTED),
        ("open.sh", OPEN_VERL, "run.num_steps=7", "N", OPEN_VERL_LISTED),
        ("open_slime.sh", OPEN_SLIME, "run.num_steps=7", "N", OPEN_SLIME_LISTED),
    ],
)
def test_a_run_of_theirs_becomes_one_of_ours(
    migrate: Migrate, name: str, source: str, expected: str, ranks: str, listed: tuple[str, ...]
) -> None:
    found = migrate(source, name)
    found.check(expected)
    for line in listed:
        assert line in found.printed
        assert line in found.out.read_text()
    assert found.printed.endswith(f"tlt train {found.out} --nproc-per-node {ranks}\n")


ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."


CORRECTION = "algorithm.rollout_correction."


@pytest.mark.parametrize(
    ("source", "ours"),
    [
        # kl_loss_type is of the loss; kl_penalty is kl by default, the coefficient 0.001
        (
            f"algorithm.use_kl_in_reward=True {ACTOR}kl_loss_type=low_var_kl",
            "algorithm.kl_placement=reward algorithm.kl_coef=0.001 algorithm.used_kl_estimator=k1",
        ),
        (
            "algorithm.kl_penalty=mse algorithm.kl_ctrl.kl_coef=0.1 algorithm.use_kl_in_reward=True",
            "algorithm.kl_placement=reward algorithm.kl_coef=0.1 algorithm.used_kl_estimator=k2",
        ),
        (
            f"algorithm.kl_penalty=mse {ACTOR}use_kl_loss=True",
            "algorithm.kl_placement=loss algorithm.kl_coef=0.001 algorithm.used_kl_estimator=k3",
        ),
        (  # what it leaves out are verl's defaults
            "data.shuffle=False",
            "algorithm.advantage=gae algorithm.dual_clip=3.0 algorithm.num_minibatches=4 data.max_prompt_tokens=512"
            " data.shuffle=False eval.temperature=0.0 optimizer.beta2=0.999 rollout.num_prompts=1024 rollout.num_samples=1",
        ),
        (
            f"algorithm.adv_estimator=reinforce_plus_plus {ACTOR}ppo_mini_batch_size=128"
            " algorithm.gamma=0.99 algorithm.lam=0.9",
            "algorithm.num_minibatches=8 algorithm.gamma=0.99 algorithm.lam=1.0 rollout.num_samples=1",
        ),
        (
            "--rollout-batch-size 128 --global-batch-size 32 --advantage-estimator reinforce_plus_plus",
            "algorithm.num_minibatches=4 data.shuffle=False rollout.num_samples=1",
        ),
        ("--use-tis --rollout-temperature 0.6 --n-samples-per-prompt 8", "algorithm.tis_cap=2.0 eval.temperature=0.6"),
        (
            "--tis-clip 3 --rollout-temperature 0.6 --eval-temperature 0.9 --n-samples-per-prompt 8",
            "algorithm.tis_cap=0.0 eval.temperature=0.9",
        ),
        (  # until verl 0.7.0
            f"{CORRECTION}rollout_is=token {CORRECTION}rollout_rs=token {CORRECTION}rollout_rs_threshold=3"
            f" {CORRECTION}rollout_rs_threshold_lower=0.25",
            "algorithm.rollout_rs_threshold=3.0 algorithm.rollout_rs_threshold_lower=0.25",
        ),
        (
            "--advantage-estimator cispo --n-samples-per-prompt 8 --rollout-seed 7 --attention-softmax-in-fp32"
            " --use-wandb --wandb-project math",
            "algorithm.loss=cispo algorithm.aggregation=sequence_mean data.input_key=input logging.project=math"
            " logging.trackers=['wandb'] mcore.transformer={'attention_softmax_in_fp32':True} run.seed=7",
        ),
        (  # gae is verl's default
            "trainer.nnodes=1 critic.model.path=rm critic.optim.lr=2e-5 algorithm.lam=0.9 trainer.critic_warmup=3",
            "algorithm.advantage=gae algorithm.lam=0.9 critic.path=rm critic.lr=2e-05 critic.warmup_steps=3",
        ),
        (
            "--advantage-estimator ppo --critic-lr 2e-5 --lambd 0.9 --num-critic-only-steps 3",
            "algorithm.advantage=gae algorithm.lam=0.9 critic.path= critic.lr=2e-05 critic.warmup_steps=3",
        ),
    ],
)  # fmt: skip
def test_a_setting_or_its_absence_there_is_set_here(
    migrate: Migrate, source: str, ours: str
) -> None:
    migrate(source).check(ours)


@pytest.mark.parametrize(
    ("source", "refused"),
    [
        ("algorithm.adv_estimator=remax", "algorithm.advantage='remax': must be one of grpo,"),
        ("algorithm.adv_estimator=$OPEN", "algorithm.advantage='$OPEN': must be"),
        ("--advantage-estimator opo", "algorithm.advantage='opo': must be one of grpo,"),
        (
            f"algorithm.adv_estimator=grpo {ROLLOUT}n=8 {ACTOR}policy_loss.loss_mode=clip_cov",
            "algorithm.loss='clip_cov': must be one of ppo,",
        ),
        ("trainer.total_epochs=15", "run.num_steps=None: must be int"),
        ("--n-samples-per-prompt 8 --num-epoch 3", "run.num_steps=None: must be int"),
        (f"{ROLLOUT}n=0", "rollout.num_samples=0"),
    ],
)
def test_what_would_train_otherwise_is_left_to_the_user(
    migrate: Migrate, source: str, refused: str
) -> None:
    """No default takes the place of an unknown estimator or loss, or of a number of epochs.

    The config is written, and what does not pass the checks is named.
    """
    found = migrate(source, steps=None)
    assert found.code == 2
    assert f"to be changed before a run: {refused}" in found.error
    assert "epoch" not in source or "see run.num_steps (there epochs" in found.out.read_text()


def test_a_file_that_exists_or_holds_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("trainer: {x: 1}\n")
    with pytest.raises(ValueError, match="exists already"):
        main([str(tmp_path / "a.yaml"), "--out", str(tmp_path / "a.yaml")])
    (tmp_path / "empty.yaml").touch()
    with pytest.raises(ValueError, match=r"empty.yaml: holds no settings of verl or slime"):
        main([str(tmp_path / "empty.yaml"), "--out", str(tmp_path / "other.yaml")])
