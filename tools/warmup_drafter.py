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
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch; --threads raises it
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from rich.console import Console

from tlt_megatron.config.schema import DataSection, DrafterSection
from tlt_megatron.data.prompts import load_prompts
from tlt_megatron.data.tokenizer import load_tokenizer
from tlt_megatron.drafter.checkpoint import save_drafter
from tlt_megatron.drafter.packing import DraftSequence, pack_sequences
from tlt_megatron.drafter.trainer import DrafterTrainer
from tlt_megatron.engines.embedded.engine import EmbeddedEngine
from tlt_megatron.engines.embedded.speculate import Speculation
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.draft_inference import DraftInference
from tlt_megatron.models.draft_model import DraftModel, default_aux_layer_ids, make_draft_config
from tlt_megatron.speculation.selector import FixedSelector
from tlt_megatron.speculation.strategy import SpeculationStrategy
from tlt_megatron.types import Prompt, Rollout, RolloutGroup, SamplingParams
from tools.load_engine import MAX_PROMPT_TOKENS, VERSION, load_engine


def main() -> None:
    """Generate, train, measure, save."""
    options = _parse()
    torch.set_num_threads(options.threads)
    console = Console()
    target = load_model_config(options.model)
    is_eagle3 = options.algorithm == "eagle3"
    aux_layer_ids = default_aux_layer_ids(target.num_layers) if is_eagle3 else ()
    engine = load_engine(
        options.model,
        dtype=options.dtype,
        tap_layers=aux_layer_ids,
        max_new_tokens=options.max_new_tokens,
    )
    tokenizer = load_tokenizer(options.model)
    section = DataSection(max_prompt_tokens=MAX_PROMPT_TOKENS)
    params = SamplingParams(
        num_samples=options.num_samples,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        stop_token_ids=tokenizer.stop_token_ids,
        seed=options.seed,
    )
    train = load_prompts(options.prompts, tokenizer, section).prompts(options.num_prompts)
    sequences = collect_sequences(engine, train, params)
    num_tokens = sum(sequence.token_ids.numel() for sequence in sequences)
    console.print(f"{len(sequences)} responses, {num_tokens:,} tokens from {len(train)} prompts")

    embedding, head = engine.target_tensors()
    drafter_section = DrafterSection(
        algorithm=options.algorithm,
        lr=options.lr,
        batch_tokens=options.batch_tokens,
        feature_weight=None if is_eagle3 else options.feature_weight,
    )
    architecture = "eagle3" if is_eagle3 else "eagle"
    config = make_draft_config(target, architecture, embedding, aux_layer_ids)
    model = DraftModel(
        config, embedding_VD=embedding.float(), lm_head_VD=head.float(), seed=options.seed
    )
    trainer = DrafterTrainer(model, drafter_section)
    strategy = SpeculationStrategy.parse(options.strategy)
    held_out = load_prompts(options.eval, tokenizer, section).prompts(options.num_eval_prompts)
    console.print(
        f"accept length, random: {_measure(engine, model, strategy, held_out, params):.2f}"
    )
    train_drafter(
        trainer,
        sequences,
        num_steps=options.steps,
        batch_tokens=options.batch_tokens,
        seed=options.seed,
        console=console,
    )
    console.print(
        f"accept length, trained: {_measure(engine, model, strategy, held_out, params):.2f}"
    )
    save_drafter(Path(options.out), model, trainer.state_dict())
    console.print(f"drafter: {options.out}")


def collect_sequences(
    engine: EmbeddedEngine, prompts: Sequence[Prompt], params: SamplingParams
) -> list[DraftSequence]:
    """Return the policy's answers with the states that decoding computed. Too short ones are left out."""
    sequences: list[DraftSequence] = []
    hidden_size = engine.target_tensors()[0].shape[1]

    def keep(rollout: Rollout, features_TF: torch.Tensor) -> None:
        sequence = DraftSequence.of_rollout(rollout, features_TF.float().cpu(), hidden_size)
        if sequence.num_rows > 0:
            sequences.append(sequence)

    engine.generate(prompts, params, policy_version=VERSION, on_features=keep)
    return sequences


def accept_length(groups: Sequence[RolloutGroup]) -> float:
    """Return tokens out per verify pass, bonus token included."""
    lengths = [n for g in groups for r in g.rollouts for n in r.accept_lengths]
    return statistics.fmean(lengths) if lengths else 1.0


def _measure(
    engine: EmbeddedEngine,
    model: DraftModel,
    strategy: SpeculationStrategy,
    prompts: Sequence[Prompt],
    params: SamplingParams,
) -> float:
    embedding, head = engine.target_tensors()
    twin = DraftModel(model.config, embedding_VD=embedding, lm_head_VD=head)
    twin.load_state_dict(model.state_dict())
    draft = DraftInference(twin, embedding.dtype)
    engine.set_speculation(Speculation(draft, FixedSelector(strategy), [strategy]))
    groups = engine.generate(prompts, params, policy_version=VERSION)
    engine.set_speculation(None)
    return accept_length(groups)


def train_drafter(
    trainer: DrafterTrainer,
    sequences: Sequence[DraftSequence],
    *,
    num_steps: int,
    batch_tokens: int,
    seed: int,
    console: Console,
) -> None:
    """Run `num_steps` optimizer steps over the sequences in random order, repeatedly."""
    order, shuffle = list(sequences), random.Random(seed)
    started, num_done = time.perf_counter(), 0
    while num_done < num_steps:
        shuffle.shuffle(order)
        batches = pack_sequences(order, batch_tokens)
        shuffle.shuffle(batches)
        for batch in batches[: num_steps - num_done]:
            stats = trainer.step(batch)
            num_done += 1
            if num_done % 50 == 0 or num_done == num_steps:
                seconds = time.perf_counter() - started
                console.print(
                    f"step {num_done}/{num_steps} loss {stats.loss:.3f} "
                    f"agreement {stats.agreement[0]:.3f} {seconds:.0f} s"
                )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="build/tiny_policy")
    parser.add_argument("--prompts", default="build/tiny_policy/train.jsonl")
    parser.add_argument("--eval", default="build/tiny_policy/eval.jsonl")
    parser.add_argument("--out", default="build/tiny_drafter")
    parser.add_argument("--algorithm", default="hass", choices=("eagle", "hass", "eagle3"))
    parser.add_argument(
        "--strategy", default="6_1_6", help="with which the accept length is measured"
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument(
        "--feature-weight", type=float, default=1.0, help="of smooth L1 on features (eagle, hass)"
    )
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--num-prompts", type=int, default=256)
    parser.add_argument("--num-samples", type=int, default=2)
    parser.add_argument("--num-eval-prompts", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=600)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
