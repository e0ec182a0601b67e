"""Builds a ready RLTrainer from a RunConfig. This is the only module that imports every package."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from tlt_megatron.config.extensions import load_extension
from tlt_megatron.config.load import dump_config
from tlt_megatron.config.preflight import risky_settings
from tlt_megatron.config.schema import RunConfig
from tlt_megatron.data.prompts import PromptSampler, load_prompts
from tlt_megatron.data.tokenizer import Tokenizer, load_tokenizer
from tlt_megatron.engines.base import RolloutEngine
from tlt_megatron.engines.embedded.engine import EmbeddedEngine
from tlt_megatron.mcore.initialize import destroy_model_parallel, initialize_model_parallel
from tlt_megatron.mcore.policy_model import McorePolicyModel
from tlt_megatron.models.config import load_model_config
from tlt_megatron.policy.health import TrainingHealth
from tlt_megatron.policy.trainer import PolicyTrainer
from tlt_megatron.rewards.workers import RewardPool
from tlt_megatron.runtime.collectives import barrier
from tlt_megatron.runtime.device import Device
from tlt_megatron.runtime.heartbeat import Heartbeat, running_heartbeat
from tlt_megatron.runtime.job_store import JobStore, open_job_store
from tlt_megatron.runtime.metrics import MetricsWriter
from tlt_megatron.runtime.process_groups import Group, ProcessGroups
from tlt_megatron.runtime.progress import Progress
from tlt_megatron.runtime.rng import seed_everything
from tlt_megatron.runtime.stop import StopRequest
from tlt_megatron.runtime.timeline import Timeline
from tlt_megatron.speculation.strategy import SpeculationStrategy
from tlt_megatron.trainer.build_drafter import (
    attach_drafter,
    drafter_tap_layers,
    speculation_over,
)
from tlt_megatron.trainer.checkpoint import CheckpointManager, SavedRun, find_saved_run
from tlt_megatron.trainer.evaluate import Evaluator
from tlt_megatron.trainer.identity import (
    Resumed,
    compare_run,
    describe_run,
)
from tlt_megatron.trainer.loop import LoopSettings, RLTrainer
from tlt_megatron.trainer.phases import Phases
from tlt_megatron.trainer.rollout_log import RolloutLog
from tlt_megatron.trainer.rollout_worker import RolloutWorker
from tlt_megatron.trainer.run_folder import CHECKPOINTS, resume_path
from tlt_megatron.trainer.speculation_log import SpeculationLog
from tlt_megatron.trainer.weight_sync import WeightSync
from tlt_megatron.types import SamplingParams

log = logging.getLogger(__name__)

EVAL_SEED_OFFSET = 0x5EED  # evaluation never samples with the noise of training


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A built run, with the parts that the launcher needs to finish it."""

    trainer: RLTrainer
    model: McorePolicyModel
    dtype: torch.dtype
    # Context for work of all ranks: a failed collective raises RanksLost, which names the lost ranks.
    explaining: Callable[[], AbstractContextManager[None]]


@contextmanager
def build_run(
    config: RunConfig,
    run_dir: Path,
    world: Group,
    device: Device,
    stop: StopRequest | None = None,
) -> Iterator[Run]:
    """Build the run, restore a checkpoint if the settings ask for it, and close everything on exit. A collective of all ranks.

    Cheap checks come first: a bad function of the user or a bad prompt raises before any model is built.
    """
    settings = config.run
    stop = stop or StopRequest()  # without a caller's: one that is never requested
    store = open_job_store(world, settings.heartbeat_timeout_s or settings.group_timeout_s)
    stop.share(store.connect("stop"))
    with running_heartbeat(store, world, settings.heartbeat_timeout_s) as heartbeat:

        def explaining() -> AbstractContextManager[None]:
            return heartbeat.explaining(settings.group_timeout_s) if heartbeat else nullcontext()

        with explaining(), _build(config, run_dir, world, device, store, heartbeat, stop) as parts:
            trainer, model, dtype = parts
            yield Run(trainer=trainer, model=model, dtype=dtype, explaining=explaining)


