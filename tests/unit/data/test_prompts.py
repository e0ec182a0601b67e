"""Which prompts a file gives, with one rank and with several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.unit.data.conftest import write_rows
from tlt_megatron.config.schema import DataSection
from tlt_megatron.data.prompts import PromptSet, load_prompts
from tlt_megatron.data.tokenizer import Tokenizer, load_tokenizer
from tlt_megatron.runtime.process_groups import init_world

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
    assert (found.prompts(2), found.prompts(100)) == (found.rows[:2], found.rows)
    with pytest.raises(ValueError, match=r"all 1 prompts are longer than data\.max_prompt"):
        load([{"prompt": "x" * 5, "label": 1}], max_prompt_tokens=4)


def test_messages_without_a_template_name_the_row(
    plain_tokenizer_folder: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": [{"role": "user", "content": "a"}], "label": "1"}]
    path = write_rows(tmp_path / "t.jsonl", rows)
    with pytest.raises(ValueError, match=r"t\.jsonl row 1: prompt .* no chat template"):
        load_prompts(path, load_tokenizer(plain_tokenizer_folder), DataSection())


def load_on_ranks(path: Path, tokenizer: Tokenizer) -> list[PromptSet | str]:
    """What each of 3 ranks gets, or the error."""

    def rank() -> PromptSet | str:
        try:
            return load_prompts(path, tokenizer, DataSection(), init_world("gloo", 60.0))
        except ValueError as error:
            return str(error)

    return run_ranks(3, rank, has_world=False)


def test_all_ranks_get_the_same_prompts_or_the_same_error(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "t.jsonl", [{"prompt": f"a{n}", "label": n} for n in range(9)])
    alone = load_prompts(path, tokenizer, DataSection())
    assert load_on_ranks(path, tokenizer) == [alone] * 3
    write_rows(path, [{"prompt": [{"role": "judge", "content": ""}], "label": "1"}])
    (message,) = set(load_on_ranks(path, tokenizer))
    assert "row 1: prompt cannot be encoded" in str(message)


def test_fingerprint_follows_content_not_place(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def fingerprint(name: str, label: str) -> str:
        path = write_rows(tmp_path / name, [{"prompt": "a", "label": label, "id": "1"}])
        return load_prompts(path, tokenizer, DataSection()).fingerprint

    assert fingerprint("a.jsonl", "1") == fingerprint("b.jsonl", "1")
    assert fingerprint("a.jsonl", "1") != fingerprint("c.jsonl", "2")
