"""Rows that read well but mean something else: refused, or named in a warning, with row and key."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tlt_megatron.config.schema import DataSection
from tlt_megatron.data.prompts import load_prompts
from tlt_megatron.data.tokenizer import Tokenizer, load_tokenizer

GOOD = '{"prompt": "a", "label": 1}\n'
DEEP = "[" * 200_000
TURNS = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return load_tokenizer(tokenizer_folder)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"prompt": "a", "label": 1, "label": 2}', "must be one JSON object: the key 'label'"),
        ('{"prompt": "a", "label": 1, "extra_info": {"x": 1, "x": 1}}', "the key 'x' stands twice"),
        (json.dumps({"prompt": TURNS, "label": 2}), "prompt ends with a turn of the assistant"),
        ('{"prompt": "a <image>", "label": 1, "images": ["a.png"]}', "images is not empty"),
        (DEEP, "must be one JSON object: .*recursion"),
        (json.dumps({"prompt": '[{"role":' + DEEP, "label": 1}), "prompt=.*not JSON .*recursion"),
    ],
    ids=["key", "inner key", "assistant", "images", "deep row", "deep prompt"],
)
def test_rows_of_another_meaning_are_refused(
    tokenizer: Tokenizer, tmp_path: Path, row: str, message: str
) -> None:
    (tmp_path / "t.jsonl").write_text(GOOD + row)
    with pytest.raises(ValueError, match=rf"t\.jsonl row 2: .*{message}"):
        load_prompts(tmp_path / "t.jsonl", tokenizer, DataSection())


def test_two_columns_of_one_name_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    one = pyarrow.array(["a"])
    pair = pyarrow.StructArray.from_arrays([one, one], ["x", "x"])
    for columns, names, message in (
        ([one, one, one], ["prompt", "label", "label"], r"the column 'label' stands twice"),
        ([one, one, pair], ["prompt", "label", "extra_info"], r"is damaged behind row 0: .*dupl"),
    ):
        table = pyarrow.Table.from_arrays(columns, names=names)
        pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
        with pytest.raises(ValueError, match=rf"t\.parquet: {message}"):
            load_prompts(tmp_path / "t.parquet", tokenizer, DataSection())


def test_doubtful_rows_are_named_and_kept(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        {"prompt": "a", "label": "NaN", "images": []},
        {
            "prompt": "b",
            "label": "1",
            "extra_info": {"x": 1, "y": 2, "z": None},
            "metadata": {"x": 3, "y": 2, "z": 1},
        },
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with caplog.at_level(logging.WARNING):
        found = load_prompts(path, tokenizer, DataSection()).rows
    assert [row.ground_truth for row in found] == ["NaN", "1"]
    assert found[1].extra_info == {"x": 3, "y": 2, "z": 1}
    assert "label is the text nan, as tables write a missing value, in 1 rows: 1" in caplog.text
    assert "metadata.x replaces another value of extra_info.x, in 1 rows: 2" in caplog.text
    assert caplog.text.count("extra_info") == 1
