"""Takes the hidden states of a forward pass of the policy, which computes them anyway, for training the drafter.

Made by the drafter's upkeep, handed to `PolicyModel.infer_logprobs` or, where the update needs no such pass before it, to
`forward_backward`; used by `policy_model.py`. What to know: which sequences are tapped and which rank gets each is arithmetic
on their lengths, the same on all tensor- and pipeline-parallel peers; every peer ends up with its own part, so that each of
them can train on other data. States that a stage computed for another travel after the pass, from stage to stage, one
sequence at a time.
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

FINAL = -1  # in the place of a layer number: after the final norm
_MIN_TOKENS = 3  # a drafter learns nothing from fewer


@dataclass(frozen=True, slots=True, kw_only=True)
class TappedSequence:
    """A prompt with its response, and the policy's states h_t at every token x_t but the last."""

    token_ids: Tensor  # [T] int64, CPU
    prompt_length: int
    features: (
        Tensor  # [T-1, D] after the final norm, or [T-1, nD] after n layers; on the policy's device
    )
    final_hidden: Tensor | None  # [T-1, D] after the final norm; None where that is `features`


@dataclass(frozen=True, slots=True, kw_only=True)
class TapPlace:
    """Where a tapped sequence stands, and which peer gets it."""

    micro_batch: int
    start: int  # of its tokens in the micro-batch
    end: int
    tp_rank: int
    pp_rank: int

    @property
    def num_states(self) -> int:
        """All tokens but the last."""
        return self.end - self.start - 1


def plan_tap(
    lengths: Sequence[Sequence[int]], *, tp_size: int, pp_size: int, max_tokens: int
) -> tuple[list[TapPlace], int]:
    """The sequences to tap, longest first, and how many are left out for want of room.

    `lengths` are those in each micro-batch; `max_tokens` is the most that the stages of one tensor-parallel rank may
    hold together. The longest go first: short responses reach a drafter from the rollout itself.
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
    """Gives `on_sequence` the hidden states of the longest sequences of a pass, as many as fit into `max_bytes`.

    `aux_layer_ids` () taps what EAGLE and HASS learn from, the states after the final norm; layer numbers tap the
    residual stream after those layers (EAGLE-3), and the final states beside them. `max_bytes` bounds the states, in
    `dtype`, that a rank holds for itself and its pipeline-parallel peers: on the device, to the end of the pass. In
    `forward_backward` that is beside the activations; `config/memory.py` counts it there. Example:
    `tap = HiddenStateTap(on_sequence=keep, max_bytes=64 << 20)`; `model.infer_logprobs(batches, 1.0, tap=tap)`.
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
        """Sequences given to this rank, and (on the first rank of each model replica) left out, in the tap's life."""
        return {
            "tap/num_sequences": float(self._num_tapped),
            "tap/num_left_out": float(self._num_left_out),
        }

    @contextmanager
    def record(
        self, stage: GPTModel, micro_batches: Sequence[MicroBatch], groups: ProcessGroups
    ) -> Iterator[None]:
        """Within: run `micro_batches` forward, once, in order. At the end `on_sequence` is called for this rank's part.

        Every tensor- and pipeline-parallel peer must enter, and leave without an exception or with. ValueError for a
        layer that the model has not.
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
    """The states that this stage computes in one pass, [T-1, n, D] for each sequence of this tensor-parallel rank."""

    def __init__(
        self,
        places: Sequence[TapPlace],
        sources: Sequence[int],  # those of this stage
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
        """Forward hooks on the modules whose outputs are wanted."""
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
                return  # a recomputed layer: these states were seen
            places = next(order)
            if not places:
                return
            hidden_T1D = output[0] if isinstance(output, tuple) else output
            hidden_TD = hidden_T1D.detach()[:, 0]
            if is_sharded:  # by all peers, whoever gets the sequences
                hidden_TD = _gather_rows(hidden_TD, self._tp)
            for place in places:
                if place.tp_rank == self._tp.rank:
                    states_TD = hidden_TD[place.start : place.end - 1]
                    self._block(place)[:, column].copy_(states_TD)

        return hook

    def _block(self, place: TapPlace) -> Tensor:
        """[T-1, n, D], made at its first use."""
        if place not in self._held:
            shape = (place.num_states, len(self._sources), self._hidden_size)
            self._held[place] = torch.empty(shape, dtype=self._dtype, device=self._device)
        return self._held[place]

    def exchange(self, place: TapPlace, holders: Sequence[int], pp: Group) -> list[Tensor] | None:
        """[T-1, n, D] of each stage that has some, in order of layers, on the stage that `place` belongs to.

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
    """The modules of this stage by the number, over all stages, of the layer whose output they give."""
    modules = {layer.layer_number - 1: layer for layer in stage.decoder.layers}
    if stage.decoder.final_layernorm is not None:
        modules[FINAL] = stage.decoder.final_layernorm
    return modules


def _is_in_backward() -> bool:
    """Whether autograd called us, as activation recompute does."""
    return torch._C._current_graph_task_id() != -1


def _find_holders(stage: GPTModel, sources: Sequence[int], pp: Group) -> dict[int, int]:
    """The pipeline stage that has each source. ValueError on all stages for one that none has."""
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
    """All rows of a sequence that is cut over the tensor-parallel ranks."""
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
