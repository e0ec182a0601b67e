"""`tlt migrate`: settings of verl and slime become ours, pass the checks, and what has no
counterpart is listed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tlt_megatron.config.load import load_config
from tools.migrate import main

VERL_SCRIPT = """#!/usr/bin/env bash
set -x
# GRPO on a cluster
folder=${MY_UNSET_FOLDER:-"${MY_UNSET_HOME:-/data}"}
train=$folder/dapo.parquet
length=$((1024 * (2 - 1)))
python3 -m verl.trainer.main_ppo --config-name ppo_trainer \\
    algorithm.adv_estimator=grpo \\
    algorithm.use_kl_in_reward=False \\
    data.train_files="['$train']" \\
    data.val_files=/data/aime.parquet \\
    data.train_batch_size=256 data.max_prompt_length=1024 data.max_response_length=$((length * 4)) \\
    actor_rollout_ref.model.path=${MY_UNSET_MODEL:-Qwen/Qwen3-8B} \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \\
    actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.actor.clip_ratio=0.2 \\
    actor_rollout_ref.actor.loss_agg_mode="token-mean" \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.n=8 \\
    actor_rollout_ref.rollout.top_k=-1 \\
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
data: {train_files: /data/train.parquet, train_batch_size: 64, max_prompt_length: 512}
algorithm:
  {adv_estimator: grpo, norm_adv_by_std_in_grpo: false, gamma: 1.0,
   rollout_correction: {rollout_is: null, rollout_rs: token_k3, rollout_token_veto_threshold: 1.0e-4}, filter_groups: {enable: false, metric: seq_reward}}
reward_model: {overlong_buffer: {enable: false, len: 512, penalty_factor: 1.0}}
actor_rollout_ref:
  model: {path: /models/policy}
  actor: {use_kl_loss: false, clip_ratio_c: 3.0, clip_ratio_low: 10, policy_loss: {loss_mode: cispo}, kl_loss_coef: 0.001, loss_agg_mode: seq-mean-token-sum, optim: {lr: 2.0e-6}}
  rollout: {name: vllm, n: 4, prompt_length: "${data.max_prompt_length}"}
trainer: {total_training_steps: 10, resume_mode: disable}
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
   --eval-prompt-data aime ${BASE}/aime-2024.jsonl
   --n-samples-per-eval-prompt 16
)
PERF_ARGS=(--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full --max-tokens-per-gpu 9216)
GRPO_ARGS=(--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --eps-clip 0.2 --eps-clip-high=0.28)
OPTIMIZER_ARGS=(--lr 1e-6 --adam-beta2 0.98)
ray stop --force
pkill -9 python
ray job submit --address="http://127.0.0.1:8265" -- python3 train.py --actor-num-nodes 1 \\
   --actor-num-gpus-per-node 4 --colocate ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]}
