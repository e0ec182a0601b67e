"""Writes the results of a run: HF export, summary.json, the table of its steps, one trace."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from tlt_megatron.config.own_layer import OWN
from tlt_megatron.config.preflight import foreign_code
from tlt_megatron.config.schema import RunConfig
from tlt_megatron.data.tokenizer import load_tokenizer
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.hf_io import save_adapters, save_hf_model
from tlt_megatron.models.own_drafter import own_tensors
from tlt_megatron.runtime.collectives import barrier
from tlt_megatron.runtime.durable import replace_text
from tlt_megatron.runtime.progress import Progress, format_number
from tlt_megatron.runtime.timeline import merge_timelines
from tlt_megatron.runtime.typed_command import resume_command, tlt_command
from tlt_megatron.saved_files import read_json
from tlt_megatron.trainer.model_card import base_model, model_card
from tlt_megatron.trainer.run import Run
from tlt_megatron.trainer.summary import read_metrics, summarize

log = logging.getLogger(__name__)

TABLE_COLUMNS = (
    "step",
    "critic/rewards/mean",
    "sft/loss",
    "eval/loss",
    "eval/accuracy",
    "response_length/mean",
    "response_length/max",
    "response_length/clip_ratio",
    "actor/grad_norm",
    "rollout/entropy",
    "timing_s/gen",
    "timing_s/wait",
    "timing_s/update_actor",
    "timing_s/step",
)


def finish_run(run: Run, config: RunConfig, run_dir: Path) -> None:
    """Write all results and print the run folder. A collective of all ranks, after the last step.

    A run that was stopped on request writes only its summary. The resumed run does the rest.
    """
    trainer = run.trainer
    progress, is_first = trainer.phases.progress, trainer.world.is_first
    is_complete = trainer.step == config.run.num_steps
    is_own, gain = config.speculation.drafter == OWN, None
    has_folder = trainer.drafter is not None and not is_own  # its own: hf/ holds it
    if not run.is_stopped:
        if config.speculation.measure_gain and is_complete:
            progress.message("measuring the speed-up: more batches, with and without speculation")
            gain = run.measure_gain()
        if trainer.drafter is not None and not is_own and is_first:
            trainer.drafter.export(run_dir / "hf_drafter")
        if config.checkpoint.export_hf and is_complete:
            _export_policy(run, config, run_dir / "hf")
        if config.model.lora_rank and config.run.num_steps and is_complete:
            _export_adapters(run, config, run_dir / "hf_adapter")
    trainer.phases.timeline.flush()
    barrier(trainer.world)
    if not is_first:
        return
    path, rows = run_dir / "summary.json", read_metrics(run_dir / "metrics.jsonl")
    summary = summarize(rows, seconds=run.report.seconds(), gain=gain)
    summary["is_stopped"] = run.is_stopped
    if not run.num_new_steps and path.exists():
        # No step since a resume: the speedup that was measured at the run's end stays true.
        summary = read_json(path) | summary
    replace_text(path, json.dumps(summary, indent=2) + "\n")
    if config.checkpoint.export_hf and is_complete and not run.is_stopped:
        card = model_card(config, summary, has_drafter=has_folder)
        replace_text(run_dir / "hf" / "README.md", card)
    if run.is_stopped:
        progress.close()
        log.info(
            "saved step %d of %d; resume with:\n%s",
            *(trainer.step, config.run.num_steps, resume_command(run_dir)),
        )
        return
    merge_timelines(run_dir)
    progress.close()
    if config.run.num_steps == 0 and rows:
        left_out = run.evaluator.left_out
        _write_evaluation(config, rows[0], left_out, run_dir / "evaluation.json", progress)
        return
    progress.print_table(rows, TABLE_COLUMNS)
    progress.message("summary.json")
    for name, value in summary.items():
        if value is not None and name != "is_stopped":
            progress.message(f"{name:<22} {format_number(value)}")
    progress.message(f"run folder: {run_dir.resolve()}")
    _print_next(config, run_dir, progress, has_drafter=has_folder)


def _print_next(config: RunConfig, run_dir: Path, progress: Progress, *, has_drafter: bool) -> None:
    """Print commands that go on from the run. They run as they are printed."""
    commands: list[tuple[object, ...]] = [("report", run_dir), ("watch", run_dir)]
    if config.checkpoint.export_hf:
        trust = ["--trust-run"] if foreign_code(config) else []
        data = (config.data.eval_files or {"": config.data.train}).popitem()[1]
        commands += [("chat", run_dir), ("evaluate", run_dir, "--data", data, *trust)]
    if has_drafter:
        names = ("--from", run_dir, "--to", f"{run_dir}-drafter", "--format", "sglang")
        commands.append(("export-drafter", *names))
    for number, words in enumerate(commands):
        progress.message(f"{'      ' if number else 'next: '}{tlt_command(*words)}")


def _export_policy(run: Run, config: RunConfig, folder: Path) -> None:
    """Write the policy as a Hugging Face model on rank 0, with its own layer as it was trained. A
    collective of all ranks.
    """
    weights, drafter = run.trainer.policy_trainer.model.export_hf_weights(), run.trainer.drafter
    if drafter is not None and config.speculation.drafter == OWN:
        policy = load_model_config(config.model.path)
        trained = own_tensors(drafter.publisher.published.weights, policy)
        weights = itertools.chain(weights, trained)
    if run.trainer.world.is_first:
        dtype = getattr(torch, config.model.dtype)
        save_hf_model(folder, weights, Path(config.model.path), dtype=dtype)
        data = run.config.data  # with its date
        tokenizer = load_tokenizer(config.model.path, data.template_date)
        tokenizer.pin_template(folder, data.chat_template_kwargs)
    else:
        for _ in weights:
            pass


def _export_adapters(run: Run, config: RunConfig, folder: Path) -> None:
    """Write the adapters in PEFT's format on rank 0. A collective of all ranks."""
    tensors = run.trainer.policy_trainer.model.gather_adapters()
    if run.trainer.world.is_first:
        base = base_model(config.model.path)
        path = base if "/" in base else str(Path(config.model.path).resolve())
        save_adapters(folder, tensors, config.model, base=path)


