"""What a speculative step does, as a value: how deep to draft, how wide, and how many tokens to verify.

Used by selectors (which choose one for each step), tree growth, verification and the graph pool. One thing to know:
`num_draft_tokens` counts drafted nodes alone; the verify pass has one row more, for the last committed token. (SGLang's
option of the same name counts that row too.)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStrategy:
    """(Draft_Depth, topK, Tokens_to_Verify) of the paper, section "adaptive rollout engine".

    Each step expands `topk` nodes into `topk` children each; the best `num_draft_tokens` of all candidates are verified.
    Example: `SpeculationStrategy(num_steps=6, topk=4, num_draft_tokens=16)`, written "6_4_16". `topk=1` is a chain.
    """

    num_steps: int  # depth of the tree, >= 1 (0: off)
    topk: int  # nodes expanded for each step and children for each node, >= 1 (0: off)
    num_draft_tokens: int  # nodes verified, the last committed token not counted (0: off)

    def __post_init__(self) -> None:
        values = (self.num_steps, self.topk, self.num_draft_tokens)
        if values == (0, 0, 0):
            return
        if min(values) < 1:
            raise ValueError(
                f"num_steps={self.num_steps}, topk={self.topk}, num_draft_tokens={self.num_draft_tokens}: "
                "all must be >= 1 (all 0: speculation off)"
            )
        if self.num_draft_tokens > self.num_candidates:
            raise ValueError(
                f"num_draft_tokens={self.num_draft_tokens} exceeds the tree of num_steps={self.num_steps}, "
                f"topk={self.topk} (at most {self.num_candidates})"
            )
        if self.num_draft_tokens < self.num_steps:
            raise ValueError(
                f"num_draft_tokens={self.num_draft_tokens} is below num_steps={self.num_steps}: "
                "the last steps could never be accepted"
            )

    @property
    def num_candidates(self) -> int:
        """Nodes that growth proposes: `topk` below the root, then `topk` for each of `topk` expanded nodes."""
        return self.topk + max(self.num_steps - 1, 0) * self.topk**2

    @property
    def num_rows(self) -> int:
        """R = Q + 1, rows of the verify pass for one request."""
        return self.num_draft_tokens + 1

    @property
    def is_off(self) -> bool:
        """Plain decoding."""
        return self.num_steps == 0

    @property
    def is_chain(self) -> bool:
        """Every node has one child."""
        return self.topk == 1

    def __str__(self) -> str:
        return "off" if self.is_off else f"{self.num_steps}_{self.topk}_{self.num_draft_tokens}"

    @classmethod
    def parse(cls, text: str) -> SpeculationStrategy:
        """ "6_4_16" or "off". ValueError for anything else."""
        if text == "off":
            return OFF
        parts = text.split("_")
        if len(parts) != 3 or not all(part.isdecimal() for part in parts):
            raise ValueError(
                f"strategy={text!r}: expected num_steps_topk_num_draft_tokens such as 6_4_16, or off"
            )
        num_steps, topk, num_draft_tokens = map(int, parts)
        return cls(num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens)


OFF = SpeculationStrategy(num_steps=0, topk=0, num_draft_tokens=0)
