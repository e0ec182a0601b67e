"""Runs the steps over rows in lanes as captured graphs, if the device has graphs and the plan has
the shape.

A graph reads and writes fixed addresses, so the rows' state and the tree are copied into static
tensors. Rows of padding write to the scratch page, which is never read. Steps without a graph are
counted with the reason. On a CPU every step runs directly, on the given tensors.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.engines.embedded.graph_plan import EagerReason, GraphKey, GraphPlan, Role
from tlt_megatron.engines.embedded.lane_steps import Committed, LaneBatch, LaneSteps
from tlt_megatron.runtime.device import GraphMemory
from tlt_megatron.speculation.tree import DraftTree

_EXTEND_POSITIONS = 64  # most unseen pairs per row that one pass computes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    state_FB: Tensor
    tree_3BQ: Tensor
    outputs: tuple[Tensor, ...]
    replay: Callable[[], None]


class GraphPool:
    """The captures of one engine, made at the first use of a shape.

    Example: `pool.bind(LaneSteps(...))` once; then `pool.target(batch, tree, longest)` for each
    step.
    """

    def __init__(self, plan: GraphPlan, new_memory: Callable[[], GraphMemory | None]) -> None:
        """`new_memory` is `Device.graph_memory`, or returns None to run every step eagerly."""
        self.plan = plan
        self._steps: LaneSteps | None = None
        self._new_memory = new_memory
        self._memory = new_memory()
        self._reads: Hashable = None
        self._captured: dict[GraphKey, _Captured] = {}
        self.capture_s = 0.0  # seconds of all captures; they do not count as cost of a pass
        self.start_counts()

    @property
    def has_graphs(self) -> bool:
        return self._memory is not None

    @property
    def steps(self) -> LaneSteps:
        assert self._steps is not None, "no lanes are bound"
        return self._steps

    def start_counts(self) -> None:
        self.num_replays: Counter[GraphKey] = Counter()
        self.num_captures = 0
        self.eager_passes: Counter[str] = Counter()  # keys are model and reason

    def bind(self, steps: LaneSteps) -> None:
        """Run these steps from now on. Drop all graphs if they read anything else."""
        reads = steps.reads()
        if reads != self._reads:
            self.drop()
            self._steps, self._reads = steps, reads

    def drop(self) -> None:
        """Free all graphs and their memory, and let go of the KV that the steps read. Call `bind`
        before the next step.
        """
        self._steps = self._reads = None
        self._captured.clear()
        if self._memory is not None:
            self._memory = self._new_memory()

    # ---- the steps

    def draft(
        self, batch: LaneBatch, strategy: SpeculationStrategy, num_unseen: int, longest: int
    ) -> DraftTree:
        """Run DRAFT: see `LaneSteps.draft`. With a graph, its next replay overwrites the tree.

        Older pairs than a graph computes are computed before it.
        """
        key = self._find(strategy, 1, batch, longest)
        most = _EXTEND_POSITIONS if key is None else key.num_rows
        self.catch_up(batch, num_unseen, most, longest, EagerReason.ROWS)
        if key is None:
            return self.steps.draft(batch, strategy, min(num_unseen, most), longest)
        tensors = self._replay(key, batch.state_FB, None)
        return DraftTree(*tensors, depth=strategy.depth, is_chain=strategy.is_chain)

    def catch_up(
        self, batch: LaneBatch, start: int, end: int, longest: int, reason: EagerReason
    ) -> None:
        """Compute the drafter's pairs from `start` positions before the roots to `end` before them,
        without graphs.
        """
        for first in range(start, end, -_EXTEND_POSITIONS):
            self.count_eager(Role.DRAFT, reason)
            self.steps.extend(batch, first, max(first - _EXTEND_POSITIONS, end), longest)

    def target(self, batch: LaneBatch, tree: DraftTree, longest: int) -> Committed:
        """Run TARGET: see `LaneSteps.target`. With a graph, its next replay overwrites what it
        commits.
        """
        key = self._find(None, tree.num_rows, batch, longest)
        if key is None:
            return self.steps.target(batch, tree, longest)
        return Committed(*self._replay(key, batch.state_FB, tree))

    def _find(
        self, strategy: SpeculationStrategy | None, num_rows: int, batch: LaneBatch, longest: int
    ) -> GraphKey | None:
        """Return the planned capture of a step. Without one, count the step as eager and return
        None.
        """
        found = EagerReason.SAMPLING if batch.sampling else EagerReason.OFF
        if self.has_graphs and not batch.sampling:
            found = self.plan.find(strategy, num_rows, batch.view.num_rows, longest)
        if isinstance(found, GraphKey):
            return self._in_lanes(found)
        self.count_eager(Role.TARGET if strategy is None else Role.DRAFT, found)
        return None

    def count_eager(self, role: Role, reason: EagerReason) -> None:
        """Count a pass without a graph, also one that the caller runs itself: over pages, or over
        only some of the rows.
        """
        self.eager_passes[f"{role}: {reason if self.has_graphs else EagerReason.OFF}"] += 1

    def _in_lanes(self, key: GraphKey) -> GraphKey:
        """Return the capture, cut to the lanes that there are and to their length."""
        steps = self.steps
        batch_size, length = key.batch_size, min(key.length, steps.cache.scratch_slot)
        if steps.lane:
            batch_size = min(batch_size, steps.cache.scratch_slot // steps.lane)
            length = min(length, steps.lane)
        return dataclasses.replace(key, batch_size=batch_size, length=length)

    # ---- captures and their static tensors

    @torch.inference_mode()  # static tensors must be writable from any caller
    def _replay(
        self, key: GraphKey, state_FB: Tensor, tree: DraftTree | None
    ) -> tuple[Tensor, ...]:
        if not self._captured:  # the largest first, so that later captures fit into its memory
            keys = map(self._in_lanes, self.plan.keys)
            self._capture(max(keys, key=lambda key: self.plan.cost(key).activation_bytes))
        captured = self._captured.get(key) or self._capture(key)
        batch_size = state_FB.shape[1]
        captured.state_FB[:, :batch_size].copy_(state_FB)
        if batch_size < key.batch_size:
            captured.state_FB[:, batch_size:].copy_(self.steps.padding_F1)
        if tree is not None and tree.num_rows > 1:
            captured.tree_3BQ.copy_(self.steps.no_node_311)
            num_nodes = tree.num_rows - 1
            captured.tree_3BQ[:, :batch_size, :num_nodes].copy_(torch.stack(tree.tensors))
        captured.replay()
        self.num_replays[key] += 1
        return tuple(output[:batch_size] for output in captured.outputs)

    def _capture(self, key: GraphKey) -> _Captured:
        """Capture a step of rows that are padding: they write to the scratch page."""
        assert self._memory is not None
        started, steps = time.perf_counter(), self.steps
        state_FB = steps.padding_F1.repeat(1, key.batch_size)
        num_nodes = 0 if key.strategy is not None else key.num_rows - 1
        tree_3BQ = steps.no_node_311.repeat(1, key.batch_size, num_nodes)
        # Outputs in graph memory would block that memory for later captures.
        outputs = tuple(torch.empty_like(out) for out in steps.run(key, state_FB, tree_3BQ))

        def work() -> None:
            for target, source in zip(outputs, steps.run(key, state_FB, tree_3BQ), strict=True):
                target.copy_(source)

        captured = _Captured(
            state_FB=state_FB, tree_3BQ=tree_3BQ, outputs=outputs, replay=self._memory.capture(work)
        )
        self._captured[key] = captured
        self.num_captures += 1
        self.capture_s += time.perf_counter() - started
        return captured
