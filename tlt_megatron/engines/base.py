"""The rollout engine protocol that the trainer uses. Each rollout replica has one engine; engines
never talk to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, Protocol

from torch import Tensor

from tlt_megatron.types import Prompt, Rollout, RolloutGroup, RolloutKey, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters of one engine since its last `generate` call began."""

    # A prompt that siblings share counts once. Tokens computed again after preemption count too.
    num_prefilled_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0  # requests evicted because KV memory ran out; recomputed later
    # Plain because memory was short, although the selector chose to speculate.
    num_unspeculated_passes: int = 0
    seconds: float = 0.0
    num_graph_replays: int = 0  # policy and drafter passes that replayed a captured graph
    eager_passes: dict[str, int] = field(default_factory=dict)  # other passes, by model and reason
    # Start and end of each copy of changed weights to the drafter, on the clock of
    # time.perf_counter.
    drafter_refreshes: tuple[tuple[float, float], ...] = ()

    @property
    def num_eager_passes(self) -> int:
        """Return the number of policy and drafter passes that ran without a graph. On a CPU all
        passes do.
        """
        return sum(self.eager_passes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRecord:
    """One pass over the running batch: strategy, time and committed tokens.

    Example: 3 requests with strategy "4_2_8" accept 0, 2 and 4 drafted tokens. Then
    `accepted_by_depth` is (2, 2, 1, 1). `num_committed` is 9, because every request also commits
    one bonus token. If a response ends within the accepted tokens, `accepted_by_depth` still counts
    those after the end. `num_committed` counts them only with SGLang.
    """

    start_s: float  # on the clock of time.perf_counter
    seconds: float  # drafting and verifying, or the plain pass
    batch_size: int  # running requests, >= 1
    strategy: str  # str(SpeculationStrategy): "6_4_16", or "off" for a plain pass
    reason: str  # why the selector chose this strategy, such as "exploit"
    num_committed: int  # new tokens of the whole batch
    accepted_by_depth: tuple[int, ...]  # [d - 1]: requests that accepted >= d drafted tokens


class LaterPrompts(NamedTuple):
    """What `more_prompts` gives a running `generate` call between two passes."""

    prompts: Sequence[Prompt]  # to answer in the same call
    # responses that no later prompt continues; their KV can be freed
    ended: Sequence[RolloutKey] = ()


MorePrompts = Callable[[], LaterPrompts | None]


class GenerationStopped(RuntimeError):
    """`should_stop` ended the generation. Its requests are dropped; the engine can be used
    again.
    """


def group_rollouts(
    prompts: Sequence[Prompt], params: SamplingParams, rollouts: Sequence[Rollout]
) -> list[RolloutGroup]:
    """Return one group per prompt. `rollouts` holds the responses of each prompt in a row."""
    numbers = [len(prompt.sample_indices(params)) for prompt in prompts]
    assert sum(numbers) == len(rollouts)
    rest = iter(rollouts)
    return [
        RolloutGroup(prompt=prompt, rollouts=tuple(islice(rest, number)))
        for prompt, number in zip(prompts, numbers, strict=True)
    ]


class RolloutEngine(Protocol):
    """Generates responses with the weights loaded last. Generation before the first load is an
    error.
    """

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        policy_version: int,
        on_finish: Callable[[Rollout], None] | None = None,
        on_features: Callable[[Rollout, Tensor], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
        more_prompts: MorePrompts | None = None,
    ) -> list[RolloutGroup]:
        """Answer all prompts and return one group per prompt, in the order of the prompts.

        A response ends with a stop token, with the token that completes one of the strings of
        `Prompt.stop_in(params)`, or at its limit.

        `on_finish` receives each response when it ends, `on_features` with the states that a
        drafter trains on, [prompt + response - 1, F]. An engine in another process may never call
        `on_features`. If `should_stop`, called about once per pass, returns True, GenerationStopped
        is raised. `more_prompts` is also called about once per pass. It returns None when there
        will be no more prompts. The groups of later prompts come last. With its responses, such a
        prompt may be longer than the longest of `prompts` by `RolloutSection.observation_tokens`.
        RuntimeError if the loaded weights are not of `policy_version`. ValueError if a prompt
        cannot fit into KV memory.
        """
        ...

    def load_weights(
        self, tensors: Iterable[tuple[str, Tensor]], *, version: int, checksum: Callable[[], int]
    ) -> None:
        """Replace all weights with `tensors`, which have Hugging Face names.

        `checksum` is called after `tensors` is exhausted. It returns
        `models.hf_io.checksum_tensors` of all tensors in the engine's dtype. If the loaded weights
        differ, RuntimeError is raised and `generate` is refused."""

    def target_tensors(self) -> tuple[Tensor, Tensor]:
        """Return the policy's embedding and LM head, both [V, D], for a drafter that trains in this
        process. The tensors stay the same objects; `load_weights` changes them in place."""
        ...

    def drafted_ids(self) -> Tensor | None:
        """Return the token ids that the learned drafter proposes, ascending; None: all."""
        ...

    def load_drafter_weights(
        self, tensors: Mapping[str, Tensor], *, version: int, checksum: int
    ) -> None:
        """Replace the drafter's weights from the next pass on. `tensors` are only the drafter's
        own, with the names of `models.draft_model.DraftModel.state_dict`. RuntimeError if the
        checksum differs or the engine has no drafter."""

    def pause_speculation(self, is_paused: bool) -> bool:
        """Switch to plain decoding, or back to speculation. Return False if the engine cannot
        switch.
        """
        ...

    def free_kv(self) -> None:
        """Free the KV until the next `generate`, on a rank that trains the drafter meanwhile. The
        weights stay usable. An engine in another process may keep its KV until `sleep`."""

    def sleep(self) -> None:
        """Free memory for training, on a GPU also the policy's weights.

        Call `wake` before the next `load_weights`, and on a GPU `load_weights` before `generate`.
        """

    def wake(self) -> None:
        """Undo `sleep`."""

    def stats(self) -> EngineStats:
        """Return the counters of the last `generate`."""
        ...

    def take_passes(self) -> list[PassRecord]:
        """Return all passes of the last `generate`, oldest first, and clear them. An engine that
        decodes in another process may return none."""
        ...

    def state_dict(self) -> dict[str, object]:
        """Return the engine's speed measurements as JSON-able values. They never change tokens."""
        ...

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restore the `state_dict` of an engine with the same settings."""

    def close(self) -> None:
        """Free everything. The engine cannot be used again."""
