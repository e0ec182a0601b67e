"""What `tlt migrate` leaves to the user: values that the checks refuse, and settings that it only
names.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.migrate import main


@pytest.mark.parametrize(
    ("source", "refused"),
    [
        (
            "algorithm.adv_estimator=remax",
            "algorithm.advantage='remax': must be one of grpo,",
        ),
        ("algorithm.adv_estimator=$MY_UNSET_NAME", "algorithm.advantage='$MY_UNSET_NAME': must be"),
        ("--advantage-estimator opo", "algorithm.advantage='opo': must be one of grpo,"),
        (
            "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8"
            " actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov",
            "algorithm.loss='clip_cov': must be one of ppo,",
        ),
        ("trainer.total_epochs=15", "run.num_steps=None: must be int"),
        ("--n-samples-per-prompt 8 --num-epoch 3", "run.num_steps=None: must be int"),
    ],
)
def test_what_would_train_otherwise_is_left_to_the_user(
    tmp_path: Path, capsys: pytest.CaptureFixture, source: str, refused: str
) -> None:
    """No default takes the place of an unknown estimator or loss, or of a number of epochs."""
    (tmp_path / "run.sh").write_text(source)
    assert main([str(tmp_path / "run.sh"), "--out", str(tmp_path / "ours.yaml")]) == 2
    printed = capsys.readouterr()
    assert refused in printed.err
    assert "epoch" not in source or "see run.num_steps (there epochs" in printed.out


def test_what_does_not_pass_the_checks_is_written_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "a.yaml").write_text("actor_rollout_ref: {rollout: {n: 0}}\ntrainer: {x: 1}\n")
    out = tmp_path / "ours.yaml"
    assert main([str(tmp_path / "a.yaml"), "--out", str(out)]) == 2
    assert "to be changed before a run: rollout.num_samples=0" in capsys.readouterr().err
    assert "trainer.x: 1" in out.read_text()
    with pytest.raises(ValueError, match="exists already"):
        main([str(tmp_path / "a.yaml"), "--out", str(out)])
    (tmp_path / "empty.yaml").touch()
    with pytest.raises(ValueError, match=r"empty.yaml: holds no settings of verl or slime"):
        main([str(tmp_path / "empty.yaml"), "--out", str(tmp_path / "other.yaml")])


def test_an_environment_is_named_but_not_taken_over(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """It is code of theirs."""
    turns = "actor_rollout_ref.rollout.multi_turn."
    (tmp_path / "run.sh").write_text(
        f"trainer.total_training_steps=7 {turns}enable=True {turns}interaction_config_path=a.yaml"
    )
    assert main([str(tmp_path / "run.sh"), "--out", str(tmp_path / "ours.yaml")]) == 0
    printed = capsys.readouterr().out
    assert f"{turns}enable: True; see rollout.environment (here empty for one turn)" in printed
    assert "'a.yaml'; see rollout.environment (path/to/file.py:name)" in printed


@pytest.mark.parametrize(
    "setting",
    [
        "trainer.save_freq=after_each_epoch",
        "actor_rollout_ref.actor.optim.betas=0.9",
        "actor_rollout_ref.actor.tis_imp_ratio_cap=none",
    ],
)
def test_a_value_of_another_kind_is_listed_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture, setting: str
) -> None:
    (tmp_path / "run.sh").write_text(f"trainer.total_training_steps=7 {setting}")
    assert main([str(tmp_path / "run.sh"), "--out", str(tmp_path / "ours.yaml")]) == 0
    assert f"  {setting.partition('=')[0]}: " in capsys.readouterr().out
