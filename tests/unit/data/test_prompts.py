from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.ranks import run_ranks
from tlt_megatron.config.schema import DataSection
from tlt_megatron.data.prompts import load_prompts
from tlt_megatron.data.tokenizer import Tokenizer, load_tokenizer
from tlt_megatron.runtime.process_groups import init_world

USER = [{"role": "user", "content": "1+1?"}]
SLIME = {"prompt": "1+1=", "label": "2", "metadata": {"source_name": "sums", "level": 3}}
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": USER,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 7, "split": "train"},
}


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return load_tokenizer(tokenizer_folder)


def write_rows(path: Path, rows: list[Mapping[str, object]]) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_slime_keys(tokenizer: Tokenizer, tmp_path: Path, suffix: str) -> None:
    path = write_rows(tmp_path / f"train{suffix}", [SLIME, {**SLIME, "label": "02"}])
    first, second = load_prompts(path, tokenizer, DataSection()).rows
    assert first.token_ids == tokenizer.encode("1+1=")
    assert (first.ground_truth, second.ground_truth) == ("2", "02")
    assert first.extra_info == {"source_name": "sums", "level": 3}
    assert first.data_source == "sums"
    assert (first.prompt_id, second.prompt_id) == ("train:1", "train:2")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_verl_keys(tokenizer: Tokenizer, tmp_path: Path, suffix: str) -> None:
    path = write_rows(tmp_path / f"train{suffix}", [VERL])
    (prompt,) = load_prompts(path, tokenizer, DataSection()).rows
    assert prompt.token_ids == tokenizer.encode(USER)
    assert prompt.ground_truth == "2"
    assert prompt.extra_info == {"index": 7, "split": "train"}
    assert prompt.data_source == "openai/gsm8k"
    assert prompt.prompt_id == "7"


def test_parquet_messages_of_unlike_keys_equal_jsonl(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "a", "name": "ann"}], "label": "1"},
        {"prompt": [{"role": "user", "content": "b"}], "label": "2"},
    ]
    loaded = [
        load_prompts(write_rows(tmp_path / f"t{suffix}", rows), tokenizer, DataSection())
        for suffix in (".jsonl", ".parquet")
    ]
    assert loaded[0].rows == loaded[1].rows
    assert loaded[0].rows[0].token_ids == tokenizer.encode("<|user|>(ann)a<eot><|assistant|>")
    assert loaded[0].fingerprint == loaded[1].fingerprint


@pytest.mark.parametrize(
    "label,text", [("x", "x"), (7, "7"), (0, "0"), (0.5, "0.5"), (True, "True"), ("42.0", "42.0")]
)
def test_label_of_any_scalar_becomes_text(
    tokenizer: Tokenizer, tmp_path: Path, label: object, text: str
) -> None:
    path = write_rows(tmp_path / "t.jsonl", [{"prompt": "a", "label": label}])
    assert load_prompts(path, tokenizer, DataSection()).rows[0].ground_truth == text


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_float_labels_are_read_in_plain_form_and_the_rows_named(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture, suffix: str
) -> None:
    labels = [42.0, 0.5, -3.0, 1e-7, 1e22]
    rows = [{"prompt": "a", "label": label} for label in labels]
    path = write_rows(tmp_path / f"t{suffix}", rows)
    with caplog.at_level(logging.WARNING):
        prompts = load_prompts(path, tokenizer, DataSection())
    found = [row.ground_truth for row in prompts.rows]
    assert found == ["42", "0.5", "-3", "0.0000001", "1" + 22 * "0"]
    assert f"{path}: label is a number that no response would write so" in caplog.text
    assert "in 4 rows: 1, 3, 4, 5" in caplog.text


def test_decimal_labels_are_read_in_plain_form(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "label": Decimal(text)} for text in ("42.00", "0.50", "7.25")]
    path = write_rows(tmp_path / "t.parquet", rows)
    found = [row.ground_truth for row in load_prompts(path, tokenizer, DataSection()).rows]
    assert found == ["42", "0.5", "7.25"]


