"""Configurations to choose from, and what each would take without speculation, with a frozen
drafter and with TLT.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tlt_megatron.config.schema import RunConfig
from tlt_megatron.runtime.memory_claim import MemoryLedger
from tools.planner.lengths import steps_of
from tools.planner.machine_model import Machine
from tools.planner.simulation import Prediction, Variant, simulate
from tools.planner.steps import Batch

PLAIN = Variant(name="plain")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A configuration to predict."""

    name: str
    config: RunConfig
    ranks: int
    ledger: MemoryLedger

    @property
    def replicas(self) -> int:
        return self.ranks // self.config.ranks_per_engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The predictions of a candidate."""

    candidate: Candidate
    found: Mapping[str, Prediction]  # by variant; of the fixed strategies only the fastest

    @property
    def best(self) -> str:
        """Return the fastest variant."""
        return min(self.found, key=lambda name: self.found[name].step_s)

    @property
    def responses_per_rank_s(self) -> float:
        """Return the responses that a rank brings to the update per second, with the best variant.

        It compares configurations with different batches and ranks.
        """
        rollout = self.candidate.config.rollout
        responses = rollout.num_prompts * rollout.num_samples
        return responses / self.found[self.best].step_s / self.candidate.ranks


def variants(config: RunConfig, machine: Machine) -> list[Variant]:
    """Return the ways that are compared. "TLT" begins without a drafter if none is configured, and
    is left out if nothing is known about drafter training.
    """
    section, end = config.speculation, machine.max_updates
    strategies = section.parsed_strategies
    machine.check(strategies)
    frozen = Variant(name="frozen", strategies=strategies, selector=section.selector, updates=end)
    begin = end if section.drafter else 0.0
    tlt = replace(frozen, name="TLT", trains_drafter=True, updates=begin)
    return [
        PLAIN,
        *(Variant(name=f"always {s}", strategies=[s], updates=end) for s in strategies),
        frozen,
        *([tlt] if machine.updates_per_idle_s else []),
    ]


def predict(candidate: Candidate, machine: Machine, batches: Sequence[Batch]) -> Plan:
    """Predict the steps in which a candidate generates these batches."""
    config = candidate.config
    steps, max_batch = steps_of(config, batches), config.rollout.max_batch_size
    found = {
        each.name: simulate(
            machine, each, steps, num_replicas=candidate.replicas, max_batch=max_batch
        )
        for each in variants(config, machine)
    }
    fixed = sorted((n for n in found if n.startswith("always")), key=lambda n: found[n].step_s)
    shown = {name: each for name, each in found.items() if name not in fixed[1:]}
    return Plan(candidate=candidate, found=shown)
