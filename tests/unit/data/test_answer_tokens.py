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

ASK = {"role": "user", "content": "q"}
ASKED = "<|user|>q<eot><|assistant|>"


def say(text: str, **flags: object) -> dict[str, object]:
    return {"role": "assistant", "content": text, **flags}


def learned(tokenizer: Tokenizer, folder: Path, row: dict[str, Any], **section: Any) -> list[str]:
    """The texts of a row's prompt, of its answer, and of what is imitated."""
    settings = DataSection(label_key="completion" if "completion" in row else "", **section)
    path = write_rows(folder / "t.jsonl", [row])
    kind: dict[str, Any] = {"kind": Kind.ANSWERED, "max_answer_tokens": 99}
    (found,) = load_prompts(path, tokenizer, settings, **kind).rows
    assert found.answer is not None
    pairs = zip(found.answer.token_ids, found.answer.mask, strict=True)
    parts = found.token_ids, found.answer.token_ids, [token for token, is_on in pairs if is_on]
    return [tokenizer.decode(part, skip_special_tokens=False) for part in parts]


@pytest.mark.parametrize(
    ("row", "texts"),
    [
        ({"prompt": "q", "completion": "a"}, ["q", "a<eos>", "a<eos>"]),
        ({"prompt": [{**ASK, "role": "system"}], "label": "a"}, ["<|system|>q<eot><|assistant|>", "a<eot>", "a<eot>"]),
        ({"messages": [ASK, say("")]}, [ASKED, "<eot>", "<eot>"]),
        ({"messages": [ASK, say("a", weight=0), ASK, say("b", weight=1)]}, [ASKED, f"a<eot>{ASKED}b<eot>", "b<eot>"]),
        ({"messages": [ASK, say("a", train=True), ASK, say("b", loss=False)]}, [ASKED, "a<eot>", "a<eot>"]),
        ({"prompt": [ASK, say("a"), ASK], "completion": [say("b")]}, [ASKED, f"a<eot>{ASKED}b<eot>", "b<eot>"]),
    ],
    ids=["texts", "system", "empty", "weight", "train", "completion"],
)  # fmt: skip
def test_rows_as_people_have_them(
    tokenizer: Tokenizer, tmp_path: Path, row: dict[str, Any], texts: list[str]
) -> None:
    assert learned(tokenizer, tmp_path, row) == texts


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": [ASK, say("a", weight=0.5)]}, r"t\.jsonl row 1: message 1: weight=0\.5: must be 0 or 1"),
        ({"messages": [ASK, say("a", train="no")]}, "message 1: train='no': must be 0 or 1"),
        ({"messages": [ASK, say("a", weight=0)]}, "no turn of the assistant is to be imitated"),
        ({"messages": [say("a")]}, "the first message is of the assistant"),
        ({"messages": [ASK]}, "label .* is missing"),
        ({"prompt": "q", "completion": ""}, "completion='' must not be empty"),
        ({"prompt": "q", "completion": [say("b")]}, "completion is a list of messages, so prompt must be one"),
        ({"prompt": [ASK], "label": [1]}, r"label\[0\]=1 must be a message with the strings role"),
        ({"prompt": "q", "label": "a" * 99}, r"longer than .*=1024, or their answers than .*tokens=99$"),
    ],
)  # fmt: skip
def test_rows_without_an_answer_are_refused(
    tokenizer: Tokenizer, tmp_path: Path, row: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        learned(tokenizer, tmp_path, row)
