"""Runs packed micro-batches through Megatron's pipeline schedules, at any tensor x context x
pipeline layout.

`model` has the chunks of this rank's stage: one, or several whose passes are interleaved. A
micro-batch is one packed sequence of P tokens (thd, batch axis 1). P varies, so the model must be
built with variable_seq_lengths. token_places.py pads it and cuts it over context-parallel ranks.
The output layer gets only the R rows that predict a response token, R / cp on each of these ranks.
What is predicted of them is gathered, so every rank computes the same loss. V is a shard if tp > 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from tlt_megatron.mcore.logprobs import vocab_parallel_logprobs
from tlt_megatron.mcore.routing_replay import RoutingReplay
from tlt_megatron.mcore.token_places import TokenPlaces, place_tokens
from tlt_megatron.runtime.collectives import broadcast_object, gather_objects
from tlt_megatron.runtime.process_groups import Group, ProcessGroups
from tlt_megatron.types import KeptTokens, LossResult, MicroBatch, TokenLogprobs, TokenValues

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

ForwardStep = Callable[[Iterator[MicroBatch], nn.Module], tuple[Tensor, Callable[..., object]]]
Chunks = Sequence[nn.Module]
T = TypeVar("T", TokenLogprobs, TokenValues)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputRows:
    """The rows of a micro-batch that the output layer computes."""

    rows: Tensor  # [R] ascending places of all ranks
    own_rows: Tensor  # the rows that this rank holds, as indices into its part of the places
    is_needed: Tensor  # [R] bool; the others only give every part equally many rows
    labels: Tensor  # [R / cp] int64, of the rows of tensor-parallel peers
    kept: KeptTokens | None  # for these R / cp rows


Tensors = TypeVar("Tensors", MicroBatch, OutputRows)
# Makes the record [R / cp] of the rows from their output [R / cp, ...] of the last stage.
Predict = Callable[[OutputRows, Tensor], T]


def label_logprobs(temperature: float, groups: ProcessGroups) -> Predict[TokenLogprobs]:
    """Return the Predict of a policy, whose output is logits [R / cp, V] (shard of V)."""

    def predict(rows: OutputRows, logits_RV: Tensor) -> TokenLogprobs:
        return vocab_parallel_logprobs(logits_RV, rows.labels, temperature, groups.tp, rows.kept)

    return predict


def token_values(_rows: OutputRows, values_R1: Tensor) -> TokenValues:
    """The Predict of a critic, whose output is values [R / cp, 1]."""
    return TokenValues(values=values_R1[:, 0].float())


def run_forward(
    model: Chunks,
    micro_batches: Sequence[MicroBatch],
    predict: Predict[T],
    record: type[T],
    groups: ProcessGroups,
    replay: RoutingReplay | None = None,
) -> list[T]:
    """Run forward without gradients; return each `record` on the CPU of every peer.

    All tensor-, context- and pipeline-parallel peers must call this with the same micro-batches.
    Data-parallel ranks need not call it together, unless they share experts.
    """
    passes = _equal_passes(micro_batches, groups, len(model))
    if not passes:
        return []
    device = next(model[0].parameters()).device

    step = _forward_step(model, groups, predict, lambda predicted, _: predicted, replay)
    was_training = model[0].training
    try:
        for chunk in model:
            chunk.eval()
        with torch.no_grad():
            kept = _run_schedule(model, passes, step, replay, is_forward_only=True)
    finally:
        for chunk in model:
            chunk.train(was_training)
    if not micro_batches:
        return []
    return _share_over_stages(kept[: len(micro_batches)], record, micro_batches, groups, device)


def run_forward_backward(
    model: Chunks,
    micro_batches: Sequence[MicroBatch],
    predict: Predict[T],
    loss_fn: Callable[[T, MicroBatch], LossResult],
    groups: ProcessGroups,
    replay: RoutingReplay | None = None,
) -> tuple[dict[str, float], int]:
    """Accumulate this rank's gradients in the buffers of `model`.

    Each chunk is Megatron's DistributedDataParallel. Returns the metric sums, on every pipeline
    stage, and the sum of the counts, on the last. Tensor-, context- and pipeline-parallel peers
    must call this together, with the same micro-batches. So must ranks that share experts, with
    any.
    """
    passes = _equal_passes(micro_batches, groups, len(model))
    device = next(model[0].parameters()).device
    totals: dict[str, Tensor] = {}
    counts: list[int] = []

    def reduce(predicted: T, micro_batch: MicroBatch) -> tuple[Tensor, Tensor, None]:
        if len(counts) == len(micro_batches):  # an empty micro-batch: its values are zero
            nothing = torch.zeros((), dtype=torch.int32, device=device)
            return getattr(predicted, dataclasses.fields(predicted)[0].name).sum(), nothing, None
        loss = loss_fn(predicted, micro_batch)
        for name, value in loss.metrics.items():
            totals[name] = totals.get(name, 0.0) + value.detach().double()
        counts.append(loss.count)
        return (
            loss.loss_sum.float(),
            torch.tensor(loss.count, dtype=torch.int32, device=device),
            None,
        )

    if passes:
        step = _forward_step(model, groups, predict, reduce, replay)
        _run_schedule(model, passes, step, replay, is_forward_only=False)
    return _share_metrics(totals, groups), sum(counts)


def _equal_passes(
    micro_batches: Sequence[MicroBatch], groups: ProcessGroups, num_chunks: int
) -> Sequence[MicroBatch]:
    """Add empty micro-batches, so that all data-parallel ranks that share experts run equally many
    passes. Interleaved passes come in groups of as many as there are stages.

    In every layer of a pass these ranks exchange tokens, so one pass more on a rank would hang. An
    empty micro-batch has one token without a label, which gives no gradient.
    """
    num_passes = len(micro_batches)
    if groups.ep.size > 1:
        num_passes = max(gather_objects(num_passes, groups.dp))
    if num_chunks > 1:
        num_passes += -num_passes % groups.pp.size
    num_missing = num_passes - len(micro_batches)
    id_1, value_1 = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
    empty = MicroBatch(
        token_ids=id_1,
        labels=id_1,
        position_ids=id_1,
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        loss_mask=value_1,
        loss_weights=value_1,
        advantages=value_1,
        old_logprobs=None,
        rollout_logprobs=value_1,
    )
    return [*micro_batches, *[empty] * num_missing]


def reduce_gradients(model: Chunks, count: int, groups: ProcessGroups) -> None:
    """Sum the accumulated gradients of all ranks and divide them by the sum of all counts.

    `count` is this data-parallel rank's, on the last pipeline stage. A collective of all ranks.
    """
    from megatron.core.distributed import finalize_model_grads

    if not groups.cp.is_first:
        count = 0  # Megatron sums over context-parallel ranks too, and these have the same
    device = next(model[0].parameters()).device
    finalize_model_grads([*model], torch.tensor(count, dtype=torch.int32, device=device))


def _run_schedule(
    model: Chunks,
    micro_batches: Sequence[MicroBatch],
    forward_step: ForwardStep,
    replay: RoutingReplay | None,
    *,
    is_forward_only: bool,
) -> list[Any]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    try:
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(micro_batches) for _ in model],
            model=[*model],
            num_microbatches=len(micro_batches),
            seq_length=0,  # unused: every stage announces the shape that it sends
            micro_batch_size=1,
            forward_only=is_forward_only,
            collect_non_loss_data=is_forward_only,
        )
    finally:
        if replay is not None:
            replay.clear()  # a pass without replay, as the reference's, routes freely


def _forward_step(
    model: Chunks,
    groups: ProcessGroups,
    predict: Predict[T],
    finish: Callable[[T, MicroBatch], object],
    replay: RoutingReplay | None,
) -> ForwardStep:
    """Return Megatron's forward_step_func.

    It runs a chunk on its next micro-batch. Behind the last layer, `finish` gets what is predicted
    [P] and the micro-batch.
    """
    from megatron.core.utils import get_model_config

    device = next(model[0].parameters()).device
    config = get_model_config(model[0])
    # Megatron would copy bfloat16 logits to float32, at twice the memory.
    options = {"fp32_output": False} if config.bf16 else {}

    def step(feed: Iterator[MicroBatch], chunk: nn.Module) -> tuple[Tensor, Callable[..., object]]:
        micro_batch = next(feed)
        places = place_tokens(micro_batch.cu_seqlens, groups, has_fp8=bool(config.fp8))
        token_ids_1P, position_ids_1P, packing = _model_inputs(micro_batch, places, groups, device)
        rows = _to_device(_output_rows(micro_batch, places, groups), device)
        if replay is not None:
            replay.start(model.index(chunk), micro_batch, places, device)
        with _output_of(chunk, rows):
            output = chunk(
                token_ids_1P, position_ids_1P, None, packed_seq_params=packing, **options
            )
        on_device = _to_device(micro_batch, device)

        def finish_output(output_1RX: Tensor, **_: bool) -> object:
            predicted = predict(rows, output_1RX[0])
            return finish(_spread(predicted, rows, places, groups.cp), on_device)

        return output, finish_output

    return step


def _output_rows(micro_batch: MicroBatch, places: TokenPlaces, groups: ProcessGroups) -> OutputRows:
    """Return the rows of `loss_mask`, at least one: there is always a graph for the backward pass.

    The parts of the ranks give equally many, so some give others too.
    """
    is_needed_M = places.fill(micro_batch.loss_mask) > 0
    is_needed_CM = is_needed_M.view(groups.num_parts, -1)  # by part
    num_rows = max(1, int(is_needed_CM.sum(dim=1).max()))
    order_CM = is_needed_CM.int().argsort(dim=1, descending=True, stable=True)
    own_rows_CR = order_CM[:, :num_rows].sort(dim=1).values
    first_C = torch.arange(groups.num_parts) * is_needed_CM.size(1)
    rows_R = (own_rows_CR + first_C[:, None]).flatten()
    peers_R = rows_R.chunk(groups.cp.size)[groups.cp.rank]
    return OutputRows(
        rows=rows_R,
        own_rows=own_rows_CR[groups.part],
        is_needed=is_needed_M[rows_R],
        labels=places.fill(micro_batch.labels)[peers_R],
        kept=_kept_of(micro_batch.kept, places, peers_R),
    )


def _kept_of(kept: KeptTokens | None, places: TokenPlaces, rows_R: Tensor) -> KeptTokens | None:
    if kept is None:
        return None
    counts_R = places.fill(kept.counts)[rows_R]
    starts_R = places.fill(kept.counts.cumsum(0) - kept.counts)[rows_R]
    shift_R = starts_R - (counts_R.cumsum(0) - counts_R)
    indices = torch.arange(int(counts_R.sum())) + shift_R.repeat_interleave(counts_R)
    return KeptTokens(token_ids=kept.token_ids[indices], counts=counts_R)


@contextmanager
def _output_of(chunk: nn.Module, rows: OutputRows) -> Iterator[None]:
    """Let the output layer, if the chunk has it, compute only `rows`."""
    from megatron.core.utils import get_attr_wrapped_model

    if not get_attr_wrapped_model(chunk, "post_process"):
        yield
        return
    layer = get_attr_wrapped_model(chunk, "output_layer")
    assert isinstance(layer, nn.Module)
    handle = layer.register_forward_pre_hook(
        lambda _, inputs: (inputs[0].index_select(0, rows.own_rows), *inputs[1:])
    )
    try:
        yield
    finally:
        handle.remove()


def _spread(record: T, rows: OutputRows, places: TokenPlaces, cp: Group) -> T:
    """Return the record [P] of all ranks' records [R / cp]: 0 at rows that are not needed.

    In the backward pass a rank takes the gradient of its own rows: the others have the same loss.
    """
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    def spread(values_R: Tensor) -> Tensor:
        if cp.size > 1:
            values_R = gather_from_tensor_model_parallel_region(values_R, group=cp.of_torch)
        values_M = values_R.new_zeros(int(places.bounds[-1]))
        values_M = values_M.index_copy(0, rows.rows, values_R.where(rows.is_needed, 0))
        return values_M[places.of_tokens.to(values_M.device)]

    fields = dataclasses.fields(record)
    return type(record)(**{f.name: spread(getattr(record, f.name)) for f in fields})


def _model_inputs(
    micro_batch: MicroBatch, places: TokenPlaces, groups: ProcessGroups, device: torch.device
) -> tuple[Tensor, Tensor, PackedSeqParams]:
    """Return token ids, position ids [1, P] of this context-parallel rank, and the sequences'
    bounds.
    """

    def own(values_P: Tensor) -> Tensor:
        return places.fill(values_P).chunk(groups.cp.size)[groups.cp.rank][None].to(device)

    packing = packing_of(places.bounds, device)
    return own(micro_batch.token_ids), own(micro_batch.position_ids), packing


def packing_of(bounds: Tensor, device: torch.device) -> PackedSeqParams:
    """Return how sequences with the cumulative lengths `bounds`, on the CPU, follow each other."""
    from megatron.core.packed_seq_params import PackedSeqParams

    longest = int(bounds.diff().max())
    bounds = bounds.to(device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _to_device(record: Tensors, device: torch.device) -> Tensors:
    fields = ((f.name, getattr(record, f.name)) for f in dataclasses.fields(record))
    moved = {name: value.to(device) for name, value in fields if isinstance(value, Tensor)}
    kept = record.kept
    if kept is not None:
        ids, counts = kept.token_ids.to(device), kept.counts.to(device)
        kept = KeptTokens(token_ids=ids, counts=counts)
    return dataclasses.replace(record, **moved, kept=kept)


def _share_over_stages(
    kept: list[T],
    record: type[T],
    micro_batches: Sequence[MicroBatch],
    groups: ProcessGroups,
    device: torch.device,
) -> list[T]:
    """Broadcast the last stage's results to every stage, in one collective."""
    names = [field.name for field in dataclasses.fields(record)]
    sizes = [micro_batch.num_tokens for micro_batch in micro_batches]
    if groups.pp.is_last:
        rows = [torch.cat([getattr(value, name) for value in kept]) for name in names]
        table = torch.stack(rows).float()
    else:
        table = torch.empty(len(names), sum(sizes), device=device)
    groups.pp.broadcast(table, groups.pp.size - 1)
    return [
        record(**dict(zip(names, columns.clone(), strict=True)))
        for columns in table.cpu().split(sizes, dim=1)
    ]


def _share_metrics(totals: dict[str, Tensor], groups: ProcessGroups) -> dict[str, float]:
    names = sorted(totals)
    values = torch.stack([totals[name] for name in names]).tolist() if names else []
    return broadcast_object(
        dict(zip(names, values, strict=True)), groups.pp, source=groups.pp.size - 1
    )
