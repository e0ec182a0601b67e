"""Grows draft trees in SGLang's EAGLE worker: noise ranks candidates, branches read their
ancestors.

A drafter's pass at position t predicts the token that the target samples from position t + 1. So
the noise of t + 1 is added to its logits before SGLang ranks them. Seeds and temperatures are in
buffers at fixed addresses, because a captured draft loop reads them on every replay. SGLang gives
each of the `topk` branches its own KV slots. When a branch continues from another branch's node,
SGLang does not copy the keys and values; `_AncestorSlots` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tlt_megatron.engines.sglang.sglang_noise import NoiseSampling, is_active
from tlt_megatron.speculation.sampling import add_noise

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.eagle_info import EagleDraftInput
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

# A child of probability 1 would tie with its parent. The best nodes could then lack an ancestor.
_MAX_PROBABILITY = 1.0 - 2.0**-23


class DraftRanking:
    """The hooks, and their state for the draft worker of this process."""

    def __init__(self, noise: NoiseSampling) -> None:
        self._noise = noise
        self._buffers: _Buffers | None = None
        self._drafting: object | None = None  # the runner whose draft loop is running
        self._ancestors = _AncestorSlots()
        # The logits output of the last draft pass outside a loop.
        self._last: LogitsProcessorOutput | None = None

    # ---- hooks

    def draft(
        self,
        original: Callable[..., object],
        worker: EagleDraftWorker,
        batch: ScheduleBatch,
        **kwargs: object,
    ) -> object:
        """Around `EagleDraftWorker.draft`: fill the buffers before the loop runs or is replayed."""
        if is_active() and not batch.forward_mode.is_idle():
            self._fill(worker, batch)
        return original(worker, batch, **kwargs)

    def draft_forward(
        self, original: Callable[..., object], worker: EagleDraftWorker, forward_batch: object
    ) -> object:
        """Around `draft_forward`, also during capture: mark the draft loop as running."""
        if not is_active():
            return original(worker, forward_batch)
        self._buffers_of(worker)
        self._drafting = worker.draft_runner
        self._ancestors = _AncestorSlots()
        try:
            return original(worker, forward_batch)
        finally:
            self._drafting = None

    def select(
        self, original: Callable[..., tuple[Any, ...]], step: int, *args: Any
    ) -> tuple[Any, ...]:
        """Around `select_top_k_tokens`: record from which branches the next nodes continue."""
        selected = original(step, *args)
        if self._drafting is not None and step > 0:
            topk = args[-1]
            picked_BK = selected[-1][-1] - (topk + topk**2 * (step - 1))
            self._ancestors.continue_from(picked_BK.div(topk, rounding_mode="floor"))
        return selected

    def runner_forward(
        self,
        original: Callable[..., Any],
        runner: ModelRunner,
        forward_batch: ForwardBatch,
        *args: object,
        **kwargs: object,
    ) -> object:
        """Around `forward`: perturb the logits of a draft loop, keep other draft logits."""
        if runner is self._drafting:
            assert self._buffers is not None
            positions_P = forward_batch.positions.clone()  # SGLang advances them in place
            self._ancestors.write(runner.token_to_kv_pool, forward_batch.out_cache_loc)
            output = original(runner, forward_batch, *args, **kwargs)
            logits_PV = output.logits_output.next_token_logits
            self._buffers.perturb_(logits_PV, positions_P + 1)
            return output
        output = original(runner, forward_batch, *args, **kwargs)
        if runner.is_draft_worker:
            self._last = output.logits_output
        return output

    def graph_execute(
        self, original: Callable[..., Any], runner: object, *args: object, **kwargs: object
    ) -> object:
        """Around the draft-extend graph's `execute`, in place of `forward`: keep its logits."""
        self._last = original(runner, *args, **kwargs)
        return self._last

    def extend_for_prefill(
        self,
        original: Callable[..., EagleDraftInput],
        worker: EagleDraftWorker,
        batch: ScheduleBatch,
        *args: object,
        **kwargs: object,
    ) -> object:
        """Around `_draft_extend_for_prefill`: rank the first candidates again, with noise."""
        draft_input = original(worker, batch, *args, **kwargs)
        self._rank_first(worker, batch, draft_input, batch.seq_lens)
        return draft_input

    def extend_for_decode(
        self,
        original: Callable[..., None],
        worker: EagleDraftWorker,
        batch: ScheduleBatch,
        batch_result: GenerationBatchResult,
        **kwargs: object,
    ) -> None:
        """Around `_draft_extend_for_decode`: rank the first candidates after a verify pass."""
        original(worker, batch, batch_result, **kwargs)
        self._rank_first(worker, batch, batch_result.next_draft_input, batch_result.new_seq_lens)

    @staticmethod
    def keep_order(probs_BV: Tensor, *_: object, **__: object) -> Tensor:
        """After `renorm_draft_probs`: keep all probabilities below 1."""
        return probs_BV.clamp(max=_MAX_PROBABILITY) if is_active() else probs_BV

    # ----

    def _rank_first(
        self,
        worker: EagleDraftWorker,
        batch: ScheduleBatch,
        draft_input: EagleDraftInput,
        lengths_B: Tensor,
    ) -> None:
        """Rank the candidates after the root. `lengths_B` is the position of each root."""
        last = self._last
        is_idle = batch.forward_mode.is_idle() or lengths_B.numel() == 0
        if last is None or is_idle or not is_active():
            return
        buffers = self._fill(worker, batch)
        logits_BV = last.next_token_logits.float().clone()
        self._last = None
        buffers.perturb_(logits_BV, lengths_B.to(torch.int64), topk=1)
        if worker.topk == 1:
            draft_input.topk_index = logits_BV.argmax(dim=-1, keepdim=True)
            draft_input.topk_p = torch.ones_like(draft_input.topk_index, dtype=torch.float32)
        else:
            probs_BV = logits_BV.softmax(-1).clamp(max=_MAX_PROBABILITY)
            draft_input.topk_p, draft_input.topk_index = probs_BV.topk(worker.topk, dim=-1)

    def _buffers_of(self, worker: EagleDraftWorker) -> _Buffers:
        self._buffers = self._buffers or _Buffers(worker)
        return self._buffers

    def _fill(self, worker: EagleDraftWorker, batch: ScheduleBatch) -> _Buffers:
        buffers = self._buffers_of(worker)
        buffers.fill(batch.sampling_info.sampling_seed, self._noise.params.temperature)
        return buffers


