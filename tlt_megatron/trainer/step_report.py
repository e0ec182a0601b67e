"""What a run reports while it runs: metrics, logs, the terminal."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil

from tlt_megatron.rollout.phases import Phases
from tlt_megatron.rollout.rollout_log import RolloutLog
from tlt_megatron.rollout.slow_rank import describe
from tlt_megatron.rollout.speculation_log import SpeculationLog
from tlt_megatron.runtime.collectives import max_by_name
from tlt_megatron.runtime.durable import sync_path
from tlt_megatron.runtime.memory_claim import MemoryLedger
from tlt_megatron.runtime.metrics import MetricsWriter
from tlt_megatron.runtime.process_groups import Group
from tlt_megatron.trainer.flops import Utilization
from tlt_megatron.trainer.loop import TrainedStep

log = logging.getLogger(__name__)

_NO_SPREAD_STEPS = 5  # in a row before a warning, as many as an alarm of the report needs

# without meaning where answers are imitated
_OF_RESPONSES = (
    *("critic/", "reward/", "rollout/entropy", "rollout/solve_none", "rollout/solve_all"),
    "perf/rollout_tokens_per_s",
)
# whose time per token counts prompts too, as in verl
_PHASES_OF_ALL_TOKENS = ("values", "update_critic", "update_actor")


@dataclass(kw_only=True)
class RunReport:
    """Every rank has one. Only rank 0 writes metrics. Methods that gather are collectives."""

    phases: Phases
    world: Group
    metrics: MetricsWriter | None = None  # on rank 0 alone; so are the last two
    passes: SpeculationLog | None = None
    rollouts: RolloutLog | None = None  # on one rank of each data-parallel index
    utilization: Utilization | None = None
    ledger: MemoryLedger | None = None  # the memory that was planned for each phase
    # the step of the last evaluation, also before a resume
    last_eval_step: int = field(default=-1, init=False)
    _slow_rank: float | None = field(default=None, init=False)  # the rank that was warned about
    _num_without_spread: int = field(default=0, init=False)  # steps in a row
    _seconds_before: float = field(default=0.0, init=False)  # before a resume
    _started: float = field(default_factory=time.perf_counter, init=False)
    _step_started: float = field(default=0.0, init=False)

    def begin_step(self, step: int) -> None:
        self._step_started = time.perf_counter()
        self.phases.timeline.status.begin_step(step)

    def end_step(self, step: int, trained: TrainedStep) -> None:
        """Report the step. A collective of all ranks."""
        collected, inference, update, differences = trained
        if self.passes is not None:
            self.passes.write(collected.passes)
        if self.rollouts is not None:
            plan = inference.plan
            samples = self.rollouts.write(
                step, plan.scored, {rollout.key for rollout in plan.own}, differences
            )
            if self.metrics is not None:
                self.metrics.log_responses(step, samples)
        metrics = collected.metrics | inference.metrics | update
        is_sft = "sft/loss" in metrics
        if is_sft:
            metrics = {n: v for n, v in metrics.items() if not n.startswith(_OF_RESPONSES)}
        metrics |= max_by_name(self.phases.take_timings(), self.world)
        metrics["timing_s/step"] = time.perf_counter() - self._step_started
        metrics["perf/time_per_step"] = metrics["timing_s/step"]
        num_tokens = metrics["perf/total_num_tokens"] = metrics["rollout/num_tokens"]
        if is_sft:
            metrics["sft/tokens_per_s"] = num_tokens / metrics["timing_s/update_actor"]
        metrics["perf/cpu_memory_used_gb"] = psutil.virtual_memory().used / 1e9
        metrics["perf/throughput"] = num_tokens / metrics["timing_s/step"] / self.world.size
        num_generated = sum(r.num_generated for g in collected.groups for r in g.rollouts)
        counts = {"gen": num_generated} | dict.fromkeys(_PHASES_OF_ALL_TOKENS, num_tokens)
        for phase, count in counts.items():
            if f"timing_s/{phase}" in metrics:
                seconds = metrics[f"timing_s/{phase}"]
                metrics[f"timing_per_token_ms/{phase}"] = 1e3 * seconds / count
        if self.utilization is not None:
            metrics |= self.utilization.metrics(inference, metrics)
        metrics["training/global_step"] = metrics["training/policy_version"] = float(step)
        metrics |= self._memory()
        self._tell_slow_rank(step, metrics)
        self._tell_no_spread(step, metrics)
        self._write(step, metrics)
        self.phases.progress.step(step, metrics)
        self.phases.timeline.flush()
        self.phases.timeline.status.end_step()

    def end_evaluation(self, step: int, result: dict[str, float]) -> None:
        """Report an evaluation. `result` is empty without prompts."""
        self.phases.take_timings()
        if result:
            self.last_eval_step = step
            self._write(step, result)
            if "eval/loss" in result:
                self.phases.progress.message(
                    f"step {step}: held-out loss {result['eval/loss']:.4f}"
                )
                return
            parts = [
                f"{match[1]} {value:.3f}"
                for name, value in result.items()
                if (match := re.fullmatch(r"eval/(.+)/accuracy", name))
            ]
            accuracy, reward = (
                f"{result[f'eval/{name}']:.3f}" for name in ("accuracy", "mean_reward")
            )
            self.phases.progress.message(
                f"step {step}: held-out accuracy {accuracy}"
                + (f" ({', '.join(parts)})" if parts else "")
                + (f", mean reward {reward}" if reward != accuracy else "")
            )

    def _tell_slow_rank(self, step: int, metrics: dict[str, float]) -> None:
        """Warn of a rank that costs the step much, once until another one does."""
        sentence = describe(metrics, metrics["timing_s/step"])
        slow_rank = metrics["perf/slowest_rank/rank"] if sentence else None
        if sentence and slow_rank != self._slow_rank and self.world.is_first:
            log.warning("step %d: %s", step, sentence)
        self._slow_rank = slow_rank if sentence else self._slow_rank

    def _tell_no_spread(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn once of steps in a row without a response that is better than others."""
        lowest, highest = (metrics.get(f"critic/rewards/{name}") for name in ("min", "max"))
        has_spread = lowest is None or lowest != highest or "actor/reverse_kl" in metrics
        self._num_without_spread = 0 if has_spread else self._num_without_spread + 1
        if self._num_without_spread == _NO_SPREAD_STEPS and self.world.is_first:
            log.warning(
                "step %d: all responses of the last %d steps have the reward %g, so there is nothing"
                " to learn from: look at responses (logging.rollouts=true), the reward function,"
                " and easier or harder prompts",
                *(step, _NO_SPREAD_STEPS, lowest),
            )

    def _memory(self) -> dict[str, float]:
        """Return the peak memory of each phase since the last step, the maximum over ranks, and
        what was planned.
        """
        metrics = {}
        for phase, peak in max_by_name(self.phases.take_peaks(), self.world).items():
            if peak:  # 0: no rank can tell
                metrics[f"memory/peak_gb/{phase}"] = peak / 1e9
                if self.ledger is not None:
                    metrics[f"memory/planned_gb/{phase}"] = self.ledger.bytes_in(phase) / 1e9
        return metrics

    def seconds(self) -> float:
        """Return the seconds of the whole run so far."""
        return self._seconds_before + time.perf_counter() - self._started

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "last_eval_step": self.last_eval_step,
            "seconds": self.seconds(),
            "written": self._num_written(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, has_history: bool) -> None:
        """Restore what `state_dict` returned. With `has_history`, warn if less is on the disk than
        there was.
        """
        self.last_eval_step = state.get("last_eval_step", -1)  # older checkpoints lack the report
        self._seconds_before = state.get("seconds", 0.0)
        if has_history:
            self._warn_of_loss(state.get("written", {}))

    def _num_written(self) -> dict[str, int]:
        """Return the rows, or the files that are not empty, in each part of the history on the
        disk.
        """
        if self.metrics is None:
            return {}
        run_dir = self.metrics.path.parent
        counts = {self.metrics.path.name: self.metrics.path.read_bytes().count(b"\n")}
        for name in ("rollouts", "speculation", "timeline"):
            sizes = [file.stat().st_size for file in (run_dir / name).glob("*.jsonl")]
            counts[f"{name}/"] = sum(size > 0 for size in sizes)
        return counts

    def _warn_of_loss(self, saved: Mapping[str, int]) -> None:
        """Warn if less is there than `_num_written` was at the checkpoint of the resume."""
        found = self._num_written()
        lost = [
            f"{name} {found[name]} of {count}"
            for name, count in saved.items()
            if found.get(name, count) < count
        ]
        if lost:
            log.warning(
                "history that was there at the checkpoint is gone (rows; files in a folder): %s",
                ", ".join(lost),
            )

    def sync(self) -> None:
        """Write the metrics so far to the disk."""
        if self.metrics is not None:
            sync_path(self.metrics.path)

    def _write(self, step: int, metrics: dict[str, float]) -> None:
        if self.metrics is not None:
            self.metrics.write(step, metrics)
