"""Where the data source of a row comes from, in the keys of verl and slime."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tlt_megatron.config.schema import DataSection
from tlt_megatron.data.rows import read_rows


def source_of(tmp_path: Path, **keys: object) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=", "label": "2", **keys}))
    (row,) = read_rows(path, DataSection())
    return row.data_source


def test_the_rows_own_key_goes_before_those_of_its_metadata(tmp_path: Path) -> None:
    metadata = {"data_source": "gsm8k", "source_name": "sums"}
    assert source_of(tmp_path, data_source="math", metadata=metadata) == "math"
    assert source_of(tmp_path, metadata=metadata) == "gsm8k"
    assert source_of(tmp_path, metadata={"source_name": "sums"}) == "sums"
    assert source_of(tmp_path, metadata={"level": 3}) == ""


def test_a_source_that_is_no_text_is_named_with_its_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"row 1: metadata\.data_source=7 must be a string"):
        source_of(tmp_path, metadata={"data_source": 7})