"""
VERL_OURS = """
model.path: Qwen/Qwen3-8B, data.train: /data/dapo.parquet, data.eval: /data/aime.parquet, data.max_prompt_tokens: 1024,
rollout.num_prompts: 256, rollout.num_samples: 8, rollout.max_new_tokens: 4096, rollout.top_k: 0, rollout.engine: sglang,
rollout.dtype: bfloat16, algorithm.num_minibatches: 4, algorithm.clip_low: 0.2, algorithm.clip_high: 0.28,
algorithm.kl_coef: 0.001, algorithm.kl_placement: loss, algorithm.aggregation: token_mean, parallel.tensor: 2,
algorithm.tis_cap: 3.0, algorithm.rollout_is: sequence, algorithm.rollout_rs: none, algorithm.dynamic_sampling: True,
algorithm.dynamic_sampling_metric: acc, reward.overlong_tokens: 512, reward.overlong_penalty: 0.5,
logging.trackers: ['wandb'], optimizer.lr: 1e-06, reward.function: reward.py:score, eval.interval: 0, checkpoint.interval: 20, run.num_steps: 400
"""
YAML_OURS = """
model.path: /models/policy, data.train: /data/train.parquet, rollout.num_prompts: 64, rollout.num_samples: 4,
algorithm.advantage: dr_grpo, algorithm.clip_low: 1.0, algorithm.loss: cispo, algorithm.tis_cap: 0.0,
reward.overlong_tokens: 0, algorithm.dynamic_sampling: False, algorithm.dynamic_sampling_metric: reward, algorithm.kl_coef: 0.0, optimizer.lr: 2e-06, checkpoint.resume: never
"""
SLIME_OURS = """
model.path: /data/Qwen3-4B, data.train: /data/dapo-math-17k.jsonl, data.label_key: label, reward.function: math,
run.num_steps: 3000, rollout.num_prompts: 32, rollout.num_samples: 8, rollout.max_new_tokens: 8192,
rollout.temperature: 0.8, algorithm.num_minibatches: 2, algorithm.clip_high: 0.28, algorithm.kl_coef: 0.0,
algorithm.aggregation: sequence_mean, data.eval: /data/aime-2024.jsonl, eval.interval: 20, eval.num_samples: 16,
parallel.tensor: 2, mcore.recompute: full, mcore.micro_batch_tokens: 9216,
optimizer.lr: 1e-06, optimizer.beta2: 0.98, checkpoint.interval: 20
"""


@pytest.mark.parametrize(
    ("name", "source", "expected", "ranks", "listed"),
    [
        (
            "run.sh",
            VERL_SCRIPT,
            VERL_OURS,
            "8 --nnodes 2",
            (
                "actor_rollout_ref.rollout.calculate_log_probs: True",
                "trainer.default_local_dir: '$MY_UNSET_FOLDER/out'",
                "algorithm.rollout_correction.bypass_mode: True",
                "algorithm.rollout_correction.rollout_rs: 'seq_mean_k1'; see algorithm.rollout_rs",
                "rollout_rs_threshold: '0.99_1.001'; see algorithm.rollout_rs_threshold (there lower_upper",
            ),
        ),
        (
            "ppo.yaml",
            VERL_YAML,
            YAML_OURS,
            "N",
            (
                "algorithm.rollout_correction.rollout_rs: 'token_k3'; see algorithm.rollout_rs",
                "algorithm.rollout_correction.rollout_token_veto_threshold: 0.0001",
                "loss_agg_mode: 'seq-mean-token-sum'",
                "rollout.name: 'vllm'",
                "rollout.prompt_length: '${data.max_prompt_length}'",
            ),
        ),
        (
            "slime.sh",
            SLIME_SCRIPT,
            SLIME_OURS,
            "4",
            (
                "balance_data: True",
                "load: '/data/Qwen3-4B_slime/'; see checkpoint.resume (here auto, never or a folder)",
                "force: True",  # without the words of the next line
            ),
        ),
    ],
)
def test_a_run_of_theirs_becomes_one_of_ours(
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    name: str,
    source: str,
    expected: str,
    ranks: str,
    listed: tuple[str, ...],
) -> None:
    (tmp_path / name).write_text(source)
    out = tmp_path / "ours.yaml"
    assert main([str(tmp_path / name), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    config = load_config(out)
    for item in expected.replace("\n", " ").split(","):
        key, _, value = item.strip().partition(": ")
        section, field = key.split(".")
        assert str(getattr(getattr(config, section), field)) == value, key
    for line in listed:
        assert line in printed
        assert line in out.read_text()
    assert printed.endswith(f"tlt train {out} --nproc-per-node {ranks}\n")


@pytest.mark.parametrize(
    ("source", "listed"),
    [
        (
            "data.train_batch_size=$MY_UNSET_SIZE actor_rollout_ref.actor.ppo_mini_batch_size=64",
            "actor_rollout_ref.actor.ppo_mini_batch_size: 64",
        ),
        (
            "--rollout-batch-size $MY_UNSET_SIZE --n-samples-per-prompt $MY_UNSET_SIZE --global-batch-size 8",
            "global_batch_size: 8",
        ),
        (
            "--n-samples-per-prompt 8 --use-kl-loss --kl-loss-coef 0.01 --seed $MY_UNSET_SIZE",
            "kl_loss_type: 'k1'",
        ),
        (
            "algorithm.use_kl_in_reward=True actor_rollout_ref.actor.use_kl_loss=True"
            " actor_rollout_ref.actor.kl_loss_coef=0.02 trainer.seed=$MY_UNSET_SIZE",
            "actor_rollout_ref.actor.kl_loss_coef: 0.02",
        ),
        (
            "actor_rollout_ref.actor.ppo_mini_batch_size='64' trainer.nnodes=$MY_UNSET_SIZE trainer.seed=$MY_UNSET_SIZE",
            "trainer.seed: '$MY_UNSET_SIZE'",
        ),
        (
            "actor_rollout_ref.actor.ppo_mini_batch_size=many data.seed=$MY_UNSET_SIZE",
            "actor_rollout_ref.actor.ppo_mini_batch_size: 'many'",
        ),
        (
            "--n-samples-per-prompt 8 --eval-prompt-data aime a.jsonl gpqa --lr $((1 / MY_UNSET_SIZE)) --seed $MY_UNSET_SIZE",
            "eval_prompt_data: ['aime', 'a.jsonl', 'gpqa']",
        ),
        (
            "none=0\n--n-samples-per-prompt 8 --lr $((1 / none)) --eval-prompt-data $((1 + 08)) --seed $MY_UNSET_SIZE",
            "lr: '$[1/0]'",
        ),
    ],
)
def test_what_the_script_leaves_open_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture, source: str, listed: str
) -> None:
    assert main([str(_written(tmp_path, source)), "--out", str(tmp_path / "ours.yaml")]) == 0
    printed = capsys.readouterr().out
    assert listed in printed
    assert "'$MY_UNSET_SIZE'" in printed


def _written(folder: Path, source: str) -> Path:
    """Write a script that says how many steps it runs, unless `source` does."""
    if "total_epochs" not in source and "num-epoch" not in source:
        is_slime = source.lstrip().startswith("--")
        source += " --num-rollout 7" if is_slime else "\ntrainer.total_training_steps=7"
    (folder / "run.sh").write_text(source)
    return folder / "run.sh"


CORRECTION = "algorithm.rollout_correction."
TRANSFORMER = "actor_rollout_ref.actor.megatron.override_transformer_config."


@pytest.mark.parametrize(
    ("source", "ours"),
    [
        (  # a variable that holds several settings
            'n=16\nROLLOUT="\n  actor_rollout_ref.rollout.name=sglang \\\n  actor_rollout_ref.rollout.n=$n"\n'
            "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo $ROLLOUT data.seed=3",
            {"rollout": {"num_samples": 16}, "run": {"seed": 3}},
        ),
        (
            f"+actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=fa3"
            f" {TRANSFORMER}recompute_granularity=full {TRANSFORMER}recompute_num_layers=1",
            {
                "sglang": {"engine_args": {"attention_backend": "fa3"}},
                "mcore": {"recompute": "full", "transformer": {"recompute_num_layers": 1}},
            },
        ),
        (  # of the engine that a migrated run has
            "actor_rollout_ref.rollout.enforce_eager=True",
            {"sglang": {"engine_args": {"disable_cuda_graph": True}}},
        ),
        (
            "--sglang-disable-cuda-graph --n-samples-per-prompt 8",
            {"sglang": {"engine_args": {"disable_cuda_graph": True}}},
        ),
        (  # kl_loss_type is of the loss; kl_penalty is kl by default, the coefficient 0.001
            "algorithm.use_kl_in_reward=True actor_rollout_ref.actor.kl_loss_type=low_var_kl",
            {"algorithm": {"kl_placement": "reward", "kl_coef": 0.001, "used_kl_estimator": "k1"}},
        ),
        (
            "algorithm.kl_penalty=mse algorithm.kl_ctrl.kl_coef=0.1 algorithm.use_kl_in_reward=True",
            {"algorithm": {"kl_placement": "reward", "kl_coef": 0.1, "used_kl_estimator": "k2"}},
        ),
        (
            "algorithm.kl_penalty=mse actor_rollout_ref.actor.use_kl_loss=True",
            {"algorithm": {"kl_placement": "loss", "kl_coef": 0.001, "used_kl_estimator": "k3"}},
        ),
        (
            "data.shuffle=False",  # what it leaves out are verl's defaults
            {
                "algorithm": {"advantage": "gae", "dual_clip": 3.0, "num_minibatches": 4},
                "data": {"max_prompt_tokens": 512, "shuffle": False},
                "eval": {"temperature": 0.0},
                "optimizer": {"beta2": 0.999},
                "rollout": {"num_prompts": 1024, "num_samples": 1},
            },
        ),
        (
            "algorithm.adv_estimator=reinforce_plus_plus actor_rollout_ref.actor.ppo_mini_batch_size=128"
            " algorithm.gamma=0.99 algorithm.lam=0.9",
            {
                "algorithm": {"num_minibatches": 8, "gamma": 0.99, "lam": 1.0},
                "rollout": {"num_samples": 1},
            },
        ),
        (
            "--rollout-batch-size 128 --global-batch-size 32 --advantage-estimator reinforce_plus_plus",
            {
                "algorithm": {"num_minibatches": 4},
                "data": {"shuffle": False},
                "rollout": {"num_samples": 1},
            },
        ),
        (
            "--n-samples-per-prompt 8 --use-tis --rollout-temperature 0.6",
            {"algorithm": {"tis_cap": 2.0}, "eval": {"temperature": 0.6}},
        ),
        (
            "--n-samples-per-prompt 8 --tis-clip 3 --rollout-temperature 0.6 --eval-temperature 0.9",
            {"algorithm": {"tis_cap": 0.0}, "eval": {"temperature": 0.9}},
        ),
        (  # until verl 0.7.0
            f"{CORRECTION}rollout_is=token {CORRECTION}rollout_rs=token {CORRECTION}rollout_rs_threshold=3"
            f" {CORRECTION}rollout_rs_threshold_lower=0.25",
            {"algorithm": {"rollout_rs_threshold": 3.0, "rollout_rs_threshold_lower": 0.25}},
        ),
        (
            "--advantage-estimator cispo --n-samples-per-prompt 8 --rollout-seed 7 --attention-softmax-in-fp32"
            " --use-wandb --wandb-project math",
            {
                "algorithm": {"loss": "cispo", "aggregation": "sequence_mean"},
                "data": {"input_key": "input"},
                "logging": {"trackers": ["wandb"], "project": "math"},
                "mcore": {"transformer": {"attention_softmax_in_fp32": True}},
                "run": {"seed": 7},
            },
        ),
    ],
)
def test_a_setting_or_its_absence_there_is_set_here(
    tmp_path: Path, source: str, ours: dict[str, dict[str, object]]
) -> None:
    assert main([str(_written(tmp_path, source)), "--out", str(tmp_path / "ours.yaml")]) == 0
    config = load_config(tmp_path / "ours.yaml")
    found = {s: {key: getattr(getattr(config, s), key) for key in keys} for s, keys in ours.items()}
    assert found == ours


@pytest.mark.parametrize(
    "source",
    [
        "data.val_files=[a.jsonl,b.parquet]",
        "--n-samples-per-prompt 8 --eval-prompt-data aime a.jsonl gpqa b.parquet",
    ],
)
def test_several_files_to_evaluate_on_stay_several(tmp_path: Path, source: str) -> None:
    assert main([str(_written(tmp_path, source)), "--out", str(tmp_path / "ours.yaml")]) == 0
    assert load_config(tmp_path / "ours.yaml").data.eval == ["a.jsonl", "b.parquet"]


@pytest.mark.parametrize(
    "source",
    [
        "trainer.nnodes=1 critic.model.path=rm critic.optim.lr=2e-5 algorithm.lam=0.9 trainer.critic_warmup=3",
        "--advantage-estimator ppo --critic-lr 2e-5 --lambd 0.9 --num-critic-only-steps 3",
    ],
)
def test_ppo_has_a_critic_and_the_others_leave_its_settings_out(
    tmp_path: Path, source: str
) -> None:
    """gae is verl's default."""
    assert main([str(_written(tmp_path, source)), "--out", str(tmp_path / "ppo.yaml")]) == 0
    config = load_config(tmp_path / "ppo.yaml")
    assert (config.algorithm.advantage, config.algorithm.lam) == ("gae", 0.9)
    assert config.critic.path == ("rm" if "path=rm" in source else "")
    assert (config.critic.lr, config.critic.warmup_steps) == (2e-5, 3)
    source = "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 critic.optim.lr=2e-5"
    assert main([str(_written(tmp_path, source)), "--out", str(tmp_path / "grpo.yaml")]) == 0
    assert "critic" not in (tmp_path / "grpo.yaml").read_text()
