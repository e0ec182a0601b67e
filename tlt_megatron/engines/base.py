"""The rollout engine as the trainer sees it. One engine per rollout replica; it never talks to other replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from tlt_megatron.types import Prompt, Rollout, RolloutGroup, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters of one engine since its last `generate` call began."""

    num_prompt_tokens: int  # prefilled; a prompt that siblings share counts once
    num_generated_tokens: int
    num_decode_passes: int
    num_preemptions: int  # requests set back to recompute because KV memory ran out
    seconds: float
    peak_kv_tokens: int  # most KV positions in use at once
    kv_capacity_tokens: int
    num_recomputed_tokens: int = 0  # prefilled again for that reason, on top of num_prompt_tokens
    num_unspeculated_passes: int = (
        0  # plain although the selector chose to speculate: memory was short
    )
    num_graph_replays: int = 0  # passes of policy and drafter that replayed a captured graph
    eager_passes: dict[str, int] = field(default_factory=dict)  # all others, by whose and why

    @property
    def num_eager_passes(self) -> int:
        """Passes of policy and drafter that ran kernel by kernel; on a CPU all do."""
        return sum(self.eager_passes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRecord:
    """One pass over the running batch: how the engine decoded it and what it brought.

    Example: 3 requests, strategy "4_2_8"; they accept 0, 2 and 4 drafted tokens, so `accepted_by_depth` is (2, 2, 1, 1)
    and `num_committed` 9, since every request commits one bonus token besides.
    """

    start_s: float  # on the clock of time.perf_counter
    seconds: float  # drafting and verifying, or the plain pass
    batch_size: int  # running requests, >= 1
    strategy: str  # str(SpeculationStrategy): "6_4_16", or "off" for a plain pass
    reason: str  # why this strategy: the selector's word, such as "exploit"
    num_committed: int  # tokens that the batch gained
    accepted_by_depth: tuple[int, ...]  # [d - 1]: requests that accepted >= d drafted tokens


class GenerationStopped(RuntimeError):
    """Generation was ended because `should_stop` said so. Its requests are dropped; the engine can be used again."""


class RolloutEngine(Protocol):
    """Generates responses with the weights it was last given, and refuses to without."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        policy_version: int,
        on_finish: Callable[[Rollout], None] | None = None,
        on_features: Callable[[Rollout, Tensor], None] | None = None,
        between_passes: Callable[[], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> list[RolloutGroup]:
        """Answer all prompts; groups come back in the order of the prompts.

        `on_finish` is called with each response as it ends. `on_features` is given, with each response, the states that a
        drafter trains on, [prompt + response - 1, F]; an engine that does not see them never calls it. `between_passes` is
        called about once for each pass, and may load drafter weights; an engine in another process may never call it.
        `should_stop` is asked about once for each pass; GenerationStopped follows when it says True. RuntimeError if the
        loaded weights are not of `policy_version`; ValueError if a prompt cannot fit into the KV memory.
        """

    def load_weights(
        self, tensors: Iterable[tuple[str, Tensor]], *, version: int, checksum: Callable[[], int]
    ) -> None:
        """Replace all weights by the Hugging Face-named `tensors`. RuntimeError if what the engine then holds
        does not have the checksum that `checksum` gives once `tensors` is exhausted (`models.hf_io.checksum_tensor`
        summed, in the dtype of the engine); it then refuses to generate."""

    def target_tensors(self) -> tuple[Tensor, Tensor]:
        """Embedding and LM head [V, D] of the policy that the engine holds, for a drafter that trains beside it: the same
        tensors all along, changed in place by `load_weights`."""

    def load_drafter_weights(
        self, tensors: Mapping[str, Tensor], *, version: int, checksum: int
    ) -> None:
        """Draft with other weights from the next pass on. `tensors` are the drafter's own, under the names of
        `models.draft_model.DraftModel.state_dict`. RuntimeError if they do not have the checksum, or nothing drafts."""

    def suspend_drafter(self, is_suspended: bool) -> None:
        """Whether to do without the learned drafter until further notice, as it has collapsed."""

    def pause_speculation(self, is_paused: bool) -> bool:
        """Decode plainly until further notice, or as before again; False if the engine cannot."""

    def sleep(self) -> None:
        """Give back memory that training can use; `wake` before the next `generate` or `load_weights`."""

    def wake(self) -> None:
        """Undo `sleep`."""

    def stats(self) -> EngineStats:
        """Counters of the last `generate`."""

    def take_passes(self) -> list[PassRecord]:
        """Every pass of the last `generate`, oldest first; they are then forgotten. An engine that decodes in a process of
        its own may give none."""

    def state_dict(self) -> dict[str, object]:
        """What the engine has learned about speed, JSON-able; it changes no token."""

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on from `state_dict`, of an engine with the same settings."""

    def close(self) -> None:
        """Free everything. The engine cannot be used again."""
