"""The responses of an RL step: their lengths, recorded or assumed, what each replica generates, and
the stages in which it ends.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import NamedTuple, TypeVar

import numpy as np

from tlt_megatron.config.schema import RolloutSection

_NUM_STEPS = 10  # with lengths that are assumed
_P99 = 2.326  # standard deviations
_T = TypeVar("_T")


class Limits(NamedTuple):
    """What an engine runs at once."""

    max_batch: int
    kv_tokens: float = math.inf  # prompts and responses together


def limits_of(rollout: RolloutSection) -> Limits:
    """Return the limits of a replica. By default its KV has room for a full batch."""
    return Limits(rollout.max_batch_size, rollout.kv_cache_tokens or math.inf)


class Group(NamedTuple):
    """The responses to one prompt."""

    lengths: list[int]  # in tokens
    prompt: float = 0.0  # tokens
    is_trained: bool = True  # False: all rewards are equal, so the update skips them


Batch = list[Group]  # an RL step's prompts


class Request(NamedTuple):
    """What a generation round does for one response, in tokens."""

    cached: float  # that the response has before
    new: float
    prompt: float = 0.0  # its share of the prompt that its siblings read, too


Round = list[list[Request]]  # one replica gets the requests of an inner list together


class Step(NamedTuple):
    """An RL step."""

    rounds: list[Round]
    batch: Batch  # the update's


class Stage(NamedTuple):
    """What a replica does from the end of one request to the next."""

    batch_size: int  # running requests
    tokens: float  # that each of them gains
    cached: float  # response tokens that all of them have, in the middle of the stage


def tokens_of(phase: str, batch: Batch) -> int:
    """Return the response tokens that a phase goes over: the update skips groups, others do not."""
    is_update = phase == "update_actor"
    return sum(sum(each.lengths) for each in batch if each.is_trained or not is_update)


def whole(batch: Batch) -> Step:
    """Return the step that generates its batch in one round."""
    rounds = [
        [Request(0, length, group.prompt / len(group.lengths)) for length in group.lengths]
        for group in batch
    ]
    return Step([rounds], batch)


class _Open(NamedTuple):
    """A group of partial rollouts."""

    group: Group
    done: list[int]  # tokens that each response has

    @property
    def is_complete(self) -> bool:
        return self.done == self.group.lengths

    def go_on(self, most: int) -> list[Request]:
        """Return the requests of a round, and count their tokens as done."""
        rest = [length - done for length, done in zip(self.group.lengths, self.done, strict=True)]
        prompt = self.group.prompt / len(rest)
        found = [
            Request(d, min(r, most), prompt) for d, r in zip(self.done, rest, strict=True) if r
        ]
        self.done[:] = [done + min(left, most) for done, left in zip(self.done, rest, strict=True)]
        return found


def steps_of(rollout: RolloutSection, batches: Sequence[Batch]) -> list[Step]:
    """Return the steps in which `rollout` generates these batches.

    In partial rollouts a response gains at most `partial_rollout_tokens` in a round. Rounds end
    when `num_prompts` groups are complete, and the others go on in the next step
    (tlt_megatron/rollout/batch_rules.py). Groups are drawn from all `batches` in a row.
    """
    if not rollout.partial_rollout_tokens:
        return list(map(whole, batches))
    num_prompts, round_tokens = rollout.num_prompts, rollout.partial_rollout_tokens
    num_drawn = rollout.over_sampling_prompts or num_prompts
    drawn = cycle(group for batch in batches for group in batch)
    steps, carried = [], []
    for _ in batches:
        rounds, groups = [], carried
        count = max(num_drawn - sum(each.is_complete for each in groups), 0)
        while True:
            old = [[request] for each in groups for request in each.go_on(round_tokens)]
            new = [_Open(group, [0] * len(group.lengths)) for group in islice(drawn, count)]
            rounds.append([*old, *(each.go_on(round_tokens) for each in new)])
            groups = [*groups, *new]
            complete = [each for each in groups if each.is_complete]
            if len(complete) >= num_prompts:
                break
            count = num_prompts - len(complete) if complete else 0
        steps.append(Step(rounds, [each.group for each in complete[:num_prompts]]))
        carried = [each for each in groups if not each.is_complete] + complete[num_prompts:]
    return steps


def resampled(rollout: RolloutSection, batches: Sequence[Batch]) -> list[Batch]:
    """Return as many batches of the configured size. If the recorded size differs, prompts and
    responses are drawn from the recorded ones.
    """
    draw = random.Random(0)

    def sized(values: list[_T], count: int) -> list[_T]:
        return values if len(values) == count else draw.choices(values, k=count)

    def resized(group: Group) -> Group:
        taken = sized(group.lengths, rollout.num_samples)
        return group._replace(lengths=[min(length, rollout.max_new_tokens) for length in taken])

    return [list(map(resized, sized(batch, rollout.num_prompts))) for batch in batches]


def lognormal(rollout: RolloutSection, text: str, prompt: float) -> list[Batch]:
    """Return batches of lognormal lengths. `text` is "median,p99"; ValueError if it is not.

    `prompt` is the mean length of prompts.
    """
    try:
        median, p99 = (float(word) for word in text.split(","))
    except ValueError:
        median = p99 = 0.0
    if not 1.0 <= median < p99 < math.inf:
        raise ValueError(f"--lengths {text}: must be MEDIAN,P99 in tokens, as in 1200,18000")
    draw, sigma = random.Random(0), math.log(p99 / median) / _P99

    def length() -> int:
        tokens = round(draw.lognormvariate(math.log(median), sigma))
        return min(max(tokens, 1), rollout.max_new_tokens)

    def group() -> Group:
        return Group([length() for _ in range(rollout.num_samples)], prompt)

    return [[group() for _ in range(rollout.num_prompts)] for _ in range(_NUM_STEPS)]


def shares(requests: Round, num_replicas: int) -> list[list[Request]]:
    """Return each replica's requests. As in a run, replicas take turns."""
    return [
        [request for own in requests[replica::num_replicas] for request in own]
        for replica in range(num_replicas)
    ]


