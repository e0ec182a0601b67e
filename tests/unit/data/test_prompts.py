"""Which prompts a file gives, with one rank and with several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def make_long_file(path: Path, num_rows: int) -> Path:
    """Chat rows of several chunks, some of them too long."""
    messages = ([{"role": "user", "content": "x" * (i % 97)}] for i in range(num_rows))
    return write_rows(path, [{"prompt": m, "label": str(i)} for i, m in enumerate(messages)])


class CountingTokenizer(Tokenizer):
    """Counts the texts that it encodes."""

    num_texts = 0

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        self.num_texts += len(texts)
        return super().encode_texts(texts)


def load_on_ranks(paths: Sequence[Path], tokenizer: Tokenizer) -> list[object]:
    """What each of 3 ranks gets of its path, or the error; and how many texts it encoded."""

    def rank() -> object:
        world = init_world("gloo", 60.0)
        path = paths[world.rank]
        counting = CountingTokenizer(tokenizer.hf, tokenizer.stop_token_ids, path)
        try:
            found = load_prompts(path, counting, DataSection(max_prompt_tokens=90), world)
        except ValueError as error:
            return str(error)
        return found, counting.num_texts

    return run_ranks(3, rank, has_world=False)


def test_ranks_encode_a_share_each_and_end_with_the_same_prompts(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = make_long_file(tmp_path / "t.jsonl", 3200)
    alone = load_prompts(path, tokenizer, DataSection(max_prompt_tokens=90))
    assert len(alone) < 3200 - 50
    expected = [(alone, 1200), (alone, 1000), (alone, 1000)]  # each row once
    assert load_on_ranks([path] * 3, tokenizer) == expected


def test_what_one_rank_cannot_read_is_refused_on_all(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path, other = make_long_file(tmp_path / "t.jsonl", 2500), tmp_path / "u.jsonl"
    other.write_text(path.read_text().replace("user", "judge", 1201).replace("judge", "user", 1200))
    (message,) = set(load_on_ranks([other] * 3, tokenizer))
    assert "row 1201: prompt cannot be encoded" in str(message)
    messages = load_on_ranks([path, path, make_long_file(other, 11)], tokenizer)
    assert all("rank 2 reads another file than rank 0" in str(message) for message in messages)


def test_fingerprint_follows_content_not_place(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def fingerprint(name: str, label: str) -> str:
        path = write_rows(tmp_path / name, [{"prompt": "a", "label": label, "id": "1"}])
        return load_prompts(path, tokenizer, DataSection()).fingerprint

    assert fingerprint("a.jsonl", "1") == fingerprint("b.jsonl", "1")
    assert fingerprint("a.jsonl", "1") != fingerprint("c.jsonl", "2")
