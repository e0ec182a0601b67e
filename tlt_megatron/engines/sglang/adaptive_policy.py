"""Our StrategySelector as SGLang's adaptive speculation policy.

Runs in SGLang's scheduler processes in the place of `AdaptiveSpeculativeParams`; configured by the JSON file that the engine
writes. What to know: SGLang 0.5.23 holds one set of graphs per number of steps, `topk` is 1 for all of them, and it drafts
steps + 1 rows; so the arms here are chains and OFF, each kept captured for every batch size.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tlt_megatron.engines.base import PassRecord
from tlt_megatron.speculation.beg_mab import BegMabSelector
from tlt_megatron.speculation.cost_model import CostModelSelector
from tlt_megatron.speculation.selector import FixedSelector, StrategySelector
from tlt_megatron.speculation.strategy import OFF, SpeculationStrategy
from tlt_megatron.speculation.verify import accepted_by_depth

CONFIG_KEY = "tlt_megatron"
_MAX_PASSES = 1 << 16


def write_config(
    path: Path,
    strategies: Sequence[SpeculationStrategy],
    selector: str,
    beg_thresholds: Sequence[int],
) -> None:
    """The file behind SGLang's `speculative_adaptive_config`: its own part sizes buffers, ours makes the selector."""
    steps = sorted({0, *(strategy.num_steps for strategy in strategies)})
    ours = {
        "strategies": [str(strategy) for strategy in strategies],
        "selector": selector,
        "beg_thresholds": list(beg_thresholds),
    }
    path.write_text(json.dumps({"1": {"candidate_steps": steps}, CONFIG_KEY: ours}))


class PolicyFactory:
    """Takes the place of the class `AdaptiveSpeculativeParams`; keeps the policy it made, for its state."""

    def __init__(self, upstream: Callable[..., object]) -> None:
        self._upstream = upstream
        self.policy: SelectorPolicy | None = None

    def make(self, initial_steps: int, cfg_path: str | None = None) -> object:
        """Ours if the configuration is ours, else SGLang's own."""
        config: dict[str, Any] = json.loads(Path(cfg_path).read_text()) if cfg_path else {}
        if CONFIG_KEY not in config:
            return self._upstream(initial_steps=initial_steps, cfg_path=cfg_path)
        ours = config[CONFIG_KEY]
        strategies = [SpeculationStrategy.parse(text) for text in ours["strategies"]]
        selectors: dict[str, Callable[[], StrategySelector]] = {
            "cost_model": lambda: CostModelSelector(strategies),
            "beg_mab": lambda: BegMabSelector(strategies, ours["beg_thresholds"]),
            "fixed": lambda: FixedSelector(strategies[0]),
        }
        self.policy = SelectorPolicy(selectors[ours["selector"]](), strategies, _agree)
        return self.policy


def _agree(num_steps: int) -> int:
    """The choice of tensor-parallel rank 0: selectors go by clocks, and ranks that disagree would hang."""
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().tp_group
    if group.world_size == 1:
        return num_steps
    choice = torch.tensor([num_steps])
    torch.distributed.broadcast(choice, src=group.ranks[0], group=group.cpu_group)
    return int(choice)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """One step under way."""

    strategy: SpeculationStrategy
    reason: str
    started: float


class SelectorPolicy:
    """Satisfies SGLang's `AdaptiveSpecPolicy`."""

    def __init__(
        self,
        selector: StrategySelector,
        strategies: Sequence[SpeculationStrategy],
        agree: Callable[[int], int],
    ) -> None:
        self.selector = selector
        self.is_off = False  # plain decoding until further notice
        self._by_steps = {strategy.num_steps: strategy for strategy in (OFF, *strategies)}
        self._agree = agree
        self._graph_sizes: list[int] | None = None
        # Oldest first: with overlap scheduling results arrive one step later.
        self._running: deque[_Step] = deque()
        self._passes: deque[PassRecord] = deque(maxlen=_MAX_PASSES)
        self._finished = 0.0

    @property
    def candidate_steps(self) -> list[int]:
        """All steps that have a state of their own; 0 is OFF."""
        return sorted(self._by_steps)

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        """Batch sizes with graphs."""
        self._graph_sizes = cuda_graph_bs

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        """Every batch size: the selector may choose any arm for any batch."""
        return self._graph_sizes

    def get_steps_for_batch(self, batch_size: int) -> int:
        """Called once before each speculative step."""
        started = time.perf_counter()
        chosen, reason = OFF, "suspended"
        if not self.is_off:
            chosen = self.selector.choose(batch_size)
            decisions = self.selector.decisions()
            reason = decisions[-1].reason if decisions else ""
        strategy = self._by_steps[self._agree(chosen.num_steps)]
        self._running.append(_Step(strategy=strategy, reason=reason, started=started))
        return strategy.num_steps

    def on_verify_complete(
        self, num_correct_drafts_per_req: list[int], batch_size: int
    ) -> int | None:
        """Observe the oldest step under way. None: nothing is switched before the next choice."""
        if not self._running:
            return None
        step = self._running.popleft()
        now = time.perf_counter()
        started = max(step.started, self._finished)
        self._finished = now
        accepted = accepted_by_depth(num_correct_drafts_per_req, step.strategy.num_steps)
        if not self.is_off:
            self.selector.observe(step.strategy, batch_size, accepted, now - started)
        self._passes.append(
            PassRecord(
                start_s=started,
                seconds=now - started,
                batch_size=batch_size,
                strategy=str(step.strategy),
                reason=step.reason,
                num_committed=batch_size + sum(num_correct_drafts_per_req),
                accepted_by_depth=tuple(accepted),
            )
        )
        return None

    def take_passes(self) -> list[PassRecord]:
        """The latest passes, oldest first, which are then forgotten."""
        passes = list(self._passes)
        self._passes.clear()
        return passes
