"""What the configuration makes of speculation."""

from __future__ import annotations

import pytest

from tlt_megatron.config.load import load_config
from tlt_megatron.trainer.build_embedded import make_speculation

OVERRIDES = (
    "speculation.enabled=true",
    "speculation.selector=beg_mab",
    "speculation.strategies=['ngram_4','ngram_2','off']",
)


@pytest.mark.parametrize(("max_batch_size", "is_off"), [(8, True), (64, False)])
def test_buckets_of_beg_mab_follow_the_largest_batch(max_batch_size: int, is_off: bool) -> None:
    """Plain decoding begins above half of the largest batch: above 4 of 8, above 32 of 64."""
    config = load_config(None, [*OVERRIDES, f"rollout.max_batch_size={max_batch_size}"])
    selector = make_speculation(config, None).selector
    assert selector.choose(5).strategy.is_off == is_off