def stages(requests: Sequence[Request], limits: Limits) -> Iterator[Stage]:
    """Yield the stages of a replica whose requests all advance at the same speed.

    Requests wait while `max_batch` run or the KV is full. A request takes KV as it grows. When the
    KV is full, the newest one leaves and waits as the next, as in the engine's scheduler. It keeps
    its tokens. The first token comes from the prefill.
    """
    waiting = deque(request for request in requests if request.new > 1)
    # Running requests by number, the newest last: with their end, in tokens of a request that runs
    # from the start of the replica. Ended and interrupted ones stay in the heap.
    running: dict[int, tuple[float, Request]] = {}
    ends: list[tuple[float, int]] = []
    at = began = prompts = 0.0
    count = 0

    def leave(number: int) -> tuple[float, Request]:
        nonlocal began, prompts
        end, request = running.pop(number)
        began -= end + 1.0 - request.new - request.cached
        prompts -= request.prompt
        return end, request

    while running or waiting:
        while waiting and len(running) < limits.max_batch:
            size, request = len(running), waiting[0]
            held = size * at - began + prompts + request.prompt + request.cached
            if running and held + size + 1 > limits.kv_tokens:
                break
            waiting.popleft()
            end = at + request.new - 1.0
            running[count] = end, request
            heapq.heappush(ends, (end, count))
            began, prompts, count = began + at - request.cached, prompts + request.prompt, count + 1
        while ends[0][1] not in running:
            heapq.heappop(ends)
        (end, first), size = ends[0], len(running)
        full = (limits.kv_tokens + began - prompts) / size
        is_full = size > 1 and full < end
        until = max(full, at) if is_full else end
        if until > at:
            yield Stage(size, until - at, size * (at + until) / 2 - began)
        at = until
        if is_full:
            newest = next(reversed(running))
            end, request = leave(newest)
            gained = at - (end + 1.0 - request.new)
            left = request.new - gained
            waiting.appendleft(request._replace(cached=request.cached + gained, new=left))
        else:
            leave(first)


def cached_by_batch(requests: Sequence[Request], limits: Limits) -> np.ndarray:
    """Return the mean cached response tokens of all running requests, by batch size; batch sizes
    that never run are interpolated.
    """
    cached_B, tokens_B = np.zeros((2, limits.max_batch + 1))
    for stage in stages(requests, limits):
        cached_B[stage.batch_size] += stage.tokens * stage.cached
        tokens_B[stage.batch_size] += stage.tokens
    return quotients(cached_B, tokens_B)


def quotients(sums_B: np.ndarray, counts_B: np.ndarray) -> np.ndarray:
    """Return the quotients by batch size, interpolated where the count is 0."""
    (seen,) = np.nonzero(counts_B)
    if not len(seen):
        return np.zeros(len(counts_B))
    return np.interp(np.arange(len(counts_B)), seen, sums_B[seen] / counts_B[seen])
