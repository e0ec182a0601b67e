"""Measures what packing and asynchronous, selective checkpoints gain in drafter training.

    python -m tools.bench drafter --model build/tiny_policy --drafter build/tiny_drafter

Packing: the policy answers prompts, and the drafter trains for one pass on the answers, with their real long-tailed lengths.
There are three variants: packed batches; batches of as many sequences (on average), padded to the longest; and padded batches
sorted by length, which reduces padding but gives up the random order. All use the same drafter and the same arithmetic on every
real row. Every round runs all variants. Ratios are taken within a round, in CPU time of this process.

Checkpoints: seconds that the trainer waits. Full: parameters, moments and the borrowed embedding and head go into one
safetensors file, fsynced, by the caller. Async: `AsyncDrafterCheckpointer`, which saves without the borrowed tensors. The
drafter has the proportions of a real target (a vocabulary of 32,768). Ratios are taken within a round, in wall time.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors.torch import save_file

from tlt_megatron.config.schema import DrafterSection
from tlt_megatron.drafter.drafter_trainer import DrafterTrainer
from tlt_megatron.drafter.packing import DraftBatch, DraftSequence, pack_batch, pack_sequences
from tlt_megatron.models.draft_model import DraftModel, make_draft_config
from tlt_megatron.runtime.durable import sync_path
from tlt_megatron.spot.drafter_checkpoint import AsyncDrafterCheckpointer
from tools.bench.measure import (
    add_policy_options,
    cpu_seconds,
    interleave,
    print_table,
    ratios,
    spread,
    wall_seconds,
)
from tools.gpu.shapes import QWEN_2_5_7B
from tools.load_engine import LoadedPolicy

PACKED, PADDED, SORTED = "packed", "padded", "padded, sorted"
FULL, ASYNCHRONOUS = "full", "async"
# A target of 80M parameters. The vocabulary takes 40 %, as in models of 0.5 to 3 billion.
REAL_TARGET = dataclasses.replace(
    QWEN_2_5_7B,
    vocab_size=32768,
    hidden_size=512,
    ffn_size=1536,
    num_layers=16,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
)


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this benchmark."""
    add_policy_options(add, "train")
    add("--algorithm", default="hass", choices=("eagle", "hass"))
    add("--dtype", default="float32", choices=("float32", "bfloat16"))
    add("--batch-tokens", type=int, default=4096, help="rows of a packed batch")
    add("--num-requests", type=int, default=256)
    add("--num-samples", type=int, default=8)
    add("--max-new-tokens", type=int, default=600)
    add("--rounds", type=int, default=5)
    add("--checkpoint-rounds", type=int, default=15)
    add("--folder", default="build", help="on the disk that checkpoints go to")
    add("--seed", type=int, default=2)


def run(options: argparse.Namespace, console: Console) -> dict[str, object]:
    """Measure and print two tables. Return the values of the JSON."""
    return _bench_packing(options, console) | _bench_checkpoints(options, console)


def pad_batch(sequences: Sequence[DraftSequence]) -> DraftBatch:
    """Return one batch of all `sequences`, each padded to the longest. Padding is computed but not trained on."""
    longest = max(sequence.token_ids.numel() for sequence in sequences)
    batch = pack_batch([_fill_up(sequence, longest) for sequence in sequences])
    num_rows = torch.tensor([sequence.num_rows for sequence in sequences])
    is_real_P = batch.position_ids < num_rows.repeat_interleave(torch.tensor(batch.lengths))
    return dataclasses.replace(batch, loss_mask=batch.loss_mask & is_real_P)


def _fill_up(sequence: DraftSequence, num_tokens: int) -> DraftSequence:
    def fill(tensor: torch.Tensor) -> torch.Tensor:
        other_dims = [0, 0] * (tensor.dim() - 1)
        return F.pad(tensor, [*other_dims, 0, num_tokens - len(tensor)])

    final = sequence.final_hidden
    return dataclasses.replace(
        sequence,
        token_ids=fill(sequence.token_ids),
        features=fill(sequence.features),
        final_hidden=None if final is None else fill(final),
    )


