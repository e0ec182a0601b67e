"""Noise-keyed exact sampling in SGLang: it samples the same tokens as the embedded engine.

SGLang's batches carry only sequence positions, so these key the noise, and the seed of a request is
shifted by its prompt length (`sampling.seed_at_origin`). In the verify pass the argmax of perturbed
logits is an exact sample, so SGLang's greedy verification samples exactly at any temperature.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tlt_megatron.speculation.sampling import Sampled, cut_logits, kept_ids, noisy_argmax, sample

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

# Start of `served_model_name` in our engines, which turns these hooks on. `sampling_backend`, meant
# for custom samplers, does not work: on a CPU SGLang overwrites it.
MARK = "tlt_megatron"
_SETTINGS = "noise_settings"  # our attribute of SamplingBatchInfo
# Elements per chunk: 256 MB of noise in float64, and a few times that while it is generated.
_MOST_NOISE = 1 << 25


class SamplingSettings(NamedTuple):
    """What all requests of a batch share, on the host: reading SGLang's tensors would wait."""

    temperature: float
    top_p: float
    top_k: int

    @property
    def is_plain(self) -> bool:
        """Whether the sampled distribution is the raw policy."""
        return self.temperature == 1.0 and not self.is_cut

    @property
    def is_cut(self) -> bool:
        """Whether top-p or top-k leaves out tokens."""
        return self.top_p < 1.0 or self.top_k > 0


def is_active() -> bool:
    """Whether this process serves our engine. Other SGLang engines must not change."""
    from sglang.srt.runtime_context import get_serving

    return get_serving().served_model_name == MARK


