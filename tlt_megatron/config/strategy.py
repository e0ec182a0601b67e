"""The speculation strategy of a decode pass: draft depth, draft width, and tokens to verify.

Selectors choose one for every decode pass; tree growth, verification and the graph pool read it.
`num_draft_tokens` counts drafted nodes only. The verify pass has one more row, for the last
committed token. SGLang's option of the same name counts that row too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tlt_megatron.config.ranges import require


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStrategy:
    """(Draft_Depth, topK, Tokens_to_Verify) of the paper, section "adaptive rollout engine".

    Each draft step expands `topk` nodes into `topk` children each; the best `num_draft_tokens`
    candidates are verified. Example: `SpeculationStrategy(num_steps=6, topk=4,
    num_draft_tokens=16)`, written "6_4_16". `topk=1` is a chain. The n-gram drafter proposes a
    chain without draft steps: "ngram_8" is `num_retrieved=8`.
    """

    num_steps: int = 0  # depth of the learned tree, >= 1 (0: no learned drafter)
    topk: int = 0  # nodes expanded per draft step and children per node, >= 1
    num_draft_tokens: int = 0  # learned nodes to verify, the last committed token not counted
    num_retrieved: int = 0  # n-gram nodes to verify, instead of learned ones

    def __post_init__(self) -> None:
        values = (self.num_steps, self.topk, self.num_draft_tokens)
        is_alone = self.num_retrieved >= 0 and not (self.num_retrieved and any(values))
        require(is_alone, "num_retrieved", self.num_retrieved, ">= 0, and 0 beside learned nodes")
        if not any(values):
            return
        rule = "all >= 1 (all 0: speculation off)"
        require(min(values) >= 1, "num_steps, topk, num_draft_tokens", values, rule)
        size, most = self.num_draft_tokens, self.num_candidates
        rule = f"<= {most}, the tree of num_steps={self.num_steps}, topk={self.topk}"
        require(size <= most, "num_draft_tokens", size, rule)
        rule = f">= num_steps={self.num_steps}: the last steps could never be accepted"
        require(size >= self.num_steps, "num_draft_tokens", size, rule)

    @property
    def num_candidates(self) -> int:
        """Return the candidates: `topk` below the root, then `topk` squared per further step."""
        return self.topk + max(self.num_steps - 1, 0) * self.topk**2

    @property
    def depth(self) -> int:
        """Return the most drafted tokens that a verify pass can accept."""
        return self.num_steps + self.num_retrieved

    @property
    def num_nodes(self) -> int:
        """Return Q, the drafted nodes per request."""
        return self.num_draft_tokens + self.num_retrieved

    @property
    def num_rows(self) -> int:
        """Return R = Q + 1, the verify pass rows per request."""
        return self.num_nodes + 1

    @property
    def is_off(self) -> bool:
        """Return whether this is plain decoding."""
        return self.depth == 0

    @property
    def is_learned(self) -> bool:
        """Return whether the learned drafter takes part."""
        return self.num_steps > 0

    @property
    def is_chain(self) -> bool:
        """Return whether every node has one child."""
        return self.topk <= 1

    def __str__(self) -> str:
        if self.is_off:
            return "off"
        if self.num_retrieved:
            return f"ngram_{self.num_retrieved}"
        return f"{self.num_steps}_{self.topk}_{self.num_draft_tokens}"

    @classmethod
    def parse(cls, text: str) -> SpeculationStrategy:
        """Parse "6_4_16", "ngram_8" or "off". ValueError for anything else."""
        if text == "off":
            return OFF
        match = _TEXT.fullmatch(text)
        values = {name: int(part or 0) for name, part in match.groupdict().items()} if match else {}
        if not any(values.values()):
            hint = "; a learned and a retrieved part are two strategies" if "+" in text else ""
            raise ValueError(
                f"strategy={text!r}: expected num_steps_topk_num_draft_tokens such as 6_4_16, "
                f"ngram_8, or off{hint}"
            )
        return cls(**values)


_TEXT = re.compile(
    r"(?P<num_steps>\d+)_(?P<topk>\d+)_(?P<num_draft_tokens>\d+)|ngram_(?P<num_retrieved>\d+)"
)
OFF = SpeculationStrategy()