def _bench_packing(options: argparse.Namespace, console: Console) -> dict[str, object]:
    policy = LoadedPolicy(options.model, max_new_tokens=options.max_new_tokens)
    sequences = _collect(policy, options)
    packed = pack_sequences(sequences, options.batch_tokens)
    size = max(1, round(len(sequences) / len(packed)))
    by_length = sorted(sequences, key=lambda sequence: sequence.num_rows)
    batches = {
        PACKED: packed,
        PADDED: [pad_batch(sequences[i : i + size]) for i in range(0, len(sequences), size)],
        SORTED: [pad_batch(by_length[i : i + size]) for i in range(0, len(sequences), size)],
    }

    section = DrafterSection(
        algorithm=options.algorithm, dtype=options.dtype, batch_tokens=options.batch_tokens
    )

    def run(of_variant: Sequence[DraftBatch]) -> Callable[[], object]:
        trainer = DrafterTrainer(policy.load_drafter(options.drafter), section)
        return lambda: [trainer.step(batch) for batch in of_variant]

    runs = {name: run(of_variant) for name, of_variant in batches.items()}
    seconds = interleave(runs, options.rounds, cpu_seconds)
    against = {name: ratios(values, seconds[PACKED]) for name, values in seconds.items()}
    lengths = [sequence.num_rows for sequence in by_length]
    num_rows = sum(lengths)
    described = f"median {statistics.median(lengths):.0f}, p95 {lengths[int(0.95 * (len(lengths) - 1))]}, max {lengths[-1]}"
    print_table(
        console,
        f"{len(lengths)} sequences, rows {described}; {size} per padded batch",
        ("batches", "rows computed", "tokens/s", "packed over it", "min", "max"),
        (
            [name, sum(batch.num_rows for batch in batches[name]),
             round(num_rows / statistics.median(values)), *against[name].values()]
            for name, values in seconds.items()
        ),
    )  # fmt: skip
    return {
        "packing_ratio": against[PADDED],
        "packing_ratio_sorted": against[SORTED],
        "packed_tokens_per_s": spread([num_rows / value for value in seconds[PACKED]]),
        "num_sequences": len(lengths),
        "rows": described,
        "dtype": options.dtype,
        "algorithm": options.algorithm,
    }


def _collect(policy: LoadedPolicy, options: argparse.Namespace) -> list[DraftSequence]:
    """Return answers of the policy in random order."""
    prompts = policy.prompts(options.prompts, options.num_requests // options.num_samples)
    params = policy.params(
        options.max_new_tokens, num_samples=options.num_samples, seed=options.seed
    )
    sequences = policy.draft_sequences(prompts, params)
    # Responses that finish together have equal lengths, so shuffle them, as a buffer returns them in random order.
    order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(options.seed))
    return [sequences[index] for index in order.tolist()]


def _make_real_trainer() -> DrafterTrainer:
    generator = torch.Generator().manual_seed(0)
    shape = (REAL_TARGET.vocab_size, REAL_TARGET.hidden_size)
    embedding = torch.randn(shape, generator=generator).bfloat16()
    config = make_draft_config(REAL_TARGET, "eagle", embedding)
    model = DraftModel(config, embedding_VD=embedding, lm_head_VD=embedding.clone())
    return DrafterTrainer(model, DrafterSection(algorithm="eagle"))


def measure_blocking(
    trainer: DrafterTrainer, folder: Path, rounds: int
) -> tuple[dict[str, list[float]], float]:
    """Return the seconds that the trainer waits for a checkpoint, by variant and round, and the thread's median seconds."""
    model = trainer.model
    borrowed = {"target.embedding": model.embedding_VD, "target.lm_head": model.lm_head_VD}
    checkpointer = AsyncDrafterCheckpointer(folder / "asynchronous", model)
    file = folder / "synchronous.safetensors"

    def save_all() -> None:
        save_file(trainer.state_dict() | borrowed, file)
        sync_path(file)

    written = [checkpointer.writing_s]

    def blocked_seconds(save: Callable[[], object]) -> float:
        seconds = wall_seconds(save)
        checkpointer.wait()  # the next variant finds the disk idle
        written.append(checkpointer.writing_s)
        return seconds

    variants: dict[str, Callable[[], None]] = {
        FULL: save_all,
        ASYNCHRONOUS: lambda: checkpointer.save(trainer.state_dict(), {}),
    }
    seconds = interleave(variants, rounds, blocked_seconds)
    checkpointer.close()
    return seconds, statistics.median(b - a for a, b in pairwise(written) if b > a)


def _bench_checkpoints(options: argparse.Namespace, console: Console) -> dict[str, object]:
    trainer = _make_real_trainer()
    model = trainer.model
    own = sum(tensor.nbytes for tensor in trainer.state_dict().values()) / 1e6
    full = own + (model.embedding_VD.nbytes + model.lm_head_VD.nbytes) / 1e6
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="checkpoints-") as folder:
        seconds, written = measure_blocking(trainer, Path(folder), options.checkpoint_rounds)
    ratio = ratios(seconds[FULL], seconds[ASYNCHRONOUS])
    title = f"milliseconds that the trainer waits for a checkpoint ({full:.0f} MB, {own:.0f} MB of its own)"
    waits = [1e3 * statistics.median(values) for values in (*seconds.values(), [written])]
    row = [*waits, *(f"{value:.1f}" for value in ratio.values())]
    columns = (FULL, ASYNCHRONOUS, "thread", "less by", "min", "max")
    print_table(console, title, columns, [row], num_names=0)
    return {
        "checkpoint_blocking_ratio": ratio,
        "checkpoint_seconds": {name: spread(values) for name, values in seconds.items()},
        "checkpoint_background_s": written,
        "checkpoint_mb": {"full": full, "own": own},
    }
