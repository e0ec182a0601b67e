"""Trains a drafter for a policy before any RL, on the passes in which the policy answers prompts.

    tlt train-drafter --config examples/smollm2.yaml --minutes 10 --out build/smollm2_drafter

Prints the accept length on hold-out prompts before and after, measured by decoding with the
drafter. The folder holds an EAGLE checkpoint (config.json, safetensors) for SGLang's loader, and
the optimizer's state. It is written after each measurement. `warm_up.json` beside them holds each
measured accept length, with the seconds of training before it. Policy, prompts, sampling and
drafter are those of a run's file, by default of the quickstart's policy. Settings follow the
options:

    tlt train-drafter --model Qwen/Qwen3-0.6B --prompts train.jsonl drafter.algorithm=eagle3
    tlt train-drafter --model mine --prompts train.jsonl --out mine_trained speculation.drafter=own

The second trains the MTP layer that the checkpoint brings. Its --out is the whole model with the
trained layer.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch; --threads raises it
import torch

from tlt_megatron.cli import ROOT
from tlt_megatron.config.draft_folder import MTP, default_aux_layer_ids
from tlt_megatron.config.hub import load_fetched_config
from tlt_megatron.config.model_folder import check_model
from tlt_megatron.config.model_shape import ModelConfig
from tlt_megatron.config.own_layer import OWN
from tlt_megatron.config.preflight import check_own
from tlt_megatron.config.schema import RunConfig
from tlt_megatron.config.strategy import SpeculationStrategy
from tlt_megatron.drafter.drafter_trainer import DrafterTrainer
from tlt_megatron.drafter.eagle_folder import config_of, load_trainer_state, write_drafter
from tlt_megatron.drafter.packing import DraftBatch, pack_sequences
from tlt_megatron.models.own_drafter import save_with_own_layer
from tlt_megatron.runtime.progress import Progress
from tlt_megatron.types import DraftSequence, Prompt, SamplingParams
from tools.commands.load_engine import LoadedPolicy, accept_length

log = logging.getLogger(__name__)

_PROMPTS_AT_ONCE = 32  # after which the time is checked
_GENERATION_SHARE = 0.5  # largest share of --minutes
_PRINT_SECONDS = 10.0  # between two lines
_HOLD_OUT = 8  # without data.eval, one of so many prompts is not trained on


def main(arguments: Sequence[str] | None = None) -> None:
    """Generate, train, measure, save."""
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    settings = [f"model.path={options.model}"] if options.model else []
    settings += [f"data.train={options.prompts}", "data.eval="] if options.prompts else []
    config, _ = load_fetched_config(options.config, [*settings, *options.settings])
    is_eagle3 = config.drafter.algorithm == "eagle3"
    architecture = MTP if config.speculation.drafter == OWN else "eagle3" if is_eagle3 else "eagle"
    target = check_model("model.path", config.model.path)
    if architecture == MTP:
        _check_own(config, target, options)
    aux_layer_ids = default_aux_layer_ids(target.num_layers) if is_eagle3 else ()
    rollout, seed = config.rollout, config.run.seed
    policy = LoadedPolicy(
        config.model.path,
        dtype=rollout.dtype,
        tap_layers=aux_layer_ids,
        data=config.data,
        max_new_tokens=rollout.max_new_tokens,
    )
    params = policy.params(
        rollout.max_new_tokens,
        num_samples=options.num_samples,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        seed=seed,
    )
    prompts = policy.prompts(config.data.train, options.num_prompts)
    held_out = prompts[::_HOLD_OUT]
    if held_out_files := list(config.data.eval_files.values()):
        held_out = policy.prompts(held_out_files[0], options.num_eval_prompts)
    else:
        prompts = [prompt for i, prompt in enumerate(prompts) if i % _HOLD_OUT]
    deadline = time.monotonic() + 60 * options.minutes
    sequences = _generate(policy, prompts, params, options.minutes)
    model = policy.new_drafter(architecture, aux_layer_ids, dtype=torch.float32, seed=seed)
    trainer = DrafterTrainer(model, config.drafter)
    if options.start:
        state = load_trainer_state(options.start)
        if state is None:
            raise SystemExit(f"--start {options.start}: has no state of the optimizer")
        trainer.load_state_dict(state)
    batches = _batches(sequences, config.drafter.batch_tokens, seed)
    progress = Progress("auto", options.steps)
    measured: list[dict[str, float]] = []
    trained_s = 0.0
    until_step = trainer.num_updates + options.steps
    while True:
        steps = trainer.num_updates
        accepted = _measure(policy, trainer, options.strategy, held_out, params)
        progress.message(f"accept length, after {steps} steps: {accepted:.2f}")
        measured.append({"training_s": trained_s, "steps": steps, "accept_length": accepted})
        if architecture == MTP:
            save_with_own_layer(options.out, Path(config.model.path), trainer.average)
        else:
            write_drafter(options.out, config_of(model), trainer.average, trainer.state_dict())
        text = json.dumps(measured, indent=2) + "\n"
        (options.out / "warm_up.json").write_text(text, encoding="utf-8")
        if steps >= until_step or (trained_s > 0.0 and time.monotonic() >= deadline):
            break
        started = time.monotonic()
        if trained_s == 0.0:  # training gets its share, however long the answers took
            deadline = max(deadline, started + 60 * options.minutes * (1 - _GENERATION_SHARE))
        until = min(deadline, started + 60 * options.measure_minutes)
        _train(trainer, batches, until_step, until, progress)
        trained_s += time.monotonic() - started
    progress.close()
    if not trainer.num_updates:
        log.warning(
            "--minutes %g left no time for an optimizer step: the drafter has random weights and"
            " makes nothing faster",
            options.minutes,
        )
    progress.message(f"drafter: {options.out}")


def _check_own(config: RunConfig, target: ModelConfig, options: argparse.Namespace) -> None:
    """Raise ValueError of one line if the checkpoint's own layer cannot be trained."""
    check_own(config, target)
    if options.start:
        raise ValueError(f"--start {options.start}: speculation.drafter={OWN} starts from --model")
    if options.out.exists():
        raise ValueError(f"--out {options.out}: must not exist, because it becomes a whole model")


