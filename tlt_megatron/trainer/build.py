"""Builds a ready Run from a RunConfig. This is the only module that imports every package."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from tlt_megatron.config.extensions import load_code, load_extension, named_code
from tlt_megatron.config.load import dump_config
from tlt_megatron.config.own_layer import OWN, note_own_layer
from tlt_megatron.config.rules import warnings_of
from tlt_megatron.config.schema import RunConfig
from tlt_megatron.data.prompts import PromptSampler, load_held_out, load_prompts
from tlt_megatron.data.rows import Kind
from tlt_megatron.data.tokenizer import Tokenizer, load_tokenizer
from tlt_megatron.engines.answers_engine import AnswersEngine
from tlt_megatron.engines.base import RolloutEngine
from tlt_megatron.mcore.initialize import destroy_model_parallel, initialize_model_parallel
from tlt_megatron.mcore.model import fp8_fields
from tlt_megatron.mcore.policy_model import McoreCriticModel, McorePolicyModel
from tlt_megatron.mcore.reference_model import McoreReferenceModel
from tlt_megatron.models.config import load_model_config
from tlt_megatron.policy.critic import CriticTrainer
from tlt_megatron.policy.health import TrainingHealth
from tlt_megatron.policy.interfaces import SavedModel
from tlt_megatron.policy.policy_trainer import PolicyTrainer
from tlt_megatron.rewards.worker_process import ToolUseSpec, name_environment
from tlt_megatron.rewards.workers import RewardPool
from tlt_megatron.rollout.batch_rules import BatchRules
from tlt_megatron.rollout.conversations import Conversations
from tlt_megatron.rollout.phases import Phases
from tlt_megatron.rollout.rollout_log import RolloutLog
from tlt_megatron.rollout.rollout_worker import RolloutWorker
from tlt_megatron.rollout.speculation_log import SpeculationLog
from tlt_megatron.runtime.collectives import barrier
from tlt_megatron.runtime.device import Device
from tlt_megatron.runtime.durable import replace_text
from tlt_megatron.runtime.metrics import MetricsWriter
from tlt_megatron.runtime.process_groups import ProcessGroups
from tlt_megatron.runtime.progress import Progress
from tlt_megatron.runtime.rng import seed_everything
from tlt_megatron.runtime.status import StatusWriter
from tlt_megatron.runtime.timeline import Timeline
from tlt_megatron.runtime.trackers import Tracker
from tlt_megatron.saved_files import errors_named
from tlt_megatron.trainer.before.conversation_checks import check_conversations, form_of
from tlt_megatron.trainer.build_drafter import build_drafter
from tlt_megatron.trainer.build_evaluator import build_evaluator, sampling_of
from tlt_megatron.trainer.flops import make_utilization
from tlt_megatron.trainer.loop import RLTrainer
from tlt_megatron.trainer.run import Run
from tlt_megatron.trainer.run_site import Site
from tlt_megatron.trainer.saving.identity import (
    compare_run,
    describe_run,
    saved_run_of,
    with_template_date,
)
from tlt_megatron.trainer.saving.run_checkpoint import STATE_FILE, CheckpointManager, SavedRun
from tlt_megatron.trainer.saving.run_folder import CHECKPOINTS
from tlt_megatron.trainer.step_report import RunReport
from tlt_megatron.trainer.weight_sync import push_policy

log = logging.getLogger(__name__)


def build_run(site: Site) -> Run:
    """Build the run, and restore a checkpoint if asked. A collective of all ranks.

    Cheap checks come first: a bad function of the user or a bad prompt raises before any model is
    built.
    """
    run_dir, world, stack = site.run_dir, site.world, site.stack
    saved = saved_run_of(site.config, run_dir, world)
    config = with_template_date(site.config, saved, world)
    _check_extensions(config)
    fp8_fields(config.mcore, getattr(torch, config.model.dtype))
    if world.is_first:
        for line in warnings_of(config, site.given):
            log.warning("%s", line)
        note = note_own_layer(config.model.path, load_model_config(config.model.path))
        if note and config.speculation.drafter != OWN:
            log.info("%s", note)
    reward = config.reward
    is_sft = config.algorithm.is_sft
    environment, data = _environment_of(config), config.data
    rewards = stack.enter_context(
        RewardPool(
            {"none": 1.0} if is_sft else reward.weights,
            num_workers=reward.num_workers,
            timeout_s=reward.timeout_s,
            on_error=reward.on_error,
            environment=environment,
        )
    )
    tokenizer = load_tokenizer(config.model.path, config.data.template_date)
    model_config = load_model_config(config.model.path)
    about = describe_run(config, model_config, tokenizer.stop_token_ids, world.size)
    resumes_drafter = saved is not None and compare_run(saved, about, is_warning=world.is_first)
    if config.rollout.tools:  # every prompt gets them, unless its row names others
        rewards.wait_ready()
        tools = {"tools": list(rewards.environment.tools)}
        data = replace(data, chat_template_kwargs=tools | data.chat_template_kwargs)
    rows: dict[str, Any] = {"kind": Kind.UNSCORED if reward.is_none else Kind.SCORED}
    if is_sft:
        rows = {"kind": Kind.ANSWERED, "max_answer_tokens": config.rollout.max_new_tokens}
    prompts = load_prompts(data.train, tokenizer, data, world, **rows)
    if world.is_first:
        for line in tokenizer.notes(has_strings=not all(row.messages for row in prompts.rows)):
            log.warning("%s", line)
    sampler = PromptSampler(prompts, shuffle=config.data.shuffle, seed=config.run.seed)
    if saved is not None:
        with errors_named(saved.folder / STATE_FILE):
            sampler.check_state(saved.state["sampler"])
    held_out = load_held_out(data, tokenizer, world, limit=config.eval.num_prompts, **rows)
    rewards.wait_ready()
    if config.rollout.has_conversations:
        everyone = [*prompts.rows, *chain(*(each.rows for each in held_out.values()))]
        lines = check_conversations(
            tokenizer,
            everyone,
            rewards.environment.tools,
            setting=name_environment(environment),
            is_complete=bool(config.rollout.tools),
        )
        for line in lines if world.is_first else ():
            log.warning("%s", line)

    seed_everything(config.run.seed)
    groups = initialize_model_parallel(config.parallel, world, config.run.seed)
    stack.callback(destroy_model_parallel)
    step = saved.step if saved else 0
    worker = _build_worker(site, rewards, tokenizer, first_step=step)
    phases = worker.phases
    worker.engine.sleep()  # until the first publication: models start and restore in its memory
    with phases("SETUP", "setup"):
        model, critic, reference = _build_models(config, groups, site.device)
        saved_models: dict[str, SavedModel | None] = {"policy": model, "critic": critic}
        if config.reference.refresh_steps:
            saved_models["reference"] = reference
        checkpoints = CheckpointManager(
            root=run_dir / CHECKPOINTS,
            models={name: each for name, each in saved_models.items() if each},
            keep=config.checkpoint.keep,
            world=world,
            about=about,
        )
        folder = checkpoints.restore(saved) if saved else None
    worker.engine.wake()
    engine_dtype = getattr(torch, config.rollout.dtype)
    with phases("SYNC", "update_weights", version=step):
        push_policy(model, worker.engine, step, dtype=engine_dtype, world=world)
    phases.take_timings()  # they belong to no step
    sampling = sampling_of(config, tokenizer)
    drafter = build_drafter(site, worker.engine, phases.timeline, sampling)
    trainer = RLTrainer(
        rules=_batch_rules(config),
        sampling=sampling,
        engine_dtype=engine_dtype,
        sampler=sampler,
        worker=worker,
        policy_trainer=_build_policy_trainer(config, model, critic, groups),
        drafter=drafter,
        refresh_steps=config.reference.refresh_steps if reference else 0,
    )
    is_saved = False  # a fork has another run folder, without the history
    if saved and folder:
        trainer.load_state_dict(saved.state, has_critic=(folder / "critic").is_dir())
        trainer.load_from(folder, with_drafter=resumes_drafter)
        is_saved = folder.resolve() == checkpoints.folder(step).resolve()
    run = Run(
        config=config,
        trainer=trainer,
        evaluator=build_evaluator(config, trainer, tokenizer, held_out),
        checkpoints=checkpoints,
        # last: it cuts what an earlier run wrote after the checkpoint
        report=_open_report(site, config, phases, tokenizer, groups, saved),
        is_saved=is_saved,
    )
    if saved:
        run.report.load_state_dict(saved.state.get("report", {}), has_history=is_saved)
    site.stop.begin_training()
    barrier(world)  # no rank trains while a signal would still end another without a save
    return run


def _environment_of(config: RunConfig) -> str | ToolUseSpec:
    """Return what answers the turns of the policy, for the reward workers; "" for nothing."""
    rollout, timeout_s = config.rollout, config.reward.timeout_s
    if not rollout.tools:
        return rollout.environment
    return ToolUseSpec(tools=rollout.tools, errors=rollout.tool_errors, timeout_s=timeout_s)


def _check_extensions(config: RunConfig) -> None:
    """Refuse a user's function or class that cannot be used, before models are built."""
    for key, spec in named_code(config):
        if key not in ("reward.function", "rollout.environment", "rollout.tools"):  # of workers
            load_code(config, key, spec)


