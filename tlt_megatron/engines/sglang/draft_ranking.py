"""Draft trees inside SGLang's EAGLE worker, grown as the embedded engine's: candidates ranked by the target's own noise, and
every branch reading its own ancestors.

Runs in SGLang's scheduler processes, hooked in by `plugin.register`. What to know: a drafter's pass at position t predicts
the token that the target samples from position t + 1, so the noise of t + 1 is added to its logits before SGLang ranks
them. Seeds and temperature live in buffers that never move: a captured draft loop reads them again on every replay.
SGLang gives each of the `topk` branches its own KV slots, but leaves keys and values where they are when a branch goes on
from another one's node; here they follow (`_AncestorSlots`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tlt_megatron.engines.sglang.noise import ranks_by_noise, settings_of
from tlt_megatron.speculation.sampling import gumbel_noise

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

# A certain child would tie with its parent, and the best nodes could then miss an ancestor of theirs.
_MAX_PROBABILITY = 1.0 - 2.0**-23


class DraftRanking:
    """The hooks, and what they remember of each draft worker."""

    def __init__(self) -> None:
        self._buffers: WeakKeyDictionary[object, _Buffers] = WeakKeyDictionary()
        self._drafting: object | None = None  # the runner whose draft loop is under way
        self._ancestors = _AncestorSlots()
        self._last: object | None = None  # logits output of the draft pass outside of a loop

    # ---- hooks

    def draft(
        self,
        original: Callable[..., object],
        worker: EagleDraftWorker,
        batch: ScheduleBatch,
        **kwargs: object,
    ) -> object:
        """Around `EagleDraftWorker.draft`: fill the buffers before the loop runs or is replayed."""
        if ranks_by_noise() and not batch.forward_mode.is_idle():
            self._of(worker).fill(batch.sampling_info)
        return original(worker, batch, **kwargs)

    def draft_forward(
        self, original: Callable[..., object], worker: EagleDraftWorker, forward_batch: object
    ) -> object:
        """Around `EagleDraftWorker.draft_forward`, in capture too."""
        if not ranks_by_noise():
            return original(worker, forward_batch)
        self._of(worker)
        self._drafting = worker.draft_runner
        self._ancestors = _AncestorSlots()
        try:
            return original(worker, forward_batch)
        finally:
            self._drafting = None

    def select(
        self,
        original: Callable[..., tuple[object, ...]],
        step: int,
        *args: object,
    ) -> tuple[object, ...]:
        """Around `select_top_k_tokens`, which picks the nodes that the next draft pass reads."""
        selected = original(step, *args)
        if self._drafting is not None and step > 0:
            topk = args[-1]
            picked_BK = selected[-1][-1] - (topk + topk**2 * (step - 1))
            self._ancestors.continue_from(picked_BK.div(topk, rounding_mode="floor"))
        return selected

    def runner_forward(
        self,
        original: Callable[..., object],
        runner: ModelRunner,
        forward_batch: object,
        *args: object,
        **kwargs: object,
    ) -> object:
        """Around `ModelRunner.forward`: perturb the logits of a draft loop, remember those of other draft passes."""
        if runner is self._drafting:
            positions_P = forward_batch.positions.clone()  # SGLang moves them on in place
            self._ancestors.write(runner.token_to_kv_pool, forward_batch.out_cache_loc)
            output = original(runner, forward_batch, *args, **kwargs)
            logits_PV = output.logits_output.next_token_logits
            self._buffers[runner].perturb_(logits_PV, positions_P + 1)
            return output
        output = original(runner, forward_batch, *args, **kwargs)
        if runner.is_draft_worker:
            self._last = output.logits_output
        return output

    def graph_execute(
        self, original: Callable[..., object], runner: object, *args: object, **kwargs: object
    ) -> object:
        """Around the draft-extend graph's `execute`, which stands in for `ModelRunner.forward`."""
        self._last = original(runner, *args, **kwargs)
        return self._last

    def extend_for_prefill(
        self,
        original: Callable[..., object],
        worker: EagleDraftWorker,
        batch: ScheduleBatch,
        *args: object,
        **kwargs: object,
    ) -> object:
        """Around `_draft_extend_for_prefill`: rank the first candidates anew."""
        draft_input = original(worker, batch, *args, **kwargs)
        self._rank_first(worker, batch, draft_input, batch.seq_lens)
        return draft_input

    def extend_for_decode(
        self,
        original: Callable[..., None],
        worker: EagleDraftWorker,
        batch: ScheduleBatch,
        batch_result: object,
        **kwargs: object,
    ) -> None:
        """Around `_draft_extend_for_decode`: the same after a verify pass."""
        original(worker, batch, batch_result, **kwargs)
        self._rank_first(worker, batch, batch_result.next_draft_input, batch_result.new_seq_lens)

    @staticmethod
    def keep_order(
        probs_BV: Tensor, logits_BV: Tensor, sampling_info: object, use_rejection_sampling: bool
    ) -> Tensor:
        """After `renorm_draft_probs`: no probability of exactly 1."""
        return probs_BV.clamp(max=_MAX_PROBABILITY) if ranks_by_noise() else probs_BV

    # ----

    def _rank_first(
        self, worker: EagleDraftWorker, batch: ScheduleBatch, draft_input: object, lengths_B: Tensor
    ) -> None:
        """Candidates behind the root; `lengths_B` is where each root stands."""
        is_idle = batch.forward_mode.is_idle() or self._last is None
        if not ranks_by_noise() or is_idle or lengths_B.numel() == 0:
            return
        buffers = self._of(worker)
        buffers.fill(batch.sampling_info)
        logits_BV = self._last.next_token_logits.float().clone()
        self._last = None
        buffers.perturb_(logits_BV, lengths_B.to(torch.int64), topk=1)
        if worker.topk == 1:
            draft_input.topk_index = logits_BV.argmax(dim=-1, keepdim=True)
            draft_input.topk_p = torch.ones_like(draft_input.topk_index, dtype=torch.float32)
        else:
            probs_BV = logits_BV.softmax(-1).clamp(max=_MAX_PROBABILITY)
            draft_input.topk_p, draft_input.topk_index = probs_BV.topk(worker.topk, dim=-1)

    def _of(self, worker: EagleDraftWorker) -> _Buffers:
        runner = worker.draft_runner
        if runner not in self._buffers:
            self._buffers[runner] = _Buffers(worker)
        return self._buffers[runner]


