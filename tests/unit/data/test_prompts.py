"""Which prompts a file gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.data.conftest import write_rows, write_tokenizer
from tlt_megatron.config.schema import DataSection
from tlt_megatron.data.prompts import PromptSet, load_prompts
from tlt_megatron.data.tokenizer import Tokenizer, load_tokenizer

Load = Callable[..., PromptSet]


def test_overlong_prompts_are_left_out_named_and_never_cut(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    """The others stand in file order."""
    found = load([{"prompt": "x" * n, "label": n} for n in (4, 5, 6, 1, 2)], max_prompt_tokens=4)
    assert [len(row.token_ids) for row in found.rows] == [4, 1, 2]
    assert "2 of 5 prompts are longer than data.max_prompt_tokens=4" in caplog.text
    assert "t:2, t:3" in caplog.text
    assert [prompt.draw_index for prompt in found.rows] == [0, 1, 2]
    with pytest.raises(ValueError, match=r"all 1 prompts are longer than data\.max_prompt"):
        load([{"prompt": "x" * 5, "label": 1}], max_prompt_tokens=4)


def test_messages_without_a_template_name_the_row(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "a"}], "label": "1"}]
    path = write_rows(tmp_path / "t.jsonl", rows)
    plain = load_tokenizer(write_tokenizer(tmp_path / "plain", chat_template=None))
    with pytest.raises(ValueError, match=r"t\.jsonl row 1: prompt .* no chat template"):
        load_prompts(path, plain, DataSection())


def test_fingerprint_follows_content_not_place(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def fingerprint(name: str, label: str) -> str:
        path = write_rows(tmp_path / name, [{"prompt": "a", "label": label, "id": "1"}])
        return load_prompts(path, tokenizer, DataSection()).fingerprint

    assert fingerprint("a.jsonl", "1") == fingerprint("b.jsonl", "1")
    assert fingerprint("a.jsonl", "1") != fingerprint("c.jsonl", "2")