def row_chunks(num_rows: int, row_size: int, most: int = _MOST_NOISE) -> Iterator[slice]:
    """Return slices of at most `most` elements, at least one row each. No rows: one empty slice."""
    step = max(most // row_size, 1)
    starts = range(0, max(num_rows, 1), step)
    return (slice(start, min(start + step, num_rows)) for start in starts)


# ---- data of a batch


def keep_seeds(
    info: SamplingBatchInfo,
    info_class: type,  # noqa: ARG001
    batch: ScheduleBatch,
    vocab_size: int,  # noqa: ARG001
) -> SamplingBatchInfo:
    """After `from_schedule_batch`: add seeds (SGLang: in deterministic mode only) and settings."""
    if not is_active():
        return info
    params = [request.sampling_params for request in batch.reqs]
    seeds = torch.tensor([p.sampling_seed or 0 for p in params], dtype=torch.int64)
    info.sampling_seed = seeds.to(batch.device, non_blocking=True)
    setattr(info, _SETTINGS, _shared({_normalized(p) for p in params}))
    return info


def _normalized(params: SamplingParams) -> SamplingSettings:
    """Return the settings. SGLang writes greedy as top_k=1 and "all tokens" as a huge top_k."""
    if params.top_k == 1:
        return SamplingSettings(0.0, 1.0, 0)
    top_k = params.top_k if params.top_k < 1 << 30 else 0
    return SamplingSettings(params.temperature, params.top_p, top_k)


def _shared(found: set[SamplingSettings]) -> SamplingSettings:
    if len(found) > 1:
        raise RuntimeError(
            f"requests of one batch have {len(found)} sampling settings {sorted(found)}: an engine answers one"
            " SamplingParams at a time"
        )
    return next(iter(found), SamplingSettings(0.0, 1.0, 0))


def check_merged(
    merge: Callable[..., None], info: SamplingBatchInfo, other: SamplingBatchInfo
) -> None:
    """Around `SamplingBatchInfo.merge_batch`: RuntimeError if the settings differ."""
    if hasattr(info, _SETTINGS) and hasattr(other, _SETTINGS):
        _shared({settings_of(info), settings_of(other)})
    merge(info, other)


def keep_settings(copied: SamplingBatchInfo, info: SamplingBatchInfo) -> SamplingBatchInfo:
    """After `copy_for_forward`, which copies only declared fields: copy the settings too."""
    if hasattr(info, _SETTINGS):
        setattr(copied, _SETTINGS, settings_of(info))
    return copied


def settings_of(info: SamplingBatchInfo) -> SamplingSettings:
    """Return the settings of a batch. They are greedy for SGLang's own warm-up batches."""
    return getattr(info, _SETTINGS, SamplingSettings(0.0, 1.0, 0))


# ---- plain decode


def make_sampler(original: Callable[..., object], backend: str | None = None) -> object:
    """Around `create_sampler`: return SGLang's Sampler with `forward` replaced."""
    if not is_active():
        return original(backend)
    from sglang.srt.layers.sampler import Sampler

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
            sampled = _sample_rows(
                logits_BV, sampling_info.sampling_seed, positions, settings_of(sampling_info)
            )
            if return_logprob:
                _write_logprobs(
                    logits_output, sampled, settings_of(sampling_info), top_logprobs_nums
                )
            self._sync_token_ids_across_tp(sampled.token_ids_B, sampling_info)
            return sampled.token_ids_B

    return NoiseKeyedSampler()


def _sample_rows(
    logits_BV: Tensor, seeds_B: Tensor, positions_B: Tensor, settings: SamplingSettings
) -> Sampled:
    parts = [
        sample(logits_BV[rows], seeds_B[rows], positions_B[rows], *settings)
        for rows in row_chunks(*logits_BV.shape)
    ]
    return functools.reduce(Sampled.followed_by, parts)


def _write_logprobs(
    logits_output: LogitsProcessorOutput,
    sampled: Sampled,
    settings: SamplingSettings,
    top_logprobs_nums: list[int] | None,
) -> None:
    """Write log-probabilities of the sampled distribution; on request also `_as_top`."""
    is_greedy = settings.temperature == 0.0
    logits_output.next_token_logprobs = (
        sampled.policy_logprobs_B if is_greedy else sampled.logprobs_B
    )
    if top_logprobs_nums and any(top_logprobs_nums):
        top = _as_top(sampled.token_ids_B, sampled.policy_logprobs_B, sampled.kept)
        logits_output.next_token_top_logprobs_val, logits_output.next_token_top_logprobs_idx = top


def _as_top(
    tokens_B: Tensor, policy_logprobs_B: Tensor, kept: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return what responses carry as "top log-probabilities" and their ids: first the token with the raw policy's
    log-probability, then the ids that top-p and top-k kept, with the same value."""
    if not kept:
        return list(policy_logprobs_B.unsqueeze(1)), list(tokens_B.unsqueeze(1))
    ids = [torch.cat((token, k)) for token, k in zip(tokens_B.cpu().split(1), kept, strict=True)]
    values = policy_logprobs_B.cpu().split(1)
    return [v.expand(len(row)) for v, row in zip(values, ids, strict=True)], ids


# ---- verification


def verify_greedily(original: Callable[..., bool], **facts: bool) -> bool:
    """Around `_verify_uses_greedy`: True, as perturbed logits make the greedy path exact."""
    return True if is_active() else original(**facts)


def verify_perturbed(
    eagle_sample: Callable[..., object],
    verify_input: EagleVerifyInput,
    batch: ScheduleBatch,
    logits_output: LogitsProcessorOutput,
    *args: object,
    **kwargs: object,
) -> object:
    """Around `eagle_sample`, which takes an argmax per node: pass logits with our samples."""
    settings = settings_of(batch.sampling_info)
    if not is_active() or batch.forward_mode.is_idle() or settings.temperature == 0.0:
        return eagle_sample(verify_input, batch, logits_output, *args, **kwargs)
    raw_PV = logits_output.next_token_logits
    draws_P = tree_draws(
        raw_PV,
        batch.sampling_info.sampling_seed,
        verify_input.positions.view(batch.seq_lens.shape[0], -1),
        settings,
    )
    # One byte per element; the argmax of every row is its sample.
    is_draw_PV = torch.zeros(raw_PV.shape, dtype=torch.uint8, device=raw_PV.device)
    logits_output.next_token_logits = is_draw_PV.scatter_(1, draws_P.unsqueeze(1), 1)
    try:
        return eagle_sample(verify_input, batch, logits_output, *args, **kwargs)
    finally:
        logits_output.next_token_logits = raw_PV  # log-probabilities are computed from these


def tree_draws(
    logits_PV: Tensor,
    seeds_B: Tensor,
    positions_BQ: Tensor,
    settings: SamplingSettings,
    *,
    most: int = _MOST_NOISE,
) -> Tensor:
    """Return the target's samples [B * Q], one after every node of the draft trees.

    `positions_BQ` are the positions of the nodes. A chunk has at most `most` elements, or one node."""
    seeds_P = seeds_B.unsqueeze(1).expand_as(positions_BQ).reshape(-1)
    positions_P = positions_BQ.reshape(-1).to(torch.int64)
    draws = [
        noisy_argmax(_allowed(logits_PV[rows], settings), seeds_P[rows], positions_P[rows])
        for rows in row_chunks(logits_PV.shape[0], logits_PV.shape[1], most)
    ]
    return torch.cat(draws)


def _allowed(logits_PV: Tensor, settings: SamplingSettings) -> Tensor:
    """Return float32 logits, scaled by temperature and cut exactly as in `sample`."""
    logits_PV = logits_PV.float()
    if settings.is_plain:
        return logits_PV
    return cut_logits(logits_PV / settings.temperature, settings.top_p, settings.top_k)


def spec_logprobs(
    original: Callable[..., None],
    batch: ScheduleBatch,
    logits_output: LogitsProcessorOutput,
    predict: Tensor,
    *,
    accept_index: Tensor | None = None,
    chain_stride: int | None = None,
) -> None:
    """Around `compute_spec_logprobs`, which ignores top-p and top-k: apply them too."""
    settings = settings_of(batch.sampling_info)
    if not is_active() or accept_index is None or settings.temperature == 0.0 or settings.is_plain:
        original(
            batch, logits_output, predict, accept_index=accept_index, chain_stride=chain_stride
        )
        return
    nodes = accept_index.long().reshape(-1)
    tokens_P1 = predict[nodes].long().unsqueeze(1)
    wants_policy = bool(batch.top_logprobs_nums) and any(batch.top_logprobs_nums)
    sampled, policy, kept = [], [], []
    for rows in row_chunks(nodes.shape[0], logits_output.next_token_logits.shape[-1]):
        logits_PV = logits_output.next_token_logits[nodes[rows]].float()
        allowed_PV = _allowed(logits_PV, settings)
        sampled.append(allowed_PV.log_softmax(-1).gather(1, tokens_P1[rows]))
        if wants_policy:
            policy.append(logits_PV.log_softmax(-1).gather(1, tokens_P1[rows]))
            kept.extend(kept_ids(allowed_PV) if settings.is_cut else ())
    # Rows after the accepted ones hold no sample, so their token may be outside the cut.
    sampled_P1 = torch.cat(sampled).clamp(min=torch.finfo(torch.float32).min)
    logits_output.next_token_logprobs = sampled_P1.view(accept_index.shape)
    if wants_policy:
        top = _as_top(tokens_P1.squeeze(1), torch.cat(policy).squeeze(1), kept)
        logits_output.next_token_top_logprobs_val, logits_output.next_token_top_logprobs_idx = top