def _generate(
    policy: LoadedPolicy, prompts: Sequence[Prompt], params: SamplingParams, minutes: float
) -> list[DraftSequence]:
    """Return the responses to `prompts`, or to the first of them if half of `minutes` is over."""
    started = time.monotonic()
    progress = Progress("auto", len(prompts), unit="prompt")
    sequences: list[DraftSequence] = []
    for first in range(0, len(prompts), _PROMPTS_AT_ONCE):
        sequences += policy.draft_sequences(prompts[first : first + _PROMPTS_AT_ONCE], params)
        progress.step(min(first + _PROMPTS_AT_ONCE, len(prompts)), {})
        if time.monotonic() - started > 60 * minutes * _GENERATION_SHARE:
            break
    progress.close()
    num_tokens = sum(sequence.token_ids.numel() for sequence in sequences)
    progress.message(f"{len(sequences)} responses of {num_tokens:,} tokens")
    seconds, share_s = time.monotonic() - started, 60 * minutes * _GENERATION_SHARE
    if seconds > 2 * share_s > 0:
        log.warning(
            "answering the prompts took %.0f s, more than --minutes %g in all: training gets"
            " another %.0f s (fewer --num-prompts, or shorter answers, take less)",
            *(seconds, minutes, share_s),
        )
    return sequences


def _measure(
    policy: LoadedPolicy,
    trainer: DrafterTrainer,
    strategy: SpeculationStrategy,
    prompts: Sequence[Prompt],
    params: SamplingParams,
) -> float:
    config = trainer.model.config
    twin = policy.new_drafter(config.architecture, config.aux_layer_ids)
    twin.load_state_dict(trainer.average)
    policy.speculate(twin, strategy)
    return accept_length(policy.generate(prompts, params))


def _batches(
    sequences: Sequence[DraftSequence], batch_tokens: int, seed: int
) -> Iterator[DraftBatch]:
    """Yield the sequences in packs in random order, without end."""
    order, shuffle = list(sequences), random.Random(seed)
    while True:
        shuffle.shuffle(order)
        batches = pack_sequences(order, batch_tokens)
        shuffle.shuffle(batches)
        yield from batches


def _train(
    trainer: DrafterTrainer,
    batches: Iterator[DraftBatch],
    num_steps: int,
    deadline: float,
    progress: Progress,
) -> None:
    """Train to step `num_steps` or to the deadline."""
    printed = time.monotonic()
    while trainer.num_updates < num_steps and time.monotonic() < deadline:
        stats = trainer.step(next(batches))
        now = time.monotonic()
        if now - printed > _PRINT_SECONDS or trainer.num_updates == num_steps:
            printed = now
            metrics = {"loss": stats.loss, "agreement": stats.agreement[0]}
            progress.step(trainer.num_updates, metrics)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("settings", nargs="*", metavar="section.key=value", help="over those of --config")
    tiny = str(ROOT / "examples" / "tiny_drafter.yaml")
    add("--config", default=tiny, help="of a run; default: examples/tiny_drafter.yaml")
    add("--model", help="model.path")
    add("--prompts", help="data.train; every eighth prompt measures, unless data.eval= follows")
    add("--out", type=Path, default=Path("build/tiny_drafter"))
    add(
        "--start", type=Path, help="drafter of the same policy to go on from; default: a random one"
    )
    add("--strategy", type=SpeculationStrategy.parse, default="6_1_6", help="to measure with")
    add("--steps", type=int, default=600, help="of the optimizer, at most")
    add("--minutes", type=float, default=math.inf, help="in all; training gets at least half")
    add("--measure-minutes", type=float, default=math.inf, help="of training between measurements")
    add("--num-prompts", type=int, default=256)
    add("--num-samples", type=int, default=2)
    add("--num-eval-prompts", type=int, default=32)
    add("--threads", type=int, default=1)
    options = parser.parse_intermixed_args(arguments)
    if options.measure_minutes <= 0:
        parser.error(f"--measure-minutes {options.measure_minutes:g}: must be > 0")
    return options


if __name__ == "__main__":
    raise SystemExit("run it as: tlt train-drafter")
