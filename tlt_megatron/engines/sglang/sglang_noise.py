"""Noise-keyed exact sampling in SGLang: it samples the same tokens as the embedded engine.

SGLang's batches carry only sequence positions, so these key the noise, and the seed of a request is
shifted by its prompt length (`sampling.seed_at_origin`). In the verify pass the argmax of perturbed
logits is an exact sample, so SGLang's greedy verification samples exactly at any temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tlt_megatron.speculation.sampling import (
    allowed_logits,
    kept_ids,
    kept_table,
    noisy_argmax,
    sample,
)
from tlt_megatron.types import SamplingParams

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

# Start of `served_model_name` in our engines, which turns these hooks on. `sampling_backend`, meant
# for custom samplers, does not work: on a CPU SGLang overwrites it.
MARK = "tlt_megatron"
# Elements per chunk: 256 MB of noise in float64, and a few times that while it is generated.
_MOST_NOISE = 1 << 25


def is_active() -> bool:
    """Whether this process serves our engine. Other SGLang engines must not change."""
    from sglang.srt.runtime_context import get_serving

    return get_serving().served_model_name == MARK


def row_chunks(num_rows: int, row_size: int, most: int = _MOST_NOISE) -> Iterator[slice]:
    """Return slices of at most `most` elements, at least one row each. No rows: one empty slice."""
    step = max(most // row_size, 1)
    starts = range(0, max(num_rows, 1), step)
    return (slice(start, min(start + step, num_rows)) for start in starts)


class NoiseSampling:
    """The hooks of sampling and verification.

    `params` are those of the running `generate` call. The engine sends them before its requests. At
    first they are greedy, for SGLang's own warm-up batches."""

    def __init__(self) -> None:
        self.params = SamplingParams(temperature=0.0)

    @staticmethod
    def keep_seeds(
        info: SamplingBatchInfo,
        info_class: type,  # noqa: ARG004
        batch: ScheduleBatch,
        vocab_size: int,  # noqa: ARG004
    ) -> SamplingBatchInfo:
        """After `from_schedule_batch`: add the seeds, which SGLang keeps in deterministic mode
        only.
        """
        if is_active():
            seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
            info.sampling_seed = torch.tensor(seeds).to(batch.device, non_blocking=True)
        return info

    # ---- plain decode

    def make_sampler(self, original: Callable[..., object], backend: str | None = None) -> object:
        """Around `create_sampler`: return SGLang's Sampler with `forward` replaced."""
        if not is_active():
            return original(backend)
        from sglang.srt.layers.sampler import Sampler

        noise = self

        class NoiseKeyedSampler(Sampler):
            """Samples with `speculation.sampling.sample`."""

            def forward(
                self,
                logits_output: LogitsProcessorOutput,
                sampling_info: SamplingBatchInfo,
                return_logprob: bool,
                top_logprobs_nums: list[int],
                token_ids_logprobs: list[list[int]],  # noqa: ARG002
                positions: Tensor,
                *,
                logprob_logits: Tensor | None = None,  # noqa: ARG002
            ) -> Tensor:
                """Return [B] tokens and write log-probabilities to `logits_output`."""
                logits_BV = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
                tokens_B = noise.sample(
                    logits_output,
                    logits_BV,
                    sampling_info.sampling_seed,
                    positions,
                    top_logprobs_nums if return_logprob else None,
                )
                self._sync_token_ids_across_tp(tokens_B, sampling_info)
                return tokens_B

        return NoiseKeyedSampler()

    def sample(
        self,
        logits_output: LogitsProcessorOutput,
        logits_BV: Tensor,
        seeds_B: Tensor,
        positions_B: Tensor,
        top_logprobs_nums: Sequence[int] | None,
    ) -> Tensor:
        """Return [B] tokens. Write log-probabilities of the sampled distribution, and on request
        `_write_top`; none of them if `top_logprobs_nums` is None."""
        sampled = sample(logits_BV, seeds_B, positions_B, self.params)
        if top_logprobs_nums is not None:
            is_greedy = self.params.temperature == 0.0
            logits_output.next_token_logprobs = (
                sampled.policy_logprobs_B if is_greedy else sampled.logprobs_B
            )
            if any(top_logprobs_nums):
                _write_top(
                    logits_output, sampled.token_ids_B, sampled.policy_logprobs_B, sampled.kept
                )
        return sampled.token_ids_B

    # ---- verification

    @staticmethod
    def verify_greedily(original: Callable[..., bool], **facts: bool) -> bool:
        """Around `_verify_uses_greedy`: True, as perturbed logits make the greedy path exact."""
        return True if is_active() else original(**facts)

    def verify_perturbed(
        self,
        eagle_sample: Callable[..., object],
        verify_input: EagleVerifyInput,
        batch: ScheduleBatch,
        logits_output: LogitsProcessorOutput,
        *args: object,
        **kwargs: object,
    ) -> object:
        """Around `eagle_sample`, which takes an argmax per node: pass logits with our samples."""
        if not is_active() or batch.forward_mode.is_idle() or self.params.temperature == 0.0:
            return eagle_sample(verify_input, batch, logits_output, *args, **kwargs)
        raw_PV = logits_output.next_token_logits
        draws_P = tree_draws(
            raw_PV,
            batch.sampling_info.sampling_seed,
            verify_input.positions.view(batch.seq_lens.shape[0], -1),
            self.params,
        )
        # One byte per element; the argmax of every row is its sample.
        is_draw_PV = torch.zeros(raw_PV.shape, dtype=torch.uint8, device=raw_PV.device)
        logits_output.next_token_logits = is_draw_PV.scatter_(1, draws_P.unsqueeze(1), 1)
        try:
            return eagle_sample(verify_input, batch, logits_output, *args, **kwargs)
        finally:
            logits_output.next_token_logits = raw_PV  # log-probabilities are computed from these

    def spec_logprobs(
        self,
        original: Callable[..., None],
        batch: ScheduleBatch,
        logits_output: LogitsProcessorOutput,
        predict: Tensor,
        *,
        accept_index: Tensor | None = None,
        chain_stride: int | None = None,
    ) -> None:
        """Around `compute_spec_logprobs`, which ignores top-p and top-k: apply them too."""
        params = self.params
        if not is_active() or params.is_plain or accept_index is None:
            original(
                batch, logits_output, predict, accept_index=accept_index, chain_stride=chain_stride
            )
            return
        nodes = accept_index.long().reshape(-1)
        tokens_P1 = predict[nodes].long().unsqueeze(1)
        sampled, policy, kept = [], [], []
        for rows in row_chunks(nodes.shape[0], logits_output.next_token_logits.shape[-1]):
            logits_PV = logits_output.next_token_logits[nodes[rows]].float()
            allowed_PV = allowed_logits(logits_PV, params)
            sampled.append(allowed_PV.log_softmax(-1).gather(1, tokens_P1[rows]))
            policy.append(logits_PV.log_softmax(-1).gather(1, tokens_P1[rows]))
            kept.append(kept_table(allowed_PV))
        # Rows after the accepted ones hold no sample, so their token may be outside the cut.
        sampled_P1 = torch.cat(sampled).clamp(min=torch.finfo(torch.float32).min)
        logits_output.next_token_logprobs = sampled_P1.view(accept_index.shape)
        table = torch.cat(kept) if params.is_cut else None
        _write_top(logits_output, tokens_P1.squeeze(1), torch.cat(policy).squeeze(1), table)


