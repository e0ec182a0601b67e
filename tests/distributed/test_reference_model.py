"""A reference of another size: equal to transformers at every layout, and so is a distillation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.mcore_policy import (
    LENGTHS,
    Layout,
    build_policy,
    check_same_bits,
    check_weights,
    export,
    hf_logits,
    load_hf,
    make_batch,
    scored_batch,
    share_of,
    train,
)
from tests.policy_batches import make_trainer
from tests.ranks import run_ranks
from tests.tiny_models import make_tiny_hf
from tlt_megatron.config.schema import AlgorithmSection
from tlt_megatron.mcore.initialize import destroy_model_parallel
from tlt_megatron.mcore.policy_model import McorePolicyModel

TEMPERATURE = 0.8
DISTILL = AlgorithmSection(advantage="rloo", distill_coef=0.7)
KL = AlgorithmSection(advantage="rloo", kl_coef=0.1, distill_coef=0.2)
LORA = {"lora_rank": 4, "lora_alpha": 8.0}
ONE, TP2, PP2 = Layout(world=1), Layout(world=2, tensor=2), Layout(world=2, pipeline=2)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A qwen2 of 6 wider layers, with the vocabulary of the policy, a qwen3 of 4."""
    path = tmp_path_factory.mktemp("models") / "teacher"
    return make_tiny_hf(path, "qwen2", num_layers=6, hidden_size=96, seed=7)


def _reference_logprobs(policy: McorePolicyModel, batch: list[Any]) -> list[Tensor]:
    found = policy.infer_logprobs(batch, TEMPERATURE, reference=True)
    return [each.logprobs for each in found]


def _infer(path: Path, reference: Path, layout: Layout, settings: dict[str, Any]) -> list[Tensor]:
    """The reference's log-probs of this rank's share, after a step of the policy."""
    policy, groups = build_policy(path, layout, reference=reference, **settings)
    shares = (3, 2) if groups.dp.size == 2 else (len(LENGTHS),)
    train(policy, groups, (1,), shares)
    return _reference_logprobs(policy, share_of(make_batch(5), groups, shares))


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        (ONE, LORA),
        (TP2, {}),
        (PP2, {"recompute": "full"}),
        (Layout(world=2), {}),
        (Layout(world=2, context=2), {}),
        (Layout(world=2, pipeline=2, virtual=2), {"num_layers": 8}),
    ],
    ids=str,
)
def test_logprobs_of_another_size_equal_transformers(
    model_path: Path, teacher: Path, tmp_path: Path, layout: Layout, settings: dict[str, Any]
) -> None:
    if num_layers := settings.pop("num_layers", 0):  # two chunks of each stage
        teacher = make_tiny_hf(tmp_path, "qwen2", num_layers=num_layers)
    model, expected = load_hf(teacher), []
    for batch in make_batch(5):
        with torch.no_grad():
            logprobs_PV = (hf_logits(model, batch) / TEMPERATURE).log_softmax(-1)
        expected.append(logprobs_PV.gather(1, batch.labels[:, None])[:, 0] * batch.loss_mask)
    results = run_ranks(layout.world, _infer, model_path, teacher, layout, settings)
    for rank, found in enumerate(results):
        first = 3 * rank if len(found) < len(expected) else 0
        for mine, theirs in zip(found, expected[first : first + len(found)], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=5e-6, atol=5e-6)


