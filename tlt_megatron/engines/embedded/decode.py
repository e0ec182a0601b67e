"""The running batch: one token for every sequence per plain pass, with its state in tensors.

The engine's loop calls `add`, then in turn `sample`, `remove`, `grow`, `forward`. This is the hot loop. A plain pass makes a
fixed number of torch calls and one read back to Python: which rows ended. Python iterates over rows only when rows join,
leave or need a page. Row b of every tensor is `requests[b]`; the last rows fill the places of rows that leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt_megatron.engines.embedded.graph_plan import EagerReason, Role
from tlt_megatron.engines.embedded.graph_pool import (
    GraphPool,
    PassInputs,
    addresses_read,
    lane_steps,
)
from tlt_megatron.engines.embedded.scheduler import Request, Scheduler
from tlt_megatron.engines.embedded.speculate import Roots, Speculator
from tlt_megatron.models.attention.lanes import LaneView
from tlt_megatron.models.kv_cache import KvCache
from tlt_megatron.models.transformer import Transformer
from tlt_megatron.speculation.sampling import NoiseAhead, Sampled, sample
from tlt_megatron.speculation.strategy import SpeculationStrategy
from tlt_megatron.types import SamplingParams

# Rows of the state matrix: seed, last (count at the final token), position, count, out, slot. Those from position on
# grow by the number of new tokens.
_NUM_FIELDS, _POSITION = 6, 2
_GROWING = slice(_POSITION, None)
# A lane is the contiguous range of KV slots of one row. All lanes are read at the length of the longest row, pages only at
# their row's length. Rows move to lanes if lanes cost at most this factor more.
_LANE_WASTE = 1.25
_LANE_FREE_POSITIONS = 512  # cost of merging pages, in positions of attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A row whose response is complete."""

    row: int
    request: Request
    token_ids_T: Tensor  # int64; all three tensors are on the CPU
    logprobs_T: Tensor  # float32
    policy_logprobs_T: Tensor  # float32


