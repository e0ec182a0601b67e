"""Generators after a restore go on as if nothing had happened, also through JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tlt_megatron.runtime.rng import rng_state, seed_everything, set_rng_state


@pytest.fixture(autouse=True)
def _generators_are_put_back() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def draw() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.random()),
        float(np.random.standard_normal()),
        *torch.rand(3).tolist(),
        *torch.randn(3).tolist(),
    ]


@pytest.mark.parametrize("num_draws_before", [0, 1, 2])
def test_restored_state_draws_the_same_numbers(num_draws_before: int) -> None:
    seed_everything(3)
    for _ in range(num_draws_before):  # one leaves a half-used pair of gaussians behind
        draw()
    state = json.loads(json.dumps(rng_state()))
    expected = [draw() for _ in range(3)]
    seed_everything(4)
    assert draw() != expected[0]
    set_rng_state(state)
    assert [draw() for _ in range(3)] == expected


def test_a_state_is_a_copy_and_reading_it_draws_nothing() -> None:
    seed_everything(3)
    first = rng_state()
    assert rng_state() == first
    text = json.dumps(first)
    draw()
    assert json.dumps(first) == text
    assert rng_state() != first


def test_seed_decides_every_generator() -> None:
    seed_everything(3)
    first = draw()
    seed_everything(3)
    assert draw() == first
    seed_everything(4)
    assert not set(draw()) & set(first)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match=rf"seed={seed}: must be in \[0, 2\*\*32\)"):
        seed_everything(seed)


def test_incomplete_state_is_refused_before_anything_changes() -> None:
    seed_everything(3)
    before = rng_state()
    with pytest.raises(ValueError, match="rng state lacks numpy, torch; it holds python"):
        set_rng_state({"python": [3, [0] * 625, None]})
    assert rng_state() == before
