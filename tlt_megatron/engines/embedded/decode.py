"""The running batch, with its state in tensors.

`generation.py` calls `add`, then in turn `sample`, `remove`, `grow`, and `forward` or `speculate`.
A pass reads back to Python once: which rows ended, and of a speculative step what it committed. Row
b of every tensor is `requests[b]`; the last rows fill the places of rows that leave.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.engines.embedded.kv_layout import KvLayout
from tlt_megatron.engines.embedded.lane_steps import Committed, LaneBatch, Report, Rows
from tlt_megatron.engines.embedded.model_pair import Models
from tlt_megatron.engines.embedded.outputs import Outputs
from tlt_megatron.engines.embedded.request import DrawnTokens, Request, longest_of
from tlt_megatron.engines.embedded.scheduler import Scheduler
from tlt_megatron.engines.embedded.speculate import Speculation
from tlt_megatron.speculation.sampling import (
    NoiseWindow,
    is_searched,
    kept_ids,
    sample,
    sample_each,
)
from tlt_megatron.speculation.tree import chain_tree

_FIRST_GROWING = Rows._fields.index("position")


class Ended(NamedTuple):
    """A complete response."""

    request: Request
    tokens: DrawnTokens


class Advance(NamedTuple):
    """What a pass did for the rows of the batch."""

    num_committed: int  # tokens of all rows
    # Drafted tokens of each row, also after its end; empty for a plain pass.
    accepted: Sequence[int] = ()
    first_by_depth: Sequence[int] | None = None  # see `StrategySelector.observe`


class DecodeBatch:
    """Sequences that decode together. Before `sample`, each has a last state or a next token."""

    def __init__(
        self, models: Models, scheduler: Scheduler, speculation: Speculation | None
    ) -> None:
        """Responses have at most `models.params.max_new_tokens`."""
        model, params = models.policy, models.params
        device, dtype = model.device, model.dtype
        draft_slots = speculation.draft_slots if speculation else 0
        self._models = models
        self._layout = KvLayout(models, scheduler, draft_slots)
        self._noise = NoiseWindow(model.config.vocab_size)
        self._speculator = speculation.start(models, self._noise) if speculation else None
        size = scheduler.max_batch_size
        self._outputs = Outputs(size, params.max_new_tokens + draft_slots, device)
        self.requests: list[Request] = []
        self._state = torch.zeros(len(Rows._fields), size, dtype=torch.int64, device=device)
        self._hidden_BD = torch.empty(0, model.config.hidden_size, dtype=dtype, device=device)
        # A step may have sampled the next tokens already. It is a graph that still runs, or it
        # told which rows ended.
        self._running_step: Committed | None = None
        self._ended: list[bool] = []
        self._stop_ids = torch.tensor(params.stop_token_ids, dtype=torch.int64, device=device)
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
            request.position, out = request.state.num_tokens + count, self._outputs.open(request)
            last = request.max_new_tokens - 1
            rows.append([0, request.seed, last, request.position, count, out, 0])
        self._layout.join(start, requests)
        self.requests.extend(requests)
        self._state[:, start : len(self.requests)] = torch.tensor(rows, dtype=torch.int64).t()
        self._hidden_BD = torch.cat(hidden)
        self._set_changed()

    def remove(self, requests: Collection[Request]) -> None:
        """Remove requests, between `sample` and `forward`. Their pages must be free already."""
        if not requests:
            return
        rows = [row for row, request in enumerate(self.requests) if request in requests]
        kept = list(range(len(self.requests)))
        for row in reversed(rows):
            self._outputs.close(self.requests[row])
            last = kept.pop()
            if row < len(kept):
                kept[row] = last
        self._layout.leave(self.requests, kept)
        index = torch.tensor(kept, dtype=torch.int64, device=self._state.device)
        self._state[:, : len(kept)] = self._state.index_select(1, index)
        self._hidden_BD = self._hidden_BD[: len(kept)]  # consumed; `forward` replaces it
        self.requests = [self.requests[row] for row in kept]
        self._set_changed()

    def _set_changed(self) -> None:
        self._layout.set_changed()
        self._noise.start()
        self._rows = Rows(*self._state[:, : len(self.requests)])
        usual = self._models.params.distribution
        is_usual = all(each.params.distribution == usual for each in self.requests)
        self._sampling = () if is_usual else tuple(each.params for each in self.requests)

    # ---- one pass

    def sample(self) -> list[Ended]:
        """Sample and record the next token of every row, unless the last step did. Return those
        that ended, for `remove`.
        """
        flags = self._read_ended()
        if len(flags) < len(self.requests):
            flags += self._draw(len(flags))
        if True not in flags:
            return []
        ended = itertools.compress(self.requests, flags)
        return [Ended(request, self._drawn_tokens(request)) for request in ended]

    def _read_ended(self) -> list[bool]:
        """Return which rows the last step ended; [] if it has not sampled. Waits for a graph."""
        step, self._running_step = self._running_step, None
        ended, self._ended = self._ended, []
        return ended if step is None else self._take(step.read())

    def _drawn_tokens(self, request: Request) -> DrawnTokens:
        """Return the tokens of a running request, after `sample`."""
        return self._outputs.read(request, request.position - request.state.num_tokens + 1)

    def take_news(self) -> list[tuple[Request, DrawnTokens]]:
        """Return the tokens of each row since the last call, after `sample`."""
        spans = []
        for request in self.requests:
            end = request.position - request.state.num_tokens + 1
            spans.append((request, request.num_reported, end))
            request.num_reported = end
        return list(zip(self.requests, self._outputs.read_spans(spans), strict=True))

    def _draw(self, first_row: int) -> list[bool]:
        """Sample and record the next token of the rows from `first_row` on. Return which of them
        ended.
        """
        params, requests = self._models.params, self.requests[first_row:]
        rows = self._rows
        if first_row:
            rows = Rows(*self._state[:, first_row : len(self.requests)])
        logits_BV = self._models.policy.logits(self._hidden_BD[first_row:])
        noise_BV = None
        is_made = logits_BV.is_cuda or is_searched(
            len(requests), logits_BV.shape[1], logits_BV.device
        )
        is_noisy = bool(self._sampling) or params.temperature > 0.0
        if first_row == 0 and is_noisy and not is_made:
            noise_BV = self._noise.window(rows.seed, rows.count, 1)[:, 0]
        if self._sampling:
            each = self._sampling[first_row:]
            sampled = sample_each(logits_BV, rows.seed, rows.count, each, noise_BV)
        else:
            sampled = sample(logits_BV, rows.seed, rows.count, params, noise_BV=noise_BV)
        rows.token.copy_(sampled.token_ids_B)
        self._outputs.write(
            rows.out, sampled.token_ids_B, sampled.logprobs_B, sampled.policy_logprobs_B
        )
        has_ended_B = rows.count >= rows.last
        if params.stop_token_ids:
            has_ended_B |= (sampled.token_ids_B.unsqueeze(1) == self._stop_ids).any(dim=1)
        columns = [has_ended_B.unsqueeze(1), sampled.token_ids_B.unsqueeze(1)]
        table = torch.cat([*columns, *([] if sampled.kept is None else [sampled.kept])], dim=1)
        facts_B2, kept_BX = table.cpu().tensor_split([2], dim=1)
        if sampled.kept is not None:
            for request, ids in zip(requests, kept_ids(kept_BX), strict=True):
                request.kept.append(ids)
        flags = []
        for request, (has_ended, token_id) in zip(requests, facts_B2.tolist(), strict=True):
            request.read([token_id])
            flags.append(bool(has_ended) or request.has_stop_string)
        return flags

    def grow(self) -> None:
        """Take a page for each row whose next token starts one. Save and remove preempted rows."""
        preempted = self._layout.grow(self.requests)
        for request in preempted:
            request.saved = self._drawn_tokens(request)
        self.remove(preempted)

    def forward(self) -> Advance:
        """Run the sampled tokens through the model."""
        rows, layout, graphs = self._rows, self._layout, self._models.graphs
        if not layout.is_placed:
            self._place()
        num_rows, longest = len(self.requests), longest_of(self.requests)
        if layout.has_lanes and graphs.has_graphs:  # the graph samples too
            no_tree = chain_tree(rows.token.new_empty(num_rows, 0))
            committed = graphs.target(self._lane_batch(), no_tree, longest)
            self._commit(committed)
            self._running_step = committed
        else:
            self._hidden_BD = layout.run(rows.token, rows.position, rows.slot, longest)
            self._state[_FIRST_GROWING:, :num_rows].add_(1)
        for request in self.requests:
            request.position += 1
        return Advance(num_rows)

    def _lane_batch(self) -> LaneBatch:
        view = self._layout.view(self._rows.slot, self._rows.position)
        return LaneBatch(view, self._state_FB, self._rows, sampling=self._sampling)

    @property
    def _state_FB(self) -> Tensor:
        return self._state[:, : len(self.requests)]

    def _commit(self, committed: Committed) -> None:
        """Record what a step committed, and move the rows on."""
        rows, tokens_BS = self._rows, committed.tokens_BS
        steps_S = torch.arange(1, tokens_BS.shape[1] + 1, device=tokens_BS.device)
        out_P = (rows.out.unsqueeze(1) + steps_S).view(-1)
        logprobs = committed.logprobs_BS.view(-1), committed.policy_logprobs_BS.view(-1)
        self._outputs.write(out_P, tokens_BS.view(-1), *logprobs)
        rows.token.copy_(committed.root_B)
        self._state_FB[_FIRST_GROWING:].add_(committed.num_committed_B)

    def _take(self, report: Report) -> list[bool]:
        """Cut a report where a stop string ends a row. Keep what top-p and top-k kept. Return which
        rows ended.
        """
        for row, token_ids in enumerate(report.token_ids):
            request = self.requests[row]
            count = report.num_committed[row] = request.read(token_ids)
            report.has_ended[row] |= request.has_stop_string
            if report.kept:
                request.kept.extend(report.kept[row][:count])
        return report.has_ended

    def _place(self) -> None:
        slots = self._layout.place(self.requests)
        self._rows.slot.copy_(torch.tensor(slots, dtype=torch.int64))

    def enter_lanes(self) -> bool:
        """Move all rows to lanes, which `speculate` needs. Return False if they do not all fit."""
        layout = self._layout
        if not layout.has_lanes:
            layout.move_to_lanes(self.requests)
        if not layout.is_placed:
            self._place()
        return layout.has_lanes

    def speculate(self, strategy: SpeculationStrategy) -> Advance:
        """Draft, verify and commit in place of `forward`. The last token of each row is what the
        next `sample` would draw.
        """
        assert self._speculator is not None
        assert self._layout.has_lanes
        rows, outputs = self._rows, self._outputs
        committed = self._speculator.step(
            self._lane_batch(),
            self.requests,
            strategy,
            lambda count: outputs.latest(rows.out, count),
        )
        self._commit(committed)
        report = committed.read()
        self._ended = self._take(report)
        for request, count in zip(self.requests, report.num_committed, strict=True):
            request.passes.append((request.position + 1, count))
            request.position += count
        first = None if strategy.is_chain else report.first_by_depth[: strategy.depth]
        return Advance(sum(report.num_committed), report.num_accepted, first)