class DecodeBatch:
    """Sequences that decode together. Before `sample`, each row has its last hidden state or its next token."""

    def __init__(
        self, model: Transformer, cache: KvCache, params: SamplingParams, *, max_batch_size: int,
        max_new_tokens: int, graphs: GraphPool, speculator: Speculator | None = None, draft_slots: int = 0,
    ) -> None:  # fmt: skip
        """`graphs` runs every pass in lanes. With a `speculator`, drafting and verifying may write `draft_slots` slots after a
        sequence."""
        self._model = model
        self._cache = cache
        self._params = params
        device = model.device
        self.requests: list[Request] = []
        self.num_passes = 0
        self._state = torch.zeros(_NUM_FIELDS, max_batch_size, dtype=torch.int64, device=device)
        self._hidden_BD = torch.empty(0, model.config.hidden_size, dtype=model.dtype, device=device)
        self._tokens_B = torch.empty(0, dtype=torch.int64, device=device)
        self._stop_ids = torch.tensor(params.stop_token_ids, dtype=torch.int64, device=device)
        self._graphs = graphs
        self._speculator = speculator
        self._draft_slots = draft_slots
        self._drawn: Sampled | None = None  # the next tokens, if a speculative step sampled them
        self._column_size = max_new_tokens + draft_slots
        num_outputs = max_batch_size * self._column_size
        self._out_tokens = torch.zeros(num_outputs, dtype=torch.int64, device=device)
        self._out_logprobs = torch.zeros(num_outputs, device=device)
        self._out_policy_logprobs = torch.zeros(num_outputs, device=device)
        self._columns: dict[Request, int] = {}  # the part of the outputs that each request writes
        self._free_columns = list(range(max_batch_size))
        self._noise = NoiseAhead(model.config.vocab_size)
        self._paged = model.arithmetic.paged(cache)
        self._lane = 0  # slots of a lane; 0 while rows are in pages
        self._view: LaneView | None = None  # of the current rows, in lanes
        self._longest = 0
        self._next_due = 0
        self._is_changed = True

    # ---- rows join and leave

    def add(self, requests: Sequence[Request]) -> None:
        """Append admitted requests, at their first token or after the tokens saved at preemption."""
        start = len(self.requests)
        rows: list[list[int]] = []
        hidden = [self._hidden_BD]
        for request in requests:
            column = self._free_columns.pop()
            self._columns[request] = column
            out = column * self._column_size
            count = request.num_saved
            if request.saved is not None:
                outputs = self._out_tokens, self._out_logprobs, self._out_policy_logprobs
                for output, saved in zip(outputs, request.saved, strict=True):
                    output[out : out + count] = saved
            last_hidden_D = request.last_hidden_D if count else request.state.last_hidden_D
            assert last_hidden_D is not None
            hidden.append(last_hidden_D.unsqueeze(0))
            position = request.state.num_tokens + count
            rows.append([request.seed, request.max_new_tokens - 1, position, count, out + count, 0])
            room = len(request.kv.pages) * self._cache.page_size - count - request.kv.num_copied
            request.due = self.num_passes + room
        if self._lane:
            self._join_lanes(start, requests)
        else:
            self._copy_prompt_ends(requests)
        self.requests.extend(requests)
        end = len(self.requests)
        self._state[:, start:end] = torch.tensor(rows, dtype=torch.int64).t()
        self._hidden_BD = torch.cat(hidden)
        self._set_changed()

    def remove(self, rows: Sequence[int]) -> None:
        """Remove rows, between `sample` and `forward`. Their pages must be free already."""
        if not rows:
            return
        kept = list(range(len(self.requests)))
        for row in sorted(rows, reverse=True):
            self._free_columns.append(self._columns.pop(self.requests[row]))
            last = kept.pop()
            if row < len(kept):
                kept[row] = last
        if self._lane:
            self._move_lanes(kept)
        index = torch.tensor(kept, dtype=torch.int64, device=self._model.device)
        self._state[:, : len(kept)] = self._state.index_select(1, index)
        self._tokens_B = self._tokens_B.index_select(0, index)
        self._hidden_BD = self._hidden_BD[
            : len(kept)
        ]  # consumed by `sample`; replaced by `forward`
        self.requests = [self.requests[row] for row in kept]
        self._set_changed()

    def _set_changed(self) -> None:
        self._is_changed = True
        self._view = None
        self._next_due = min((request.due for request in self.requests), default=0)
        self._noise.start()
        if self._speculator is not None:
            self._speculator.set_changed()
        rows = self._state[:, : len(self.requests)]
        self._seed_B, self._last_B, self._position_B, self._count_B, self._out_B, self._slot_B = (
            rows
        )
        self._growing_CB = rows[_GROWING]

    def _outputs(self, row: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        start = self._columns[self.requests[row]] * self._column_size
        part = slice(start, start + count)
        outputs = self._out_tokens, self._out_logprobs, self._out_policy_logprobs
        tokens, logprobs, policy_logprobs = (output[part].cpu().clone() for output in outputs)
        return tokens, logprobs, policy_logprobs

    # ---- one pass

    def sample(self) -> list[Ended]:
        """Sample and record the next token of every row. Return the rows that ended, for `remove`."""
        params, count_B, out_B = self._params, self._count_B, self._out_B
        sampled = self._draw()
        self._tokens_B = sampled.token_ids_B
        self._out_tokens.index_copy_(0, out_B, sampled.token_ids_B)
        self._out_logprobs.index_copy_(0, out_B, sampled.logprobs_B)
        self._out_policy_logprobs.index_copy_(0, out_B, sampled.policy_logprobs_B)
        has_ended_B = count_B >= self._last_B
        if params.stop_token_ids:
            has_ended_B |= (sampled.token_ids_B.unsqueeze(1) == self._stop_ids).any(dim=1)
        flags = has_ended_B.tolist()
        if True not in flags:
            return []
        counts = count_B.tolist()
        ended = []
        for row in [row for row, flag in enumerate(flags) if flag]:
            tokens, logprobs, policy_logprobs = self._outputs(row, counts[row] + 1)
            ended.append(
                Ended(
                    row=row,
                    request=self.requests[row],
                    token_ids_T=tokens,
                    logprobs_T=logprobs,
                    policy_logprobs_T=policy_logprobs,
                )
            )
        return ended

    def _draw(self) -> Sampled:
        """Sample the next token of every row, except for rows whose token the last speculative step sampled."""
        drawn, self._drawn = self._drawn, None
        num_drawn = 0 if drawn is None else drawn.token_ids_B.shape[0]
        if drawn is not None and num_drawn == len(self.requests):
            return drawn
        params, new = self._params, slice(num_drawn, None)
        fresh = sample(
            self._model.logits(self._hidden_BD[new]),
            self._seed_B[new],
            self._count_B[new],
            params.temperature,
            params.top_p,
            params.top_k,
            noise_ahead=self._noise if drawn is None else None,
        )
        return fresh if drawn is None else drawn.followed_by(fresh)

    def grow(self, scheduler: Scheduler) -> None:
        """Take a page for every row whose next token starts one. Rows preempted for it leave, and their tokens are saved."""
        if self._lane or self.num_passes < self._next_due:
            return
        preempted: set[Request] = set()
        due = [request for request in self.requests if request.due == self.num_passes]
        for request in sorted(due, key=lambda request: request.order):
            if request in preempted:
                continue
            preempted.update(scheduler.grow(request))
            request.due += self._cache.page_size
        rows = [row for row, request in enumerate(self.requests) if request in preempted]
        if rows:
            counts = self._count_B.tolist()
            for row in rows:
                self.requests[row].saved = self._outputs(row, counts[row] + 1)
            self.remove(rows)
        self._next_due = min((request.due for request in self.requests), default=0)
        self._is_changed = True

    def forward(self, scheduler: Scheduler) -> None:
        """Run the sampled tokens through the model."""
        if self._is_changed:
            self._plan(scheduler)
        self._longest += 1
        self._hidden_BD, features = self._run_in_lanes() if self._lane else self._run_in_pages()
        self._cache.keep_features(self._slot_B, features, self._tokens_B)
        self._growing_CB.add_(1)
        if self._speculator is not None:
            self._speculator.set_changed()
        self.num_passes += 1

    def _run_in_lanes(self) -> tuple[Tensor, ...]:
        self._cache.mark_written(self._slot_B)
        view = self._lane_view()
        inputs = PassInputs(
            token_ids_P=self._tokens_B,
            positions_P=self._position_B,
            slots_P=self._slot_B,
            bias_BRS=view.committed_bias(view.read_length(self._longest)),
        )
        return self._graphs.run(Role.TARGET, inputs)

    def _run_in_pages(self) -> tuple[Tensor, ...]:
        self._paged.begin_step(self._slot_B)
        self._graphs.count_eager(
            Role.TARGET, batch_size=len(self.requests), num_rows=1, reason=EagerReason.PAGES
        )
        return self._model.forward_tapped(
            self._tokens_B, self._position_B, self._paged, self._cache.tap_layers
        )

    def _lane_view(self) -> LaneView:
        if self._view is None:
            self._view = LaneView(self._cache, num_rows=len(self.requests), lane=self._lane)
        return self._view

    def enter_lanes(self, scheduler: Scheduler) -> bool:
        """Move all rows to lanes, which `speculate` needs, at any cost. Return False if they do not all fit."""
        if not self._lane:
            positions = self._position_B.tolist()
            self._move_to_lanes(positions, scheduler)
        if self._is_changed:
            self._plan(scheduler)
        return self._lane > 0

    def speculate(self, strategy: SpeculationStrategy) -> list[int]:
        """Draft, verify and commit in place of `forward`. Return how many drafted tokens each row accepted.

        All committed tokens are recorded here. The next `sample` takes the last of them as its draw.
        """
        assert self._speculator is not None
        assert self._lane
        positions = self._position_B.tolist()
        if self._speculator.has_new_drafter():
            for request in self.requests:
                request.num_drafted = 0
        roots = Roots(
            token_ids_B=self._tokens_B,
            positions_B=self._position_B,
            seeds_B=self._seed_B,
            draw_positions_B=self._count_B,
            rooms_B=self._last_B - self._count_B,
            positions=positions,
            num_unseen=[p - r.num_drafted for p, r in zip(positions, self.requests, strict=True)],
        )
        retrieved = self._retrieve(positions, strategy.num_retrieved)
        committed = self._speculator.step(self._lane_view(), roots, strategy, retrieved)
        steps_S = torch.arange(strategy.depth + 1, device=self._model.device)
        out_P = (self._out_B.unsqueeze(1) + 1 + steps_S).view(-1)
        self._out_tokens.index_copy_(0, out_P, committed.token_ids_BS.view(-1))
        self._out_logprobs.index_copy_(0, out_P, committed.logprobs_BS.view(-1))
        self._out_policy_logprobs.index_copy_(0, out_P, committed.policy_logprobs_BS.view(-1))
        last_B1 = committed.num_committed_B.unsqueeze(1) - 1
        self._drawn = Sampled(
            token_ids_B=committed.token_ids_BS.gather(1, last_B1).squeeze(1),
            logprobs_B=committed.logprobs_BS.gather(1, last_B1).squeeze(1),
            policy_logprobs_B=committed.policy_logprobs_BS.gather(1, last_B1).squeeze(1),
        )
        counts = committed.num_committed_B.tolist()
        self._growing_CB.add_(committed.num_committed_B)
        for request, position, count in zip(self.requests, positions, counts, strict=True):
            if strategy.is_learned:
                request.num_drafted = position
            request.accept_lengths.append(count)
        self._longest += max(counts)
        self._noise.start()
        self.num_passes += 1
        return committed.num_accepted_B.tolist()

    def _retrieve(self, positions: Sequence[int], num_tokens: int) -> Tensor | None:
        """Show the n-gram drafter its unseen tokens. Return its continuations [B, num_tokens]; None for `num_tokens=0`."""
        if not num_tokens:
            return None
        assert self._speculator is not None
        unseen = []
        for request, position in zip(self.requests, positions, strict=True):
            num_drawn = position + 1 - request.state.num_tokens  # the root included
            unseen.append(num_drawn - request.num_indexed)
            request.num_indexed = num_drawn
        device = self._model.device
        back_U = torch.arange(1 - max(unseen), 1, device=device)
        slots_BU = (self._out_B.unsqueeze(1) + back_U).clamp_(min=0)
        rows = self._out_tokens[slots_BU].tolist()
        new = [row[len(row) - count :] for row, count in zip(rows, unseen, strict=True)]
        found_BN = self._speculator.retrieve(self.requests, new, num_tokens)
        return found_BN.to(device, non_blocking=True)

    # ---- KV in pages or lanes

    def _plan(self, scheduler: Scheduler) -> None:
        positions = self._position_B.tolist()
        self._longest = max(positions)
        self._is_changed = False
        if not self._lane and (
            self._graphs.has_graphs  # graphs save more than pages do
            or (not scheduler.has_waiting and self._lanes_pay(positions))
        ):
            self._move_to_lanes(positions, scheduler)
        page_size = self._cache.page_size
        if self._lane:
            slots = [row * self._lane + position for row, position in enumerate(positions)]
        else:
            self._cache.compact()
            self._paged.rebuild([request.kv for request in self.requests])
            slots = [
                request.kv.pages[-1] * page_size
                + (position - request.state.num_tokens + request.kv.num_copied) % page_size
                for request, position in zip(self.requests, positions, strict=True)
            ]
        self._slot_B.copy_(torch.tensor(slots, dtype=torch.int64))

    def _copy_prompt_ends(self, requests: Sequence[Request]) -> None:
        """Copy the end of the prompt into the first page of each new request that starts with such a copy."""
        cache = self._cache
        for request in requests:
            if copied := request.kv.num_copied:
                state = request.state
                source_S = cache.slots(state.kv.pages, state.num_tokens - copied, state.num_tokens)
                cache.relocate(source_S, cache.slots(request.kv.pages, 0, copied))

    def _lanes_pay(self, positions: list[int]) -> bool:
        """Whether it costs plain decoding little to pad every row to the longest."""
        prompts = {id(request.state): request.state for request in self.requests}
        num_pages = sum(len(request.kv.pages) for request in self.requests)
        num_pages += sum(len(state.kv.pages) for state in prompts.values())
        limit = _LANE_WASTE * num_pages * self._cache.page_size + _LANE_FREE_POSITIONS
        return len(positions) * max(positions) <= limit

    def _move_to_lanes(self, positions: list[int], scheduler: Scheduler) -> None:
        """Move every sequence to a lane of its full length, if lanes for all running and waiting requests fit."""
        cache, requests = self._cache, self.requests
        if not self._reserve_lanes(scheduler):
            return
        prompts = {id(request.state): request.state for request in requests}
        sources, targets = [], []
        for row, (request, position) in enumerate(zip(requests, positions, strict=True)):
            num_prompt, copied = request.state.num_tokens, request.kv.num_copied
            sources.append(cache.slots(request.state.kv.pages, 0, num_prompt))
            sources.append(cache.slots(request.kv.pages, copied, copied + position - num_prompt))
            start = row * self._lane
            targets.append(torch.arange(start, start + position, device=self._model.device))
        for request in requests:
            cache.free(request.kv.pages)
        for state in prompts.values():
            if state.num_running == state.num_unfinished:  # else waiting siblings need it
                cache.free(state.kv.pages)
        self._is_changed = True
        for row, request in enumerate(requests):
            self._fill_lane(row, request)
        target_S = torch.cat(targets)
        cache.relocate(torch.cat(sources), target_S)
        cache.bias_T[: len(requests) * self._lane].fill_(-torch.inf)
        cache.mark_written(target_S)

    def _reserve_lanes(self, scheduler: Scheduler) -> bool:
        """Reserve lanes of the planned length, which keep captured graphs valid, or else of the needed length."""
        cache, graphs, draft = self._cache, self._graphs, None
        needed = cache.pages_for(scheduler.longest_sequence + self._draft_slots)
        planned = cache.pages_for(graphs.plan.max_length) if graphs.has_graphs else 0
        for lane_pages in sorted({needed, max(needed, planned)}, reverse=True):
            if scheduler.reserve_lanes(lane_pages):
                break
        else:
            return False
        self._lane = lane_pages * cache.page_size
        if self._speculator is not None:
            draft = self._speculator.draft
        graphs.bind(
            lane_steps(self._model, cache, self._lane, draft),
            addresses_read(self._model, cache, draft),
            lane=self._lane,
            num_lanes=cache.num_pages // lane_pages,
            scratch_slot=cache.scratch_slot,
        )
        return True

    def _join_lanes(self, first_row: int, requests: Sequence[Request]) -> None:
        """Give each new request a lane that starts with its prompt. Free prompts whose siblings have all joined."""
        cache, lane = self._cache, self._lane
        for request in requests:
            assert request.saved is None, "a request was preempted although all have lanes"
            cache.free(request.kv.pages)
        sources, targets = [], []
        for row, request in enumerate(requests, first_row):
            state = request.state
            self._fill_lane(row, request)
            sources.append(cache.slots(state.kv.pages, 0, state.num_tokens))
            targets.append(
                torch.arange(row * lane, row * lane + state.num_tokens, device=cache.device)
            )
        target_S = torch.cat(targets)
        cache.relocate(torch.cat(sources), target_S)
        cache.mark_written(target_S)
        for state in {id(request.state): request.state for request in requests}.values():
            if state.num_running == state.num_unfinished:
                cache.free(state.kv.pages)

    def _fill_lane(self, row: int, request: Request) -> None:
        """Take all pages of lane `row`, which no other request uses."""
        request.kv.prompt = None
        lane_pages = self._cache.pages_for(self._lane)
        for page in range(row * lane_pages, (row + 1) * lane_pages):
            self._cache.take_response_page(request.kv.pages, at=page)

    def _move_lanes(self, kept: list[int]) -> None:
        """Move the lane of each row whose index changes after rows left."""
        cache, lane = self._cache, self._lane
        moves = [(row, old) for row, old in enumerate(kept) if row != old]
        if not moves:
            return
        positions = self._state[_POSITION].tolist()
        for row, old in moves:
            request, position = self.requests[old], positions[old]
            source_S = torch.arange(old * lane, old * lane + position, device=cache.device)
            target_S = source_S + (row - old) * lane
            cache.free(request.kv.pages)
            cache.bias_T[row * lane : (row + 1) * lane].fill_(-torch.inf)
            self._fill_lane(row, request)
            cache.relocate(source_S, target_S)
            cache.mark_written(target_S)
