"""What a resumed run must share with its checkpoint, and which learned parts go on with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import tiny_config
from tlt_megatron.config.load import load_config
from tlt_megatron.models.config import RopeConfig
from tlt_megatron.runtime.durable import save_tensors
from tlt_megatron.trainer.saving.identity import compare_run, describe_run
from tlt_megatron.trainer.saving.run_checkpoint import SavedRun

MODEL = tiny_config(vocab_size=48, num_layers=2, rope=RopeConfig(theta=1e4))
SPECULATION = ("speculation.enabled=true", "speculation.strategies=['2_1_2']", "spot.enabled=true")


def describe(
    *overrides: str, stop: tuple[int, ...] = (1,), ranks: int = 2, **model: Any
) -> dict[str, object]:
    config = load_config(None, [*SPECULATION, *overrides])
    return describe_run(config, replace(MODEL, **model), stop, ranks)


def saved(state: dict[str, object]) -> SavedRun:
    return SavedRun(folder=Path("iter_0000001"), state=state)


@pytest.mark.parametrize(
    ("now", "named"),
    [
        (describe("run.seed=1"), "run.seed 0 -> 1"),
        (describe("data.shuffle=false"), "data.shuffle True -> False"),
        (describe(stop=(1, 2)), r"stop_token_ids \[1\] -> \[1, 2\]"),
        (describe(rope=RopeConfig(theta=5e5)), "config.json.rope.theta 10000.0 -> 500000.0"),
        (describe(tie_word_embeddings=True), "config.json.tie_word_embeddings False -> True"),
        (describe(vocab_size=64, num_layers=3), r"num_layers 2 -> 3, .*vocab_size 48 -> 64"),
        (describe(rms_norm_eps=1e-6), "rms_norm_eps 1e-05 -> 1e-06"),
    ],
)
def test_another_model_or_seed_is_refused_by_name(now: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=rf"iter_0000001 belongs to another run: .*{named}"):
        compare_run(saved(describe()), now, is_warning=False)


def test_what_changes_no_number_is_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    overrides = "run.dir=elsewhere run.num_steps=99 checkpoint.resume=auto"
    now = describe(*overrides.split(), max_position_embeddings=128)
    assert compare_run(saved(describe()), now, is_warning=True)
    assert not caplog.text


@pytest.mark.parametrize(
    ("now", "named", "fits_drafter"),
    [
        (describe("speculation.strategies=['4_2_8']"), "speculation.strategies", True),
        (describe("drafter.algorithm=eagle3"), "drafter.algorithm", False),
        (describe("speculation.drafter=folder"), "speculation.drafter", False),
        (describe("drafter.lr=0.1"), "drafter.lr", True),
        (describe(ranks=4), "ranks 2 -> 4", True),
    ],
)
def test_one_warning_names_what_changed_and_a_drafter_that_starts_anew(
    now: dict[str, object], named: str, fits_drafter: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert compare_run(saved(describe()), now, is_warning=True) == fits_drafter
    (message,) = caplog.messages
    assert named in message
    assert ("the drafter starts anew" in message) == (not fits_drafter)


def test_a_checkpoint_of_other_noise_resumes_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Older checkpoints do not name their noise."""
    before = describe()
    before["settings"] = {k: v for k, v in before["settings"].items() if "noise" not in k}
    assert compare_run(saved(before), describe(), is_warning=True)
    assert "draws other tokens from the same seed) None -> 'race in blocks of 64'" in caplog.text


def test_a_reference_is_compared_where_both_runs_have_one(tmp_path: Path) -> None:
    save_tensors({"w": torch.zeros(3, 5)}, tmp_path / "model.safetensors")
    with_kl = f"model.path={tmp_path}", "algorithm.kl_coef=0.1"
    before = saved(describe(*with_kl))
    compare_run(before, describe(*with_kl), is_warning=False)
    compare_run(saved(describe()), describe(*with_kl), is_warning=False)  # an older version's
    save_tensors({"w": torch.ones(3, 5)}, tmp_path / "model.safetensors")
    compare_run(before, describe(), is_warning=False)
    with pytest.raises(
        ValueError, match=r"another run: weights in model\.path \(the KL reference\) '"
    ):
        compare_run(before, describe(*with_kl), is_warning=False)


def test_a_state_without_identity_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks identity"):
        compare_run(saved({}), describe(), is_warning=False)
