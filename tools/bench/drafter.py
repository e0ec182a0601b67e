"""Measures what packing and asynchronous, selective checkpoints gain in drafter training.

    python -m tools.bench drafter

Packing: the policy answers prompts, and the drafter trains for one pass on the answers, with their
real long-tailed lengths: in packed batches; in batches of as many sequences (on average), padded to
the longest; and in padded batches sorted by length, which give up the random order. Ratios are
taken within a round, in CPU time of this process.

Checkpoints: seconds that the trainer waits. Full: parameters, moments and the borrowed embedding
and head go into one safetensors file, fsynced, by the caller. Async: `AsyncDrafterCheckpointer`,
which saves without the borrowed tensors. The drafter is that of a target of 80M parameters with a
vocabulary of 32,768. Ratios are taken within a round, in wall time.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from tlt_megatron.config.schema import DrafterSection
from tlt_megatron.drafter.drafter_trainer import DrafterTrainer
from tlt_megatron.drafter.eagle_folder import config_of
from tlt_megatron.drafter.packing import DraftBatch, pack_batch, pack_sequences
from tlt_megatron.models.config import load_model_config
from tlt_megatron.models.draft_model import DraftModel, make_draft_config
from tlt_megatron.runtime.durable import sync_path
from tlt_megatron.spot.drafter_checkpoint import AsyncDrafterCheckpointer, DrafterCheckpoint
from tlt_megatron.types import DraftSequence
from tools.bench.measure import (
    add_policy_options,
    cpu_seconds,
    interleave,
    ratios,
    spread,
    told,
    wall_seconds,
)
from tools.commands.load_engine import LoadedPolicy
from tools.gpu.shapes import MODEL_CONFIGS
from tools.print_tables import print_table

FULL, ASYNCHRONOUS = "full", "async"
_REAL_TARGET = load_model_config(MODEL_CONFIGS / "80m")
_NUM_REQUESTS, _NUM_SAMPLES, _MAX_NEW_TOKENS, _SEED = 256, 8, 600, 2


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this benchmark."""
    add_policy_options(add, "train")
    add("--batch-tokens", type=int, default=4096, help="rows of a packed batch")
    add("--rounds", type=int, default=5)
    add("--checkpoint-rounds", type=int, default=15)
    add("--folder", default="build", help="on the disk that checkpoints go to")


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure and print two tables. Return the values of the JSON."""
    return _bench_packing(options) | _bench_checkpoints(options)


def pad_batch(sequences: Sequence[DraftSequence]) -> DraftBatch:
    """Return one batch of all `sequences`, each padded to the longest. They have no tapped states.

    Padding is computed but not trained on.
    """
    longest = max(sequence.token_ids.numel() for sequence in sequences)
    padded = [
        dataclasses.replace(
            sequence,
            token_ids=F.pad(sequence.token_ids, (0, longest - len(sequence.token_ids))),
            features=F.pad(sequence.features, (0, 0, 0, longest - len(sequence.features))),
        )
        for sequence in sequences
    ]
    batch = pack_batch(padded)
    num_rows = torch.tensor([sequence.num_rows for sequence in sequences])
    is_real_P = batch.position_ids < num_rows.repeat_interleave(torch.tensor(batch.lengths))
    return dataclasses.replace(batch, loss_mask=batch.loss_mask & is_real_P)


def _bench_packing(options: argparse.Namespace) -> dict[str, object]:
    policy = LoadedPolicy(options.model, max_new_tokens=_MAX_NEW_TOKENS)
    prompts = policy.prompts(options.prompts, _NUM_REQUESTS // _NUM_SAMPLES)
    params = policy.params(_MAX_NEW_TOKENS, num_samples=_NUM_SAMPLES, seed=_SEED)
    by_length = sorted(policy.draft_sequences(prompts, params), key=lambda each: each.num_rows)
    # A buffer returns sequences in random order.
    order = torch.randperm(len(by_length), generator=torch.Generator().manual_seed(_SEED))
    sequences = [by_length[index] for index in order.tolist()]
    packed = pack_sequences(sequences, options.batch_tokens)
    size = max(1, round(len(sequences) / len(packed)))
    batches = {"packed": packed}
    for name, ordered in (("padded", sequences), ("padded, sorted", by_length)):
        starts = range(0, len(ordered), size)
        batches[name] = [pad_batch(ordered[start : start + size]) for start in starts]

    def training(of_variant: Sequence[DraftBatch]) -> Callable[[], object]:
        section = DrafterSection(algorithm="hass", batch_tokens=options.batch_tokens)
        trainer = DrafterTrainer(policy.load_drafter(options.drafter), section)
        return lambda: [trainer.step(batch) for batch in of_variant]

    runs = {name: training(of_variant) for name, of_variant in batches.items()}
    seconds = interleave(runs, options.rounds, cpu_seconds)
    against = {name: ratios(values, seconds["packed"]) for name, values in seconds.items()}
    lengths = [sequence.num_rows for sequence in by_length]
    rows = [
        [name, sum(batch.num_rows for batch in batches[name]),
         round(sum(lengths) / statistics.median(values)), told(against[name])]
        for name, values in seconds.items()
    ]  # fmt: skip
    described = f"median {statistics.median(lengths):.0f}, longest {lengths[-1]}"
    title = f"{len(lengths)} sequences, rows {described}; {size} per padded batch"
    print_table(title, ("batches", "rows computed", "tokens/s", "packed over it"), rows)
    return {"packing_ratio": against["padded"], "packing_ratio_sorted": against["padded, sorted"]}


def measure_blocking(trainer: DrafterTrainer, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Return the seconds that the trainer waits for a checkpoint, by variant and round."""
    model = trainer.model
    borrowed = {"target.embedding": model.embedding_VD, "target.lm_head": model.lm_head_VD}
    checkpointer = AsyncDrafterCheckpointer(folder / "asynchronous")
    file = folder / "synchronous.safetensors"
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def save_all() -> None:
        save_file(trainer.state_dict() | borrowed, file)
        sync_path(file)

    def save_own() -> None:
        checkpoint = DrafterCheckpoint(
            config=config_of(model), weights=weights, state=trainer.state_dict(), record={}
        )
        checkpointer.save(checkpoint)

    def blocked_seconds(save: Callable[[], object]) -> float:
        seconds = wall_seconds(save)
        checkpointer.wait()  # the next variant finds the disk idle
        return seconds

    variants: dict[str, Callable[[], None]] = {FULL: save_all, ASYNCHRONOUS: save_own}
    seconds = interleave(variants, rounds, blocked_seconds)
    checkpointer.close()
    return seconds


def _bench_checkpoints(options: argparse.Namespace) -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    shape = (_REAL_TARGET.vocab_size, _REAL_TARGET.hidden_size)
    embedding = torch.randn(shape, generator=generator).bfloat16()
    config = make_draft_config(_REAL_TARGET, "eagle", embedding)
    model = DraftModel(config, embedding_VD=embedding, lm_head_VD=embedding.clone())
    trainer = DrafterTrainer(model, DrafterSection(algorithm="eagle"))
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="checkpoints-") as folder:
        seconds = measure_blocking(trainer, Path(folder), options.checkpoint_rounds)
    ratio = ratios(seconds[FULL], seconds[ASYNCHRONOUS])
    title = "milliseconds that the trainer waits for a checkpoint"
    row = [*(1e3 * statistics.median(values) for values in seconds.values()), told(ratio)]
    print_table(title, (FULL, ASYNCHRONOUS, "less by"), [row], num_names=0)
    return {
        "checkpoint_blocking_ratio": ratio,
        "checkpoint_seconds": {name: spread(values) for name, values in seconds.items()},
    }