class _AncestorSlots:
    """Where the branches of one draft loop keep their keys and values, step by step."""

    def __init__(self) -> None:
        self._slots_SP: list[Tensor] = []  # [B * K] of each step so far
        self._parents_BK: Tensor | None = None  # the branch from which each branch goes on

    def continue_from(self, parents_BK: Tensor) -> None:
        """What the next `write` is to move."""
        self._parents_BK = parents_BK

    def write(self, pool: KVCache, slots_P: Tensor) -> None:
        """Before the pass that writes `slots_P`: what it reads of earlier steps is copied from branch to branch."""
        if self._slots_SP and self._parents_BK is not None and self._parents_BK.shape[1] > 1:
            parents_BK = self._parents_BK
            to_SBK = torch.stack(self._slots_SP).view(-1, *parents_BK.shape)
            from_SBK = to_SBK.gather(2, parents_BK.expand_as(to_SBK))
            self._move(pool, to_SBK.reshape(-1), from_SBK.reshape(-1))
        self._slots_SP.append(slots_P)

    @staticmethod
    def _move(pool: KVCache, to_P: Tensor, from_P: Tensor) -> None:
        """Branches may change places, so every row of a buffer is read before one is written; SGLang's fast copy is for
        rows that do not overlap."""
        if pool.use_hnd:  # not laid out by slots, and copied by indexing then
            pool.move_kv_cache(to_P, from_P)
            return
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer[to_P] = buffer[from_P]


class _Buffers:
    """Seeds and temperatures of the rows of a batch, at addresses that stay."""

    def __init__(self, worker: EagleDraftWorker) -> None:
        from sglang.srt.runtime_context import get_exec

        graph_sizes = get_exec().graph.cuda_graph_bs_decode or [0]
        num_rows = max(worker.draft_runner.max_running_requests, *graph_sizes, 1)
        self._seeds_R = torch.zeros(num_rows, dtype=torch.int64, device=worker.device)
        self._temperatures_R = torch.zeros(num_rows, dtype=torch.float64, device=worker.device)
        self._topk = worker.topk
        self._worker = worker

    def fill(self, info: SamplingBatchInfo) -> None:
        """With the rows of a batch. At temperature 0 nothing is added to the logits."""
        seeds_B = info.sampling_seed
        self._seeds_R[: seeds_B.shape[0]].copy_(seeds_B)
        self._temperatures_R.fill_(settings_of(info).temperature)

    def perturb_(self, logits_PV: Tensor, positions_P: Tensor, topk: int = 0) -> None:
        """Add temperature * noise; the `topk` branches of a request share its noise."""
        topk = topk or self._topk
        num_rows = logits_PV.shape[0] // topk
        hot_ids = self._worker.hot_token_id  # a pruned draft vocabulary
        vocab_size = logits_PV.shape[-1]
        if hot_ids is not None:
            vocab_size = self._worker.target_worker.model_config.vocab_size
        noise_BV = gumbel_noise(
            self._seeds_R[:num_rows], positions_P.view(num_rows, topk)[:, 0], vocab_size
        )
        if hot_ids is not None:
            noise_BV = noise_BV[:, hot_ids]
        noise_BV *= self._temperatures_R[:num_rows].unsqueeze(1)
        logits_BKV = logits_PV.view(num_rows, topk, -1)
        logits_BKV += noise_BV.unsqueeze(1).to(logits_PV.dtype)
