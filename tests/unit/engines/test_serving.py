"""`EmbeddedEngine.serve`: requests join and leave a running batch, and each has the tokens that it
has alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.recorded_graphs import recording_device
from tests.unit.engines.conftest import engine_over, make_prompts, speculate, tokens_of
from tlt_megatron.engines.embedded.embedded_engine import EmbeddedEngine
from tlt_megatron.engines.embedded.request import DrawnTokens, ResponseKey
from tlt_megatron.engines.embedded.serving import NewRequests
from tlt_megatron.types import FinishReason, Prompt, SamplingParams

STOP = (5,)
SETTINGS = [
    SamplingParams(num_samples=2, max_new_tokens=30, seed=1, stop_token_ids=STOP),
    SamplingParams(num_samples=1, max_new_tokens=40, temperature=0.0, stop_token_ids=STOP),
    SamplingParams(
        num_samples=2, max_new_tokens=25, temperature=0.6, top_k=9, seed=7, stop_token_ids=STOP
    ),
    SamplingParams(num_samples=1, max_new_tokens=35, top_p=0.8, seed=2**63, stop_token_ids=STOP),
]


class Crowd:
    """Clients whose requests come at given passes, and who leave after so many tokens."""

    def __init__(
        self,
        arrivals: Mapping[int, tuple[Prompt, SamplingParams]],
        leaving: Mapping[ResponseKey, int] | None = None,
    ) -> None:
        self.arrivals = dict(arrivals)
        self.leaving = leaving or {}
        self.tokens: dict[ResponseKey, list[int]] = defaultdict(list)
        self.logprobs: dict[ResponseKey, list[float]] = defaultdict(list)
        self.reasons: dict[ResponseKey, FinishReason] = {}
        self.left: list[ResponseKey] = []
        self.num_passes = 0

    def take(self, *, is_idle: bool) -> NewRequests | None:
        """See `Clients`."""
        self.num_passes += 1
        if is_idle and not self.arrivals:
            return None
        new = [self.arrivals.pop(n) for n in sorted(self.arrivals) if n <= self.num_passes]
        stopped, self.left = self.left, []
        return NewRequests(new, stopped)

    def receive(self, key: ResponseKey, tokens: DrawnTokens, accept_lengths: Sequence[int]) -> None:
        """See `Clients`."""
        assert key not in self.reasons
        assert sum(accept_lengths) <= len(self.tokens[key]) + tokens.token_ids_T.numel()
        self.tokens[key] += tokens.token_ids_T.tolist()
        self.logprobs[key] += tokens.logprobs_T.tolist()
        if len(self.tokens[key]) >= self.leaving.get(key, 1000):
            self.left.append(key)

    def finish(self, key: ResponseKey, reason: FinishReason) -> None:
        """See `Clients`."""
        self.reasons[key] = reason


def serve(engine: EmbeddedEngine, crowd: Crowd, params: SamplingParams = SETTINGS[0]) -> None:
    widest = SamplingParams(
        max_new_tokens=63,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        stop_token_ids=STOP,
    )
    engine.serve(crowd, widest, longest=96, policy_version=1)
    assert engine._cache is not None
    assert engine._cache.num_free == engine._cache.num_pages, "pages are held after the last client"


@pytest.fixture(params=["plain", "tree", "chain", "ngram", "graphs"])
def engine(request: pytest.FixtureRequest, tiny_path: Path) -> EmbeddedEngine:
    has_graphs = request.param == "graphs"
    engine = engine_over(
        tiny_path,
        max_batch_size=6,
        max_new_tokens=64,
        max_prompt_tokens=32,
        kv_cache_tokens=7 * 128,
        device=recording_device() if has_graphs else None,
    )
    strategy = {"tree": "4_4_16", "chain": "4_1_4", "ngram": "ngram_4", "graphs": "4_4_16"}
    if request.param in strategy:
        speculate(engine, strategy[request.param])
    return engine


PROMPTS = make_prompts(4, 17, 9, 30)
ARRIVALS = {1 + 6 * i: each for i, each in enumerate(zip(PROMPTS, SETTINGS, strict=True))}


def alone(tiny_path: Path) -> dict[ResponseKey, list[int]]:
    engine = engine_over(tiny_path, max_batch_size=6, max_new_tokens=64)
    found = {}
    for prompt, params in ARRIVALS.values():
        groups = engine.generate([prompt], params, policy_version=1)
        found |= {(prompt.prompt_id, i): ids for i, ids in enumerate(tokens_of(groups))}
    return found


def test_each_request_has_the_tokens_that_it_has_alone(engine, tiny_path: Path) -> None:
    crowd = Crowd(ARRIVALS)
    serve(engine, crowd)
    expected = alone(tiny_path)
    assert crowd.tokens == expected
    for key, ids in expected.items():
        assert crowd.reasons[key] == ("stop" if ids[-1] in STOP else "length")
    assert {key: len(values) for key, values in crowd.logprobs.items()} == {
        key: len(ids) for key, ids in expected.items()
    }
    assert set(crowd.logprobs["p1", 0]) == {0.0}  # greedy


def test_who_leaves_is_gone_within_a_pass_and_the_others_go_on(engine, tiny_path: Path) -> None:
    leaving = {("p0", 1): 3, ("p2", 0): 1, ("p3", 0): 5}
    crowd = Crowd(ARRIVALS, leaving)
    serve(engine, crowd)
    expected = alone(tiny_path)
    for key, ids in expected.items():
        found = crowd.tokens[key]
        if key in leaving and len(ids) > leaving[key] + 8:
            assert found == ids[: len(found)]
            assert leaving[key] <= len(found) < leaving[key] + 5, "tokens after the client left"
            assert key not in crowd.reasons
        else:
            assert found == ids
    everyone = dict.fromkeys(expected, 1)
    serve(engine, Crowd(ARRIVALS, everyone))


def test_waiting_requests_that_are_dropped_never_run(engine) -> None:
    many = SamplingParams(num_samples=20, max_new_tokens=20, seed=1, stop_token_ids=STOP)
    crowd = Crowd({1: (PROMPTS[3], many)}, {("p3", 0): 2})
    receive = crowd.receive

    def leave_all(key: ResponseKey, tokens: DrawnTokens, lengths: Sequence[int]) -> None:
        receive(key, tokens, lengths)
        crowd.left = [("p3", index) for index in range(20)]

    crowd.receive = leave_all
    serve(engine, crowd)
    assert len(crowd.tokens) <= 6
    assert not crowd.reasons


@pytest.mark.parametrize("temperature", [1e-39, 9e-6, -1.0, 10.5, float("nan")])
def test_a_temperature_that_overflows_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"must be 0 \(greedy\) or in \[1e-05, 10\]"):
        SamplingParams(temperature=temperature)
