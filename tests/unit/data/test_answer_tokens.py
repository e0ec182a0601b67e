"""What supervised training imitates of the rows that people have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.data.conftest import write_rows
from tlt_megatron.config.schema import DataSection
from tlt_megatron.data.prompts import load_prompts
from tlt_megatron.data.rows import Kind
from tlt_megatron.data.tokenizer import Tokenizer

ASK, SYSTEM = {"role": "user", "content": "q"}, {"role": "system", "content": "s"}


def say(text: str, **flags: object) -> dict[str, object]:
    return {"role": "assistant", "content": text, **flags}


def learned(tokenizer: Tokenizer, folder: Path, row: dict[str, Any], **section: Any) -> list[str]:
    """The texts of a row's prompt, of its answer, and of what is imitated."""
    path = write_rows(folder / "t.jsonl", [row])
    settings = DataSection(**section)
    (found,) = load_prompts(
        path, tokenizer, settings, kind=Kind.ANSWERED, max_answer_tokens=99
    ).rows
    assert found.answer is not None
    pairs = zip(found.answer.token_ids, found.answer.mask, strict=True)
    parts = found.token_ids, found.answer.token_ids, [token for token, is_on in pairs if is_on]
    return [tokenizer.decode(part, skip_special_tokens=False) for part in parts]


@pytest.mark.parametrize(
    ("row", "keys", "prompt", "answer", "imitated"),
    [
        ({"prompt": "q", "completion": "a"}, {"label_key": "completion"}, "q", "a<eos>", "a<eos>"),
        ({"prompt": [SYSTEM], "label": "a"}, {}, "<|system|>s<eot><|assistant|>", "a<eot>", "a<eot>"),
        ({"messages": [ASK, say("")]}, {}, "<|user|>q<eot><|assistant|>", "<eot>", "<eot>"),
        (
            {"messages": [ASK, say("a", weight=0), ASK, say("b", weight=1)]}, {},
            "<|user|>q<eot><|assistant|>", "a<eot><|user|>q<eot><|assistant|>b<eot>", "b<eot>",
        ),
        (
            {"messages": [ASK, say("a", train=True), ASK, say("b", loss=False)]}, {},
            "<|user|>q<eot><|assistant|>", "a<eot>", "a<eot>",
        ),
        (
            {"prompt": [ASK, say("a"), ASK], "completion": [say("b")]}, {"label_key": "completion"},
            "<|user|>q<eot><|assistant|>", "a<eot><|user|>q<eot><|assistant|>b<eot>", "b<eot>",
        ),
    ],
    ids=["texts", "system", "empty", "weight", "train", "completion"],
)  # fmt: skip
def test_rows_as_people_have_them(
    tokenizer: Tokenizer,
    tmp_path: Path,
    row: dict[str, Any],
    keys: dict[str, str],
    prompt: str,
    answer: str,
    imitated: str,
) -> None:
    assert learned(tokenizer, tmp_path, row, **keys) == [prompt, answer, imitated]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": [ASK, say("a", weight=0.5)]}, r"message 1: weight=0\.5: must be 0 or 1"),
        ({"messages": [ASK, say("a", train="no")]}, "message 1: train='no': must be 0 or 1"),
        ({"messages": [ASK, say("a", weight=0)]}, "no turn of the assistant is to be imitated"),
        ({"messages": [say("a")]}, "the first message is of the assistant"),
        ({"messages": [ASK]}, "label .* is missing"),
        ({"prompt": "q", "label": ""}, "label='' must not be empty"),
        (
            {"prompt": "q", "label": [say("b")]},
            "label is a list of messages, so prompt must be one",
        ),
        ({"prompt": [ASK], "label": [1]}, r"label\[0\]=1 must be a message with the strings role"),
    ],
)
def test_rows_without_an_answer_are_refused(
    tokenizer: Tokenizer, tmp_path: Path, row: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=rf"t\.jsonl row 1: {says}"):
        learned(tokenizer, tmp_path, row)


def test_rows_that_are_too_long_are_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"longer than .*=4, or their answers than .*tokens=99$"):
        learned(tokenizer, tmp_path, {"prompt": "q", "label": "a" * 99}, max_prompt_tokens=4)
