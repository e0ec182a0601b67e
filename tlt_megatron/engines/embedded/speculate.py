"""One speculative step: draft a tree, verify it in one pass, commit the tokens the target samples.

A row enters with its last token sampled but not computed: the root. It leaves in the same state
with m more tokens. So a step can replace any `DecodeBatch.forward`, with any strategy. Plain
decoding keeps features too, so the drafter can start in the middle of a rollout. `lane_steps.py`
has what runs on the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.engines.embedded.graph_plan import EagerReason
from tlt_megatron.engines.embedded.lane_steps import Committed, LaneBatch, Rows
from tlt_megatron.engines.embedded.memory_plan import draft_slots_of
from tlt_megatron.engines.embedded.model_pair import Models
from tlt_megatron.engines.embedded.request import Request, longest_of
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.speculation.ngram import IndexedText, NgramIndex
from tlt_megatron.speculation.sampling import NoiseWindow, is_searched
from tlt_megatron.speculation.selector import StrategySelector
from tlt_megatron.speculation.token_counts import TokenCounts
from tlt_megatron.speculation.tree import DraftTree, chain_tree

_LAG = 32  # rows with more unseen pairs catch up in separate passes


class Speculation:
    """The state of speculation that outlives a `generate` call: drafters and selector."""

    def __init__(
        self,
        draft: DraftInference | None,
        selector: StrategySelector,
        strategies: Sequence[SpeculationStrategy],
    ) -> None:
        """`selector` chooses from `strategies`. ValueError if one needs a drafter that is None."""
        drafting = [s for s in strategies if not s.is_off]
        learned = [s for s in drafting if s.is_learned]
        if learned and draft is None:
            raise ValueError(f"strategy={learned[0]} needs a learned drafter: there is none")
        self.strategies = tuple(drafting)
        self.draft = draft
        self.selector = selector
        self.ngrams = NgramIndex()
        self.draft_slots = draft_slots_of(drafting)
        # Counts the tokens of all responses if the drafter proposes only the most frequent ids.
        self._token_counts: TokenCounts | None = None
        if draft is not None and draft.ids_C is not None:
            self._token_counts = TokenCounts(draft.config.vocab_size, len(draft.ids_C))

    def load_drafter(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the drafter's weights from the next step on. RuntimeError without a drafter."""
        if self.draft is None:
            raise RuntimeError("there is no learned drafter whose weights could be replaced")
        self.draft.load(weights)
        self.selector.drafter_changed()

    def target_changed(self) -> None:
        if self.draft is not None:
            self.draft.mark_stale()
        if self._token_counts is not None:
            self._token_counts.fade()

    def state_dict(self) -> dict[str, object]:
        """Return the measurements of acceptance and speed as JSON-able values."""
        counts = self._token_counts
        return {
            "selector": self.selector.state_dict(),
            "token_counts": None if counts is None else counts.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`. A selector's state that does not fit is ignored with a warning.

        ValueError for token counts of a larger vocabulary; then nothing is loaded.
        """
        saved = state.get("token_counts")  # older checkpoints have none
        if self._token_counts is not None and saved is not None:
            self._token_counts.load_state_dict(saved)
        self.selector.load_state_dict(state["selector"])

    def start(self, models: Models, noise: NoiseWindow) -> Speculator:
        """Return a Speculator for one `generate` call. `noise` is that of the batch."""
        if self._token_counts is not None:
            assert self.draft is not None
            self.draft.draft_from(self._token_counts.most_frequent().to(models.policy.device))
        return Speculator(self, models, noise)

    def finish(self, request: Request, token_ids: Sequence[int]) -> None:
        """Learn from a complete response, also if it was decoded plainly."""
        if any(strategy.num_retrieved for strategy in self.strategies):
            text = self.text_of(request)
            self.ngrams.append([text], [token_ids[text.num_appended :]])
        if self._token_counts is not None:
            self._token_counts.add(token_ids)

    def text_of(self, request: Request) -> IndexedText:
        """Return what the index of n-grams has of a request."""
        if request.text is None:
            prompt = request.state.prompt
            request.text = self.ngrams.start(prompt.prompt_id, prompt.token_ids)
        return request.text


class Speculator:
    """Drafts and verifies for the rows of a batch in lanes, during one `generate` call."""

    def __init__(self, speculation: Speculation, models: Models, noise: NoiseWindow) -> None:
        self._speculation = speculation
        self._models = models
        self._noise = noise
        self._num_loads = 0  # loads of the drafter that has seen `_num_seen`
        self._num_seen: dict[Request, int] = {}  # positions whose pairs are in the drafter's KV

    def step(
        self,
        batch: LaneBatch,
        requests: Sequence[Request],
        strategy: SpeculationStrategy,
        latest: Callable[[int], list[list[int]]],
    ) -> Committed:
        """Run one draft and one verify pass over all rows.

        `latest(n)` returns the last n tokens of each response, the root included.
        """
        noise_BSV = self._noise_of(batch.rows, strategy)
        if strategy.num_retrieved:
            tree = self._retrieve(requests, latest, strategy.num_retrieved)
        else:
            drafting = batch if self._is_reduced else batch._replace(noise_BSV=noise_BSV)
            tree = self._draft(drafting, requests, strategy)
        longest = longest_of(requests) + tree.num_rows
        return self._models.graphs.target(batch._replace(noise_BSV=noise_BSV), tree, longest)

    @property
    def _is_reduced(self) -> bool:
        """Whether the drafter proposes only some token ids."""
        draft = self._models.draft
        return draft is not None and draft.ids_C is not None

    def _noise_of(self, rows: Rows, strategy: SpeculationStrategy) -> Tensor | None:
        """Return the noise of the tokens after the roots, [B, depth + 1, V]. None where it is made
        when it is used.
        """
        policy, graphs = self._models.policy, self._models.graphs
        if self._models.params.temperature == 0.0 or graphs.has_graphs or rows.seed.is_cuda:
            return None
        num_rows = len(rows.seed) * (strategy.depth + 1)
        # A learned tree reads the noise of all token ids. If it drafts few, it makes theirs itself.
        is_read = (strategy.is_learned and not self._is_reduced) or not is_searched(
            num_rows, policy.config.vocab_size, policy.device
        )
        if not is_read:
            return None
        return self._noise.window(rows.seed, rows.count + 1, strategy.depth + 1)

    # ---- n-grams

    def _retrieve(
        self,
        requests: Sequence[Request],
        latest: Callable[[int], list[list[int]]],
        num_tokens: int,
    ) -> DraftTree:
        """Return the continuations in earlier text. The index learns the new tokens before."""
        ngrams = self._speculation.ngrams
        texts = [self._speculation.text_of(request) for request in requests]
        unseen = [
            request.position + 1 - request.state.num_tokens - text.num_appended
            for request, text in zip(requests, texts, strict=True)
        ]
        rows = latest(max(unseen))
        ngrams.append(texts, [row[len(row) - n :] for row, n in zip(rows, unseen, strict=True)])
        found_BN = ngrams.propose(texts, num_tokens)
        return chain_tree(found_BN.to(self._models.policy.device, non_blocking=True))

    # ---- the learned drafter

    def _draft(
        self, batch: LaneBatch, requests: Sequence[Request], strategy: SpeculationStrategy
    ) -> DraftTree:
        """Compute the pairs that the drafter has not seen. Then grow a tree from every root."""
        draft = self._models.draft
        assert draft is not None, strategy
        if self._num_loads != draft.num_loads:  # a new drafter has seen no positions
            self._num_loads = draft.num_loads
            self._num_seen.clear()
        num_unseen = [each.position - self._num_seen.get(each, 0) for each in requests]
        num_left = self._catch_up(batch, requests, num_unseen)
        self._num_seen = {request: request.position for request in requests}
        longest = longest_of(requests) + strategy.topk * (strategy.num_steps - 1)
        return self._models.graphs.draft(batch, strategy, num_left, longest)

    def _catch_up(
        self, batch: LaneBatch, requests: Sequence[Request], num_unseen: Sequence[int]
    ) -> int:
        """Compute the pairs of rows that lag far behind, but for the newest. Return the most that
        another row lacks.
        """
        lagging = [n > _LAG for n in num_unseen]
        if all(lagging):
            return max(num_unseen)
        start = 0
        for is_lagging, run in itertools.groupby(lagging):
            end = start + len(list(run))
            if is_lagging:
                most, longest = max(num_unseen[start:end]), longest_of(requests[start:end])
                part_FB = batch.state_FB[:, start:end]
                part = LaneBatch(batch.view.part(start, end), part_FB, Rows(*part_FB))
                self._models.graphs.catch_up(part, most, 1, longest, EagerReason.LAGGING)
            start = end
        return max(n for n in num_unseen if n <= _LAG)
