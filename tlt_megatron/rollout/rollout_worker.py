"""Prompts -> scored rollouts. Each rank generates its share; when the last one finishes, all learn
lengths and rewards.

Tokens stay where they were generated until the policy trainer has planned the batch
(policy/exchange.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from torch import Tensor

from tlt_megatron.engines.base import GenerationStopped, PassRecord, RolloutEngine
from tlt_megatron.policy.exchange import ResponseRow, move_tokens, part_of, row_of
from tlt_megatron.rewards.worker_process import Outcome
from tlt_megatron.rewards.workers import RewardPool
from tlt_megatron.rollout.batch_rules import BatchPlan, BatchRules
from tlt_megatron.rollout.conversations import Conversations
from tlt_megatron.rollout.open_responses import OpenResponses, carried_metrics
from tlt_megatron.rollout.phases import Phases
from tlt_megatron.rollout.rollout_metrics import (
    rollout_metrics,
    speculation_metrics,
    speculation_sums,
    token_sums,
)
from tlt_megatron.rollout.slow_rank import pass_costs, slowest_rank
from tlt_megatron.rollout.speculation_log import PassTotals, add_pass_spans, sum_passes
from tlt_megatron.runtime.collectives import gather_json
from tlt_megatron.runtime.process_groups import Group
from tlt_megatron.spot.lifecycle import DrafterLifecycle
from tlt_megatron.spot.spot_trainer import merge_metrics
from tlt_megatron.types import Prompt, Rollout, SamplingParams, ScoredGroup, ScoredResponse

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The scored batch of an RL step or an evaluation in the order of the prompts.

    It is the same on every rank, except that a rank has only the tokens that it generated.
    """

    groups: tuple[ScoredGroup, ...]
    metrics: dict[str, float]
    passes: list[PassTotals]  # this rank's
    carried: tuple[ScoredGroup, ...] = ()  # to the next step, with partial rollouts


