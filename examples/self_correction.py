"""An environment that gives a second chance: a wrong answer gets the question again, with the first
attempt before it.

The policy sees that its first answer was wrong only by being asked again.
`examples/self_correction.yaml` runs it. A reward function gets all turns as one text: `math` scores
the last answer, `exact` the one behind the last "####".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tlt_megatron.rewards.builtin import score_exact


def answer(
    messages: Sequence[Mapping[str, object]],
    data_source: str,
    ground_truth: str,
    extra_info: Mapping[str, object],
) -> tuple[str, bool]:
    """Return the question again after a wrong answer. `rollout.max_turns` ends the conversation."""
    is_right = score_exact(data_source, str(messages[-1]["content"]), ground_truth) > 0
    return str(messages[0]["content"]), is_right
