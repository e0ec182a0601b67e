"""Makes the selector that `speculation.selector` names. Called by the trainer and in SGLang's scheduler processes."""

from __future__ import annotations

from collections.abc import Sequence

from tlt_megatron.config.extensions import load_extension
from tlt_megatron.speculation.selector import StrategySelector
from tlt_megatron.speculation.strategy import SpeculationStrategy


def make_selector(
    spec: str,
    strategies: Sequence[SpeculationStrategy],
    *,
    max_batch_size: int,
    beg_thresholds: Sequence[int] = (),
) -> StrategySelector:
    """Return a new selector over `strategies`. A selector that is not built in is called as `Selector(strategies)`.

    ValueError names the methods of `StrategySelector` that it lacks, or what is wrong with the import path.
    """
    selector = load_extension("speculation.selector", spec)
    if spec == "fixed":
        return selector(strategies[0])
    if spec == "beg_mab":
        return selector(strategies, beg_thresholds, max_batch_size=max_batch_size)
    methods = [name for name in vars(StrategySelector) if not name.startswith("_")]
    missing = [name for name in methods if not callable(getattr(selector, name, None))]
    if missing:
        raise ValueError(f"speculation.selector={spec!r}: lacks {', '.join(missing)}")
    return selector(strategies)