@dataclass(kw_only=True)
class RolloutWorker:
    """Runs this rank's engine and reward workers."""

    engine: RolloutEngine
    rewards: RewardPool
    decode: Callable[[Sequence[int]], str]
    replicas: Group  # all ranks with an engine
    phases: Phases
    ranks_per_engine: int = 1  # the first rank of an engine gets all its prompts
    # Each rank calls it on its own, about once per pass.
    should_stop: Callable[[], bool] = lambda: False
    conversations: Conversations | None = None  # None without an environment

    def collect(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        policy_version: int,
        *,
        drafter: DrafterLifecycle | None = None,
        step: int = 0,
        plan: BatchPlan | None = None,
    ) -> Collected:
        """Generate responses, score them as they finish, and exchange the batch. A collective of
        all replicas.

        With `drafter`, a rank that has finished trains the drafter until all ranks have finished.
        `step` is the RL step; 0 for an evaluation. With dynamic sampling or partial rollouts, there
        are rounds until the batch is complete, for which `plan` draws further prompts. Each round
        is a rollout phase with its own spot training, and all ranks begin the next round with the
        same drafter. All ranks raise GenerationStopped if any rank was told to stop before its
        responses were generated and scored. That rank ends its phase as if it had finished, so that
        spot sessions end normally.
        """
        if plan is None:
            plan = BatchPlan(rules=BatchRules(num_prompts=len(prompts)), draw=lambda _: ())
        rules, rounds, stall_s = plan.rules, [], 0.0
        responses = OpenResponses(params, round_tokens=rules.round_tokens, carried=plan.carried)
        while True:
            if rounds and drafter:
                with self.phases("PUBLISH", "publish_drafter"):
                    stall_s += drafter.end_round()
            rounds.append(
                self._run_round(prompts, responses, policy_version, drafter, step, len(rounds))
            )
            responses.add(rounds[-1].parts)
            complete = [group for group in responses.groups() if group.is_complete]
            if rules.is_complete(complete, len(rounds)):
                break
            prompts = plan.draw(rules.num_missing(complete))
        batch = rules.select(complete)
        sums = gather_json(token_sums(batch), self.replicas)
        metrics = rollout_metrics(batch, sums, rules.max_prompt_tokens, rules.right_score)
        metrics |= rules.metrics(complete, len(rounds)) | self.rewards.weight_metrics()
        if metrics.get("rollout/filler_groups") == rules.num_prompts and self.replicas.is_first:
            log.warning(
                "step %d: all %d groups are fillers: within none did responses differ in"
                " algorithm.filter_groups, in %d generation rounds. Take easier or harder"
                " prompts, or more rollout.num_samples",
                *(step, rules.num_prompts, len(rounds)),
            )
        carried = rules.carry(responses.groups(), batch)
        if rules.round_tokens:
            metrics |= carried_metrics(batch, carried, policy_version=policy_version)
        metrics |= max((each.slowest for each in rounds), key=_cost_s)
        metrics["bubble/idle_s"] = sum(each.idle_s for each in rounds)
        if drafter:
            metrics |= _spot_metrics(rounds)
            metrics["bubble/stall_s"] += stall_s
        metrics |= speculation_metrics(
            [share.pass_sums for each in rounds for share in each.shares]
        )
        return Collected(
            groups=tuple(batch),
            metrics=metrics | _engine_metrics(rounds),
            passes=[total for each in rounds for total in each.passes],
            carried=tuple(carried),
        )

    def _run_round(
        self,
        prompts: Sequence[Prompt],
        responses: OpenResponses,
        policy_version: int,
        drafter: DrafterLifecycle | None,
        step: int,
        number: int,
    ) -> _Round:
        """Go on with open responses, answer `prompts` and score, on all ranks: the round `number`
        of the step.
        """
        own: list[ScoredResponse] = []
        passes: list[PassTotals] = []
        share: RankShare | None = None
        mine = self._requests(prompts, responses)
        with contextlib.suppress(GenerationStopped):
            own, counts, records = self._generate_share(mine, responses, policy_version, drafter)
            passes = sum_passes(records, step=step, rank=self.replicas.rank)
            share = RankShare(
                rows=[row_of(part) for part in own],
                num_generated=self.engine.stats().num_generated_tokens,
                seconds=self.engine.stats().seconds,
                counts=counts,
                pass_sums=speculation_sums(passes),
                costs=pass_costs(passes),
                finished_s=self.phases.timeline.now_s(),
            )
        if drafter:
            self.engine.free_kv()
        with self.phases("WAIT", "wait"):
            spot = drafter.run_until_preempted(step, number).metrics() if drafter else {}
            if share is not None:
                share = dataclasses.replace(share, spot=spot)
            shares = gather_shares(share, self.replicas)
        if len(shares) < self.replicas.size:
            raise GenerationStopped("the rollouts of this phase are dropped")
        ends = [each.finished_s for each in shares]
        parts = [part_of(row) for each in shares for row in each.rows]
        start = sum(len(each.rows) for each in shares[: self.replicas.rank])
        parts[start : start + len(own)] = own
        return _Round(
            parts=parts,
            passes=passes,
            shares=shares,
            slowest=slowest_rank([each.costs for each in shares], ends),
            idle_s=sum(max(ends) - end for end in ends),
        )

    def _generate_share(
        self,
        mine: Sequence[Prompt],
        responses: OpenResponses,
        policy_version: int,
        drafter: DrafterLifecycle | None,
    ) -> tuple[list[ScoredResponse], dict[str, float], Sequence[PassRecord]]:
        """Return this rank's scored part of the batch, its counts and its decode passes.

        GenerationStopped if this rank was told to stop first.
        """
        status, progress = self.phases.timeline.status, self.phases.progress

        def score(part: Rollout) -> None:
            status.add_response(part.num_generated)
            progress.add_response()
            if responses.is_cut(part):
                return
            rollout = responses.join(part)
            key = rollout.key
            prompt = responses.prompts[rollout.draw_index]
            text = self.decode(rollout.token_ids.tolist())
            if talk := rollout.transcript:
                if talk.has_failed:
                    return
                replies = talk.messages[talk.num_prompt_messages :]
                text = "\n".join(str(message["content"]) for message in replies)
                info = {**prompt.extra_info, "messages": talk.messages}
                prompt = dataclasses.replace(prompt, extra_info=info)
            self.rewards.submit(key, prompt, text, talk)

        def keep(part: Rollout, features: Tensor) -> None:
            assert drafter is not None
            num_prompt_tokens = len(responses.prompts[part.draw_index].token_ids)
            num_before = max(0, len(part.prompt_ids) - num_prompt_tokens)
            drafter.add_features(part, features, num_before)

        status.expect_responses(sum(len(p.sample_indices(responses.params)) for p in mine))
        generate = (self.conversations or self.engine).generate
        with self.phases("ROLLOUT", "gen", prompts=len(mine)):
            groups = generate(
                mine,
                responses.params,
                policy_version=policy_version,
                on_finish=score,
                on_features=keep if drafter else None,
                should_stop=self.should_stop,
            )
            passes = self.engine.take_passes()
            if drafter:
                drafter.add_passes(passes)
            add_pass_spans(self.phases.timeline, passes)
            for start_s, end_s in self.engine.stats().drafter_refreshes:
                self.phases.timeline.add_span("REFRESH-DRAFTER", start_s, end_s)
        with self.phases("REWARD", "reward"):
            outcomes = self.rewards.collect(self.should_stop)
        if outcomes is None:
            raise GenerationStopped("responses were not scored yet")
        parts = []
        for part in (rollout for group in groups for rollout in group.rollouts):
            has_failed = part.transcript is not None and part.transcript.has_failed
            is_scored = not has_failed and not responses.is_cut(part)
            outcome = outcomes[part.key] if is_scored else Outcome()
            if outcome.failure:  # the reward is 0, and so is that of each turn
                turns = tuple(turn._replace(reward=0.0) for turn in part.turns)
                part = dataclasses.replace(part, turns=turns)
            parts.append(ScoredResponse(part, outcome.score, outcome.details))
        return parts, self._take_counts(outcomes.values()), passes

    def _take_counts(self, outcomes: Iterable[Outcome]) -> dict[str, float]:
        """Return the metrics of this round that are sums over ranks and rounds."""
        engine = self.engine.stats()
        failures = Counter(outcome.failure for outcome in outcomes)
        counts = {
            "rollout/preemptions": float(engine.num_preemptions),
            "rollout/unspeculated_passes": float(engine.num_unspeculated_passes),
            "rollout/graph_replays": float(engine.num_graph_replays),
            "rollout/eager_passes": float(engine.num_eager_passes),
            "reward/num_errors": float(failures["error"]),
            "reward/num_timeouts": float(failures["timeout"]),
        }
        return counts | (self.conversations.take_metrics() if self.conversations else {})

    def _requests(self, prompts: Sequence[Prompt], responses: OpenResponses) -> list[Prompt]:
        """Return what this rank's engine answers in a round: open responses, then its share of
        `prompts`. A rank with fewer open responses comes first.
        """
        responses.expect(prompts)
        rank, engines = self.replicas.rank, range(0, self.replicas.size, self.ranks_per_engine)
        rollouts, targets = move_tokens(responses.open(), engines, self.replicas)
        responses.replace(rollouts)
        mine = [r for r, target in zip(rollouts, targets, strict=True) if target == rank]
        order = sorted(engines, key=Counter(targets).__getitem__)
        own = prompts[order.index(rank) :: len(order)] if rank in engines else ()
        return responses.requests(mine, own)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """A rank's part of a generation round, as all ranks know it: everything but the tokens."""

    rows: list[ResponseRow]
    num_generated: int  # tokens of the engine
    seconds: float  # the engine's call
    counts: dict[str, float]  # metrics that are sums over ranks and rounds
    pass_sums: dict[str, int]  # see `speculation_sums`
    costs: dict[str, list[float]]  # see `pass_costs`
    finished_s: float  # when the rollouts ended, on the clock of the timeline
    spot: dict[str, float] = field(default_factory=dict)  # `SpotReport.metrics`


