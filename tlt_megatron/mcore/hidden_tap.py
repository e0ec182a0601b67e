"""Records hidden states from a forward pass of the policy, for drafter training.

Sequence lengths alone decide which sequences are tapped and which rank gets each, so all tensor-,
context- and pipeline-parallel peers agree without a message. Every peer gets its own share, so each
can train on other data. After the pass, stages send each other the states, one sequence at a time.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tlt_megatron.mcore.token_places import TokenPlaces, place_tokens
from tlt_megatron.runtime.collectives import gather_objects
from tlt_megatron.runtime.device import HostCopies
from tlt_megatron.runtime.process_groups import Group, ProcessGroups
from tlt_megatron.types import MIN_DRAFT_TOKENS, DraftSequence, MicroBatch

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

FINAL = -1  # used as a layer number: the states after the final norm


@dataclass(frozen=True, slots=True, kw_only=True)
class TapPlace:
    """The place of a tapped sequence in the batch, and the peer that gets it."""

    micro_batch: int
    start: int  # its first token in the micro-batch; `end` is exclusive
    end: int
    part: int  # see ProcessGroups
    pp_rank: int

    @property
    def num_states(self) -> int:
        """Return the number of states: one per token except the last."""
        return self.end - self.start - 1


def plan_tap(
    lengths: Sequence[Sequence[int]], groups: ProcessGroups, max_tokens: int
) -> list[TapPlace]:
    """Return the sequences to tap, longest first.

    `lengths` holds the sequence lengths of each micro-batch. `max_tokens` is the most that all
    stages of one part may hold together. The longest go first: a drafter already gets short
    responses from the rollout itself.
    """
    num_parts = groups.num_parts
    found = []
    for micro_batch, parts in enumerate(lengths):
        for length, end in zip(parts, itertools.accumulate(parts), strict=True):
            if length >= MIN_DRAFT_TOKENS:
                found.append((-length, micro_batch, end - length))
    peers = [(part, stage) for part in range(num_parts) for stage in range(groups.pp.size)]
    loads = dict.fromkeys(peers, 0)
    of_stages = [0] * num_parts  # states of all stages, by part
    places = []
    for minus_length, micro_batch, start in sorted(found):
        num_states = -minus_length - 1
        part, stage = min(peers, key=lambda peer: (of_stages[peer[0]], loads[peer], peer))
        if of_stages[part] + num_states <= max_tokens:
            loads[part, stage] += num_states
            of_stages[part] += num_states
            end = start - minus_length
            places.append(
                TapPlace(micro_batch=micro_batch, start=start, end=end, part=part, pp_rank=stage)
            )
    return places


class HiddenStateTap:
    """Passes hidden states of the longest sequences that fit into `max_bytes` to `on_sequence`.

    It taps the states after the final norm and, with `aux_layer_ids` (EAGLE-3), the residual stream
    after those layers. `max_bytes` bounds the states, in `dtype`, that a rank holds for itself and
    its pipeline-parallel peers. They are copied to pinned host memory while the pass runs. With
    pipeline parallelism they stay on the device until it ends, and add to the activations.
    """

    def __init__(
        self,
        *,
        on_sequence: Callable[[DraftSequence], None],
        max_bytes: int,
        hidden_size: int,
        aux_layer_ids: Sequence[int] = (),
        dtype: torch.dtype = torch.float32,
        has_own_passes: bool = True,
    ) -> None:
        """Without `has_own_passes`, no pass may run for the tap alone. The same on all ranks."""
        self._on_sequence = on_sequence
        self._sources = (*sorted(aux_layer_ids), FINAL)
        self._max_tokens = max_bytes // (len(self._sources) * hidden_size * dtype.itemsize)
        self._dtype = dtype
        self._has_own_passes = has_own_passes

    def choose(self, lengths: Sequence[int], groups: ProcessGroups) -> list[int]:
        """Return the indices of the long tail that fits: the longest, up to half of all tokens.

        For sequences that only the tap needs forward; none without `has_own_passes`.
        """
        if not self._has_own_passes:
            return []
        places = plan_tap([[length] for length in lengths], groups, self._max_tokens)
        chosen, num_tokens = [], 0
        for place in places:  # longest first
            if 2 * num_tokens < sum(lengths):
                chosen.append(place.micro_batch)
                num_tokens += place.end - place.start
        return chosen

    @contextmanager
    def record(
        self, stage: Sequence[GPTModel], micro_batches: Sequence[MicroBatch], groups: ProcessGroups
    ) -> Iterator[None]:
        """Record while the body runs `micro_batches` forward, once and in order.

        At the end, call `on_sequence` for this rank's share. Every tensor-, context- and
        pipeline-parallel peer must enter. They must all leave normally, or all with an exception.
        ValueError for a layer that the model does not have.
        """
        holders = _find_holders(stage, self._sources, groups.pp)
        lengths = [batch.cu_seqlens.diff().tolist() for batch in micro_batches]
        places = plan_tap(lengths, groups, self._max_tokens)
        held: dict[TapPlace, list[Tensor]] = defaultdict(list)
        copies = HostCopies()
        points = _tap_points(stage)
        has_fp8 = bool(stage[0].config.fp8)
        tokens = [place_tokens(b.cu_seqlens, groups, has_fp8=has_fp8) for b in micro_batches]
        by_micro_batch = [
            ([place for place in places if place.micro_batch == i], each)
            for i, each in enumerate(tokens)
        ]
        to_host = copies if groups.pp.size == 1 else None  # stages exchange the states before
        handles = [
            points[source].register_forward_hook(
                _hook(by_micro_batch, held, dtype=self._dtype, groups=groups, copies=to_host)
            )
            for source, holder in holders.items()
            if holder == groups.pp.rank
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        hidden_size = stage[0].config.hidden_size
        state = next(stage[0].parameters()).new_empty(hidden_size, dtype=self._dtype)
        copies.wait()
        for place in places:
            if place.part == groups.part:
                states = held.pop(place, [])
                if groups.pp.size > 1:
                    states = _exchange(place, states, list(holders.values()), state, groups.pp)
                    states = [copies.add(states_TD) for states_TD in states]
                    copies.wait()
                if states:
                    self._on_sequence(_tapped(place, micro_batches[place.micro_batch], states))


def _hook(
    by_micro_batch: Sequence[tuple[Sequence[TapPlace], TokenPlaces]],
    held: dict[TapPlace, list[Tensor]],
    *,
    dtype: torch.dtype,
    groups: ProcessGroups,
    copies: HostCopies | None,
) -> Callable[..., None]:
    """Return a forward hook that appends the states [T-1, D] of this rank's sequences to `held`.

    With `copies` they are on the host, complete after `copies.wait()`.
    """
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    order = iter(by_micro_batch)  # a module sees the micro-batches once each, in order

    def hook(_module: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        if _is_in_backward():
            return  # a recomputed layer: its states are recorded already
        places, tokens = next(order, ((), None))  # none for an empty micro-batch (schedule.py)
        if not places:
            return
        assert tokens is not None
        hidden_T1D = output[0] if isinstance(output, tuple) else output
        hidden_TD = hidden_T1D.detach()[:, 0]
        for group in (groups.tp, groups.cp):
            if group.size > 1:  # every peer takes part, also if another one gets the sequences
                hidden_TD = gather_from_sequence_parallel_region(hidden_TD, group=group.of_torch)
        for place in places:
            if place.part == groups.part:
                rows_T = tokens.of_tokens[place.start : place.end - 1].to(hidden_TD.device)
                states_TD = hidden_TD[rows_T].to(dtype)
                held[place].append(states_TD if copies is None else copies.add(states_TD))

    return hook


def _exchange(
    place: TapPlace, states: Sequence[Tensor], holders: Sequence[int], state: Tensor, pp: Group
) -> list[Tensor]:
    """Return the states [T-1, D], in the order of `holders`, on the stage that gets `place`; else
    none.

    `states` are this stage's, `holders` the stage of each source, `state` [D] gives size, dtype and
    device. Every pipeline-parallel peer must call this for the same places in the same order.
    """
    own, found = iter(states), []
    for stage in holders:
        if stage == pp.rank:
            states_TD = next(own)
        else:
            states_TD = state.new_empty(place.num_states, state.numel())
        if stage != place.pp_rank:
            pp.broadcast(states_TD, stage)
        found.append(states_TD)
    return found if place.pp_rank == pp.rank else []


def _tap_points(stage: Sequence[GPTModel]) -> dict[int, nn.Module]:
    """Return the modules of this stage by the number of the layer whose output they give."""
    modules: dict[int, nn.Module] = {}
    for chunk in stage:
        layers = list[Any](chunk.decoder.layers)  # TransformerLayers; a ModuleList does not say so
        modules |= {layer.layer_number - 1: layer for layer in layers}
        final = chunk.decoder.final_layernorm
        if isinstance(final, nn.Module):  # on the last stage
            modules[FINAL] = final
    return modules


def _is_in_backward() -> bool:
    """Return whether autograd is calling, as it does for activation recompute."""
    return torch._C._current_graph_task_id() != -1


def _find_holders(stage: Sequence[GPTModel], sources: Sequence[int], pp: Group) -> dict[int, int]:
    """Return the pipeline stage that has each source. ValueError on all stages if none has it."""
    by_stage = gather_objects(sorted(_tap_points(stage)), pp)
    holders = {source: rank for rank, numbers in enumerate(by_stage) for source in numbers}
    missing = [source for source in sources if source not in holders]
    if missing:
        num_layers = stage[0].config.num_layers
        raise ValueError(f"aux_layer_ids: layers {missing} are not in 0..{num_layers - 1}")
    return {source: holders[source] for source in sources}


def _tapped(place: TapPlace, batch: MicroBatch, states: Sequence[Tensor]) -> DraftSequence:
    """Return a tapped sequence, without the state at its last token. All its tensors are on the
    host.
    """
    *aux, final_TD = states
    rows = slice(place.start, place.end)
    is_label = batch.loss_mask[rows].cpu() > 0
    prompt_length = int(is_label.int().argmax()) + 1
    loss_mask = is_label.roll(1)  # now by token; the last token has no label
    number = batch.cu_seqlens.tolist().index(place.start)
    return DraftSequence(
        token_ids=batch.token_ids[rows].cpu(),
        loss_start=prompt_length,
        features=torch.cat(aux, dim=1) if aux else final_TD,
        final_hidden=final_TD if aux else None,
        loss_mask=None if loss_mask[prompt_length:].all() else loss_mask,
        request=(*batch.requests[number], 0) if batch.requests else None,
    )