def test_a_mixture_is_the_reference_of_a_mixture(mixture: Path, tmp_path: Path) -> None:
    other = make_tiny_hf(tmp_path, "qwen3_moe", num_layers=2, seed=3)
    (expected,) = run_ranks(1, _infer, mixture, other, ONE, {})
    first, second = run_ranks(2, _infer, mixture, other, Layout(world=2, expert=2), {})
    for mine, theirs in zip([*first, *second], expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def _distill(
    path: Path, teacher: Path, layout: Layout
) -> list[tuple[list[dict[str, float]], dict[str, Tensor]]]:
    found = []
    for section in (DISTILL, KL):
        policy, groups = build_policy(path, layout, reference=teacher)
        trainer = make_trainer(policy, section, groups, temperature=TEMPERATURE)
        plans = [trainer.plan(scored_batch(seed)) for seed in (0, 1)]
        assert not any(plan.skipped for plan in plans)
        steps = [trainer.update(trainer.infer_logprobs(plan)) for plan in plans]
        inferred = trainer.infer_logprobs(plans[0])
        found.append(([*steps, inferred.metrics], export(policy)))
        destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def distilled(model_path: Path, teacher: Path) -> Any:
    (result,) = run_ranks(1, _distill, model_path, teacher, ONE)
    return result


@pytest.mark.parametrize("layout", [TP2, PP2, Layout(world=2)], ids=str)
def test_distillation_equals_that_of_one_rank(
    model_path: Path, teacher: Path, distilled: Any, layout: Layout
) -> None:
    for result in run_ranks(layout.world, _distill, model_path, teacher, layout):
        for (steps, weights), (expected, theirs) in zip(result, distilled, strict=True):
            for step, other in zip(steps, expected, strict=True):
                assert step == pytest.approx(other, rel=1e-4, abs=1e-5)
            check_weights(weights, theirs, 2e-5)


def _first_step(path: Path, teacher: Path) -> Any:
    policy, groups = build_policy(path, ONE, reference=teacher)
    trainer = make_trainer(policy, DISTILL, groups, temperature=TEMPERATURE)
    return trainer.infer_logprobs(trainer.plan(scored_batch(0)))


def test_the_advantage_of_each_token_falls_by_log_p_minus_log_q(
    model_path: Path, teacher: Path
) -> None:
    (inferred,) = run_ranks(1, _first_step, model_path, teacher)
    models, ratios = [load_hf(path) for path in (model_path, teacher)], []
    for scored in scored_batch(0):
        rewards = torch.tensor(scored.rewards, dtype=torch.float64)
        for rollout, reward in zip(scored.rollouts, rewards, strict=True):
            num_prompt = len(rollout.prompt_ids)
            ids = torch.cat([torch.tensor(rollout.prompt_ids), rollout.token_ids])
            both = []
            for model in models:
                with torch.no_grad():
                    logits = model(ids[None]).logits[0, num_prompt - 1 : -1] / TEMPERATURE
                both.append(logits.log_softmax(-1).gather(1, rollout.token_ids[:, None])[:, 0])
            ratios.append(both[0] - both[1])
            plain = reward - (rewards.sum() - reward)  # of two siblings, less the other's
            expected = plain - DISTILL.distill_coef * ratios[-1].double()
            torch.testing.assert_close(
                inferred.advantages[rollout.key].double(), expected, rtol=1e-5, atol=1e-5
            )
    expected = float(torch.cat(ratios).double().mean())
    assert inferred.metrics["actor/reverse_kl"] == pytest.approx(expected, abs=1e-6, rel=1e-6)


def _refresh(
    path: Path, layout: Layout, settings: dict[str, Any], folder: Path, reference: Path
) -> Any:
    policy, groups = build_policy(path, layout, reference=reference, **settings)
    shares = (3, 2) if groups.dp.size == 2 else (len(LENGTHS),)
    train(policy, groups, (1,), shares)
    policy.refresh_reference()
    own = [each.logprobs for each in policy.infer_logprobs(make_batch(5), TEMPERATURE)]
    train(policy, groups, (2,), shares)
    found = _reference_logprobs(policy, make_batch(5))
    assert policy._second is not None
    policy._second.save(folder)
    return own, found


def _restore(path: Path, layout: Layout, folder: Path) -> list[Tensor]:
    policy, _ = build_policy(path, layout, reference=path)
    assert policy._second is not None
    policy._second.load(folder)
    return _reference_logprobs(policy, make_batch(5))


@pytest.mark.parametrize(
    ("model", "layout", "settings"),
    [
        ("dense", TP2, {}),
        ("tied", PP2, {}),
        ("dense", TP2, LORA),
        ("dense", ONE, {"dtype": "bfloat16"} | LORA),
        ("mixture", Layout(world=2, expert=2), {}),
    ],
    ids=str,
)
def test_a_refreshed_reference_is_the_policy_of_that_step_and_is_saved(
    model_path: Path,
    tied_path: Path,
    mixture: Path,
    tmp_path: Path,
    model: str,
    layout: Layout,
    settings: dict[str, Any],
) -> None:
    path = {"dense": model_path, "tied": tied_path, "mixture": mixture}[model]
    kind, further = {
        "dense": ("qwen3", {}),
        "tied": ("llama", {"tied": True}),
        "mixture": ("qwen3_moe", {"mlp_only_layers": [0]}),
    }[model]
    other = make_tiny_hf(tmp_path / "other", kind, seed=9, **further)
    folder = tmp_path / "reference"
    folder.mkdir()
    results = run_ranks(layout.world, _refresh, path, layout, settings, folder, other)
    for own, found in results:
        assert all(map(torch.equal, own, found))
    if "dtype" in settings:  # _restore builds float32
        return
    restored = run_ranks(layout.world, _restore, path, layout, folder)
    for (own, _), found in zip(results, restored, strict=True):
        check_same_bits(dict(enumerate(found)), dict(enumerate(own)))
