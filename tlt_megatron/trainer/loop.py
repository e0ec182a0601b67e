"""The RL loop. `train_step` follows the paper's figure, and each box of the figure is one file."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tlt_megatron.data.prompts import PromptSampler
from tlt_megatron.engines.base import GenerationStopped, RolloutEngine
from tlt_megatron.policy.trainer import PolicyTrainer
from tlt_megatron.runtime.collectives import agree_any, gather_objects
from tlt_megatron.runtime.durable import sync_path
from tlt_megatron.runtime.metrics import MetricsWriter
from tlt_megatron.runtime.process_groups import Group
from tlt_megatron.runtime.rng import rng_state, set_rng_state
from tlt_megatron.runtime.stop import StopRequest
from tlt_megatron.spot.lifecycle import DrafterLifecycle
from tlt_megatron.trainer.checkpoint import CheckpointManager, SavedRun
from tlt_megatron.trainer.evaluate import Evaluator
from tlt_megatron.trainer.gain import measure_gain
from tlt_megatron.trainer.history import RunHistory
from tlt_megatron.trainer.identity import Resumed
from tlt_megatron.trainer.phases import Phases
from tlt_megatron.trainer.rollout_log import RolloutLog
from tlt_megatron.trainer.rollout_worker import RolloutWorker
from tlt_megatron.trainer.weight_sync import WeightSync
from tlt_megatron.types import Prompt, SamplingParams

log = logging.getLogger(__name__)

_GAIN_STEPS = 4  # latest steps whose prompts measure the speedup of speculation


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """Lengths and intervals, in RL steps."""

    num_steps: int
    num_prompts: int  # per step
    eval_interval: int  # 0: only before the first step and after the last
    checkpoint_interval: int  # 0: only after the last step


class RLTrainer:
    """Runs the steps, evaluates, checkpoints, stops on request. Every method is a collective of all ranks."""

    def __init__(
        self,
        settings: LoopSettings,
        *,
        sampler: PromptSampler,
        sampling: SamplingParams,
        engine: RolloutEngine,
        rollout_worker: RolloutWorker,
        policy_trainer: PolicyTrainer,
        weight_sync: WeightSync,
        evaluator: Evaluator,
        checkpoints: CheckpointManager,
        phases: Phases,
        stop: StopRequest,
        world: Group,
    ) -> None:
        self.settings = settings
        self.sampler = sampler
        self.sampling = sampling
        self.engine = engine
        self.rollout_worker = rollout_worker
        self.policy_trainer = policy_trainer
        self.weight_sync = weight_sync
        self.evaluator = evaluator
        self.checkpoints = checkpoints
        self.phases = phases
        self.progress = phases.progress
        self.drafter: DrafterLifecycle | None = None  # manages the drafter; only with spot training
        self.metrics: MetricsWriter | None = None  # only on rank 0
        self.rollout_log: RolloutLog | None = None  # only on rank 0
        self.stop = stop
        self.world = world
        self.step = 0  # RL steps done; also the version of the policy
        self.last_prompts: deque[list[Prompt]] = deque(maxlen=_GAIN_STEPS)  # of the latest steps
        self.history = RunHistory()
        self.is_stopped = False  # stopped on request; a resumed run does the rest

    def train(self) -> None:
        """Run from the current step to the last, or to a stop request, and save a checkpoint. Call `start` first.

        A stop drops unfinished rollouts: the policy has not changed in that step, so the checkpoint is the state at its
        beginning. A running update is finished first.
        """
        self.is_stopped = not self._run_steps()
        self.save_checkpoint()

    def _run_steps(self) -> bool:
        """Return True after the last step, False after a stop request."""
        try:
            self._evaluate_if_due()
            while self.step < self.settings.num_steps:
                self.train_step()
                if agree_any(self.stop.is_requested, self.world):
                    return False
                self._evaluate_if_due()
                # checkpoints of steps without an update would replace the last good one
                if (
                    self._is_due(self.settings.checkpoint_interval)
                    and self.policy_trainer.is_last_update_good
                ):
                    self.save_checkpoint()
        except GenerationStopped:  # on all ranks
            self.phases.current = ""
            return False
        return True

    def _evaluate_if_due(self) -> None:
        """Evaluate before the first step, after the last and at the interval, unless done for this step before a resume."""
        is_end = self.step in (0, self.settings.num_steps)
        if self.history.last_eval_step != self.step and (
            is_end or self._is_due(self.settings.eval_interval)
        ):
            self.evaluate()

    def train_step(self) -> None:
        """Run one RL step: prompts -> rollouts -> rewards -> advantages -> update -> weights."""
        started = time.perf_counter()
        before = self.sampler.state_dict(), rng_state()
        prompts = self.sampler.next_batch(self.settings.num_prompts)
        drafter = self.drafter
        if drafter is not None:
            drafter.start_step(self.step + 1)
        try:
            collected = self.rollout_worker.collect(
                prompts,
                self.sampling,
                policy_version=self.step,
                drafter=drafter,
                step=self.step + 1,
            )
        except GenerationStopped:
            self.sampler.load_state_dict(before[0])
            set_rng_state(before[1])
            raise
        self.last_prompts.append(prompts)
        if drafter is not None:
            with self.phases("PUBLISH", "publish_drafter"):
                drafter.publish(collected.metrics)
        self.engine.sleep()
        with self.phases("LOGPROB", "old_log_prob"):
            tap = drafter.make_tap() if drafter else None
            inference = self.policy_trainer.infer_logprobs(collected.groups, tap)
        with self.phases("UPDATE", "update_actor"):
            update = self.policy_trainer.update(inference)
        self.engine.wake()
        self.step += 1
        self.push_policy()
        if self.rollout_log is not None:
            self.rollout_log.write(self.step, collected.groups)
        self._report(collected.metrics | inference.metrics | update, started)

    def push_policy(self) -> None:
        """Load the policy of this step into every engine."""
        with self.phases("SYNC", "update_weights", version=self.step):
            self.weight_sync.push_policy(self.step)

    def evaluate(self) -> None:
        """Measure the hold-out accuracy of the current policy, and write it to the metrics of the step."""
        with self.phases("EVAL", "testing"):
            result = self.evaluator.evaluate(self.step)
        self.phases.take_timings()
        if result:
            self.history.add_eval(self.step, result["eval/accuracy"])
            self._write(result)
            self.progress.message(
                f"step {self.step}: held-out accuracy {result['eval/accuracy']:.3f}"
            )

    def save_checkpoint(self) -> None:
        """Save everything that a resumed run needs to equal an uninterrupted one."""
        with self.phases("CHECKPOINT", "save_checkpoint"):
            state = {
                "step": self.step,
                "sampler": self.sampler.state_dict(),
                "rng": gather_objects(rng_state(), self.world),
                "engine": gather_objects(self.engine.state_dict(), self.world),
                "history": self.history.state_dict(),
            }
            if self.metrics is not None:
                sync_path(self.metrics.path)  # a checkpoint's steps must not be lost to a power cut
            self.checkpoints.save(
                self.step, state, save_part=self.drafter.save_into if self.drafter else None
            )
        self._note_memory()

    def start(
        self,
        saved: SavedRun | None,
        resumed: Resumed,
        attach_drafter: Callable[[], DrafterLifecycle | None],
    ) -> None:
        """Restore `saved`, if given, with the learned parts that `resumed` names, and load policy and drafter into the engines.

        `attach_drafter` is called once the engine holds weights.
        """
        state = saved.state if saved is not None else {}
        folder = None
        if saved is not None:
            folder = self.checkpoints.restore(saved)
            self.step = saved.step
            self.sampler.load_state_dict(state["sampler"])
            self.history.load_state_dict(state["history"])
        self.push_policy()
        self.drafter = attach_drafter()
        if folder is not None and resumed.has_drafter and self.drafter is not None:
            self.drafter.load_from(folder)
        if saved is not None and len(state["rng"]) == self.world.size:
            set_rng_state(state["rng"][self.world.rank])
        if saved is not None and resumed.has_selector:
            try:
                self.engine.load_state_dict(state["engine"][self.world.rank])
            except (ValueError, KeyError) as error:  # of another version of the selector
                log.warning("the strategy selector starts anew: its state does not fit: %r", error)

    def measure_gain(self) -> None:
        """Time the latest steps' prompts with and without speculation, for the summary."""
        if self.last_prompts:
            gain = measure_gain(
                self.engine,
                tuple(self.last_prompts),
                self.sampling,
                policy_version=self.step,
                replicas=self.rollout_worker.replicas,
                should_stop=lambda: self.stop.is_requested,
            )
            if gain is not None:
                self.history.add_gain(gain)

    def _is_due(self, interval: int) -> bool:
        return interval > 0 and self.step % interval == 0 and self.step < self.settings.num_steps

    def _report(self, metrics: dict[str, float], started: float) -> None:
        timings = gather_objects(self.phases.take_timings(), self.world)
        metrics |= {name: max(rank[name] for rank in timings) for name in timings[0]}
        metrics["timing_s/step"] = time.perf_counter() - started
        metrics["perf/throughput"] = metrics["rollout/num_tokens"] / metrics["timing_s/step"]
        metrics["training/policy_version"] = float(self.step)
        metrics |= self._note_memory()
        self.history.add_step(metrics)
        self._write(metrics)
        self.progress.step(self.step, metrics)
        self.phases.timeline.flush()

    def _note_memory(self) -> dict[str, float]:
        """Record the peak memory of each phase since the last call, the maximum over ranks. Returns it as metrics."""
        ranks = gather_objects(self.phases.take_peaks(), self.world)
        peaks = {phase: max(rank[phase] for rank in ranks) for phase in ranks[0]}
        peaks = {phase: peak for phase, peak in peaks.items() if peak}  # 0: no rank can tell
        self.history.add_memory(peaks)
        return {f"memory/peak_gb/{phase}": peak / 1e9 for phase, peak in peaks.items()}

    def _write(self, metrics: dict[str, float]) -> None:
        if self.metrics is not None:
            self.metrics.write(self.step, metrics)
