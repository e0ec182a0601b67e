"""Features two by two, through the whole program: see features.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pairs.features import SEED, check, draw, make_tasks

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.mark.parametrize("features", draw(SEED), ids=" + ".join)
def test_a_run_of_several_features_equals_its_references(
    tasks: dict[str, Path], tmp_path: Path, features: list[str]
) -> None:
    assert check(features, tasks, tmp_path) == ("", []), f"drawn with PAIRS_SEED={SEED}"
