"""One speculative step: draft a tree, verify it in one pass, commit the tokens the target samples.

A row enters with its last token sampled but not computed: the root. It leaves in the same state
with m more tokens. So a step can replace any `DecodeBatch.forward`, with any strategy. Plain
decoding keeps features too, so the drafter can start in the middle of a rollout. `lane_steps.py`
has what runs on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.engines.embedded.graph_pool import Models
from tlt_megatron.engines.embedded.lane_steps import Committed
from tlt_megatron.engines.embedded.memory_plan import draft_slots_of
from tlt_megatron.engines.embedded.model_drafter import ModelDrafter, Roots
from tlt_megatron.engines.embedded.retrieval import Retriever
from tlt_megatron.engines.embedded.scheduler import Request
from tlt_megatron.models.attention.lanes import LaneView
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.speculation.sampling import NoiseWindow, is_searched
from tlt_megatron.speculation.selector import StrategySelector
from tlt_megatron.speculation.token_counts import TokenCounts
from tlt_megatron.speculation.tree import chain_tree


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
        self.retriever = Retriever()
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
        self.retriever.start()
        if self._token_counts is not None:
            assert self.draft is not None
            self.draft.draft_from(self._token_counts.most_frequent().to(models.policy.device))
        return Speculator(self, models, noise)

    def finish(self, request: Request, token_ids: Sequence[int]) -> None:
        if any(strategy.num_retrieved for strategy in self.strategies):
            self.retriever.finish(request, token_ids)
        if self._token_counts is not None:
            self._token_counts.add(token_ids)


class Speculator:
    """Drafts and verifies for the rows of a batch in lanes."""

    def __init__(self, speculation: Speculation, models: Models, noise: NoiseWindow) -> None:
        self._speculation = speculation
        self._models = models
        self._drafter = None
        if speculation.draft is not None:
            self._drafter = ModelDrafter(models, speculation.draft)
        self._noise = noise

    def step(
        self,
        view: LaneView,
        roots: Roots,
        strategy: SpeculationStrategy,
        latest: Callable[[int], list[list[int]]],
    ) -> Committed:
        """Draft and verify once for every row. `latest` is for `Retriever.propose`."""
        noise_BSV = self._noise_of(roots, strategy)
        if strategy.num_retrieved:
            found_BN = self._speculation.retriever.propose(
                roots.requests, roots.positions, latest, strategy.num_retrieved
            )
            tree = chain_tree(found_BN.to(self._models.policy.device, non_blocking=True))
        else:
            assert self._drafter is not None, strategy
            noise = None if self._is_reduced else noise_BSV
            tree = self._drafter.propose(view, roots, strategy, noise_BSV=noise)
        longest = roots.longest + tree.num_rows
        return self._models.graphs.target(view, roots.state_FB, tree, longest, noise_BSV)

    @property
    def _is_reduced(self) -> bool:
        """Whether the drafter proposes only some token ids."""
        draft = self._speculation.draft
        return draft is not None and draft.ids_C is not None

    def _noise_of(self, roots: Roots, strategy: SpeculationStrategy) -> Tensor | None:
        """Return the noise of the tokens after the roots, [B, depth + 1, V]. None where it is made
        when it is used.
        """
        policy, graphs, rows = self._models.policy, self._models.graphs, roots.rows
        if self._models.params.temperature == 0.0 or graphs.has_graphs or rows.seed.is_cuda:
            return None
        num_rows = len(roots.requests) * (strategy.depth + 1)
        # a tree reads the noise of all token ids, or makes that of its few
        is_read = (strategy.is_learned and not self._is_reduced) or not is_searched(
            num_rows, policy.config.vocab_size, policy.device
        )
        if not is_read:
            return None
        return self._noise.window(rows.seed, rows.count + 1, strategy.depth + 1)
