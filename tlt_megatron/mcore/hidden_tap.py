"""Records hidden states from a forward pass of the policy, for drafter training.

spot/lifecycle.py makes it and passes it to `PolicyModel.infer_logprobs`. If the update needs no such pass, it goes to
`forward_backward`. Used by `policy_model.py`. Sequence lengths alone decide which sequences are tapped and which rank gets
each, so all tensor- and pipeline-parallel peers agree without a message. Every peer gets its own part, so each can train on
other data. After the pass, stages send each other the states they computed, one sequence at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tlt_megatron.runtime.collectives import gather_objects
from tlt_megatron.runtime.process_groups import Group, ProcessGroups
from tlt_megatron.types import MicroBatch

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

FINAL = -1  # used as a layer number: the states after the final norm
_MIN_TOKENS = 3  # fewer tokens hold nothing to train on


@dataclass(frozen=True, slots=True, kw_only=True)
class TappedSequence:
    """A prompt with its response, and the policy's state h_t at every token x_t except the last."""

    token_ids: Tensor  # [T] int64, CPU
    prompt_length: int
    features: (
        Tensor  # [T-1, D] after the final norm, or [T-1, nD] after n layers; on the policy's device
    )
    final_hidden: Tensor | None  # [T-1, D] after the final norm; None if `features` holds it


@dataclass(frozen=True, slots=True, kw_only=True)
class TapPlace:
    """The place of a tapped sequence in the batch, and the peer that gets it."""

    micro_batch: int
    start: int  # of its tokens in the micro-batch; `end` is exclusive
    end: int
    tp_rank: int
    pp_rank: int

    @property
    def num_states(self) -> int:
        """Return the number of states: one per token except the last."""
        return self.end - self.start - 1


def plan_tap(
    lengths: Sequence[Sequence[int]], *, tp_size: int, pp_size: int, max_tokens: int
) -> tuple[list[TapPlace], int]:
    """Return the sequences to tap, longest first, and how many do not fit.

    `lengths` holds the sequence lengths of each micro-batch. `max_tokens` is the most that all stages of one tensor-parallel
    rank may hold together. The longest go first: a drafter already gets short responses from the rollout itself.
    """
    found = []
    for micro_batch, parts in enumerate(lengths):
        start = 0
        for length in parts:
            if length >= _MIN_TOKENS:
                found.append((-length, micro_batch, start))
            start += length
    loads = [[0] * pp_size for _ in range(tp_size)]
    places, num_left_out = [], 0
    for minus_length, micro_batch, start in sorted(found):
        end = start - minus_length
        tp_rank, pp_rank = min(
            ((t, p) for t in range(tp_size) for p in range(pp_size)),
            key=lambda peer: (sum(loads[peer[0]]), loads[peer[0]][peer[1]], peer),
        )
        if sum(loads[tp_rank]) + end - start - 1 > max_tokens:
            num_left_out += 1
            continue
        loads[tp_rank][pp_rank] += end - start - 1
        places.append(
            TapPlace(
                micro_batch=micro_batch, start=start, end=end, tp_rank=tp_rank, pp_rank=pp_rank
            )
        )
    return places, num_left_out


