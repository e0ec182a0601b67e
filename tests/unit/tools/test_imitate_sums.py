"""Imitation of right sums: what it trains on, and that the folder it writes has learned."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from tests.tiny_task import make_tiny_task
from tools.tiny_models import imitate_sums, sum_task
from tools.tiny_models.imitate_sums import draw_batches, loss_of


def test_it_learns_right_responses_and_writes_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tiny_task(tmp_path, kind="llama")
    model, task, out = tmp_path / "model", tmp_path / "task", tmp_path / "sums"
    sum_task.main(["--out", str(task), "--train", "1", "--eval", "3"])
    folders = ["--model", str(model), "--task", str(task), "--out", str(out)]
    imitate_sums.main([*folders, "--steps", "8", "--lr", "0.01", "--threads", "1"])
    tokenizer = AutoTokenizer.from_pretrained(out)
    rows = next(draw_batches(tokenizer, frozenset(), random.Random(9)))
    before, after = (LlamaForCausalLM.from_pretrained(folder) for folder in (model, out))
    with torch.no_grad():
        assert loss_of(after, rows) < 0.7 * loss_of(before, rows)
    imitate_sums.main(folders)
    assert capsys.readouterr().out.rstrip().endswith("is there already")


def test_held_out_sums_are_not_imitated_and_prompts_are_no_labels(tmp_path: Path) -> None:
    make_tiny_task(tmp_path, kind="llama")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    drawn = random.Random(3)
    held_out = frozenset(sum_task.prompt(sum_task.draw(drawn)) for _ in range(40))
    held_out_ids = {tuple(tokenizer.encode(prompt)) for prompt in held_out}
    rows = next(draw_batches(tokenizer, held_out, random.Random(3)))
    assert not held_out_ids & {tuple(ids[:num_prompt]) for ids, num_prompt in rows}

    model = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    ids, num_prompt = rows[0]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        log_probs_TV = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    of_labels = [log_probs_TV[i - 1, ids[i]] for i in range(num_prompt, len(ids))]
    mean = sum(of_labels).item() / len(of_labels)
    assert loss_of(model, [(ids, num_prompt)]).item() == pytest.approx(-mean, rel=1e-2)
