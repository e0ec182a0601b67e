"""A selector that has given drafting up looks at a new drafter soon, not after a hundred steps."""

from __future__ import annotations

from tlt_megatron.speculation.cost_model import CostModelSelector
from tlt_megatron.speculation.strategy import SpeculationStrategy

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