def _build_worker(
    site: Site, rewards: RewardPool, tokenizer: Tokenizer, *, first_step: int
) -> RolloutWorker:
    config, world, stack = site.config, site.world, site.stack
    if config.algorithm.is_sft:
        engine: RolloutEngine = AnswersEngine()
    else:
        build_engine = load_extension("rollout.engine", config.rollout.engine)
        engine = build_engine(config, site.device, site.run_dir, world)
    stack.callback(engine.close)
    path = site.run_dir / "timeline" / f"rank_{world.rank:05d}.jsonl"
    status = site.heartbeat.status
    status.device = site.device.gpu_name or "cpu"
    stack.callback(StatusWriter(site.run_dir, status).close)
    timeline = Timeline(path, world.rank, status)
    stack.callback(timeline.close)
    progress = Progress(
        config.logging.progress if world.is_first else "none",
        config.run.num_steps,
        first_step=first_step,
        status=status,
    )
    stack.callback(progress.close)
    conversations = None
    if config.rollout.has_conversations:
        form = form_of(tokenizer)
        conversations = Conversations(engine, rewards, tokenizer, config.rollout, form)
    return RolloutWorker(
        engine=engine,
        rewards=rewards,
        decode=tokenizer.decode_turn,
        replicas=world,
        phases=Phases(timeline, progress, site.device, site.heartbeat.tell_phase),
        ranks_per_engine=config.ranks_per_engine,
        should_stop=lambda: site.stop.is_requested,
        conversations=conversations,
    )