class _AncestorSlots:
    """The KV slots of the branches of one draft loop, step by step."""

    def __init__(self) -> None:
        self._slots_SP: list[Tensor] = []  # [B * K] each, one per step so far
        self._parents_BK: Tensor | None = None  # the branch from which each branch continues

    def continue_from(self, parents_BK: Tensor) -> None:
        """Set the parent branches for the next `write`."""
        self._parents_BK = parents_BK

    def write(self, pool: KVCache, slots_P: Tensor) -> None:
        """Copy earlier keys and values from parents, before the pass that writes `slots_P`."""
        if self._slots_SP and self._parents_BK is not None and self._parents_BK.shape[1] > 1:
            parents_BK = self._parents_BK
            to_SBK = torch.stack(self._slots_SP).view(-1, *parents_BK.shape)
            from_SBK = to_SBK.gather(2, parents_BK.expand_as(to_SBK))
            self._move(pool, to_SBK.reshape(-1), from_SBK.reshape(-1))
        self._slots_SP.append(slots_P)

    @staticmethod
    def _move(pool: KVCache, to_P: Tensor, from_P: Tensor) -> None:
        """Copy slots. Branches may swap, so all rows of a buffer are read before any is written.
        SGLang's fast copy needs rows that do not overlap."""
        if pool.use_hnd:  # another layout, which SGLang copies by indexing
            pool.move_kv_cache(to_P, from_P)
            return
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer[to_P] = buffer[from_P]


class _Buffers:
    """Seeds and temperatures of the rows of a batch, at fixed addresses."""

    def __init__(self, worker: EagleDraftWorker) -> None:
        from sglang.srt.runtime_context import get_exec

        graph_sizes = get_exec().graph.cuda_graph_bs_decode or [0]
        num_rows = max(worker.draft_runner.max_running_requests, *graph_sizes, 1)
        self._seeds_R = torch.zeros(num_rows, dtype=torch.int64, device=worker.device)
        self._temperatures_R = torch.zeros(num_rows, dtype=torch.float64, device=worker.device)
        self._one = torch.ones((), dtype=torch.float64, device=worker.device)
        self._topk = worker.topk
        self._worker = worker

    def fill(self, seeds_B: Tensor, temperature: float) -> None:
        """Copy in the rows of a batch. At temperature 0 `perturb_` adds nothing."""
        self._seeds_R[: seeds_B.shape[0]].copy_(seeds_B)
        self._temperatures_R.fill_(temperature)

    def perturb_(self, logits_PV: Tensor, positions_P: Tensor, topk: int = 0) -> None:
        """Add temperature * noise in place. The `topk` branches of a request share its noise."""
        topk = topk or self._topk
        num_rows = logits_PV.shape[0] // topk
        logits_BKV = logits_PV.view(num_rows, topk, -1)
        seeds_B, factor_B = self._seeds_R[:num_rows], self._temperatures_R[:num_rows]
        positions_B = positions_P.view(num_rows, topk)[:, 0]
        hot_ids = self._worker.hot_token_id  # a pruned draft vocabulary, or None
        noisy_BKV = add_noise(logits_BKV, seeds_B, positions_B, self._one, factor_B, hot_ids)
        logits_BKV.copy_(noisy_BKV)
