"""Our StrategySelector as SGLang's adaptive speculation policy.

SGLang 0.5.23 holds one set of graphs per number of steps, all with `topk` 1 and steps + 1 rows. So
this policy chooses a chain or OFF. SGLang captures one graph per chain and batch size.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tlt_megatron.config.strategy import OFF, SpeculationStrategy
from tlt_megatron.engines.base import PassRecord
from tlt_megatron.speculation.selector import StrategySelector, make_selector
from tlt_megatron.speculation.verify import accepted_by_depth

if TYPE_CHECKING:
    from sglang.srt.managers.utils import GenerationBatchResult

CONFIG_KEY = "tlt_megatron"
_MAX_PASSES = 1 << 16


def adaptive_steps(strategies: Sequence[SpeculationStrategy]) -> list[int]:
    """Return the numbers of steps for which SGLang captures graphs: 0 is plain decoding."""
    return sorted({0, *(strategy.num_steps for strategy in strategies)})


def write_config(
    path: Path, strategies: Sequence[SpeculationStrategy], selector: str, *, max_batch_size: int
) -> None:
    """Write SGLang's `speculative_adaptive_config`: its part sizes buffers, ours the selector."""
    ours = {
        "strategies": [str(strategy) for strategy in strategies],
        "selector": selector,
        "max_batch_size": max_batch_size,
    }
    path.write_text(
        json.dumps({"1": {"candidate_steps": adaptive_steps(strategies)}, CONFIG_KEY: ours})
    )


class AdaptiveHooks:
    """Hooks of adaptive speculation, and the policy of this process.

    With the overlap schedule, SGLang launches a pass before it has the result of the last one. So
    each result carries its step."""

    _STEP = "tlt_megatron_step"  # our attribute of a GenerationBatchResult

    def __init__(self, upstream: Callable[..., object]) -> None:
        self._upstream = upstream
        self.policy: SelectorPolicy | None = None

    def make(self, initial_steps: int, cfg_path: str | None = None) -> object:
        """Replaces `AdaptiveSpeculativeParams`: our policy if the configuration is ours."""
        config: dict[str, Any] = json.loads(Path(cfg_path).read_text()) if cfg_path else {}
        if CONFIG_KEY not in config:
            return self._upstream(initial_steps=initial_steps, cfg_path=cfg_path)
        ours = config[CONFIG_KEY]
        strategies = [SpeculationStrategy.parse(text) for text in ours["strategies"]]
        selector = make_selector(
            ours["selector"], strategies, max_batch_size=ours["max_batch_size"]
        )
        self.policy = SelectorPolicy(selector, strategies, _agree)
        return self.policy

    def launch(
        self, original: Callable[..., GenerationBatchResult], *args: object, **kwargs: object
    ) -> GenerationBatchResult:
        """Around `forward_batch_generation`, which chooses a step: attach it to the result."""
        result = original(*args, **kwargs)
        if self.policy is not None:
            setattr(result, self._STEP, self.policy.take_chosen())
        return result

    def resolve(
        self, _tokens: object, _processor: object, result: GenerationBatchResult, _batch: object
    ) -> None:
        """After `_resolve_spec_v2_tokens`, which counts the accepted drafts: observe the step."""
        step = getattr(result, self._STEP, None)
        if self.policy is not None and step is not None:
            self.policy.observe(step, result.num_correct_drafts_per_req_cpu)


def _agree(num_steps: int) -> int:
    """Return rank 0's choice: selectors use clocks, and ranks that disagree hang. A collective."""
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().tp_group
    if group.world_size == 1:
        return num_steps
    choice = torch.tensor([num_steps])
    torch.distributed.broadcast(choice, src=group.ranks[0], group=group.cpu_group)
    return int(choice)


class _Step(NamedTuple):
    """One speculative step."""

    strategy: SpeculationStrategy
    reason: str
    started: float  # on the clock of time.perf_counter


@dataclass(eq=False)
class SelectorPolicy:
    """Satisfies SGLang's `AdaptiveSpecPolicy`."""

    selector: StrategySelector
    strategies: Sequence[SpeculationStrategy]
    agree: Callable[[int], int]
    is_off: bool = False  # whether to decode plainly
    _graph_sizes: list[int] | None = None
    _chosen: _Step | None = None  # kept until its pass is launched
    _passes: deque[PassRecord] = field(default_factory=lambda: deque(maxlen=_MAX_PASSES))
    _finished: float = 0.0

    def __post_init__(self) -> None:
        self._by_steps = {strategy.num_steps: strategy for strategy in (OFF, *self.strategies)}

    @property
    def candidate_steps(self) -> list[int]:
        """Return all numbers of steps that have their own state; 0 is OFF."""
        return sorted(self._by_steps)

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        self._graph_sizes = cuda_graph_bs

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:  # noqa: ARG002
        """Return all batch sizes: the selector may choose any strategy for any batch."""
        return self._graph_sizes

    def get_steps_for_batch(self, batch_size: int) -> int:
        """Choose the number of steps. SGLang calls it once before each speculative step."""
        started = time.perf_counter()
        chosen, reason = OFF, "paused"
        if not self.is_off:
            decision = self.selector.choose(batch_size)
            chosen, reason = decision.strategy, decision.reason
        strategy = self._by_steps[self.agree(chosen.num_steps)]
        self._chosen = _Step(strategy, reason, started)
        return strategy.num_steps

    def take_chosen(self) -> _Step | None:
        """Return the step of the pass just launched, or None if none was chosen for it."""
        step, self._chosen = self._chosen, None
        return step

    def on_verify_complete(
        self, num_correct_drafts_per_req: list[int], batch_size: int
    ) -> int | None:
        """Return None: SGLang does not switch before the next choice."""

    def observe(self, step: _Step, num_correct_drafts_per_req: Sequence[int]) -> None:
        """Observe the result of a step. Results come in the order of the launches."""
        batch_size = len(num_correct_drafts_per_req)
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

    def take_passes(self) -> list[PassRecord]:
        passes = list(self._passes)
        self._passes.clear()
        return passes
