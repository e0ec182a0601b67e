"""An environment with state and a reward for each turn: a search for a number. search.yaml runs it
on the tiny policy of the quickstart.

The policy answers a question, and each wrong answer brings the question again, with the previous
answer before it. A turn earns the part of the distance to the right number that it closes. So all
turns together earn at most 1, and a turn that goes away from the number earns nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tlt_megatron import Environment, Step, Turn

_NUMBER = re.compile(r"\d{1,9}")


class Search(Environment):
    """One search. `open_part` is the part of the distance that is still open."""

    def start(self, row: Mapping[str, object], seed: int) -> None:
        """Note the number to find. The prompt needs no further message."""
        messages = row["messages"]
        assert isinstance(messages, Sequence)
        self.target = int(str(row["ground_truth"]))
        self.question = str(messages[0]["content"]) if messages else ""
        self.open_part, self.num_turns = 1.0, 0

    def step(self, turn: Turn) -> Step:
        """Return the question again, and the reward of this turn."""
        self.num_turns += 1
        found = _NUMBER.findall(turn.text)
        if not found:
            return Step(self.question)
        distance = min(1.0, abs(int(found[-1]) - self.target) / max(self.target, 1))
        closed = max(0.0, self.open_part - distance)
        self.open_part -= closed
        return Step(self.question, reward=closed, is_done=distance == 0)

    def end(self) -> dict[str, float]:
        """Return numbers that become metrics: they add nothing to the reward."""
        return {"open_part": self.open_part, "turns": self.num_turns}
