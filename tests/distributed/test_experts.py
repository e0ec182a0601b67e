"""What the router of a mixture of experts learns and exports.

Mixtures are compared with transformers in test_mcore_parity.py, at other layouts in
test_mcore_training.py and after a load in test_mcore_checkpoint.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.mcore_policy import Layout, build_policy, export, make_micro_batch, tiny_loss, train
from tests.ranks import run_ranks
from tlt_megatron.models.hf_io import HfReader

TOLERANCE = 5e-6  # relative, of gradient norms
EP2 = Layout(world=2, expert=2)


def _grad_norm(path: Path, layout: Layout, coefficient: float) -> float:
    """Four micro-batches whose sequences are of multiples of four tokens, which no layout
    pads.
    """
    policy, groups = build_policy(path, layout, transformer={"moe_aux_loss_coeff": coefficient})
    batches = [make_micro_batch((n, 12), seed=n) for n in (20, 12, 32, 8)]
    share = batches[groups.dp.rank :: groups.dp.size]
    policy.forward_backward(share, 1.0, tiny_loss)
    return policy.optimizer_step().grad_norm


def test_the_load_balancing_loss_is_that_of_one_rank_at_every_layout(mixture: Path) -> None:
    off, expected = (run_ranks(1, _grad_norm, mixture, Layout(world=1), c)[0] for c in (0.0, 0.5))
    assert abs(expected - off) > 0.1 * off
    for layout in (
        EP2,
        Layout(world=2, tensor=2, expert=2),
        Layout(world=4, tensor=2, expert=4),
        Layout(world=2, context=2, expert=2),
    ):
        for found in run_ranks(layout.world, _grad_norm, mixture, layout, 0.5):
            assert found == pytest.approx(expected, rel=TOLERANCE)


def test_in_bfloat16_the_bias_of_the_router_is_exported_as_it_was_read(
    glm: Path, tmp_path: Path
) -> None:
    def on_rank() -> dict[str, torch.Tensor]:
        policy, groups = build_policy(glm, EP2, dtype="bfloat16")
        train(policy, groups, (1,), (3, 2))
        policy.save(tmp_path / "checkpoint")
        policy.load(tmp_path / "checkpoint")
        return export(policy)

    source = dict(HfReader(glm).items())
    for exported in run_ranks(2, on_rank):
        for name, tensor in source.items():
            is_bias = name.endswith("correction_bias")
            assert exported[name].dtype == (torch.float32 if is_bias else torch.bfloat16)
            assert torch.equal(exported[name], tensor) == is_bias, name
