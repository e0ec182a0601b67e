"""An environment with a tool, state and a reward for each turn: a search for a number.

The question is a product. The turn that looks it up with the tool earns half of the reward, and
the turn that then names it the other half. tool_user_lookup.yaml trains it.
"""

from __future__ import annotations

from collections.abc import Mapping

from examples.tools import calculate
from tlt_megatron import Environment, Step, Turn


class Lookup(Environment):
    """One search. The rows have the schema of the tool in their column `tools`."""

    def start(self, row: Mapping[str, object], seed: int) -> None:
        """Note the number. The prompt needs no further message."""
        self.target = str(row["ground_truth"])
        self.has_found = False

    def step(self, turn: Turn) -> Step:
        """Return the results of the calls, or end the search with an answer."""
        if not turn.tool_calls:
            is_right = turn.text.rpartition("####")[2].strip() == self.target
            return Step(reward=0.5 * is_right, is_done=True)
        results = [self._look_up(call.arguments.get("expression")) for call in turn.tool_calls]
        is_new = self.target in results and not self.has_found
        self.has_found |= is_new
        return Step([{"role": "tool", "content": each} for each in results], reward=0.5 * is_new)

    def end(self) -> dict[str, float]:
        """Return a number that becomes a metric: it adds nothing to the reward."""
        return {"found": float(self.has_found)}

    def _look_up(self, expression: object) -> str:
        try:
            return calculate(str(expression))
        except (ArithmeticError, SyntaxError, ValueError) as error:
            return f"Error: {error}"
