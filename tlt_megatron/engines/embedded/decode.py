"""The running batch, with its state in tensors.

`generation.py` calls `add`, then in turn `sample`, `remove`, `grow`, and `forward` or `speculate`. A
plain pass reads back to Python only which rows ended. Row b of every tensor is `requests[b]`; the
last rows fill the places of rows that leave.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.engines.embedded.graph_pool import Models
from tlt_megatron.engines.embedded.kv_layout import KvLayout
from tlt_megatron.engines.embedded.model_drafter import Roots
from tlt_megatron.engines.embedded.outputs import Outputs
from tlt_megatron.engines.embedded.scheduler import DrawnTokens, Request, Scheduler
from tlt_megatron.engines.embedded.speculate import Speculation
from tlt_megatron.speculation.sampling import NoiseWindow, Sampled, is_searched, sample
from tlt_megatron.types import SamplingParams


class _Rows(NamedTuple):
    """Views of the state matrix, each [B] int64. Those from `position` on grow with the tokens."""

    seed: Tensor
    last: Tensor  # `count` at the final token
    position: Tensor  # of the next token to compute, in the whole sequence
    count: Tensor  # of that token in the response
    out: Tensor  # of that token in the outputs
    slot: Tensor  # of that token in the KV


_FIRST_GROWING = _Rows._fields.index("position")


class Ended(NamedTuple):
    """A row whose response is complete."""

    row: int
    request: Request
    tokens: DrawnTokens


class Advance(NamedTuple):
    """What a pass did for the rows of the batch."""

    num_committed: int  # tokens of all rows
    # drafted tokens of each row, also behind its end; empty for a plain pass
    accepted: Sequence[int] = ()
    first_by_depth: Sequence[int] | None = None  # see `StrategySelector.observe`


class DecodeBatch:
    """Sequences that decode together. Before `sample`, each has a last state or a next token."""

    def __init__(
        self,
        models: Models,
        params: SamplingParams,
        *,
        max_batch_size: int,
        speculation: Speculation | None,
    ) -> None:
        """Responses have at most `params.max_new_tokens`."""
        model = self._model = models.policy
        device, dtype = model.device, model.dtype
        draft_slots = speculation.draft_slots if speculation else 0
        self._params = params
        self._layout = KvLayout(models, draft_slots)
        self._speculator = speculation.start(models, params) if speculation else None
        self._outputs = Outputs(max_batch_size, params.max_new_tokens + draft_slots, device)
        self.requests: list[Request] = []
        self._positions: list[int] = []  # `_Rows.position` on the host
        self.num_passes = 0
        size = len(_Rows._fields), max_batch_size
        self._state = torch.zeros(size, dtype=torch.int64, device=device)
        self._hidden_BD = torch.empty(0, model.config.hidden_size, dtype=dtype, device=device)
        self._tokens_B = torch.empty(0, dtype=torch.int64, device=device)
        self._drawn: Sampled | None = None  # the next tokens, if a speculative step sampled them
        self._stop_ids = torch.tensor(params.stop_token_ids, dtype=torch.int64, device=device)
        self._noise = NoiseWindow(model.config.vocab_size)
        self._set_changed()

    # ---- rows join and leave

    def add(self, requests: Sequence[Request]) -> None:
        """Append admitted requests, at their first token or after their saved tokens."""
        start = len(self.requests)
        rows: list[list[int]] = []
        hidden = [self._hidden_BD]
        for request in requests:
            count = request.num_saved
            last_hidden_D = request.last_hidden_D if count else request.state.last_hidden_D
            assert last_hidden_D is not None
            hidden.append(last_hidden_D.unsqueeze(0))
            position, out = request.state.num_tokens + count, self._outputs.open(request)
            rows.append([request.seed, request.max_new_tokens - 1, position, count, out, 0])
            self._positions.append(position)
        self._layout.join(start, requests)
        self.requests.extend(requests)
        self._state[:, start : len(self.requests)] = torch.tensor(rows, dtype=torch.int64).t()
        self._hidden_BD = torch.cat(hidden)
        self._set_changed()

    def remove(self, rows: Sequence[int]) -> None:
        """Remove rows, between `sample` and `forward`. Their pages must be free already."""
        if not rows:
            return
        kept = list(range(len(self.requests)))
        for row in sorted(rows, reverse=True):
            self._outputs.close(self.requests[row])
            last = kept.pop()
            if row < len(kept):
                kept[row] = last
        self._layout.leave(self.requests, kept, self._positions)
        index = torch.tensor(kept, dtype=torch.int64, device=self._model.device)
        self._state[:, : len(kept)] = self._state.index_select(1, index)
        self._tokens_B = self._tokens_B.index_select(0, index)
        self._hidden_BD = self._hidden_BD[: len(kept)]  # consumed; `forward` replaces it
        self.requests = [self.requests[row] for row in kept]
        self._positions = [self._positions[row] for row in kept]
        self._set_changed()

    def _set_changed(self) -> None:
        self._layout.set_changed()
        self._noise.start()
        if self._speculator is not None:
            self._speculator.set_changed()
        self._rows = _Rows(*self._state[:, : len(self.requests)])

    def _advance(self, num_tokens_B: Tensor | int, num_tokens: Sequence[int]) -> None:
        """Move rows on by so many tokens, given on the device and on the host."""
        self._state[_FIRST_GROWING:, : len(self.requests)].add_(num_tokens_B)
        self._positions = list(map(operator.add, self._positions, num_tokens))
        self.num_passes += 1

    # ---- one pass

    def sample(self) -> list[Ended]:
        """Sample and record the next token of every row. Return those that ended, for `remove`."""
        rows = self._rows
        sampled = self._draw()
        self._tokens_B = sampled.token_ids_B
        self._outputs.write(
            rows.out, sampled.token_ids_B, sampled.logprobs_B, sampled.policy_logprobs_B
        )
        for request, ids in zip(self.requests, sampled.kept, strict=False):  # may be ()
            request.kept.append(ids)
        has_ended_B = rows.count >= rows.last
        if self._params.stop_token_ids:
            has_ended_B |= (sampled.token_ids_B.unsqueeze(1) == self._stop_ids).any(dim=1)
        flags = has_ended_B.tolist()
        if True not in flags:
            return []
        return [
            Ended(row, request, self._drawn_tokens(row))
            for row, request in enumerate(self.requests)
            if flags[row]
        ]

    def _drawn_tokens(self, row: int) -> DrawnTokens:
        """Return the tokens of a row, after `sample`."""
        request = self.requests[row]
        num_drawn = self._positions[row] - request.state.num_tokens + 1
        return self._outputs.read(request, num_drawn)

    def _draw(self) -> Sampled:
        """Sample the next token of every row, unless the last speculative step did."""
        drawn, self._drawn = self._drawn, None
        num_drawn = 0 if drawn is None else drawn.token_ids_B.shape[0]
        if drawn is not None and num_drawn == len(self.requests):
            return drawn
        params, new = self._params, slice(num_drawn, None)
        logits_BV = self._model.logits(self._hidden_BD[new])
        seeds_B, positions_B, noise_BV = self._rows.seed[new], self._rows.count[new], None
        is_made = logits_BV.is_cuda or is_searched(
            len(seeds_B), logits_BV.shape[-1], logits_BV.device
        )
        if drawn is None and params.temperature > 0.0 and not is_made:
            noise_BV = self._noise.window(seeds_B, positions_B, 1)[:, 0]
        fresh = sample(
            logits_BV,
            seeds_B,
            positions_B,
            params.temperature,
            params.top_p,
            params.top_k,
            noise_BV=noise_BV,
        )
        return fresh if drawn is None else drawn.followed_by(fresh)

    def grow(self, scheduler: Scheduler) -> None:
        """Take a page for each row whose next token starts one. Save and remove preempted rows."""
        preempted = self._layout.grow(self.requests, self._positions, scheduler)
        rows = [row for row, request in enumerate(self.requests) if request in preempted]
        for row in rows:
            self.requests[row].saved = self._drawn_tokens(row)
        self.remove(rows)

    def forward(self, scheduler: Scheduler) -> Advance:
        """Run the sampled tokens through the model."""
        rows, layout = self._rows, self._layout
        if not layout.is_placed:
            self._place(scheduler)
        longest = max(self._positions) + 1
        self._hidden_BD = layout.run(self._tokens_B, rows.position, rows.slot, longest)
        self._advance(1, [1] * len(self.requests))
        if self._speculator is not None:
            self._speculator.set_changed()
        return Advance(len(self.requests))

    def _place(self, scheduler: Scheduler) -> None:
        slots = self._layout.place(self.requests, self._positions, scheduler)
        self._rows.slot.copy_(torch.tensor(slots, dtype=torch.int64))

    def enter_lanes(self, scheduler: Scheduler) -> bool:
        """Move all rows to lanes, which `speculate` needs. Return False if they do not all fit."""
        layout = self._layout
        if not layout.has_lanes:
            layout.move_to_lanes(self.requests, self._positions, scheduler)
        if not layout.is_placed:
            self._place(scheduler)
        return layout.has_lanes

    def speculate(self, strategy: SpeculationStrategy) -> Advance:
        """Draft, verify and commit in place of `forward`.

        Commits are recorded here. The next `sample` takes the last of them as its draw.
        """
        assert self._speculator is not None
        assert self._layout.has_lanes
        rows, outputs = self._rows, self._outputs
        roots = Roots(
            requests=self.requests,
            token_ids_B=self._tokens_B,
            positions_B=rows.position,
            seeds_B=rows.seed,
            draw_positions_B=rows.count,
            rooms_B=rows.last - rows.count,
            positions=self._positions,
        )
        committed = self._speculator.step(
            self._layout.view(len(self.requests)),
            roots,
            strategy,
            lambda count: outputs.latest(rows.out, count),
        )
        verdict = committed.verdict
        tokens_BS, logprobs_BS = verdict.committed_tokens_BS, committed.logprobs_BS
        policy_logprobs_BS = committed.policy_logprobs_BS
        steps_S = torch.arange(strategy.depth + 1, device=self._model.device)
        out_P = (rows.out.unsqueeze(1) + 1 + steps_S).view(-1)
        outputs.write(out_P, tokens_BS.view(-1), logprobs_BS.view(-1), policy_logprobs_BS.view(-1))
        last_B1 = verdict.num_committed_B.unsqueeze(1) - 1
        counts = verdict.num_committed_B.tolist()
        kept = [row[:count] for row, count in zip(committed.kept, counts, strict=False)]
        for request, sets in zip(self.requests, kept, strict=False):
            request.kept.extend(sets[:-1])  # `sample` adds the last
        self._drawn = Sampled(
            token_ids_B=tokens_BS.gather(1, last_B1).squeeze(1),
            logprobs_B=logprobs_BS.gather(1, last_B1).squeeze(1),
            policy_logprobs_B=policy_logprobs_BS.gather(1, last_B1).squeeze(1),
            kept=tuple(sets[-1] for sets in kept),
        )
        for request, count in zip(self.requests, counts, strict=True):
            request.accept_lengths.append(count)
        self._advance(verdict.num_committed_B, counts)
        self._noise.start()
        first = committed.first_by_depth
        by_depth = None if first is None else first.tolist()
        return Advance(sum(counts), verdict.num_accepted_B.tolist(), by_depth)
