from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reward_puppet import PUPPET, PoolMaker
from tlt_megatron.rewards.workers import RewardPool


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[PoolMaker]:
    """Pools over the functions of `code`: quick to fail, closed after the test."""
    pools: list[RewardPool] = []

    def make(
        function: str = "act",
        *,
        code: str = PUPPET,
        num_workers: int = 1,
        timeout_s: float = 120.0,
        on_error: str = "zero",
        environment: str = "",
    ) -> RewardPool:
        path = tmp_path / "puppet.py"
        path.write_text(code)
        pool = RewardPool(
            f"{path}:{function}",
            num_workers=num_workers,
            timeout_s=timeout_s,
            on_error=on_error,
            environment=environment and f"{path}:{environment}",
        )
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        pool.close()