def gather_shares(share: RankShare | None, replicas: Group) -> list[RankShare]:
    """Return the shares of all ranks that have one. A collective."""
    sent = share and {each.name: getattr(share, each.name) for each in fields(share)}
    found = [each for each in gather_json(sent, replicas) if each is not None]
    return [
        RankShare(**{**each, "rows": [ResponseRow(*row) for row in each["rows"]]}) for each in found
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """One generation round of all ranks."""

    parts: list[ScoredResponse]
    passes: list[PassTotals]  # this rank's
    shares: list[RankShare]  # one for each rank
    slowest: dict[str, float]  # see `slow_rank.slowest_rank`
    # From the end of each rank's rollouts to the end of the last rank's, with and without spot
    # training.
    idle_s: float


def _cost_s(slowest: Mapping[str, float]) -> float:
    return slowest.get("perf/slowest_rank/cost_s", -1.0)


def _spot_metrics(rounds: Sequence[_Round]) -> dict[str, float]:
    """Return the sums over all rounds of a step. Means of the drafter's training are of the newest
    round that has them.
    """
    metrics: dict[str, float] = {}
    for each in rounds:
        for name, value in merge_metrics([share.spot for share in each.shares]).items():
            is_mean = name.startswith("drafter/")
            metrics[name] = value if is_mean else metrics.get(name, 0.0) + value
    return metrics


def _engine_metrics(rounds: Sequence[_Round]) -> dict[str, float]:
    """Return the metrics of engines and reward workers, of all rounds of a step."""
    counts: Counter[str] = Counter()
    num_generated, seconds = 0, 0.0
    for each in rounds:
        for share in each.shares:
            counts.update(share.counts)
            num_generated += share.num_generated
        seconds += max(share.seconds for share in each.shares)
    return {"perf/rollout_tokens_per_s": num_generated / seconds, **counts}
