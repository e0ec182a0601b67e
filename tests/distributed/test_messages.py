"""Bytes that a rank receives for a batch: of all messages, from the rollouts to the update."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from tests.distributed.test_advantages import FakeCritic
from tests.policy_batches import data_parallel_groups, make_rollout, make_trainer
from tests.ranks import run_ranks
from tests.rollout_stand_ins import Drafter, OneTokenEngine, Rewards, make_passes, make_worker
from tests.unit.policy.test_policy_trainer import NUM_TOKENS, FakeModel
from tlt_megatron.config.schema import AlgorithmSection, CriticSection
from tlt_megatron.engines.base import PassRecord
from tlt_megatron.policy.critic import CriticTrainer
from tlt_megatron.policy.exchange import spread_requests
from tlt_megatron.rollout.batch_rules import BatchPlan, BatchRules
from tlt_megatron.types import (
    FinishReason,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Transcript,
    TurnCredit,
)

NUM_RANKS, NUM_PROMPTS, NUM_SAMPLES, NUM_STEPS = 4, 8, 8, 3
PARAMS = SamplingParams(num_samples=NUM_SAMPLES, max_new_tokens=2048)
BYTES_OF_TOKEN, ROUTE = 12, (3, 4)  # an id and two log-probs; layers and experts
# of a conversation; its reward and length in a row
NUM_TURNS, BYTES_OF_TURN = 6, 32
KL = {"kl_coef": 0.1, "kl_placement": "reward"}


def length_of(draw: int, sample: int) -> int:
    return 16 + zlib.crc32(f"{draw} {sample}".encode()) % 2000


class Engine(OneTokenEngine):
    """Answers with as many tokens as `length_of` says, up to the limit of the prompt."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.num_answers = 0

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        policy_version: int,
        on_finish: Callable[[Rollout], None],
        **_: object,
    ) -> list[RolloutGroup]:
        groups = []
        for prompt in prompts:
            rollouts = []
            for sample in prompt.sample_indices(params):
                rollouts.append(self._answer(prompt, sample, prompt.limit(params), policy_version))
                on_finish(rollouts[-1])
            groups.append(RolloutGroup(prompt=prompt, rollouts=tuple(rollouts)))
        return groups

    def take_passes(self) -> list[PassRecord]:
        return make_passes((16, 8, 4, 2, 1))

    def _answer(self, prompt: Prompt, sample: int, limit: int, version: int) -> Rollout:
        self.num_answers += 1
        rest = length_of(prompt.draw_index, sample) - prompt.first_position
        tokens = torch.arange(prompt.first_position, prompt.first_position + min(rest, limit))
        fields: dict[str, Any] = {"versions": ((version, tokens.numel()),)}
        if rest > limit:
            fields["finish_reason"] = FinishReason.LENGTH
        if self.mode == "routing_replay":
            num_routes = len(prompt.token_ids) + tokens.numel() - 1
            fields["routes"] = torch.zeros(num_routes, *ROUTE, dtype=torch.int16)
        if self.mode == "conversations":
            fields["loss_mask"] = tokens % 7 != 3
            talk = ({"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"})
            fields["transcript"] = Transcript(messages=talk, num_turns=1, has_failed=False)
            first = TurnCredit(1, -1 / 3)
            rest = int(fields["loss_mask"].sum()) - NUM_TURNS + 1
            fields["turns"] = (*[first] * (NUM_TURNS - 1), first._replace(num_tokens=rest))
        key = prompt.draw_index, sample
        return make_rollout(prompt.token_ids, tokens % NUM_TOKENS, key, **fields)


