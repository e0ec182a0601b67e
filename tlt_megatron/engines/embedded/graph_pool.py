"""Runs passes over rows in lanes as captured graphs, if the device has graphs and the plan has the shape.

A graph reads and writes fixed addresses, so inputs are copied into static tensors. Padding repeats the first row; padded
queries write to a scratch slot that is never read. Passes without a graph are counted with the reason. On a CPU every pass
runs directly, on the given tensors.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt_megatron.engines.embedded.graph_plan import EagerReason, GraphKey, GraphPlan, Role
from tlt_megatron.models.attention.lanes import LaneTreeAttention, LaneView
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.models.kv_cache import KvCache
from tlt_megatron.models.transformer import Transformer
from tlt_megatron.runtime.device import GraphMemory


@dataclass(slots=True, kw_only=True)  # not frozen: made in every pass, and frozen is slower
class PassInputs:
    """Inputs of a pass over B sequences in lanes with R queries each, packed row by row: P = B * R."""

    token_ids_P: Tensor  # int64
    positions_P: Tensor  # int64
    slots_P: Tensor  # int64, where keys and values are written
    bias_BRS: Tensor  # 0 where a query may attend, -inf elsewhere; S positions are read
    hidden_PD: Tensor | None = None  # hidden states for the drafter


Step = Callable[[PassInputs], tuple[Tensor, ...]]
"""A pass. Outputs begin with P. It is run again on the same inputs when it is captured, and must then do the same;
shapes must follow from shapes alone, and nothing may be read back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    inputs: PassInputs
    outputs: tuple[Tensor, ...]
    replay: Callable[[], None]


