"""Log-probs of given tokens, and of the most likely ones in their places, in a pass of its own.

For clients of `tlt serve` who ask for alternatives or for the log-probs of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tlt_megatron.models.attention.packed import attend_packed
from tlt_megatron.models.transformer import Transformer

_CHUNK = 128  # tokens whose logits are in memory at once


class TokenScore(NamedTuple):
    """Log-probs of one place at temperature 1, without a cut."""

    logprob: float  # the log-prob of the token there
    top: list[tuple[int, float]]  # id and log-prob of the most likely tokens, best first


class _OneSequence:
    """Causal attention over one sequence. Nothing is kept: see `Attention`."""

    def attend(self, layer: int, query_PNH: Tensor, kv_PKH: Tensor) -> Tensor:  # noqa: ARG002
        key_PKH, value_PKH = kv_PKH.chunk(2, dim=1)
        return attend_packed(query_PNH, key_PKH, value_PKH, [len(query_PNH)]).flatten(1)


def score_tokens(model: Transformer, token_ids: Sequence[int], num_top: int) -> list[TokenScore]:
    """Return a score for each token but the first."""
    ids_P = torch.tensor(token_ids, device=model.device)
    places_P = torch.arange(len(ids_P), device=model.device)
    hidden_PD, _ = model.forward(ids_P, places_P, _OneSequence())
    scores: list[TokenScore] = []
    pairs = zip(hidden_PD[:-1].split(_CHUNK), ids_P[1:].split(_CHUNK), strict=True)
    for hidden_CD, ids_C in pairs:
        logits_CV = model.logits(hidden_CD)
        logprobs_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        logprobs_CV = logprobs_CV.log_softmax(dim=-1)
        own = logprobs_CV.gather(1, ids_C.unsqueeze(1)).squeeze(1).tolist()
        values_CK, top_CK = logprobs_CV.topk(min(num_top, logprobs_CV.shape[1]), dim=-1)
        tops = zip(top_CK.tolist(), values_CK.tolist(), strict=True)
        scores += [
            TokenScore(logprob, list(zip(ids, values, strict=True)))
            for logprob, (ids, values) in zip(own, tops, strict=True)
        ]
    return scores
