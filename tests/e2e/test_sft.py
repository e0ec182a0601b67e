"""Supervised runs through the whole program: equal to a plain PyTorch loop, also resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.mcore_policy import check_same_bits, load_hf
from tests.ranks import LIMIT_S
from tests.tiny_models import make_tiny_hf
from tests.tiny_task import make_tiny_task, metric_rows, run, run_ending, weights
from tlt_megatron.config.schema import DataSection
from tlt_megatron.data.prompts import PromptSampler, load_prompts
from tlt_megatron.data.rows import Kind
from tlt_megatron.data.tokenizer import load_tokenizer
from tools.tiny_models import make_tiny_policy
from tools.tiny_models.make_tiny_policy import SIZES, Settings, is_made, make_tokenizer

pytestmark = pytest.mark.e2e

SFT = ("algorithm.advantage=sft", "logging.trackers=[]", "rollout.num_prompts=6")
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}a:{{ m['content'] }}<eos>{% else %}"
    "q:{{ m['content'] }}{% endif %}#{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a task whose rows are answered: strings, and chats of one and two turns."""
    folder = tmp_path_factory.mktemp("task")
    config = make_tiny_task(folder)
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    rows: list[dict[str, Any]] = [{"prompt": f"{i}+1=", "label": str(i + 1)} for i in range(8)]
    for i in range(8):
        turn = {"role": "assistant", "content": f"{i}{i}", "weight": int(i != 3)}
        chat = [{"role": "user", "content": f"{i}"}, turn]
        more = [{"role": "user", "content": "bc"}, {"role": "assistant", "content": "d"}]
        rows.append({"messages": chat + more * (i % 2)})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "train.jsonl").write_text(text)
    (folder / "eval.jsonl").write_text(text)
    return config


def _by_torch(folder: Path, rows: Path, lrs: list[float], batch: int, eps: float) -> list[float]:
    """The losses of a plain loop over the same batches, one step for each learning rate."""
    section = DataSection(max_prompt_tokens=16)
    found = load_prompts(
        rows, load_tokenizer(folder), section, kind=Kind.ANSWERED, max_answer_tokens=600
    )
    sampler = PromptSampler(found, shuffle=True, seed=0)
    model = load_hf(folder)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    adam = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=eps,
    )
    losses = []
    for lr in lrs:
        total, count = torch.zeros(()), 0
        for row in sampler.next_batch(batch):
            assert row.answer is not None
            ids = torch.tensor([*row.token_ids, *row.answer.token_ids])
            logits = model(ids[None]).logits[0, len(row.token_ids) - 1 : -1]
            mask = torch.tensor(row.answer.mask)
            targets = torch.tensor(row.answer.token_ids)
            losses_T = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
            total, count = total + losses_T[mask].sum(), count + int(mask.sum())
        losses.append(float(total) / count)
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in adam.param_groups:
            group["lr"] = lr
        adam.step()
        adam.zero_grad()
    return losses


def test_experts_equal_a_plain_loop_of_torch(task: Path, tmp_path: Path) -> None:
    """Two ranks that share the experts of a mixture."""
    shutil.copytree(task.parent, tmp_path / "task")
    model = tmp_path / "task" / "model"
    make_tiny_hf(model, "qwen3_moe", vocab_size=48, eos_token_id=1, pad_token_id=0)
    short = ("optimizer.eps=1e-6", "run.num_steps=5", "data.eval=", f"model.path={model}")
    run(2, task, tmp_path / "run", *SFT, "parallel.expert=2", *short)
    found = [row["sft/loss"] for row in metric_rows(tmp_path / "run")]
    assert found == pytest.approx(
        _by_torch(model, task.parent / "train.jsonl", [1e-3] * 5, 6, 1e-6), rel=1e-5
    )


def test_twenty_steps_equal_a_plain_loop_of_torch(task: Path, tmp_path: Path) -> None:
    run(1, task, tmp_path, *SFT, "optimizer.eps=1e-6", "run.num_steps=20")
    rows = metric_rows(tmp_path)
    found = [row["sft/loss"] for row in rows if "sft/loss" in row]
    folder = task.parent
    expected = _by_torch(folder / "model", folder / "train.jsonl", [1e-3] * 20, 6, 1e-6)
    assert found == pytest.approx(expected, rel=1e-5)
    held_out = [row["eval/loss"] for row in rows if "eval/loss" in row]
    assert held_out[-1] < 0.8 * held_out[0]
    assert all(row["sft/tokens_per_s"] > 0 for row in rows if "sft/loss" in row)
    assert (tmp_path / "hf" / "model.safetensors").is_file()


