"""The classes of an environment of your own, which `rollout.environment` names. They need no torch.

    from tlt_megatron import Environment, Step, Turn

    class Guess(Environment):
        def start(self, row, seed):
            self.number = random.Random(seed).randrange(100)
            return [{"role": "user", "content": "Guess my number."}]

        def step(self, turn: Turn) -> Step:
            is_right = turn.text == str(self.number)
            answer = "higher" if turn.text < str(self.number) else "lower"
            return Step(answer, reward=float(is_right), is_done=is_right)

Each conversation has an instance of its own, which lives in one reward worker. If that worker dies,
another one repeats `start` and the turns so far. So what an environment does may depend on its row,
the seed and the turns alone. Methods may be `async def`: a worker then has many conversations at
once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tlt_megatron.types import Message

Observation = str | Sequence[Message]  # a text is one message of the role user


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that the policy wrote."""

    name: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    id: str = ""  # as the policy wrote it; "": the form of the model's calls has no ids
    error: str = ""  # why the call cannot be read; the other fields are then empty, if not known


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the policy."""

    text: str  # with special tokens, but without the stop token that ends it
    token_ids: tuple[int, ...] = ()  # as they were drawn
    tool_calls: tuple[ToolCall, ...] = ()
    messages: tuple[Message, ...] = ()  # the conversation up to this turn, which is the last of it
    is_last: bool = False  # no turn follows, because a limit on turns or tokens is reached
    logprobs: tuple[
        float, ...
    ] = ()  # of token_ids, from the distribution that they were drawn from


@dataclass(frozen=True, slots=True)
class Step:
    """The answer of an environment to a turn."""

    messages: Observation = ()
    reward: float = 0.0  # of the turn
    is_done: bool = False  # the conversation ends, and `messages` are dropped
    stop: Sequence[str] | None = None  # strings that end the next turn; None: rollout.stop
    # of an environment that encodes its messages itself: the tokens that follow the turn
    token_ids: Sequence[int] | None = None


class Environment:
    """One conversation. Its methods may also be `async def`. Only `step` is needed, and a class
    with these methods need not derive from this one.
    """

    tools: Sequence[Mapping[str, object]] = ()  # OpenAI schemas, for the chat template

    def start(self, row: Mapping[str, object], seed: int) -> Observation | Step | None:
        """Return messages that follow the prompt, or None. A `Step` has in `token_ids` the whole
        first prompt, in place of the row's.

        `row` has data_source, ground_truth, extra_info, messages (the prompt) and policy: the
        folder of its tokenizer, and how turns are drawn. `seed` depends on run.seed, the draw and
        the sample, so that a resume repeats it.
        """

    def step(self, turn: Turn) -> Step:
        """Return the answer to a turn. It is called for each turn, the last one too."""
        raise NotImplementedError

    def end(self) -> float | Mapping[str, float] | None:
        """Return a further reward, or a dict of numbers that may have it as "score". It is called
        once, when the conversation has ended.
        """