def count_received(received: Counter[str]) -> None:
    """Count the bytes that this process receives in torch's collectives from now on."""

    def size(tensor: Tensor) -> int:
        return tensor.numel() * tensor.element_size()

    def counted(name: str, bytes_of: Callable[..., int]) -> None:
        collective = getattr(distributed_c10d, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            received[name] += bytes_of(*args)
            return collective(*args, **kwargs)

        setattr(dist, name, wrapper)
        setattr(distributed_c10d, name, wrapper)

    counted("all_gather", lambda found, *_: sum(map(size, found)))
    counted("all_to_all_single", lambda found, *_: size(found))
    counted("broadcast", lambda tensor, *_: size(tensor))
    counted("all_reduce", lambda tensor, *_: 2 * size(tensor))  # a ring


def train(mode: str, section: AlgorithmSection) -> tuple[int, int, int]:
    """Bytes that this rank received, those of its share, and its responses of all rounds."""
    groups = data_parallel_groups()
    received: Counter[str] = Counter()
    count_received(received)
    critic: Any = CriticTrainer(FakeCritic(), CriticSection(), groups)
    engine = Engine(mode)
    worker = make_worker(engine, Rewards(lambda text: int(text) > 1800), world=groups.world)
    trainer = make_trainer(
        FakeModel(groups), section, groups, critic=critic if section.has_critic else None
    )
    is_cut = mode in ("partial", "routing_replay")
    rules = BatchRules(
        num_prompts=NUM_PROMPTS,
        round_tokens=256 if is_cut else 0,
        num_drawn=NUM_PROMPTS,
        metric="score" if mode == "dynamic_sampling" else "",
        max_rounds=4 if mode == "dynamic_sampling" else 1,
    )
    num_drawn, share = 0, 0

    def draw(count: int) -> list[Prompt]:
        nonlocal num_drawn
        num_drawn += count
        return [
            Prompt(prompt_id=f"p{i}", draw_index=i, token_ids=(1, 2))
            for i in range(num_drawn - count, num_drawn)
        ]

    carried: tuple[Any, ...] = ()
    drafter: Any = Drafter()
    for step in range(NUM_STEPS):
        plan = BatchPlan(rules=rules, draw=draw, carried=carried)
        first = draw(rules.num_first(carried))
        collected = worker.collect(first, PARAMS, step, plan=plan, drafter=drafter)
        carried = collected.carried
        planned = trainer.plan(collected.groups)
        values = trainer.infer_values(planned) if section.has_critic else None
        trainer.update(trainer.infer_logprobs(planned, version=step, values=values))
        for rollout in planned.own:
            assert rollout.is_here
            assert rollout.token_ids.numel() == length_of(*rollout.key)
            share += BYTES_OF_TOKEN * rollout.token_ids.numel()
            if rollout.routes is not None:
                share += 2 * rollout.routes.numel()
                assert len(rollout.routes) == rollout.num_tokens - 1
    return received.total(), share, engine.num_answers


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("plain", {}),
        ("critic", {"advantage": "gae"}),
        ("kl_in_reward", {"advantage": "reinforce_plus_plus", **KL}),
        ("critic_and_kl", {"advantage": "gae", **KL}),
        ("partial", {}),
        ("routing_replay", {}),
        ("conversations", {}),
        ("conversations", {"advantage": "gae", **KL}),
        ("dynamic_sampling", {}),
    ],
)
def test_a_rank_receives_twice_its_share_and_a_little_for_each_response_and_turn(
    mode: str, options: dict[str, Any]
) -> None:
    """The rows of partial rollouts and dynamic sampling count in every round."""
    section = AlgorithmSection(tis_cap=2.0, **options)
    results = run_ranks(NUM_RANKS, train, mode, section)
    num_rows = sum(answers for _, _, answers in results)
    for received, share, _ in results:
        print(f"{mode} {options}: {received / share:.2f} of the share, {num_rows} responses")
        num_turns = num_rows * NUM_TURNS if mode == "conversations" else 0
        assert received <= 2 * share + 200 * num_rows + BYTES_OF_TURN * num_turns


def test_a_response_moves_only_where_a_rank_has_more_than_its_share() -> None:
    assert spread_requests([0, 1, 2, 3], range(4)) == [0, 1, 2, 3]
    assert spread_requests([3, 3, 3, 3, 3, 1], range(4)) == [3, 3, 0, 2, 0, 1]
    assert spread_requests([1, 1, 5], (0, 2)) == [0, 2, 0]  # engines of two ranks
    assert spread_requests([], range(3)) == []