def tree_draws(
    logits_PV: Tensor,
    seeds_B: Tensor,
    positions_BQ: Tensor,
    params: SamplingParams,
    *,
    most: int = _MOST_NOISE,
) -> Tensor:
    """Return the target's samples [B * Q], one after every node of the draft trees.

    `positions_BQ` are the positions of the nodes. A chunk has at most `most` elements, or one node.
    """
    seeds_P = seeds_B.unsqueeze(1).expand_as(positions_BQ).reshape(-1)
    positions_P = positions_BQ.reshape(-1).to(torch.int64)
    draws = [
        noisy_argmax(
            allowed_logits(logits_PV[rows].float(), params), seeds_P[rows], positions_P[rows]
        )
        for rows in row_chunks(logits_PV.shape[0], logits_PV.shape[1], most)
    ]
    return torch.cat(draws)


def _write_top(
    logits_output: LogitsProcessorOutput,
    tokens_B: Tensor,
    policy_logprobs_B: Tensor,
    kept: Tensor | None,
) -> None:
    """Write what responses carry as "top log-probabilities" and their ids: first the token with the
    raw policy's log-probability, then the ids that top-p and top-k kept, with the same value.
    `kept` is a `kept_table`."""
    values, ids = list(policy_logprobs_B.unsqueeze(1)), list(tokens_B.unsqueeze(1))
    if kept is not None:
        # One read-back: ids of one dtype, and the bits of float32 log-probabilities.
        bits_B = policy_logprobs_B.view(torch.int32)
        table = torch.cat((kept.int(), torch.stack((tokens_B, bits_B), dim=1).int()), dim=1).cpu()
        policy_B1 = table[:, -1:].contiguous().view(torch.float32)
        tokens_B1 = table[:, -2:-1]
        ids = [torch.cat(row) for row in zip(tokens_B1, kept_ids(table[:, :-2]), strict=True)]
        values = [v.expand(len(row)) for v, row in zip(policy_B1, ids, strict=True)]
    logits_output.next_token_top_logprobs_val = values
    logits_output.next_token_top_logprobs_idx = ids
