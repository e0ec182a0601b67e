"""A selector that has given drafting up tries a new drafter and new requests soon, and goes on where the engine overrules it."""

from __future__ import annotations

from tests.synthetic_decoding import (
    ARMS,
    RETRIEVING_ARMS,
    SyntheticDecoding,
    counts_by_depth,
    run_selector,
)
from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.speculation.cost_model import CostModelSelector

CHAIN = SpeculationStrategy.parse("4_1_4")


def decode(selector: CostModelSelector, num_steps: int, *, num_accepted: int) -> list[bool]:
    """Whether each step drafted. A plain step takes 1 ms, a drafting one 2 ms."""
    drafted = []
    for _ in range(num_steps):
        strategy = selector.choose(4).strategy
        drafted.append(not strategy.is_off)
        depths = [4 * (depth < num_accepted) for depth in range(strategy.depth)]
        selector.observe(strategy, 4, depths, 0.001 if strategy.is_off else 0.002)
    return drafted


def test_a_new_drafter_is_looked_at_soon() -> None:
    selector = CostModelSelector([CHAIN])
    decode(selector, 300, num_accepted=0)
    while any(decode(selector, 10, num_accepted=0)):
        pass
    selector.drafter_changed()
    assert any(decode(selector, 10, num_accepted=4))
    assert all(decode(selector, 40, num_accepted=4)[-10:])


def test_a_new_drafter_is_not_judged_by_its_first_pass() -> None:
    """The first pass reads the prompts, so it is slow, and drafts the beginnings of responses, which are hard."""
    selector = CostModelSelector([CHAIN])
    decode(selector, 300, num_accepted=0)
    for _ in range(3):
        while any(decode(selector, 10, num_accepted=0)):
            pass
        selector.drafter_changed()
        assert selector.choose(4).strategy == CHAIN
        selector.observe(CHAIN, 4, [0, 0, 0, 0], 0.040)
        assert all(decode(selector, 60, num_accepted=4)[-10:])


def test_a_straggler_does_not_keep_new_requests_from_drafting() -> None:
    """The last request of a batch accepts nothing and is decoded plainly. The next batch is drafted at once."""
    for seed in range(4):
        world, selector = SyntheticDecoding(seed=seed, quality=0.85), CostModelSelector(ARMS)
        run_selector(selector, world, [8] * 300)
        world.quality = 0.0
        assert run_selector(selector, world, [1] * 300).chosen[200:].count(OFF) > 70
        world.quality = 0.85
        assert run_selector(selector, world, [8] * 12).chosen.count(OFF) <= 3  # probes


def test_retrieval_goes_on_while_learned_drafts_find_no_memory() -> None:
    """A probe that the engine overrules waits for its next turn, also the first one of a new drafter."""
    world = SyntheticDecoding(seed=0, quality=0.03, retrieval=0.6, arms=RETRIEVING_ARMS)
    selector = CostModelSelector(RETRIEVING_ARMS)
    run_selector(selector, world, [4] * 300)
    selector.drafter_changed()
    chosen = []
    for _ in range(200):
        strategy = selector.choose(4).strategy
        strategy = OFF if strategy.is_learned else strategy
        accepted, seconds = world.step(strategy, 4)
        selector.observe(strategy, 4, counts_by_depth(accepted, strategy), seconds)
        chosen.append(strategy)
    assert sum(s.num_retrieved > 0 for s in chosen) > 180
