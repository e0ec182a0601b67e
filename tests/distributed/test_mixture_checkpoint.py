"""A checkpoint of a mixture of experts loads at every layout: its optimizer has two parts with
`parallel.expert` > 1 and one without.

`make pairs` sets ALL_LAYOUTS=1, for the layouts that `make test` leaves out.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from tests.mcore_policy import LENGTHS, OPTIMIZER, Layout, build_policy, check_weights, train
from tests.ranks import run_ranks

# Adam does not enlarge gradients that are 0 but for rounding (GLM's biases of keys).
SMOOTH = dataclasses.replace(OPTIMIZER, eps=1e-3)

SAVED = {
    "1": Layout(world=1),
    "DP2": Layout(world=2),
    "EP2": Layout(world=2, expert=2),
    "EP4": Layout(world=4, expert=4),
    "EP2 x TP2": Layout(world=2, expert=2, tensor=2),
    "EP2 x PP2": Layout(world=4, expert=2, pipeline=2),
}
LOADED = SAVED | {
    "PP2": Layout(world=2, pipeline=2),
    "CP2": Layout(world=2, context=2),
    "EP2 x CP2": Layout(world=2, expert=2, context=2),
    "EP2 x virtual PP2": Layout(world=4, expert=2, pipeline=2, virtual=2),
}
if "ALL_LAYOUTS" not in os.environ:
    SAVED = {name: SAVED[name] for name in ("1", "EP2 x PP2")}
    LOADED = {name: LOADED[name] for name in ("DP2", "EP2")}


def _shares(layout: Layout) -> tuple[int, ...]:
    """Return the number of micro-batches of each data-parallel rank."""
    num_ranks = layout.world // (layout.tensor * layout.context * layout.pipeline)
    return {1: (len(LENGTHS),), 2: (3, 2), 4: (2, 1, 1, 1)}[num_ranks]


def _save(model_path: Path, layout: Layout, path: Path) -> dict[str, Any]:
    """Two steps, save, two more steps."""
    policy, groups = build_policy(model_path, layout, optimizer=SMOOTH)
    train(policy, groups, (1, 2), _shares(layout))
    policy.save(path)
    return train(policy, groups, (3, 4), _shares(layout))


def _load(model_path: Path, layout: Layout, paths: list[Path]) -> list[dict[str, Any]]:
    """Load one checkpoint after the other into the same policy, each followed by two steps."""
    policy, groups = build_policy(model_path, layout, optimizer=SMOOTH)
    results = []
    for path in paths:
        policy.load(path)
        results.append(train(policy, groups, (3, 4), _shares(layout)))
    return results


@pytest.fixture(scope="module", params=["mixture", "glm"])
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, tuple[Path, dict[str, Any]]]]:
    """A model folder, and the checkpoint and the straight run of every layout of SAVED."""
    model_path = request.getfixturevalue(request.param)
    runs = {}
    for name, layout in SAVED.items():
        path = tmp_path_factory.mktemp("saved") / "checkpoint"
        runs[name] = path, run_ranks(layout.world, _save, model_path, layout, path)[0]
    return model_path, runs


@pytest.mark.parametrize("loaded", LOADED)
def test_a_mixture_saved_at_any_layout_goes_on_at_another(
    saved: tuple[Path, dict[str, tuple[Path, dict[str, Any]]]], loaded: str
) -> None:
    model_path, runs = saved
    layout = LOADED[loaded]
    paths = [path for path, _ in runs.values()]
    resumed = run_ranks(layout.world, _load, model_path, layout, paths)
    for number, (name, (_, expected)) in enumerate(runs.items()):
        for results in resumed:
            found = results[number]
            for mine, theirs in zip(found["stats"], expected["stats"], strict=True):
                assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5), name
            check_weights(found["weights"], expected["weights"])