class HiddenStateTap:
    """Passes the hidden states of the longest sequences of a pass to `on_sequence`, as many as fit into `max_bytes`.

    With `aux_layer_ids` () it taps the states after the final norm, for EAGLE and HASS. With layer numbers it taps the residual
    stream after those layers (EAGLE-3) and the final states. `max_bytes` bounds the states, in `dtype`, that a rank holds for
    itself and its pipeline-parallel peers. They stay on the device until the pass ends; in `forward_backward` they add to the
    activations.
    Example: `tap = HiddenStateTap(on_sequence=keep, max_bytes=64 << 20)`; `model.infer_logprobs(batches, 1.0, tap=tap)`.
    """

    def __init__(
        self,
        *,
        on_sequence: Callable[[TappedSequence], None],
        max_bytes: int,
        aux_layer_ids: Sequence[int] = (),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._on_sequence = on_sequence
        self._max_bytes = max_bytes
        self._sources = (*sorted(aux_layer_ids), FINAL)
        self._dtype = dtype
        self._num_tapped = self._num_left_out = 0

    def stats(self) -> dict[str, float]:
        """Return totals over the tap's life: sequences given to this rank, and sequences left out.

        Only the first rank of each model replica counts the sequences left out.
        """
        return {
            "tap/num_sequences": float(self._num_tapped),
            "tap/num_left_out": float(self._num_left_out),
        }

    @contextmanager
    def record(
        self, stage: GPTModel, micro_batches: Sequence[MicroBatch], groups: ProcessGroups
    ) -> Iterator[None]:
        """Record while the body runs `micro_batches` forward, once and in order.

        At the end, call `on_sequence` for this rank's part. Every tensor- and pipeline-parallel peer must enter. They must all
        leave normally, or all with an exception. ValueError for a layer that the model does not have.
        """
        holders = _find_holders(stage, self._sources, groups.pp)
        state_bytes = len(self._sources) * stage.config.hidden_size * self._dtype.itemsize
        places, num_left_out = plan_tap(
            [batch.cu_seqlens.diff().tolist() for batch in micro_batches],
            tp_size=groups.tp.size,
            pp_size=groups.pp.size,
            max_tokens=self._max_bytes // state_bytes,
        )
        mine = [source for source in self._sources if holders[source] == groups.pp.rank]
        recording = _Recording(places, mine, self._dtype, len(micro_batches), groups.tp)
        handles = recording.attach(stage)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._num_left_out += num_left_out if groups.tp.is_first and groups.pp.is_first else 0
        for place in places:
            if place.tp_rank == groups.tp.rank:
                blocks = recording.exchange(place, list(holders.values()), groups.pp)
                if blocks is not None:
                    self._num_tapped += 1
                    self._on_sequence(_tapped(place, micro_batches[place.micro_batch], blocks))


class _Recording:
    """The states that this stage computes in one pass: [T-1, n, D] for each sequence of this tensor-parallel rank."""

    def __init__(
        self,
        places: Sequence[TapPlace],
        sources: Sequence[int],  # of this stage
        dtype: torch.dtype,
        num_micro_batches: int,
        tp: Group,
    ) -> None:
        self._sources = sources
        self._dtype = dtype
        self._tp = tp
        self._places: list[list[TapPlace]] = [[] for _ in range(num_micro_batches)]
        for place in places:
            self._places[place.micro_batch].append(place)
        self._held: dict[TapPlace, Tensor] = {}
        self._device = torch.device("cpu")
        self._hidden_size = 0

    def attach(self, stage: GPTModel) -> list[torch.utils.hooks.RemovableHandle]:
        """Register forward hooks on the modules whose outputs are wanted, and return their handles."""
        self._device = next(stage.parameters()).device
        self._hidden_size = stage.config.hidden_size
        modules = _tap_points(stage)
        is_sharded = stage.config.sequence_parallel and self._tp.size > 1
        return [
            modules[source].register_forward_hook(self._hook(column, is_sharded))
            for column, source in enumerate(self._sources)
        ]

    def _hook(self, column: int, is_sharded: bool) -> Callable[..., None]:
        order = iter(self._places)  # a module sees the micro-batches once each, in order

        def hook(module: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
            if _is_in_backward():
                return  # a recomputed layer: its states are recorded already
            places = next(order)
            if not places:
                return
            hidden_T1D = output[0] if isinstance(output, tuple) else output
            hidden_TD = hidden_T1D.detach()[:, 0]
            if is_sharded:  # every peer takes part, also if another one gets the sequences
                hidden_TD = _gather_rows(hidden_TD, self._tp)
            for place in places:
                if place.tp_rank == self._tp.rank:
                    states_TD = hidden_TD[place.start : place.end - 1]
                    self._block(place)[:, column].copy_(states_TD)

        return hook

    def _block(self, place: TapPlace) -> Tensor:
        """Return the buffer [T-1, n, D] of `place`, created at its first use."""
        if place not in self._held:
            shape = (place.num_states, len(self._sources), self._hidden_size)
            self._held[place] = torch.empty(shape, dtype=self._dtype, device=self._device)
        return self._held[place]

    def exchange(self, place: TapPlace, holders: Sequence[int], pp: Group) -> list[Tensor] | None:
        """Return each stage's block [T-1, n, D], in layer order, on the stage that gets `place`; None on the others.

        Every pipeline-parallel peer must call this for the same places in the same order.
        """
        blocks = []
        for stage in sorted(set(holders)):
            is_mine = pp.rank == stage
            block = self._held.pop(place) if is_mine else None
            if stage == place.pp_rank:
                blocks.append(block)
            elif is_mine:
                dist.send(block, dst=pp.global_ranks[place.pp_rank], group=pp.handle)
            elif pp.rank == place.pp_rank:
                shape = (place.num_states, holders.count(stage), self._hidden_size)
                block = torch.empty(shape, dtype=self._dtype, device=self._device)
                dist.recv(block, src=pp.global_ranks[stage], group=pp.handle)
                blocks.append(block)
        return blocks if pp.rank == place.pp_rank else None


def _tap_points(stage: GPTModel) -> dict[int, nn.Module]:
    """Return the modules of this stage, keyed by the number, over all stages, of the layer whose output they give."""
    modules = {layer.layer_number - 1: layer for layer in stage.decoder.layers}
    if stage.decoder.final_layernorm is not None:
        modules[FINAL] = stage.decoder.final_layernorm
    return modules


def _is_in_backward() -> bool:
    """Return whether autograd is calling, as it does for activation recompute."""
    return torch._C._current_graph_task_id() != -1


def _find_holders(stage: GPTModel, sources: Sequence[int], pp: Group) -> dict[int, int]:
    """Return the pipeline stage that has each source. ValueError on all stages if no stage has a source."""
    by_stage = gather_objects(sorted(_tap_points(stage)), pp)
    holders = {
        source: rank
        for rank, numbers in enumerate(by_stage)
        for source in numbers
        if source in sources
    }
    missing = [source for source in sources if source not in holders]
    if missing:
        num_layers = stage.config.num_layers
        raise ValueError(f"aux_layer_ids: layers {missing} are not in 0..{num_layers - 1}")
    return {source: holders[source] for source in sources}


def _gather_rows(shard_TD: Tensor, tp: Group) -> Tensor:
    """Gather all rows of a sequence that is split over the tensor-parallel ranks."""
    rows = shard_TD.new_empty(tp.size * shard_TD.shape[0], shard_TD.shape[1])
    dist.all_gather_into_tensor(rows, shard_TD.contiguous(), group=tp.handle)
    return rows


def _tapped(place: TapPlace, batch: MicroBatch, blocks: Sequence[Tensor]) -> TappedSequence:
    states_TND = torch.cat(tuple(blocks), dim=1) if len(blocks) > 1 else blocks[0]
    num_aux = states_TND.shape[1] - 1
    rows = slice(place.start, place.end)
    is_response = batch.loss_mask[rows] > 0
    return TappedSequence(
        token_ids=batch.token_ids[rows].cpu(),
        prompt_length=int(is_response.int().argmax()) + 1,
        features=states_TND[:, :num_aux].flatten(1) if num_aux else states_TND[:, 0],
        final_hidden=states_TND[:, num_aux] if num_aux else None,
    )
