"""`tlt migrate`: settings of verl and slime become ours, pass the checks, and what has no
counterpart is listed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tlt_megatron.config.load import load_config
from tools.commands.migrate import main

THEIRS = Path(__file__).with_name("migrated")


class Migrated(NamedTuple):
    """What a migration wrote and said."""

    code: int
    out: Path
    printed: str
    error: str

    def check(self, expected: str) -> None:
        """Check that the config has these settings, written as `a.b=value ...`."""
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


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("verl.sh", "8 --nnodes 2 --node-rank 0 --master-addr $(hostname)"),
        ("verl.yaml", "8"),
        ("slime.sh", "4"),
        ("open_verl.sh", "8"),  # a script that leaves values open, and values without a counterpart
        ("open_slime.sh", "8"),
    ],
)
def test_a_run_of_theirs_becomes_one_of_ours(migrate: Migrate, name: str, ranks: str) -> None:
    """`NAME.expected` holds our settings, and below a line their settings that are listed."""
    found = migrate((THEIRS / name).read_text(), name)
    expected, listed = (THEIRS / f"{name}.expected").read_text().split("# Not taken over:\n")
    found.check(expected)
    for line in listed.splitlines():
        assert line in found.printed
        assert line in found.out.read_text()
    command = found.printed.splitlines()[-1].partition("   #")[0]
    assert command.endswith(f"tlt train {found.out} --nproc-per-node {ranks}")


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
            " data.shuffle=False eval.temperature=0.0 optimizer.betas=[0.9,0.999] rollout.num_prompts=1024 rollout.num_samples=1",
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
            "algorithm.rollout_rs_threshold=[0.25,3.0]",
        ),
        (
            "--advantage-estimator cispo --n-samples-per-prompt 8 --rollout-seed 7 --attention-softmax-in-fp32"
            " --use-wandb --wandb-project math",
            "algorithm.loss=cispo algorithm.aggregation=sequence_mean data.input_key=input logging.project=math"
            " logging.trackers=['wandb'] mcore.transformer={'attention_softmax_in_fp32':True} run.seed=7",
        ),
        # their limits are of a GPU, ours of all that share the tokens of a sequence
        (
            f"{ACTOR}ppo_max_token_len_per_gpu=1000 {ACTOR}megatron.context_parallel_size=2",
            "mcore.micro_batch_tokens=2000 parallel.context=2",
        ),
        (
            f"{ACTOR}ppo_max_token_len_per_gpu=1000 {ACTOR}ulysses_sequence_parallel_size=4",
            "mcore.micro_batch_tokens=4000 parallel.context=4",
        ),
        (
            "--max-tokens-per-gpu 1000 --context-parallel-size 8 --n-samples-per-prompt 8"
            " --recompute-granularity selective --recompute-modules mlp --fp8-format hybrid",
            "mcore.micro_batch_tokens=8000 parallel.context=8 mcore.recompute=selective"
            " mcore.transformer={'recompute_modules':['mlp'],'fp8':'hybrid'}",
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
        (
            "trainer.total_epochs=15",
            "run.num_steps: set the number of RL steps",
        ),
        (
            "--n-samples-per-prompt 8 --num-epoch 3",
            "run.num_steps: set the number of RL steps",
        ),
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


@pytest.mark.parametrize(
    ("source", "ours", "said"),
    [
        (
            "data.train_files=/d/gsm8k/train.parquet",
            "reward.function=exact",
            "): gsm8k: the text after ####",
        ),
        (
            "data.train_files=/d/dapo-math-17k.parquet reward_model.overlong_buffer.enable=True"
            " reward_model.overlong_buffer.len=4 reward_model.overlong_buffer.penalty_factor=1.0",
            "reward.function=math reward.overlong_penalty=0.5",
            "gives 1 and -1, here math gives 1 and 0: overlong_penalty 1 is halved",
        ),
        (
            "data.train_files=/d/my.parquet",
            "reward.function=math",
            "not known from data.train_files",
        ),
    ],
)
def test_the_scorer_that_verl_chooses_is_mapped_or_named(
    migrate: Migrate, source: str, ours: str, said: str
) -> None:
    found = migrate(f"{source} {ROLLOUT}n=8")
    found.check(ours)
    assert said in found.printed
    assert said in found.out.read_text()


def test_what_is_so_here_by_default_is_not_listed(migrate: Migrate) -> None:
    """The settings of verl's own examples that need nothing here, and the options of `ray`."""
    same = (
        "data.filter_overlong_prompts=True data.truncation=error trainer.val_before_train=True"
        f" actor_rollout_ref.model.use_remove_padding=True {ACTOR}use_dynamic_bsz=True"
        f" {ROLLOUT}enable_chunked_prefill=True reward_model.reward_manager=dapo"
    )
    launcher = 'ray job submit --no-wait --runtime-env="$E" -- python3 -m verl.trainer.main_ppo'
    found = migrate(f"{launcher} {ROLLOUT}n=8 {same} data.train_files=a/gsm8k.parquet")
    found.check("rollout.num_samples=8")
    assert "not taken over: 1\n" in found.printed  # the scorer
    other = same.replace("True", "False").replace("=error", "=left").replace("=dapo", "=prime")
    found = migrate(f"{ROLLOUT}n=8 {other}")
    assert "not taken over: 8\n" in found.printed


def test_validation_samples_only_where_theirs_does(migrate: Migrate) -> None:
    values = f"{ROLLOUT}n=8 {ROLLOUT}val_kwargs.temperature=0.6 {ROLLOUT}val_kwargs.top_p=0.7"
    migrate(values).check("eval.temperature=0.0 eval.top_p=1.0")
    sampled = f"{values} {ROLLOUT}val_kwargs.do_sample=True"
    migrate(sampled).check("eval.temperature=0.6 eval.top_p=0.7")


def test_variables_of_a_cluster_are_not_printed_as_counts(migrate: Migrate) -> None:
    found = migrate(
        f"{ROLLOUT}n=8 trainer.nnodes=${{SLURM_JOB_NUM_NODES}} trainer.n_gpus_per_node=$GPUS"
    )
    assert found.printed.endswith(f"tlt train {found.out} --nproc-per-node 8\n")
    assert "--ranks 8 --memory 80   # put your GPUs and their GiB here\n" in found.printed


def test_a_config_of_trl_is_refused(migrate: Migrate) -> None:
    with pytest.raises(ValueError, match="num_generations: names of TRL"):
        migrate("num_generations: 8\nlearning_rate: 1.0e-6\n", "grpo.yaml", steps=None)
