"""Trains a drafter for a policy before any RL: the policy answers prompts, and the drafter trains on those passes.

    python tools/warmup_drafter.py --model build/tiny_policy --prompts build/tiny_policy/train.jsonl \\
        --eval build/tiny_policy/eval.jsonl --out build/tiny_drafter

Prints the accept length on hold-out prompts before and after, measured by decoding with the drafter. The folder holds an EAGLE
checkpoint (config.json, safetensors) for SGLang's loader, and the optimizer's state.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch; --threads raises it
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from rich.console import Console

from tlt_megatron.config.schema import DrafterSection
from tlt_megatron.drafter.checkpoint import save_drafter
from tlt_megatron.drafter.packing import DraftSequence, pack_sequences
from tlt_megatron.drafter.trainer import DrafterTrainer
from tlt_megatron.engines.embedded.speculate import Speculation
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.models.draft_model import DraftModel, default_aux_layer_ids
from tlt_megatron.speculation.selector import FixedSelector
from tlt_megatron.speculation.strategy import SpeculationStrategy
from tlt_megatron.types import Prompt, SamplingParams
from tools.load_engine import LoadedPolicy, accept_length


def main(arguments: Sequence[str] | None = None) -> None:
    """Generate, train, measure, save."""
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    console = Console()
    is_eagle3 = options.algorithm == "eagle3"
    num_layers = load_model_config(options.model).num_layers
    aux_layer_ids = default_aux_layer_ids(num_layers) if is_eagle3 else ()
    policy = LoadedPolicy(
        options.model,
        dtype=options.dtype,
        tap_layers=aux_layer_ids,
        max_new_tokens=options.max_new_tokens,
    )
    params = policy.params(
        options.max_new_tokens,
        num_samples=options.num_samples,
        temperature=options.temperature,
        seed=options.seed,
    )
    prompts = policy.prompts(options.prompts, options.num_prompts)
    sequences = policy.draft_sequences(prompts, params)
    num_tokens = sum(sequence.token_ids.numel() for sequence in sequences)
    console.print(f"{len(sequences)} responses, {num_tokens:,} tokens from {len(prompts)} prompts")
    section = DrafterSection(
        algorithm=options.algorithm,
        lr=options.lr,
        batch_tokens=options.batch_tokens,
        feature_weight=None if is_eagle3 else options.feature_weight,
    )
    model = policy.new_drafter(
        "eagle3" if is_eagle3 else "eagle", aux_layer_ids, dtype=torch.float32, seed=options.seed
    )
    trainer = DrafterTrainer(model, section)
    strategy = SpeculationStrategy.parse(options.strategy)
    held_out = policy.prompts(options.eval, options.num_eval_prompts)
    before = _measure(policy, model, strategy, held_out, params)
    console.print(f"accept length, random: {before:.2f}")
    _train(trainer, sequences, options, console)
    after = _measure(policy, model, strategy, held_out, params)
    console.print(f"accept length, trained: {after:.2f}")
    save_drafter(Path(options.out), model, trainer.state_dict())
    console.print(f"drafter: {options.out}")


def _measure(
    policy: LoadedPolicy,
    model: DraftModel,
    strategy: SpeculationStrategy,
    prompts: Sequence[Prompt],
    params: SamplingParams,
) -> float:
    embedding_VD, lm_head_VD = policy.engine.target_tensors()
    twin = DraftModel(model.config, embedding_VD=embedding_VD, lm_head_VD=lm_head_VD)
    twin.load_state_dict(model.state_dict())
    draft = DraftInference(twin, embedding_VD.dtype)
    policy.engine.set_speculation(Speculation(draft, FixedSelector(strategy), [strategy]))
    groups = policy.generate(prompts, params)
    policy.engine.set_speculation(None)
    return accept_length(groups)


def _train(
    trainer: DrafterTrainer,
    sequences: Sequence[DraftSequence],
    options: argparse.Namespace,
    console: Console,
) -> None:
    """Run `options.steps` optimizer steps over the sequences in random order, repeatedly."""
    order, shuffle = list(sequences), random.Random(options.seed)
    started, num_done = time.perf_counter(), 0
    while num_done < options.steps:
        shuffle.shuffle(order)
        batches = pack_sequences(order, options.batch_tokens)
        shuffle.shuffle(batches)
        for batch in batches[: options.steps - num_done]:
            stats = trainer.step(batch)
            num_done += 1
            if num_done % 50 == 0 or num_done == options.steps:
                seconds = time.perf_counter() - started
                console.print(
                    f"step {num_done}/{options.steps} loss {stats.loss:.3f} "
                    f"agreement {stats.agreement[0]:.3f} {seconds:.0f} s"
                )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="build/tiny_policy")
    add("--prompts", default="build/tiny_policy/train.jsonl")
    add("--eval", default="build/tiny_policy/eval.jsonl")
    add("--out", default="build/tiny_drafter")
    add("--algorithm", default="hass", choices=("eagle", "hass", "eagle3"))
    add("--strategy", default="6_1_6", help="with which the accept length is measured")
    add("--steps", type=int, default=600)
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
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
