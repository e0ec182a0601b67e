"""Sessions of spot training as a state machine: ranks finish, plan, answer, train, die and are
late, in any order.

The rules are the real ones (spot/rank_state.py, spot/coordinator.py); what a rank does with them is
spot_trainer.py and session.py in few words, without processes, so that a schedule of hundreds of
steps costs milliseconds.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tlt_megatron.spot.coordinator import Coordinator
from tlt_megatron.spot.rank_state import PhaseView, Plan, ReplicaLayout

SETTLE_S = 0.25
MEMBER_TIMEOUT_S = 10.0
MAX_BROKEN = 5  # as in spot_trainer.py
_ROUNDS = 120  # in which ranks that all get their turn must be where they should be


@dataclass(kw_only=True)
class Rank:
    """One process: what it does, and how far it has read the log."""

    rank: int
    view: PhaseView
    coordinator: Coordinator
    state: str = "generates"  # generates | finished | waits | answers | trains | done | dead
    epoch: int = 0  # of the newest session that it was in
    num_read: int = 0
    num_broken: int = 0
    deadline: float = 0.0  # for the answers of others
    proposal: Plan | None = None  # decided on, not yet in the log


@dataclass(kw_only=True)
class Session:
    """One plan that counts."""

    plan: Plan
    members: tuple[int, ...]
    answered: set[int] = field(default_factory=set)
    verdict: str = ""  # go | cancel


class SpotMachine(RuleBasedStateMachine):
    """`lines` is the log in the store; `now` the one monotonic clock."""

    @initialize(
        num_replicas=st.integers(2, 6), size=st.sampled_from([1, 1, 2]), min_idle=st.integers(1, 2)
    )
    def start(self, num_replicas: int, size: int, min_idle: int) -> None:
        """A phase begins: every rank generates."""
        self.layout = ReplicaLayout(num_replicas * size, size)
        self.min_idle = min_idle
        self.now = 100.0
        self.lines: list[list[str]] = []
        self.sessions: dict[int, Session] = {}
        self.truth = PhaseView(self.layout, "here")
        self.ranks = [
            Rank(rank=rank, view=PhaseView(self.layout, "here"), coordinator=self.coordinator(rank))
            for rank in range(self.layout.world_size)
        ]

    def coordinator(self, rank: int) -> Coordinator:
        """The rules of one rank."""
        return Coordinator(
            self.layout,
            rank,
            min_idle_replicas=self.min_idle,
            settle_s=SETTLE_S,
            member_timeout_s=MEMBER_TIMEOUT_S,
        )

    # ---- what happens

    @rule(seed=st.integers(0, 1 << 16), count=st.integers(1, 30))
    def turns(self, seed: int, count: int) -> None:
        """Ranks go on, in any order; some do not get a turn for long."""
        rng = random.Random(seed)
        eager = rng.sample(self.ranks, rng.randint(1, len(self.ranks)))
        for _ in range(count):
            self.act(rng.choice(eager))
            self.now += 0.01

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """A rank's rollouts end. It may measure before it is ready."""
        busy = [rank for rank in self.ranks if rank.state == "generates"]
        if busy:
            rank = data.draw(st.sampled_from(busy))
            self.append("finished", rank.rank, "here", repr(self.now))
            rank.state = "finished"

    @rule(data=st.data(), number=st.integers(0, 20))
    def lose(self, data: st.DataObject, number: int) -> None:
        """A rank is killed, now and then; at most all but one of them."""
        alive = [rank for rank in self.ranks if rank.state != "dead"]
        if len(alive) > 1 and number % 7 == 3:
            data.draw(st.sampled_from(alive)).state = "dead"

    @rule(seconds=st.sampled_from([0.3, 1.0, 11.0]))
    def wait(self, seconds: float) -> None:
        """Time goes by; ranks may sleep through their deadlines."""
        self.now += seconds

    @rule()
    def settle(self) -> None:
        """Nobody finishes or dies for a while: all ranks that can train do, in one session."""
        self.let_all_act()
        able = [
            replica
            for replica in map(self.layout.ranks_of, range(self.layout.num_replicas))
            if all(self.ranks[rank].state in ("waits", "answers", "trains") for rank in replica)
        ]
        is_worn = any(rank.num_broken >= MAX_BROKEN for rank in self.ranks)
        if self.truth.is_over or is_worn or len(able) < self.min_idle:
            return
        training = {rank.rank for rank in self.ranks if rank.state == "trains"}
        expected = {rank for replica in able for rank in replica}
        assert training == expected, f"{training} train, {expected} could: {self.lines}"
        assert len({self.ranks[rank].epoch for rank in training}) == 1

    def teardown(self) -> None:
        """The rollouts of all that live end: everyone leaves, or the lost ones can be named."""
        if not hasattr(self, "ranks"):
            return
        for rank in self.ranks:
            if rank.state == "generates":
                self.append("finished", rank.rank, "here", repr(self.now))
                rank.state = "finished"
        self.let_all_act()
        alive = [rank for rank in self.ranks if rank.state != "dead"]
        if self.truth.is_over:
            assert all(rank.state == "done" for rank in alive), [r.state for r in self.ranks]
        else:
            late = set(self.truth.unfinished)
            assert late
            assert all(self.ranks[rank].state == "dead" for rank in late)

    # ---- what must always hold

    @invariant()
    def views_agree(self) -> None:
        """Who has read equally far holds the same view, whenever it has read what."""
        for rank in getattr(self, "ranks", []):
            fresh = PhaseView(self.layout, "here")
            for line in self.lines[: rank.num_read]:
                fresh.apply(line, 0.0)
            for other in range(self.layout.world_size):
                assert fresh.has_left(other) == rank.view.has_left(other)
                assert fresh.listed_in(other) == rank.view.listed_in(other)
            assert fresh.finished.keys() == rank.view.finished.keys()
            assert fresh.free_replicas() == rank.view.free_replicas()
            assert fresh.plan == rank.view.plan

    @invariant()
    def sessions_are_apart(self) -> None:
        """Nobody trains with a rank that trains with others, or that generates."""
        for rank in getattr(self, "ranks", []):
            if rank.state == "trains":
                members = self.sessions[rank.epoch].members
                assert rank.rank in members
                assert all(self.ranks[other].state != "generates" for other in members)

    # ---- one rank's step

    def act(self, rank: Rank) -> None:
        """What it does next. Between a decision and its line in the log others may be faster."""
        if rank.state == "waits" and rank.proposal is not None:
            self.propose(rank.proposal)
            rank.proposal = None
        elif rank.state == "finished":
            self.append("ready", rank.rank)
            rank.state = "waits"
        elif rank.state == "waits":
            self.await_plan(rank)
        elif rank.state == "answers":
            self.answer(rank)
        elif rank.state == "trains":
            self.train(self.sessions[rank.epoch])

    def await_plan(self, rank: Rank) -> None:
        """As SpotTrainer._await_plan."""
        view = self.read(rank)
        if view.is_over:
            rank.state = "done"
            return
        plan, listed = view.plan, view.listed_in(rank.rank)
        if plan is not None and plan.epoch == listed > rank.epoch:
            rank.state, rank.epoch = "answers", plan.epoch
            rank.deadline = self.now + MEMBER_TIMEOUT_S
            self.sessions[plan.epoch].answered.add(rank.rank)
        elif not view.has_left(rank.rank) and rank.num_broken < MAX_BROKEN:
            self.append("left", rank.rank, listed)
        else:
            rank.proposal = rank.coordinator.plan_start(view, self.now)

    def answer(self, rank: Rank) -> None:
        """As SpotSession._rendezvous."""
        session = self.sessions[rank.epoch]
        if not session.verdict:
            view = self.read(rank)
            is_leader = rank.rank == session.members[0]
            if is_leader and session.answered == set(session.members):
                session.verdict = "go"
            elif self.now >= rank.deadline or view.is_over:
                session.verdict = "cancel"
        if session.verdict == "go":
            rank.state = "trains"
        elif session.verdict == "cancel":
            rank.state = "waits"
            rank.num_broken += 1

    def train(self, session: Session) -> None:
        """As SpotSession._train: a step of all members, the flags of the leader, or the loss of
        one.
        """
        members = self.members(session)
        if any(member.state == "dead" for member in members):
            for member in members:
                if member.state == "trains":
                    member.state = "waits"
                    member.num_broken += 1
            return
        if not self.is_complete(session):
            return  # the reduction waits for who is on the way
        leader = members[0]
        view = self.read(leader)
        if view.is_over:
            for member in members:
                member.state = "done"
            return
        if view.plan is not None and view.plan.epoch == session.plan.epoch:
            proposal = leader.coordinator.plan_growth(view)
            if proposal is not None:
                self.propose(proposal)
                view = self.read(leader)
        assert view.plan is not None
        if view.plan.epoch > session.plan.epoch:
            for member in members:
                member.state = "waits"

    # ---- the log

    def append(self, *words: object) -> None:
        """A line for all."""
        self.lines.append([str(word) for word in words])
        self.truth.apply(self.lines[-1], self.now)

    def read(self, rank: Rank) -> PhaseView:
        """All that has been appended until now."""
        for line in self.lines[rank.num_read :]:
            rank.view.apply(line, self.now)
        rank.num_read = len(self.lines)
        return rank.view

    def propose(self, plan: Plan) -> None:
        """Append a plan; where it counts, it must list ranks that are free or in the session that
        it lets grow.
        """
        before = self.truth.plan
        free = set(self.truth.free_replicas())
        counts = plan.epoch == self.truth.next_epoch
        self.append("plan", plan.epoch, *plan.replicas)
        if not counts:
            return
        members = self.layout.ranks_of(*plan.replicas)
        grown = (
            set(before.replicas) if before and set(before.replicas) <= set(plan.replicas) else set()
        )
        assert len(set(plan.replicas)) == len(plan.replicas)
        assert set(plan.replicas) - grown <= free, f"{plan} lists replicas that are not free"
        for member in members:
            assert self.ranks[member].state not in ("generates", "finished")
        self.sessions[plan.epoch] = Session(plan=plan, members=members)

    def members(self, session: Session) -> list[Rank]:
        """The first leads."""
        return [self.ranks[rank] for rank in session.members]

    def is_complete(self, session: Session) -> bool:
        """Whether every member has arrived in it, and is still there."""
        return all(
            member.state == "trains" and member.epoch == session.plan.epoch
            for member in self.members(session)
        )

    def let_all_act(self) -> None:
        """Every rank gets its turns, and time goes by."""
        for _ in range(_ROUNDS):
            for rank in self.ranks:
                self.act(rank)
            self.now += 0.5
