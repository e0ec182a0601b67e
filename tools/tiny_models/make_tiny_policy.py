"""Makes what the quickstart needs, from scratch: a tiny Llama policy, its tokenizer, train.jsonl
and eval.jsonl.

    python -m tools.tiny_models.make_tiny_policy --out build/tiny_policy

start/ holds an untrained model and derivations of tools/tiny_models/reasoning_task.py as rows.
examples/sft.yaml trains it on them: a supervised run of this program on 2 ranks, in sft_run/. A
share of the derivations contains one error (a "slip"), like text written by people. So the policy
knows the method: greedy decoding is nearly always right. At temperature 1 it slips as often as the
derivations, and reinforcement learning can remove that. It cannot see its earlier slips, so slips
are independent, slip_share per derivation, and sampled accuracy is about exp(-slip_share). The
problems of eval.jsonl are in neither the derivations nor train.jsonl.

A finished folder made with the same settings and sources is kept. An interrupted one goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import signal
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from tlt_megatron.cli import ROOT, train_command
from tlt_megatron.runtime.durable import new_folder
from tlt_megatron.runtime.parent import run_environment
from tools.tiny_models import reasoning_task
from tools.tiny_models.reasoning_task import Problem, ProblemSampler
from tools.tiny_models.task_rows import write_rows

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
RECIPE = ROOT / "examples" / "sft.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that, with the sources, determine the result."""

    steps: int | None = None  # optimizer steps, at least 1; None: the recipe's
    seed: int = 0
    slip_share: float = 0.85  # share of the derivations, in [0, 1)
    derivations: int = 14_400  # each is seen once

    def key(self) -> str:
        """Return a hash of the settings and of the sources that make the result."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode())
        for source in (__file__, reasoning_task.__file__, RECIPE):
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
    if _made_with(out) != settings.key():
        with new_folder(out) as folder:
            _write_task(folder, settings)
            made_with = {"key": settings.key(), "settings": asdict(settings)}
            (folder / MADE_WITH).write_text(json.dumps(made_with, indent=2) + "\n", "utf-8")
    _train(out, settings)
    print(f"made {out}")


def is_made(out: Path, settings: Settings) -> bool:
    """Return whether `out` holds a finished model made with these settings and sources."""
    return (out / "config.json").is_file() and _made_with(out) == settings.key()


def _made_with(out: Path) -> str | None:
    path = out / MADE_WITH
    return json.loads(path.read_text(encoding="utf-8")).get("key") if path.is_file() else None


def split_problems(seed: int) -> tuple[list[Problem], list[Problem]]:
    """Return the problems of train.jsonl and of eval.jsonl, without overlap."""
    held_out = ProblemSampler().draw_distinct(_NUM_EVAL, random.Random(f"eval-{seed}"))
    sampler = ProblemSampler(frozenset(held_out))
    return sampler.draw_distinct(_NUM_TRAIN, random.Random(f"train-{seed}")), held_out


def task_rows(problems: list[Problem]) -> list[dict[str, Any]]:
    """Return a row for each problem, in slime's keys."""
    rows = []
    for problem in problems:
        right = reasoning_task.render(problem, reasoning_task.derive(problem))
        metadata = {**asdict(problem), "right_tokens": reasoning_task.num_tokens(right)}
        rows.append(
            {"prompt": problem.prompt, "label": reasoning_task.label(problem), "metadata": metadata}
        )
    return rows


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


def derivation_rows(settings: Settings, excluded: list[Problem]) -> list[dict[str, Any]]:
    """Return derivations as rows with `prompt` and `label`, without the problems of `excluded`."""
    sampler, rng = ProblemSampler(frozenset(excluded)), random.Random(f"corpus-{settings.seed}")
    rows = []
    for problem in (sampler.draw(rng) for _ in range(settings.derivations)):
        has_slip = rng.random() < settings.slip_share
        steps = reasoning_task.slip(problem, rng)[0] if has_slip else reasoning_task.derive(problem)
        rows.append({"prompt": problem.prompt, "label": reasoning_task.render(problem, steps)})
    return rows


def _write_task(folder: Path, settings: Settings) -> None:
    """Write the task, and the untrained model with the derivations."""
    disable_progress_bar()
    train_problems, eval_problems = split_problems(settings.seed)
    write_rows(folder / "train.jsonl", task_rows(train_problems))
    write_rows(folder / "eval.jsonl", task_rows(eval_problems))
    start = folder / "start"
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(start)
    torch.manual_seed(settings.seed)
    make_model(tokenizer).save_pretrained(start)
    write_rows(start / "derivations.jsonl", derivation_rows(settings, eval_problems))


def _train(out: Path, settings: Settings) -> None:
    """Run the recipe, or go on with it, and put its policy into `out`."""
    start, run = out / "start", out / "sft_run"
    own = [f"model.path={start}", f"data.train={start / 'derivations.jsonl'}", f"run.dir={run}"]
    own += [f"run.seed={settings.seed}", "run.device=cpu", "checkpoint.resume=auto"]
    own += [f"run.num_steps={settings.steps}"] if settings.steps else []
    command = train_command([str(RECIPE), "--nproc-per-node", "2", *own])
    process = subprocess.Popen(command, env=run_environment())
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run saves and says how it goes on
    code = process.wait()
    signal.signal(signal.SIGINT, before)
    if code or not (run / "hf").is_dir():
        raise SystemExit(code or f"{out}: stopped before its last step; the same command goes on")
    for path in (run / "hf").iterdir():
        if path.name != "config.json":
            shutil.copy(path, out / path.name)
    shutil.copy(run / "hf" / "config.json", out / "config.json")  # the last one: it is made


def _parse(arguments: list[str] | None) -> tuple[Path, Settings]:
    defaults = Settings()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/tiny_policy"))
    parser.add_argument(
        "--steps",
        type=int,
        default=defaults.steps,
        help="of the supervised run; default: the recipe's",
    )
    parser.add_argument("--seed", type=int, default=defaults.seed)
    options = vars(parser.parse_args(arguments))
    if options["steps"] is not None and options["steps"] < 1:
        parser.error(f"--steps {options['steps']}: must be >= 1")
    return options.pop("out"), Settings(**options)


if __name__ == "__main__":
    main()