@contextmanager
def _build(
    config: RunConfig,
    run_dir: Path,
    world: Group,
    device: Device,
    store: JobStore,
    heartbeat: Heartbeat | None,
    stop: StopRequest,
) -> Iterator[tuple[RLTrainer, McorePolicyModel, torch.dtype]]:
    saved = _find_saved_run(config, run_dir, world)
    load_extension("algorithm.advantage", config.algorithm.advantage)  # refused before models exist
    load_extension("algorithm.loss", config.algorithm.loss)
    if world.is_first:
        for line in risky_settings(config):
            log.warning("%s", line)
    with ExitStack() as stack:
        rewards = stack.enter_context(_start_rewards(config))
        tokenizer = load_tokenizer(config.model.path)
        model_config = load_model_config(config.model.path)
        about = describe_run(config, model_config, tokenizer.stop_token_ids, world.size)
        resumed = Resumed(has_selector=False, has_drafter=False)
        if saved is not None:
            resumed = compare_run(saved, about, is_warning=world.is_first)
        prompts = load_prompts(config.data.train, tokenizer, config.data, world)
        rewards.wait_ready()

        seed_everything(config.run.seed)
        groups = initialize_model_parallel(config.parallel, world, config.run.seed)
        stack.callback(destroy_model_parallel)
        engine = stack.enter_context(
            closing(build_engine(config, device, run_dir=run_dir, world=world))
        )
        model = _build_policy(config, groups, device)
        phases = Phases(
            stack.enter_context(closing(_open_timeline(config, run_dir, world))),
            stack.enter_context(closing(_open_progress(config, world))),
            device,
            *([heartbeat.enter] if heartbeat else []),
        )
        worker = RolloutWorker(
            engine,
            rewards,
            tokenizer.decode,
            replicas=world,
            phases=phases,
            ranks_per_engine=config.ranks_per_engine,
            should_stop=lambda: stop.is_requested,
        )
        trainer = RLTrainer(
            LoopSettings(
                num_steps=config.run.num_steps,
                num_prompts=config.rollout.num_prompts,
                eval_interval=config.eval.interval,
                checkpoint_interval=config.checkpoint.interval,
            ),
            sampler=PromptSampler(prompts, shuffle=config.data.shuffle, seed=config.data.seed),
            sampling=_train_sampling(config, tokenizer),
            engine=engine,
            rollout_worker=worker,
            policy_trainer=_build_policy_trainer(config, model, groups),
            weight_sync=WeightSync(
                model, engine, dtype=getattr(torch, config.rollout.dtype), world=world
            ),
            evaluator=_build_evaluator(config, worker, tokenizer, world),
            checkpoints=CheckpointManager(
                run_dir / CHECKPOINTS, model, keep=config.checkpoint.keep, world=world, about=about
            ),
            phases=phases,
            stop=stop,
            world=world,
        )
        attach = partial(
            attach_drafter,
            config,
            engine,
            run_dir=run_dir,
            timeline=phases.timeline,
            world=world,
            store=store,
            check_ranks=heartbeat.check if heartbeat else lambda: None,
        )
        trainer.start(saved, resumed, attach)
        if trainer.drafter is not None:
            stack.callback(trainer.drafter.close)
        if world.is_first:
            (run_dir / "config.yaml").write_text(dump_config(config), encoding="utf-8")
            first_step = trainer.step + 1 if saved is not None else None
            trainer.metrics = stack.enter_context(
                closing(_open_metrics(config, run_dir, first_step))
            )
            worker.speculation_log = SpeculationLog(run_dir, resume_step=first_step)
            if config.logging.rollouts:
                trainer.rollout_log = RolloutLog(
                    run_dir / "rollouts", tokenizer.decode, resume_step=first_step
                )
        stop.begin_training()
        barrier(world)  # no rank trains while a signal would still end another without a save
        yield trainer, model, getattr(torch, config.model.dtype)


def _start_rewards(config: RunConfig) -> RewardPool:
    return RewardPool(
        config.reward.function,
        num_workers=config.reward.num_workers,
        timeout_s=config.reward.timeout_s,
        on_error=config.reward.on_error,
    )


