"""Trains a drafter for a policy before any RL: the policy answers prompts, and the drafter trains on those passes.

    python tools/warmup_drafter.py --model build/tiny_policy --prompts build/tiny_policy/train.jsonl \\
        --eval build/tiny_policy/eval.jsonl --out build/tiny_drafter

Prints the accept length on hold-out prompts before and after, measured by decoding with the drafter. The folder holds an EAGLE
checkpoint (config.json, safetensors) for SGLang's loader, and the optimizer's state. It is written every minute and at the end.
`warm_up.json` beside them holds each measured accept length, with the seconds of training before it.
`--resume` continues from it, up to `--steps` in all. `--config` takes policy, prompts, sampling and drafter from a run's file:

    python tools/warmup_drafter.py --config examples/smollm2.yaml --minutes 10 --out build/smollm2_drafter
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import random
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch; --threads raises it
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from tlt_megatron.config.draft_folder import default_aux_layer_ids
from tlt_megatron.config.hub import fetch_data, fetch_model
from tlt_megatron.config.load import load_config
from tlt_megatron.config.schema import DrafterSection, RunConfig
from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.drafter.drafter_trainer import DrafterTrainer
from tlt_megatron.drafter.eagle_folder import load_drafter, load_trainer_state, save_drafter
from tlt_megatron.drafter.packing import DraftBatch, DraftSequence, pack_sequences
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.draft_model import DraftModel
from tlt_megatron.runtime.progress import Progress
from tlt_megatron.types import Prompt, SamplingParams
from tools.load_engine import DATA, LoadedPolicy, accept_length

_PROMPTS_AT_ONCE = 32  # after which the time is checked
_GENERATION_SHARE = 0.5  # of --minutes, at most
_SAVE_SECONDS, _PRINT_SECONDS = 60.0, 10.0  # between two saves, two lines
_HOLD_OUT = 8  # without --eval, one of so many prompts is not trained on


def main(arguments: Sequence[str] | None = None) -> None:
    """Generate, train, measure, save."""
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    section, is_eagle3 = options.section, options.algorithm == "eagle3"
    aux_layer_ids: tuple[int, ...] = ()
    if is_eagle3:
        num_layers = load_model_config(options.model).num_layers
        aux_layer_ids = default_aux_layer_ids(num_layers)
    policy = LoadedPolicy(
        options.model,
        dtype=options.dtype,
        tap_layers=aux_layer_ids,
        data=options.data,
        max_new_tokens=options.max_new_tokens,
    )
    params = policy.params(
        options.max_new_tokens,
        num_samples=options.num_samples,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
    )
    strategy = SpeculationStrategy.parse(options.strategy)
    prompts = policy.prompts(options.prompts, options.num_prompts)
    held_out = policy.prompts(options.eval, options.num_eval_prompts) if options.eval else ()
    if not held_out:
        held_out, prompts = (
            prompts[::_HOLD_OUT],
            [p for i, p in enumerate(prompts) if i % _HOLD_OUT],
        )
    deadline = time.monotonic() + 60 * options.minutes
    sequences = _generate(policy, prompts, params, options.minutes)
    section = dataclasses.replace(
        section,
        algorithm=options.algorithm,
        lr=options.lr,
        batch_tokens=options.batch_tokens,
        feature_weight=options.feature_weight,
    )
    model = policy.new_drafter(
        "eagle3" if is_eagle3 else "eagle", aux_layer_ids, dtype=torch.float32, seed=options.seed
    )
    trainer = DrafterTrainer(model, section)
    out = Path(options.out)
    if options.resume:
        _resume(trainer, out)
    record = out / "warm_up.json"
    measured: list[dict[str, float]] = []
    if options.resume and record.is_file():
        measured = json.loads(record.read_text(encoding="utf-8"))
    trained_s = measured[-1]["training_s"] if measured else 0.0
    if measured and measured[-1]["steps"] == trainer.num_updates:
        measured.pop()  # it is measured again
    progress = Progress("auto", options.steps, first_step=trainer.num_updates, enabled=True)
    while True:
        accepted = _measure(policy, model, strategy, held_out, params)
        progress.message(f"accept length, after {trainer.num_updates} steps: {accepted:.2f}")
        steps = trainer.num_updates
        measured.append({"training_s": trained_s, "steps": steps, "accept_length": accepted})
        is_over = steps >= options.steps or time.monotonic() >= deadline
        if trained_s > 0.0 and is_over:
            break
        started = time.monotonic()
        until = min(deadline, started + 60 * options.measure_minutes)
        _train(trainer, sequences, options, until, progress)
        trained_s += time.monotonic() - started
    record.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    progress.close()
    progress.message(f"drafter: {out}")


def _generate(
    policy: LoadedPolicy,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    minutes: float,
) -> list[DraftSequence]:
    """Return the responses to `prompts`, or to the first of them if half of `minutes` is over."""
    started, progress = (
        time.monotonic(),
        Progress("auto", len(prompts), unit="prompt", enabled=True),
    )
    sequences: list[DraftSequence] = []
    for first in range(0, len(prompts), _PROMPTS_AT_ONCE):
        sequences += policy.draft_sequences(prompts[first : first + _PROMPTS_AT_ONCE], params)
        progress.step(min(first + _PROMPTS_AT_ONCE, len(prompts)), {})
        if time.monotonic() - started > 60 * minutes * _GENERATION_SHARE:
            break
    progress.close()
    num_tokens = sum(sequence.token_ids.numel() for sequence in sequences)
    progress.message(f"{len(sequences)} responses of {num_tokens:,} tokens")
    return sequences


def _measure(
    policy: LoadedPolicy,
    model: DraftModel,
    strategy: SpeculationStrategy,
    prompts: Sequence[Prompt],
    params: SamplingParams,
) -> float:
    twin = policy.new_drafter(model.config.architecture, model.config.aux_layer_ids)
    twin.load_state_dict(model.state_dict())
    policy.speculate(twin, strategy)
    return accept_length(policy.generate(prompts, params))


def _train(
    trainer: DrafterTrainer,
    sequences: Sequence[DraftSequence],
    options: argparse.Namespace,
    deadline: float,
    progress: Progress,
) -> None:
    """Train on the sequences in random order, repeatedly, to step `options.steps` or the deadline. Save."""
    order, shuffle = list(sequences), random.Random(options.seed + trainer.num_updates)
    printed = saved = time.monotonic()
    batches: list[DraftBatch] = []
    while trainer.num_updates < options.steps and time.monotonic() < deadline:
        if not batches:
            shuffle.shuffle(order)
            batches = pack_sequences(order, options.batch_tokens)
            shuffle.shuffle(batches)
        stats = trainer.step(batches.pop())
        now = time.monotonic()
        if now - printed > _PRINT_SECONDS or trainer.num_updates == options.steps:
            printed = now
            metrics = {"loss": stats.loss, "agreement": stats.agreement[0]}
            progress.step(trainer.num_updates, metrics)
        if now - saved > _SAVE_SECONDS:
            saved = now
            _save(trainer, Path(options.out))
    _save(trainer, Path(options.out))


def _save(trainer: DrafterTrainer, out: Path) -> None:
    """Write `out` file by file, each whole or not at all, so that it can be resumed at any time."""
    partial = out.with_name(f"{out.name}.partial")
    save_drafter(partial, trainer.model, trainer.state_dict())
    for file in sorted(path for path in partial.rglob("*") if path.is_file()):
        target = out / file.relative_to(partial)
        target.parent.mkdir(parents=True, exist_ok=True)
        file.replace(target)
    shutil.rmtree(partial)


def _resume(trainer: DrafterTrainer, out: Path) -> None:
    """Continue from `out`, if it is there. ValueError if it belongs to another policy."""
    if not (out / "config.json").is_file():
        return
    model = trainer.model
    load_drafter(out, embedding_VD=model.embedding_VD, lm_head_VD=model.lm_head_VD)
    state = load_trainer_state(out)
    if state is None:
        raise ValueError(f"--resume: {out} holds no state of an optimizer")
    trainer.load_state_dict(state)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--config", help="of a run; options below that are given here have precedence")
    add("--model", default="build/tiny_policy")
    add("--prompts", default="build/tiny_policy/train.jsonl")
    help_ = "prompts that measure the accept length; empty: every eighth one of --prompts"
    add("--eval", default="build/tiny_policy/eval.jsonl", help=help_)
    add("--out", default="build/tiny_drafter")
    add("--algorithm", default="hass", choices=("eagle", "hass", "eagle3"))
    add("--strategy", default="6_1_6", help="with which the accept length is measured")
    add("--steps", type=int, default=600, help="of the optimizer, at most")
    add("--minutes", type=float, default=math.inf, help="of generation and training, at most")
    add("--measure-minutes", type=float, default=math.inf, help="of training between measurements")
    add("--resume", action="store_true", help="continue from --out, if it is there")
    add("--lr", type=float, default=3e-3)
    add("--feature-weight", type=float, default=1.0, help="of smooth L1 on features (eagle, hass)")
    add("--batch-tokens", type=int, default=2048)
    add("--num-prompts", type=int, default=256)
    add("--num-samples", type=int, default=2)
    add("--num-eval-prompts", type=int, default=32)
    add("--max-new-tokens", type=int, default=600)
    add("--temperature", type=float, default=1.0)
    add("--dtype", default="float32", choices=("float32", "bfloat16"))
    add("--threads", type=int, default=1)
    add("--seed", type=int, default=0)
    parser.set_defaults(data=DATA, section=DrafterSection(), top_p=1.0, top_k=0)
    config = parser.parse_known_args(arguments)[0].config
    if config:
        parser.set_defaults(**_of_run(load_config(config)))
    options = parser.parse_args(arguments)
    options.model = fetch_model("--model", options.model)
    options.prompts = fetch_data("--prompts", options.prompts)
    options.eval = fetch_data("--eval", options.eval) if options.eval else ""
    if options.measure_minutes <= 0:
        parser.error(f"--measure-minutes {options.measure_minutes:g}: must be > 0")
    return options


def _of_run(config: RunConfig) -> dict[str, object]:
    """Return the options that a run's settings stand for."""
    drafter, rollout = config.drafter, config.rollout
    return {
        "model": config.model.path,
        "data": config.data,
        "prompts": config.data.train,
        "eval": [*config.data.eval_files.values(), ""][0],
        "dtype": rollout.dtype,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "max_new_tokens": rollout.max_new_tokens,
        "section": drafter,
        "algorithm": drafter.algorithm,
        "lr": drafter.lr,
        "batch_tokens": drafter.batch_tokens,
        "feature_weight": drafter.feature_weight,
        "seed": config.run.seed,
    }


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"warmup_drafter.py: {error}")
