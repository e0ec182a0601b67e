from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reward_puppet import EXPECTED, PUPPET, PoolMaker
from tlt_megatron.rewards.workers import RewardPool


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[PoolMaker]:
    """Pools over PUPPET: quick to fail, closed after the test."""
    (tmp_path / "puppet.py").write_text(PUPPET + EXPECTED)
    pools: list[RewardPool] = []

    def make(
        function: str = "act",
        *,
        num_workers: int = 1,
        timeout_s: float = 120.0,
        on_error: str = "zero",
    ) -> RewardPool:
        spec = f"{tmp_path / 'puppet.py'}:{function}"
        pools.append(
            RewardPool(spec, num_workers=num_workers, timeout_s=timeout_s, on_error=on_error)
        )
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