def _write_evaluation(
    config: RunConfig,
    row: dict[str, float],
    left_out: Mapping[str, int],
    path: Path,
    progress: Progress,
) -> None:
    """Write and print the metrics of a run of 0 steps: a row per data set, then the data
    sources.
    """
    samples, names = config.eval.num_samples, list(config.data.eval_files)
    prefixes = [f"eval/{name}/" if len(names) > 1 else "eval/" for name in names]
    kinds = [name.removeprefix(prefixes[0]) for name in row if name.startswith(prefixes[0])]

    def of(prefix: str) -> dict[str, float]:
        return {f"avg@{samples}" if k == "accuracy" else k: row[prefix + k] for k in kinds}

    sets = {name: of(prefix) for name, prefix in zip(names, prefixes, strict=True)}
    by_source = {name: value for name, value in row.items() if name.startswith("val-")}
    metrics = of("eval/") | by_source
    about = {"model": config.model.path, "data": config.data.eval, "num_samples": samples}
    about |= {"temperature": config.eval.temperature, "seed": config.run.seed}
    about |= {"prompts_left_out": dict(left_out)}  # longer than data.max_prompt_tokens
    result = about | {"metrics": metrics, "data_sets": sets}
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    rows = [{"data set": name, **found} for name, found in sets.items()]
    if len(names) > 1:
        rows.append({"data set": "mean", **of("eval/")})
    progress.print_table(rows, list(rows[0]), title="evaluation", max_rows=len(rows))
    for name, value in by_source.items():
        progress.message(f"{name:<40} {value:10.4f}")
    progress.message(f"evaluation: {path.resolve()}")