def test_messages_as_json_text_are_read_as_messages_and_the_rows_named(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [json.dumps(USER), '{"a": 1}', '[{"name": "a text about JSON"}]', "[1, 2]"]
    rows = [{"prompt": text, "label": "1"} for text in texts]
    path = write_rows(tmp_path / "t.jsonl", rows)
    with caplog.at_level(logging.WARNING):
        prompts = load_prompts(path, tokenizer, DataSection()).rows
    assert prompts[0].token_ids == tokenizer.encode(USER)
    assert [p.token_ids for p in prompts[1:]] == [tokenizer.encode(text) for text in texts[1:]]
    assert f"{path}: prompt is JSON text, read as chat messages, in 1 rows: 1" in caplog.text
    with pytest.raises(ValueError, match=r"row 1: prompt is a list of messages, must be a string"):
        load_prompts(path, tokenizer, DataSection(apply_chat_template=False))


def test_ids_differ_within_a_data_source_alone(tokenizer: Tokenizer, tmp_path: Path) -> None:
    base = {"prompt": "a", "label": "1", "extra_info": {"index": 7}}
    rows = [{**base, "data_source": "x"}, {**base, "data_source": "y"}]
    path = write_rows(tmp_path / "t.jsonl", rows)
    assert [p.prompt_id for p in load_prompts(path, tokenizer, DataSection()).rows] == ["7", "7"]
    write_rows(path, [*rows, rows[0]])
    with pytest.raises(ValueError, match=r"row 3: id '7' of data_source 'x' stands in row 1"):
        load_prompts(path, tokenizer, DataSection())
    kept = load_prompts(path, tokenizer, DataSection(duplicate_ids="keep"))
    assert [p.data_source for p in kept.rows] == ["x", "y", "x"]


def test_an_index_may_be_a_float_that_is_a_whole_number(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    rows = [{"prompt": "a", "label": "1", "extra_info": {"index": n}} for n in (3.0, 4)]
    path = write_rows(tmp_path / "t.jsonl", rows)
    assert [p.prompt_id for p in load_prompts(path, tokenizer, DataSection()).rows] == ["3", "4"]


def test_own_keys(tokenizer: Tokenizer, tmp_path: Path) -> None:
    row = {"question": "a", "answer": {"final": 3}, "label": "not this"}
    path = write_rows(tmp_path / "t.jsonl", [row])
    section = DataSection(input_key="question", label_key="answer.final")
    assert load_prompts(path, tokenizer, section).rows[0].ground_truth == "3"


def test_ids_come_from_the_row_where_it_has_one(tokenizer: Tokenizer, tmp_path: Path) -> None:
    base = {"prompt": "a", "label": "1"}
    rows = [
        {**base, "id": "own", "metadata": {"id": "not this"}},
        {**base, "metadata": {"id": 12}},
        {**base, "extra_info": {"index": 0}},
        base,
    ]
    prompts = load_prompts(write_rows(tmp_path / "t.jsonl", rows), tokenizer, DataSection())
    assert [row.prompt_id for row in prompts.rows] == ["own", "12", "0", "t:4"]


def test_blank_lines_are_passed_over_and_counted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('\n{"prompt": "a", "label": 1}\n\n{"prompt": "b", "label": 2}\n\n')
    prompts = load_prompts(path, tokenizer, DataSection())
    assert [row.prompt_id for row in prompts.rows] == ["t:2", "t:4"]


def test_overlong_prompts_are_left_out_named_and_never_cut(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "x" * n, "label": n} for n in (4, 5, 6, 1)]
    path = write_rows(tmp_path / "t.jsonl", rows)
    with caplog.at_level(logging.WARNING):
        prompts = load_prompts(path, tokenizer, DataSection(max_prompt_tokens=4))
    assert [len(row.token_ids) for row in prompts.rows] == [4, 1]
    assert "2 of 4 prompts are longer than data.max_prompt_tokens=4" in caplog.text
    assert "t:2, t:3" in caplog.text


def test_eval_prompts_stand_in_file_order(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [{"prompt": "x" * n, "label": n} for n in (2, 9, 1, 3)]
    prompts = load_prompts(
        write_rows(tmp_path / "t.jsonl", rows), tokenizer, DataSection(max_prompt_tokens=4)
    )
    assert [p.ground_truth for p in prompts.prompts()] == ["2", "1", "3"]
    assert [p.draw_index for p in prompts.prompts()] == [0, 1, 2]
    assert prompts.prompts(2) == prompts.rows[:2]
    assert prompts.prompts(100) == prompts.rows


GOOD = '{"prompt": "a", "label": 1}\n'


@pytest.mark.parametrize(
    "text,message",
    [
        ("", "t.jsonl: holds no rows"),
        (GOOD + '{"prompt": "a"\n', "t.jsonl row 2: must be one JSON object"),
        (GOOD + "[1]\n", "row 2: is a list, must be an object"),
        (GOOD + '{"label": 1}\n', r"row 2: prompt is missing, .*\(the row has label\)"),
        (GOOD + '{"prompt": null, "label": 1}\n', "row 2: prompt is missing"),
        (GOOD + '{"prompt": "a"}\n', r"row 2: label \(or reward_model.ground_truth\) is missing"),
        (GOOD + '{"prompt": "a", "label": null}\n', "row 2: label .* is missing"),
        (GOOD + '{"prompt": "a", "label": [1]}\n', r"row 2: label=\[1\] must be a string, number"),
        (
            GOOD + '{"prompt": "a", "reward_model": {"ground_truth": {}}}\n',
            r"row 2: reward_model.ground_truth=\{\} must be a string",
        ),
        (GOOD + '{"prompt": 5, "label": 1}\n', "row 2: prompt=5 must be a string or a list"),
        (GOOD + '{"prompt": [], "label": 1}\n', r"row 2: prompt=\[\] must be a string or a list"),
        (GOOD + '{"prompt": "", "label": 1}\n', "row 2: prompt='' gives no tokens"),
        (GOOD + '{"prompt": ["a"], "label": 1}\n', r"row 2: prompt\[0\]='a' must be a message"),
        (
            GOOD + '{"prompt": [{"role": "user"}], "label": 1}\n',
            r"row 2: prompt\[0\]=.* must be a message with the strings role and content",
        ),
        (
            GOOD + '{"prompt": [{"role": "judge", "content": ""}], "label": 1}\n',
            "row 2: prompt cannot be encoded: .*no judges",
        ),
        (
            GOOD + '{"prompt": "a", "label": 1, "metadata": "m"}\n',
            "row 2: metadata='m' must be an object",
        ),
        (
            GOOD + '{"prompt": "a", "label": 1, "extra_info": 3}\n',
            "row 2: extra_info=3 must be an object",
        ),
        (
            GOOD + '{"prompt": "a", "label": 1, "data_source": 3}\n',
            "row 2: data_source=3 must be a string",
        ),
        (GOOD + '{"prompt": "a", "label": 1, "id": [1]}\n', r"row 2: id=\[1\] must be a string or"),
        (
            '{"prompt": "a", "label": 1, "id": 4}\n'
            + GOOD
            + '{"prompt": "b", "label": 1, "id": "4"}',
            "row 3: id '4' of data_source '' stands in row 1 already; .* set data.duplicate_ids=keep",
        ),
        (GOOD + '{"prompt": "a", "label": NaN}\n', "row 2: label=nan must be a finite number"),
        (GOOD + '{"prompt": "a", "label": -Infinity}\n', "row 2: label=-inf must be a finite"),
        (GOOD + '{"prompt": "a", "label": ""}\n', "row 2: label='' must not be empty"),
        (GOOD + '{"prompt": "a", "label": " \\n"}\n', "row 2: label=.* must not be empty"),
        (
            GOOD + '{"prompt": "a", "reward_model": {"ground_truth": ""}}\n',
            "row 2: reward_model.ground_truth='' must not be empty",
        ),
        (
            GOOD + """{"prompt": "[{'role': 'user', 'content': 'a'}]", "label": 1}\n""",
            "row 2: prompt=.* must be a list of messages, not the text of one that is not JSON",
        ),
        (
            GOOD + r"""{"prompt": "[{\"role\": \"user\"}]", "label": 1}""",
            r"row 2: prompt\[0\]=.* must be a message with the strings role and content",
        ),
        (
            GOOD + '{"prompt": "a", "label": 1, "extra_info": {"index": 1.5}}\n',
            r"row 2: extra_info\.index=1\.5 must be a string or a whole number",
        ),
        (
            GOOD + '{"prompt": "a", "label": 1, "id": NaN}\n',
            "row 2: id=nan must be a string or a whole number",
        ),
        (GOOD + r'{"prompt": "\ud83d", "label": 1}', "row 2: prompt .* surrogates not allowed"),
        ('{"prompt": "%s", "label": 1}\n' % ("x" * 2000), "all 1 prompts are longer than data.max"),
    ],
)
def test_unusable_rows_are_refused(
    tokenizer: Tokenizer, tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load_prompts(path, tokenizer, DataSection())
    assert str(path) in str(caught.value)


def test_missing_own_label_key_is_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(GOOD)
    with pytest.raises(ValueError, match="row 1: answer is missing"):
        load_prompts(path, tokenizer, DataSection(label_key="answer"))


def test_messages_without_the_template_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "t.jsonl", [VERL])
    with pytest.raises(ValueError, match=r"row 1: prompt is a list of messages, must be a string"):
        load_prompts(path, tokenizer, DataSection(apply_chat_template=False))


def test_messages_without_a_template_name_the_row(
    plain_tokenizer_folder: Path, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "t.jsonl", [VERL])
    with pytest.raises(ValueError, match=r"t\.jsonl row 1: prompt .* no chat template"):
        load_prompts(path, load_tokenizer(plain_tokenizer_folder), DataSection())


def test_unreadable_files_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.jsonl: no such file"):
        load_prompts(tmp_path / "none.jsonl", tokenizer, DataSection())
    with pytest.raises(ValueError, match=r"t\.csv: must be a \.jsonl or \.parquet file"):
        load_prompts(tmp_path / "t.csv", tokenizer, DataSection())
    (tmp_path / "t.parquet").write_text(GOOD)
    with pytest.raises(ValueError, match=r"t\.parquet: is not a parquet file"):
        load_prompts(tmp_path / "t.parquet", tokenizer, DataSection())
    empty = pyarrow.schema([("prompt", pyarrow.string()), ("label", pyarrow.string())])
    pyarrow.parquet.write_table(empty.empty_table(), tmp_path / "e.parquet")
    with pytest.raises(ValueError, match=r"e\.parquet: holds no rows"):
        load_prompts(tmp_path / "e.parquet", tokenizer, DataSection())


def test_damaged_parquet_is_refused_by_name(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "t.parquet", [{"prompt": f"a{i}", "label": "1"} for i in range(99)]
    )
    data = bytearray(path.read_bytes())
    data[4:200] = bytes(196)
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"t\.parquet: is damaged behind row 0"):
        load_prompts(path, tokenizer, DataSection())


def make_long_file(path: Path, num_rows: int) -> Path:
    """Chat rows of several chunks, some of them too long."""
    rows = [
        {"prompt": [{"role": "user", "content": "x" * (i % 97)}], "label": str(i)}
        for i in range(num_rows)
    ]
    return write_rows(path, rows)


def load_on_ranks(path: Path | dict[int, Path], tokenizer: Tokenizer) -> list[object]:
    """What each of 3 ranks gets, or the error; and how many texts it encoded."""
    section = DataSection(max_prompt_tokens=90)

    def rank() -> object:
        world = init_world("gloo", 60.0)
        own = path if isinstance(path, Path) else path[world.rank]
        counting = CountingTokenizer(tokenizer.hf, tokenizer.stop_token_ids, own)
        try:
            return load_prompts(own, counting, section, world), counting.num_texts
        except ValueError as error:
            return str(error)

    return run_ranks(3, rank, has_world=False)


class CountingTokenizer(Tokenizer):
    """Counts the texts that it encodes."""

    num_texts = 0

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        self.num_texts += len(texts)
        return super().encode_texts(texts)


def test_ranks_encode_a_share_each_and_end_with_the_same_prompts(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = make_long_file(tmp_path / "t.jsonl", 3200)
    alone = load_prompts(path, tokenizer, DataSection(max_prompt_tokens=90))
    assert len(alone) < 3200 - 50
    results = load_on_ranks(path, tokenizer)
    assert [prompts for prompts, _ in results] == [alone] * 3
    assert [num_texts for _, num_texts in results] == [1200, 1000, 1000]  # each row once


def test_a_row_that_one_rank_cannot_encode_is_refused_on_all(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = make_long_file(tmp_path / "t.jsonl", 2500)
    lines = path.read_text().splitlines()
    lines[1200] = lines[1200].replace("user", "judge")
    path.write_text("\n".join(lines))
    messages = set(load_on_ranks(path, tokenizer))
    assert len(messages) == 1
    assert "row 1201: prompt cannot be encoded" in str(messages.pop())


def test_ranks_that_read_different_files_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    same = make_long_file(tmp_path / "t.jsonl", 10)
    other = make_long_file(tmp_path / "u.jsonl", 11)
    messages = load_on_ranks({0: same, 1: same, 2: other}, tokenizer)
    assert all("rank 2 reads another file than rank 0" in str(message) for message in messages)


def test_fingerprint_follows_content_not_place(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def fingerprint(folder: str, label: str) -> str:
        (tmp_path / folder).mkdir()
        path = write_rows(tmp_path / folder / "t.jsonl", [{"prompt": "a", "label": label}])
        return load_prompts(path, tokenizer, DataSection()).fingerprint

    assert fingerprint("here", "1") == fingerprint("there", "1") != fingerprint("changed", "2")