class GraphPool:
    """The captures of one engine, made at the first use of a shape.

    Example: `pool.bind(model, cache, lane)` once; each pass calls `hidden_PD, features_PF = pool.run(Role.TARGET, inputs)`.
    """

    def __init__(self, plan: GraphPlan, new_memory: Callable[[], GraphMemory | None]) -> None:
        """`new_memory` is `Device.graph_memory`, or returns None to run every pass eagerly."""
        self.plan = plan
        self._steps: Mapping[Role, Step] = {}
        self._new_memory = new_memory
        self._memory = new_memory()
        self._addresses: Hashable = None
        self._lane = self._num_lanes = self._scratch_slot = 0
        self._captured: dict[GraphKey, _Captured] = {}
        self._static: dict[tuple[Role, str], Tensor] = {}
        self.capture_s = 0.0  # seconds of all captures; they do not count as cost of a pass
        self.start_counts()

    @property
    def has_graphs(self) -> bool:
        return self._memory is not None

    def start_counts(self) -> None:
        self.num_replays: Counter[GraphKey] = Counter()
        self.num_captures = 0
        self.eager_passes: Counter[str] = Counter()  # by model and reason

    def bind(
        self, model: Transformer, cache: KvCache, lane: int, draft: DraftInference | None = None
    ) -> None:
        """Run passes over rows in lanes of `lane` slots from now on. Drop all graphs if what they read is elsewhere."""
        addresses = lane, cache.scratch_slot, addresses_read(model, cache, draft)
        if addresses != self._addresses:
            self.drop()
        self._addresses = addresses
        self._steps = lane_steps(model, cache, lane, draft)
        self._lane, self._scratch_slot = lane, cache.scratch_slot
        self._num_lanes = cache.scratch_slot // lane

    def drop(self) -> None:
        """Free all graphs and their memory, and let go of the KV that the steps read. Call `bind` before the next pass."""
        self._steps = {}
        self._captured.clear()
        self._static.clear()
        self._addresses = None
        if self._memory is not None:
            self._memory = self._new_memory()

    def run(self, role: Role, inputs: PassInputs) -> tuple[Tensor, ...]:
        """Run a pass and return its outputs, [P, ...] each. With a graph, the next pass of this role overwrites them."""
        reason = EagerReason.OFF
        if self._memory is not None:
            batch_size, num_rows, longest = inputs.bias_BRS.shape
            found = self.plan.find(role, num_rows=num_rows, batch_size=batch_size, longest=longest)
            if isinstance(found, GraphKey):
                return self._run_graph(self._in_lanes(found), inputs)
            reason = found
        self.count_eager(role, reason)
        return self._steps[role](inputs)

    @torch.inference_mode()  # static tensors must be writable from any caller
    def _run_graph(self, key: GraphKey, inputs: PassInputs) -> tuple[Tensor, ...]:
        if not self._captured:
            self._first_capture(inputs)
        captured = self._captured.get(key)
        if captured is None:
            static = self._static_inputs(key, inputs)
            self._fill(static, inputs)
            captured = self._capture(key, static)
        else:
            self._fill(captured.inputs, inputs)
        captured.replay()
        self.num_replays[key] += 1
        batch_size, num_rows = inputs.bias_BRS.shape[:2]
        return tuple(_unpad(output, key, batch_size, num_rows) for output in captured.outputs)

    def count_eager(self, role: Role, reason: EagerReason) -> None:
        """Count a pass without a graph, also one that the caller runs itself: over pages, or over only some of the rows."""
        self.eager_passes[f"{role}: {reason if self.has_graphs else EagerReason.OFF}"] += 1

    def _in_lanes(self, key: GraphKey) -> GraphKey:
        """Return the capture, cut to the lanes that there are and to their length."""
        if key.batch_size <= self._num_lanes and key.length <= self._lane:
            return key
        batch_size = min(key.batch_size, self._num_lanes)
        return dataclasses.replace(key, batch_size=batch_size, length=min(key.length, self._lane))

    # ---- captures and their static tensors

    def _first_capture(self, inputs: PassInputs) -> None:
        """Make the largest capture first, so that later captures fit into its memory."""
        keys = map(self._in_lanes, self.plan.keys)
        largest = max(keys, key=lambda key: self.plan.cost(key).activation_bytes)
        if largest.role is Role.TARGET:
            self._capture_blank(largest, dataclasses.replace(inputs, hidden_PD=None))

    def _capture_blank(self, key: GraphKey, like: PassInputs) -> None:
        """Capture with queries that attend to all positions and write to the scratch slot."""
        static = self._static_inputs(key, like)
        for name, tensor in _tensors(static):
            tensor.fill_(self._scratch_slot if name == "slots_P" else 0)
        self._capture(key, static)

    def _capture(self, key: GraphKey, static: PassInputs) -> _Captured:
        assert self._memory is not None
        started = time.perf_counter()
        step = self._steps[key.role]
        outputs = tuple(
            self._buffer(key.role, f"output {number}", out.shape, out)
            for number, out in enumerate(step(static))
        )

        def work() -> None:
            # Outputs in graph memory would block that memory for later captures.
            for target, source in zip(outputs, step(static), strict=True):
                target.copy_(source)

        captured = _Captured(inputs=static, outputs=outputs, replay=self._memory.capture(work))
        self._captured[key] = captured
        self.num_captures += 1
        self.capture_s += time.perf_counter() - started
        return captured

    def _static_inputs(self, key: GraphKey, like: PassInputs) -> PassInputs:
        fields = {}
        for name, tensor in _tensors(like):
            shape = (key.num_tokens, *tensor.shape[1:])
            if name == "bias_BRS":
                shape = (key.batch_size, key.num_rows, key.length)
            fields[name] = self._buffer(key.role, name, shape, tensor)
        return PassInputs(**fields)

    def _buffer(self, role: Role, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return a static tensor of `shape` (P, ... or B, R, ...): the start of a tensor that all captures of a role share."""
        buffer = self._static.get((role, name))
        if buffer is None:
            of_role = [key for key in self.plan.keys if key.role is role]
            if name == "bias_BRS":
                size = max(key.num_tokens * key.length for key in of_role)
            else:
                size = max(key.num_tokens for key in of_role) * math.prod(shape[1:])
            buffer = torch.zeros(size, dtype=like.dtype, device=like.device)
            self._static[role, name] = buffer
        return buffer[: math.prod(shape)].view(*shape)

    def _fill(self, static: PassInputs, given: PassInputs) -> None:
        """Copy `given` into `static`. Padding repeats each row's first query and the first row, so results stay finite."""
        wide, narrow = static.bias_BRS.shape[:2], given.bias_BRS.shape[:2]
        (batch_size, num_rows), length = narrow, given.bias_BRS.shape[2]
        for (name, target), (_, source) in zip(_tensors(static), _tensors(given), strict=True):
            is_slots, is_bias = name == "slots_P", name == "bias_BRS"
            if not is_bias:
                target, source = target.unflatten(0, wide), source.unflatten(0, narrow)
            elif length < target.shape[-1]:
                target[..., length:].fill_(-torch.inf)
                target = target[..., :length]
            target[:batch_size, :num_rows].copy_(source)
            if num_rows < target.shape[1]:
                repeated = target[:batch_size, :1]
                target[:batch_size, num_rows:] = self._scratch_slot if is_slots else repeated
            if batch_size < target.shape[0]:
                target[batch_size:] = self._scratch_slot if is_slots else target[:1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """The policy and its drafter over one KV memory, and the graphs that run their passes over lanes."""

    policy: Transformer
    draft: DraftInference | None
    cache: KvCache
    graphs: GraphPool


def lane_steps(
    model: Transformer, cache: KvCache, lane: int, draft: DraftInference | None = None
) -> dict[Role, Step]:
    """Return the passes of an engine whose rows are in lanes of `lane` slots, from the first lane on.

    TARGET returns (hidden [P, D], features [P, F]), DRAFT returns (hidden [P, D], head input [P, D]). Logits are another call.
    """
    view: LaneView | None = None  # the latest only: a view keeps a slice per layer and length

    def view_of(inputs: PassInputs) -> LaneView:
        nonlocal view
        num_rows = inputs.bias_BRS.shape[0]
        if view is None or view.num_rows != num_rows:
            view = LaneView(cache, num_rows=num_rows, lane=lane)
        return view

    def run_target(inputs: PassInputs) -> tuple[Tensor, ...]:
        return model.forward_tapped(
            inputs.token_ids_P,
            inputs.positions_P,
            model.arithmetic.lanes(view_of(inputs), inputs.slots_P, inputs.bias_BRS),
            cache.tap_layers,
        )

    def run_draft(inputs: PassInputs) -> tuple[Tensor, ...]:
        assert draft is not None
        assert inputs.hidden_PD is not None
        return draft.forward(
            inputs.token_ids_P,
            inputs.hidden_PD,
            inputs.positions_P,
            LaneTreeAttention(
                view_of(inputs),
                inputs.slots_P,
                inputs.bias_BRS,
                first_layer=model.config.num_layers,
            ),
        )

    return {Role.TARGET: run_target, Role.DRAFT: run_draft}


def addresses_read(
    model: Transformer, cache: KvCache, draft: DraftInference | None = None
) -> Hashable:
    """Return the tapped layers and the addresses that `lane_steps` read besides their inputs, for `bind`."""
    tensors = [cache.kv_LKTH, *model.tensors_read(), *(draft.tensors_read() if draft else ())]
    return cache.tap_layers, tuple(tensor.data_ptr() for tensor in tensors)


def _tensors(inputs: PassInputs) -> list[tuple[str, Tensor]]:
    fields = ((field.name, getattr(inputs, field.name)) for field in dataclasses.fields(inputs))
    return [(name, value) for name, value in fields if value is not None]


def _unpad(output: Tensor, key: GraphKey, batch_size: int, num_rows: int) -> Tensor:
    """Return the unpadded output [B * R, ...]. It is a copy if the rows were padded."""
    shape = output.shape[1:]
    output = output.view(key.batch_size, key.num_rows, *shape)[:batch_size, :num_rows]
    return output.reshape(batch_size * num_rows, *shape)