def _open_timeline(config: RunConfig, run_dir: Path, world: Group) -> Timeline:
    path = run_dir / "timeline" / f"rank_{world.rank:05d}.jsonl"
    timeline = Timeline(path if config.logging.trace else None, world.rank)
    timeline.align_clocks(world)
    return timeline


def _open_progress(config: RunConfig, world: Group) -> Progress:
    return Progress(config.logging.progress, config.run.num_steps, enabled=world.is_first)


def _open_metrics(config: RunConfig, run_dir: Path, first_step: int | None) -> MetricsWriter:
    """`first_step` is the next step of a resumed run, else None. Rows from that step on, left by a crash, are cut."""
    return MetricsWriter(
        run_dir,
        tensorboard=config.logging.tensorboard,
        wandb_project=config.logging.wandb_project,
        resume_step=first_step,
    )


def _build_policy(config: RunConfig, groups: ProcessGroups, device: Device) -> McorePolicyModel:
    return McorePolicyModel(
        model=config.model,
        parallel=config.parallel,
        mcore=config.mcore,
        optimizer=config.optimizer,
        groups=groups,
        device=device,
        keep_reference=config.algorithm.kl_coef > 0,
    )


def _build_policy_trainer(
    config: RunConfig, model: McorePolicyModel, groups: ProcessGroups
) -> PolicyTrainer:
    return PolicyTrainer(
        model,
        config.algorithm,
        groups=groups,
        micro_batch_tokens=config.mcore.micro_batch_tokens,
        temperature=config.rollout.temperature,
        max_new_tokens=config.rollout.max_new_tokens,
        health=TrainingHealth(
            max_bad_updates=config.run.max_bad_updates,
            max_diff=config.algorithm.max_logprob_diff,
            dtypes=(config.model.dtype, config.rollout.dtype),
        ),
    )


def build_engine(
    config: RunConfig, device: Device, *, run_dir: Path, world: Group
) -> RolloutEngine:
    """Build the rollout engine of this rank. A collective of all ranks."""
    if config.rollout.engine == "sglang":
        from tlt_megatron.trainer.build_sglang import build_sglang_engine

        return build_sglang_engine(config, device, run_dir=run_dir, world=world)
    return _build_embedded_engine(config, device)


def _build_embedded_engine(config: RunConfig, device: Device) -> EmbeddedEngine:
    model = load_model_config(config.model.path)
    is_on = config.speculation.enabled
    engine = EmbeddedEngine(
        model,
        config.rollout,
        device,
        max_prompt_tokens=config.data.max_prompt_tokens,
        tap_layers=drafter_tap_layers(config, model),
        make_speculation=partial(speculation_over, config, model) if is_on else None,
    )
    strategies = [SpeculationStrategy.parse(text) for text in config.speculation.strategies]
    graphs = engine.memory_plan(strategies if is_on else ()).graphs
    if engine.has_graphs:
        log.info("graphs of the rollout engine: %s", "\n  ".join(graphs.lines()))
    return engine


def _train_sampling(config: RunConfig, tokenizer: Tokenizer) -> SamplingParams:
    return SamplingParams(
        num_samples=config.rollout.num_samples,
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
        stop_token_ids=tokenizer.stop_token_ids,
        seed=config.run.seed,
    )


def _build_evaluator(
    config: RunConfig, worker: RolloutWorker, tokenizer: Tokenizer, world: Group
) -> Evaluator:
    prompts = []
    if config.data.eval:
        held_out = load_prompts(config.data.eval, tokenizer, config.data, world)
        prompts = held_out.prompts(config.eval.num_prompts)
    params = SamplingParams(
        num_samples=config.eval.num_samples,
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.eval.temperature,
        stop_token_ids=tokenizer.stop_token_ids,
        seed=config.run.seed + EVAL_SEED_OFFSET,
    )
    return Evaluator(worker, prompts, params)


def _find_saved_run(config: RunConfig, run_dir: Path, world: Group) -> SavedRun | None:
    """Return the verified checkpoint to resume from; None for a fresh start. ValueError if no checkpoint is intact."""
    path = resume_path(run_dir, config.checkpoint.resume)
    saved = None if path is None else find_saved_run(path, world)
    if path is not None and saved is None and world.is_first:
        log.warning("%s holds no checkpoint yet: the run starts at step 0", path)
    return saved
