"""Statistics of a run for summary.json, kept across resumes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

from tlt_megatron.runtime.memory_claim import MemoryLedger, Phase
from tlt_megatron.trainer.gain import SpeculationGain

_SERIES = (
    "timing_s/gen",
    "rollout/spec_accept_length",
    "bubble/idle_s",
    "bubble/used_s",
    "bubble/stall_s",
)
# Attributes that a checkpoint keeps.
_STATE = (
    "step_seconds",
    "generated_tokens",
    "generation_seconds",
    "evals",
    "series",
    "peak_bytes",
)


class RunHistory:
    """Statistics of the whole run, including the parts before a resume."""

    def __init__(self) -> None:
        self.step_seconds: list[float] = []
        self.generated_tokens = 0.0
        self.generation_seconds = 0.0
        self.evals: list[tuple[int, float]] = []
        self.series: dict[str, list[float]] = {name: [] for name in _SERIES}
        self.gain: dict[str, float] = {}
        self.peak_bytes: dict[str, int] = {}  # of each phase of the memory ledger
        self.planned_bytes: dict[str, int] = {}  # of each phase, by the memory ledger
        self.seconds_before = 0.0
        self._started = time.perf_counter()

    @property
    def last_eval_step(self) -> int:
        """Return the step of the last evaluation, or -1."""
        return self.evals[-1][0] if self.evals else -1

    def add_step(self, metrics: dict[str, float]) -> None:
        self.step_seconds.append(metrics["timing_s/step"])
        self.generated_tokens += metrics["perf/rollout_tokens_per_s"] * metrics["timing_s/gen"]
        self.generation_seconds += metrics["timing_s/gen"]
        for name, values in self.series.items():
            if name in metrics:
                values.append(metrics[name])

    def add_memory(self, peak_bytes: Mapping[Phase, int]) -> None:
        """Add peak memory by phase. Keeps the largest value of the run."""
        for phase, peak in peak_bytes.items():
            self.peak_bytes[phase] = max(peak, self.peak_bytes.get(phase, 0))

    def add_memory_plan(self, ledger: MemoryLedger) -> None:
        """Set the bytes of the fullest rank in each phase that the ledger predicts."""
        self.planned_bytes = {phase: ledger.bytes_in(phase) for phase in Phase}

    def add_eval(self, step: int, accuracy: float) -> None:
        self.evals.append((step, accuracy))

    def summary(self) -> dict[str, float | int | None]:
        return {
            "eval_accuracy_first": self.evals[0][1] if self.evals else None,
            "eval_accuracy_last": self.evals[-1][1] if self.evals else None,
            "num_steps": len(self.step_seconds),
            "step_time_s_median": statistics.median(self.step_seconds)
            if self.step_seconds
            else None,
            "rollout_tokens_per_s": self.generated_tokens / self.generation_seconds
            if self.generation_seconds
            else None,
            "seconds_total": self._seconds(),
            "memory_peak_gb": max(self.peak_bytes.values()) / 1e9 if self.peak_bytes else None,
            "memory_planned_gb": max(self.planned_bytes.values()) / 1e9
            if self.planned_bytes
            else None,
        } | self._drafting_summary()

    def _drafting_summary(self) -> dict[str, float]:
        """Return the part on speculation: first and last accept length, idle seconds and use."""
        lengths, idle = self.series["rollout/spec_accept_length"], self.series["bubble/idle_s"]
        summary = {}
        if lengths:
            summary["accept_length_first"] = lengths[0]
            summary["accept_length_last"] = statistics.fmean(lengths[-5:])
        if used := self.series["bubble/used_s"]:
            summary["idle_s"], summary["idle_used_s"] = sum(idle), sum(used)
            summary["stall_s"] = sum(self.series["bubble/stall_s"])
        return summary | self.gain

    def add_gain(self, gain: SpeculationGain) -> None:
        """Set the speedup of speculation that was measured at the end."""
        gen_s = statistics.median(self.series["timing_s/gen"])
        step_s = statistics.median(self.step_seconds)
        self.gain = {
            "rollout_speedup": gain.rollout_speedup,
            "step_speedup": gain.step_speedup(step_s, gen_s),
            "responses_differing": float(gain.num_differing),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the checkpoint."""
        return {name: getattr(self, name) for name in _STATE} | {"seconds": self._seconds()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state from the checkpoint. Older ones lack some of it."""
        for name in _STATE:
            setattr(self, name, state.get(name, getattr(self, name)))
        self.series = {name: self.series.get(name, []) for name in _SERIES}
        self.seconds_before = state["seconds"]

    def _seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self._started
