"""A step draws the same numbers in a straight and in a resumed run."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tlt_megatron.runtime.rng import seed_everything


@pytest.fixture(autouse=True)
def _generators_are_put_back() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def draw() -> list[float]:
    return [
        random.gauss(0, 1),
        float(np.random.standard_normal()),
        *torch.rand(3).tolist(),
        *torch.randn(3).tolist(),
    ]


@pytest.mark.parametrize("num_draws_before", [0, 1, 2])
def test_seed_and_step_decide_every_generator(num_draws_before: int) -> None:
    seed_everything(3, 5)
    expected = draw()
    for _ in range(num_draws_before):  # one leaves a half-used pair of gaussians behind
        draw()
    seed_everything(3, 5)
    assert draw() == expected
    for seed, step in ((4, 5), (3, 6), (2**32 - 1, 5)):
        seed_everything(seed, step)
        assert not set(draw()) & set(expected)
