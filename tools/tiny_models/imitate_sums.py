"""Fine-tunes SmolLM2 on right sums: `python -m tools.tiny_models.imitate_sums --model build/smollm2
--out build/smollm2_sums`.

The model as it is answers a long sum at temperature 1 with babble, which no drafter predicts. A
reasoning model has imitated right responses before RL begins, and so has the one that this writes:
it adds line by line, and slips. The sums are drawn as those of tools/tiny_models/sum_task.py,
without the held-out ones. AdamW with float32 weights and bfloat16 products, some three minutes on 2
cores.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from tlt_megatron.runtime.durable import new_folder
from tools.tiny_models import sum_task
from tools.tiny_models.imitation import NO_LABEL, Row, pack, pad

_BATCH_TOKENS = 2048  # in one optimizer step, padding included
_SUMS_AT_ONCE = 64  # drawn and sorted by length, so that batches have little padding


def main(arguments: list[str] | None = None) -> None:
    """Train and write the folder, unless it is there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("--model", type=Path, default=Path("build/smollm2"))
    add("--task", type=Path, default=Path("build/sum_task"), help="holds the held-out sums")
    add("--out", type=Path, default=Path("build/smollm2_sums"))
    add("--steps", type=int, default=40)
    add("--lr", type=float, default=5e-5)
    add("--threads", type=int, default=2)
    add("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    out: Path = options.out
    if (out / "config.json").is_file():
        print(f"{out} is there already")
        return
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = LlamaForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    lines = (options.task / "eval.jsonl").read_text(encoding="utf-8").splitlines()
    held_out = frozenset(json.loads(line)["prompt"] for line in lines)
    batches = draw_batches(tokenizer, held_out, random.Random(options.seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0)
    for step in range(1, options.steps + 1):
        loss = loss_of(model, next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}/{options.steps} loss {loss.item():.3f}", flush=True)
    with new_folder(out) as folder:
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    print(f"made {out}")


def draw_batches(
    tokenizer: PreTrainedTokenizerBase, held_out: frozenset[str], rng: random.Random
) -> Iterator[list[Row]]:
    """Yield lists of rows of at most _BATCH_TOKENS, without end; no row has a prompt of
    `held_out`.
    """
    while True:
        rows: list[Row] = []
        while len(rows) < _SUMS_AT_ONCE:
            terms = sum_task.draw(rng)
            if sum_task.prompt(terms) not in held_out:
                prompt_ids = tokenizer.encode(sum_task.prompt(terms))
                right = sum_task.right_response(terms)
                right_ids = tokenizer.encode(right, add_special_tokens=False)
                ids = [*prompt_ids, *right_ids, tokenizer.eos_token_id]
                rows.append((ids, len(prompt_ids)))
        batches = pack(rows, _BATCH_TOKENS)
        rng.shuffle(batches)
        yield from batches


def loss_of(model: LlamaForCausalLM, rows: list[Row]) -> Tensor:
    """Return the mean cross entropy of the response tokens of `rows`."""
    ids_BT, labels_BT = pad(rows, pad_id=0)
    is_label_BT = labels_BT != NO_LABEL
    with torch.autocast("cpu", torch.bfloat16):
        states_BTF = model.model(ids_BT).last_hidden_state
        logits_NV = model.lm_head(states_BTF[is_label_BT])
    return F.cross_entropy(logits_NV.float(), labels_BT[is_label_BT])


if __name__ == "__main__":
    main()