def test_the_policy_of_the_quickstart_equals_a_plain_loop_and_is_made_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is whole, kept, made anew when settings change, and no folder of others is replaced."""
    out = tmp_path / "policy"
    arguments = ["--out", str(out), "--steps", "20"]
    make_tiny_policy.main(arguments)
    assert load_hf(out).config.hidden_size == SIZES["hidden_size"]
    assert AutoTokenizer.from_pretrained(out).get_vocab() == make_tokenizer().get_vocab()
    rows = [json.loads(line) for line in (out / "eval.jsonl").read_text().splitlines()]
    assert rows[0].keys() == {"prompt", "label", "metadata"}
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]

    steps = metric_rows(out / "sft_run")
    lrs = [row["actor/lr"] for row in steps]
    assert len(set(lrs)) > 10
    expected = _by_torch(out / "start", out / "start" / "derivations.jsonl", lrs, 16, 1e-8)
    assert [row["sft/loss"] for row in steps] == pytest.approx(expected, rel=1e-5)

    stamp = (out / "config.json").stat().st_mtime_ns
    capfd.readouterr()
    make_tiny_policy.main(arguments)
    assert "same settings" in capfd.readouterr().out
    assert (out / "config.json").stat().st_mtime_ns == stamp
    assert not is_made(out, Settings(steps=3))
    assert not is_made(tmp_path / "elsewhere", Settings())
    with pytest.raises(SystemExit, match="not a folder that this tool made"):
        make_tiny_policy.main(["--out", str(tmp_path), "--steps", "1"])
    assert out.is_dir()

    again = tmp_path / "interrupted"
    command = [sys.executable, "-m", make_tiny_policy.__name__, "--steps", "20", "--out", again]
    process = subprocess.Popen(command, start_new_session=True, preexec_fn=_heed_interrupts)
    metrics = again / "sft_run" / "metrics.jsonl"
    while not metrics.is_file() or not metrics.read_text():
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
    assert process.wait(LIMIT_S) == 1
    assert "the same command goes on" in capfd.readouterr().err
    assert not is_made(again, Settings(steps=20))
    make_tiny_policy.main([*arguments[:1], str(again), *arguments[2:]])
    check_same_bits(weights(again / "sft_run"), weights(out / "sft_run"))


def _heed_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it


@pytest.mark.parametrize(
    "layout",
    [
        (2, "parallel.pipeline=2", "mcore.recompute=full"),
        (2, "model.lora_rank=4", "algorithm.num_minibatches=2"),
        (2, "parallel.context=2"),
    ],
    ids=str,
)
def test_a_layout_equals_one_rank_and_a_resume_the_straight_run(
    task: Path, tmp_path: Path, layout: tuple[Any, ...]
) -> None:
    num_ranks, *settings = layout
    short = (*SFT, *settings, "data.eval=", "optimizer.eps=1e-5")
    run(num_ranks, task, tmp_path / "straight", *short, "run.num_steps=3")
    run(num_ranks, task, tmp_path / "resumed", *short, "run.num_steps=1")
    run(num_ranks, task, tmp_path / "resumed", *short, "run.num_steps=3", "--resume=auto")
    check_same_bits(weights(tmp_path / "resumed"), weights(tmp_path / "straight"))
    plain = [each for each in short if not each.startswith("parallel.")]
    run(1, task, tmp_path / "one", *plain, "run.num_steps=3")
    losses = [[row["sft/loss"] for row in metric_rows(tmp_path / n)] for n in ("straight", "one")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_assistant_alone_is_imitated(task: Path) -> None:
    tokenizer = load_tokenizer(task.parent / "model")
    rows = load_prompts(
        task.parent / "train.jsonl",
        tokenizer,
        DataSection(max_prompt_tokens=16),
        kind=Kind.ANSWERED,
        max_answer_tokens=24,
    ).rows
    texts = []
    for row in (rows[0], rows[8], rows[9]):
        assert row.answer is not None
        pairs = zip(row.answer.token_ids, row.answer.mask, strict=True)
        learned = [token for token, is_learned in pairs if is_learned]
        whole = (*row.token_ids, *row.answer.token_ids)
        texts.append([tokenizer.decode(ids, skip_special_tokens=False) for ids in (whole, learned)])
    assert texts == [
        ["0+1=1<eos>", "1<eos>"],
        ["q:0#a:00<eos>", "00<eos>"],
        ["q:1#a:11<eos>#q:bc#a:d<eos>", "11<eos>d<eos>"],
    ]


def test_settings_of_rollouts_are_refused_or_named(task: Path, tmp_path: Path) -> None:
    said = run_ending(2, 1, task, tmp_path / "no", *SFT, "algorithm.filter_groups=score")
    assert "algorithm.filter_groups='score': must be none where algorithm.advantage='sft'" in said
    said = run_ending(
        0, 1, task, tmp_path / "run", *SFT, "rollout.temperature=0.5", "run.num_steps=1"
    )
    assert "settings without effect: " in said
    assert "rollout.temperature" in said
