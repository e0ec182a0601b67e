"""Makes what the quickstart needs, from scratch: a tiny Llama policy, its tokenizer, train.jsonl
and eval.jsonl.

    python -m tools.tiny_models.make_tiny_policy --out build/tiny_policy

The policy is pre-trained on derivations of tools/tiny_models/reasoning_task.py. A share of them
contain one error (a "slip"), like text written by people. So the policy knows the method: greedy
decoding is nearly always right. At temperature 1 it makes as many slips as the corpus, and
reinforcement learning can remove them. It cannot see its earlier slips, so slips are independent,
slip_share per derivation, and sampled accuracy is about exp(-slip_share): 0.46 of eval.jsonl, and
0.95 greedily. The problems of eval.jsonl are in neither the corpus nor train.jsonl. A finished
folder made with the same settings and sources is kept.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads are slow on a busy machine
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import hashlib
import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from tlt_megatron.runtime.durable import new_folder
from tlt_megatron.runtime.progress import Progress
from tools.tiny_models import imitation, reasoning_task
from tools.tiny_models.reasoning_task import Problem, ProblemSampler

MADE_WITH = "made_with.json"
SIZES: dict[str, Any] = {  # each can be cut by TP2 and PP2; 0.8M parameters
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MAX_POSITIONS = 1024
_SPECIAL = ("<pad>", "<eos>", "<unk>")
_NUM_TRAIN, _NUM_EVAL = 512, 64
_WARMUP_STEPS, _DECAY_SHARE = 30, 0.4  # the learning rate: linear up, flat, linear down to 5 %


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that, with the sources, determine the result."""

    steps: int = 1200  # optimizer steps, at least 1
    seed: int = 0
    slip_share: float = 0.85  # share of the corpus's derivations, in [0, 1)
    batch_tokens: int = 2048  # in a training batch, padding included
    lr: float = 3e-3

    def key(self) -> str:
        """Return a hash of the settings and of the sources that make the result."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode())
        for source in (__file__, reasoning_task.__file__, imitation.__file__):
            digest.update(Path(source).read_bytes())
        return digest.hexdigest()


def main(arguments: list[str] | None = None) -> None:
    """Make the folder, unless it is there."""
    out, settings = _parse(arguments)
    if is_made(out, settings):
        print(f"{out} is there, made with the same settings")
        return
    if out.exists() and not (out / MADE_WITH).is_file():
        raise SystemExit(f"out={out}: exists and is not a folder that this tool made")
    started = time.perf_counter()
    with new_folder(out) as folder:
        _make(folder, settings)
        made_with = {"key": settings.key(), "settings": asdict(settings)}
        (folder / MADE_WITH).write_text(json.dumps(made_with, indent=2) + "\n", encoding="utf-8")
    print(f"made {out} in {time.perf_counter() - started:.0f} s")


def is_made(out: Path, settings: Settings) -> bool:
    """Return whether `out` holds a finished model made with these settings and sources."""
    path = out / MADE_WITH
    return (
        path.is_file() and json.loads(path.read_text(encoding="utf-8")).get("key") == settings.key()
    )


def split_problems(seed: int) -> tuple[list[Problem], list[Problem]]:
    """Return the problems of train.jsonl and of eval.jsonl, without overlap."""
    held_out = ProblemSampler().draw_distinct(_NUM_EVAL, random.Random(f"eval-{seed}"))
    sampler = ProblemSampler(frozenset(held_out))
    return sampler.draw_distinct(_NUM_TRAIN, random.Random(f"train-{seed}")), held_out


def write_rows(path: Path, problems: list[Problem]) -> None:
    """Write one JSON line for each problem, in slime's keys."""
    rows = []
    for problem in problems:
        right = reasoning_task.render(problem, reasoning_task.derive(problem))
        metadata = {**asdict(problem), "right_tokens": reasoning_task.num_tokens(right)}
        rows.append(
            {"prompt": problem.prompt, "label": reasoning_task.label(problem), "metadata": metadata}
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character and one for the answer mark, padded to a
    multiple of 8 tokens.
    """
    tokens = [*_SPECIAL, *reasoning_task.SYMBOLS]
    tokens += [f"<unused{i}>" for i in range(-len(tokens) % 8)]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="<unk>"))
    pattern = Regex(f"{reasoning_task.ANSWER_MARK}|[\\s\\S]")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def make_model(
    tokenizer: PreTrainedTokenizerFast, max_positions: int = MAX_POSITIONS
) -> LlamaForCausalLM:
    """Return an untrained model. Set torch's seed first."""
    config = LlamaConfig(
        **SIZES,
        vocab_size=len(tokenizer),
        max_position_embeddings=max_positions,
        tie_word_embeddings=False,
        initializer_range=0.03,
        bos_token_id=None,
        eos_token_id=cast(int, tokenizer.eos_token_id),
        pad_token_id=cast(int, tokenizer.pad_token_id),
    )
    return LlamaForCausalLM(config)


def corpus_batches(
    settings: Settings, excluded: list[Problem], tokenizer: PreTrainedTokenizerFast
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (token ids [B, T], labels [B, T]) of similar lengths without end."""
    sampler, rng = ProblemSampler(frozenset(excluded)), random.Random(f"corpus-{settings.seed}")
    while True:
        num_prompts, texts = [], []
        for problem in (sampler.draw(rng) for _ in range(512)):
            if rng.random() < settings.slip_share:
                steps, _ = reasoning_task.slip(problem, rng)
            else:
                steps = reasoning_task.derive(problem)
            num_prompts.append(len(problem.prompt))
            texts.append(
                problem.prompt + reasoning_task.render(problem, steps) + str(tokenizer.eos_token)
            )
        rows = zip(tokenizer(texts)["input_ids"], num_prompts, strict=True)
        batches = imitation.pack(rows, settings.batch_tokens)
        rng.shuffle(batches)
        for batch in batches:
            yield imitation.pad(batch, cast(int, tokenizer.pad_token_id))


def train(
    model: LlamaForCausalLM, batches: Iterator[tuple[Tensor, Tensor]], settings: Settings
) -> None:
    """Train for `settings.steps` steps in fp32."""
    progress = Progress("auto", settings.steps)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.01
    )
    model.train()
    every = max(1, settings.steps // 20)
    for step, (ids_BT, labels_BT) in zip(range(1, settings.steps + 1), batches, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * _lr_factor(step, settings.steps)
        logits = model(input_ids=ids_BT, use_cache=False).logits[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits, labels_BT[:, :-1].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % every == 0:
            progress.step(step, {"loss": loss.item()})
    progress.close()


def _lr_factor(step: int, num_steps: int) -> float:
    decay = (num_steps - step) / max(1.0, _DECAY_SHARE * num_steps)
    return min(step / _WARMUP_STEPS, 1.0, max(0.05, decay))


def _make(folder: Path, settings: Settings) -> None:
    """Write everything into `folder`."""
    disable_progress_bar()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    train_problems, eval_problems = split_problems(settings.seed)
    write_rows(folder / "train.jsonl", train_problems)
    write_rows(folder / "eval.jsonl", eval_problems)
    tokenizer = make_tokenizer()
    torch.manual_seed(settings.seed)
    model = make_model(tokenizer)
    print(f"a policy of {model.num_parameters():,} parameters, {settings.steps} steps")
    train(model, corpus_batches(settings, eval_problems, tokenizer), settings)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _parse(arguments: list[str] | None) -> tuple[Path, Settings]:
    defaults = Settings()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/tiny_policy"))
    parser.add_argument("--steps", type=int, default=defaults.steps, help="of pre-training")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    options = vars(parser.parse_args(arguments))
    if options["steps"] < 1:
        parser.error(f"--steps {options['steps']}: must be >= 1")
    return options.pop("out"), Settings(**options)


if __name__ == "__main__":
    main()
