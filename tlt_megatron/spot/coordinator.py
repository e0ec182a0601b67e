"""Rules for starting, growing and replacing a session, computed from the phase's view.

There is no coordinating process. The leader of the running session plans its growth. Without a
session, the first rank of any idle replica plans one, and the first plan in the log (rank_state.py)
counts. So planning continues after the loss of any rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from tlt_megatron.spot.rank_state import PhaseView, Plan, SpotRanks


def plan_growth(view: PhaseView) -> Plan | None:
    """Return the session's plan with all free replicas added, or None. Its leader calls it."""
    free = view.free_replicas()
    if view.is_over or view.plan is None or not free:
        return None
    return Plan(epoch=view.next_epoch, replicas=view.plan.replicas + free)


@dataclass(slots=True, eq=False)
class Coordinator:
    """Decides when a rank that waits starts a session. Times are seconds of one monotonic clock."""

    ranks: SpotRanks
    settle_s: float = 0.25  # members of a lost session report within this time
    _seen: tuple[int, bool] = (0, False)  # epoch, and whether a member has left it
    _since: float = 0.0

    def plan_start(self, view: PhaseView, now: float) -> Plan | None:
        """Return a plan of all free replicas, or None."""
        free = view.free_replicas()
        replica, place = divmod(self.ranks.rank, self.ranks.layout.replica_size)  # place 0 plans
        is_allowed = self._may_follow(view, now)  # always called: it also starts the clock
        if view.is_over or not is_allowed or place > 0:
            return None
        if replica not in free or len(free) < self.ranks.min_idle_replicas:
            return None
        return Plan(epoch=view.next_epoch, replicas=free)

    def _may_follow(self, view: PhaseView, now: float) -> bool:
        """Return whether a new session may start: the newest one is over, or counts as lost."""
        if view.plan is None:
            return True
        members = view.members()
        absent = [rank for rank in members if not view.has_left(rank)]
        if not absent:
            return True
        seen = (view.plan.epoch, len(absent) < len(members))
        if seen != self._seen:
            self._seen, self._since = seen, now
        waited_s = now - self._since
        if len(absent) < len(members):
            # Members report that the session broke. The lost one cannot; late ones join the next.
            return len(absent) == 1 or waited_s >= self.settle_s
        # No plan has added this rank. A leader that still trains adds it within one step.
        return waited_s >= self.ranks.member_timeout_s