def _open_report(
    site: Site,
    config: RunConfig,
    phases: Phases,
    tokenizer: Tokenizer,
    groups: ProcessGroups,
    saved: SavedRun | None,
) -> RunReport:
    """Open the files of this rank. Rank 0 cuts rows and files of steps that a resumed run does
    again.
    """
    run_dir, rank = site.run_dir, site.world.rank
    passes = SpeculationLog(run_dir / "speculation", rank=rank)
    rollouts = None
    if config.logging.rollouts and groups.part == 0 and groups.pp.is_first:
        rollouts = RolloutLog(run_dir / "rollouts", tokenizer, rank=rank)
    report = RunReport(phases=phases, world=site.world, passes=passes, rollouts=rollouts)
    if not site.world.is_first:
        return report
    first_step = saved.step + 1 if saved else None
    passes.begin(first_step)
    if rollouts is not None:
        rollouts.begin(first_step)
    trackers = _make_trackers(config, run_dir, first_step)
    replace_text(run_dir / "config.yaml", dump_config(config))
    metrics = MetricsWriter(run_dir, trackers, resume_step=first_step)
    site.stack.push(lambda error, *_: metrics.close(failed=error is not None))
    utilization = make_utilization(config, site.device.gpu_name, site.world.size)
    return replace(report, metrics=metrics, utilization=utilization, ledger=site.ledger)


def _make_trackers(config: RunConfig, run_dir: Path, resume_step: int | None) -> dict[str, Tracker]:
    """Start the trackers of rank 0. ValueError names one that cannot start."""
    trackers = {}
    for spec in config.logging.trackers:
        try:
            trackers[spec] = load_extension("logging.trackers", spec)(
                run_dir=run_dir,
                project=config.logging.project,
                config=dataclasses.asdict(config),
                resume_step=resume_step,
            )
        except Exception as error:
            raise ValueError(f"logging.trackers={spec}: cannot start: {error!r}") from error
    return trackers


def _batch_rules(config: RunConfig) -> BatchRules:
    rollout, algorithm, reward = config.rollout, config.algorithm, config.reward
    return BatchRules(
        num_prompts=rollout.num_prompts,
        right_score=reward.right_score,
        max_rounds=algorithm.max_num_gen_batches if config.sampling_metric else 1,
        metric=config.sampling_metric,
        round_tokens=rollout.partial_rollout_tokens,
        num_drawn=rollout.over_sampling_prompts,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_new_tokens=rollout.max_new_tokens,
        overlong_tokens=reward.overlong_tokens,
        overlong_penalty=reward.overlong_penalty,
    )


def _build_models(
    config: RunConfig, groups: ProcessGroups, device: Device
) -> tuple[McorePolicyModel, McoreCriticModel | None, McoreReferenceModel | None]:
    """Build the models. Each leaves the device before the next one comes."""
    layout: dict[str, Any] = {"parallel": config.parallel, "mcore": config.mcore}
    layout |= {"groups": groups, "device": device}
    critic = reference = None
    if config.second_path:
        rank = config.model.lora_rank if config.reference.refresh_steps else 0
        section = replace(config.model, path=config.second_path, lora_rank=rank)
        reference = McoreReferenceModel(model=section, **layout)
    policy = McorePolicyModel(
        model=config.model,
        optimizer=config.optimizer,
        num_updates=config.num_updates,
        keep_reference=config.has_reference and reference is None,
        reference=reference,
        **layout,
    )
    policy.leave_device()
    if config.has_critic:
        model = replace(config.model, path=config.critic_path)
        optimizer = config.critic.optimizer(config.optimizer)
        critic = McoreCriticModel(model=model, optimizer=optimizer, **layout)
        critic.leave_device()
    return policy, critic, reference


def _build_policy_trainer(
    config: RunConfig,
    model: McorePolicyModel,
    critic: McoreCriticModel | None,
    groups: ProcessGroups,
) -> PolicyTrainer:
    return PolicyTrainer(
        model=model,
        section=config.algorithm,
        groups=groups,
        micro_batch_tokens=config.mcore.micro_batch_tokens,
        temperature=1.0 if config.algorithm.is_sft else config.rollout.temperature,
        max_new_tokens=config.rollout.max_new_tokens,
        health=TrainingHealth(
            max_diff=config.algorithm.max_logprob_diff,
            dtypes=(config.model.dtype, config.rollout.dtype),
        ),
        critic=CriticTrainer(critic, config.critic, groups) if critic else None,
    )
