"""A row means the same by every door: jsonl, parquet of any writer, and a folder or an id of
`datasets`."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.data.conftest import write_rows
from tlt_megatron.config.hub import fetch_data
from tlt_megatron.config.schema import DataSection
from tlt_megatron.data.prompts import PromptSet, load_prompts
from tlt_megatron.data.tokenizer import Tokenizer

Read = Callable[[Path], PromptSet]

TEXTS = st.sampled_from(
    [
        *("Oslo", "1/2", '"', "null", "true", "42", "42.0", "042", "1e5", "[1, 2]", "é", "😀"),
        *("2024-01-02", "2024-01-02T03:04:05", "a\nb", " 7 ", "\u2028", "0.12345678901234567"),
    ]
)
NUMBERS = st.integers(-(2**53), 2**53) | st.sampled_from([0.1, 1e-12, 0.12345678901234568, 2.5])
LABELS = TEXTS.filter(str.strip) | NUMBERS  # pyarrow writes booleans among numbers as numbers
VALUES = st.recursive(
    TEXTS | NUMBERS | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["city", "unit", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.just("user"), "content": TEXTS},
        optional={"name": TEXTS, "calls": st.lists(VALUES, max_size=2)},
    ),
    min_size=1,
    max_size=2,
)
ROWS = st.lists(
    st.fixed_dictionaries(
        {"prompt": TEXTS | MESSAGES, "label": LABELS},
        optional={"extra_info": st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3)},
    ),
    min_size=1,
    max_size=5,
)


@pytest.fixture
def read(tokenizer: Tokenizer) -> Read:
    return lambda path: load_prompts(path, tokenizer, DataSection())


def numbered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "id": f"row {i}"} for i, row in enumerate(rows)]


def check_same(read: Read, path: Path, expected: Path) -> None:
    found, wanted = read(path), read(expected)
    assert found.rows == wanted.rows
    assert found.fingerprint == wanted.fingerprint


@given(rows=ROWS)
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_jsonl_equals_parquet(rows: list[dict[str, Any]], read: Read, tmp_path: Path) -> None:
    """With the types of the rows, where they have one for a column, and as columns of JSON."""
    rows = numbered(rows)
    jsonl = write_rows(tmp_path / "t.jsonl", rows)
    columns: dict[str, Any] = {"id": pyarrow.array([row["id"] for row in rows])}
    for key in ("prompt", "label", "extra_info"):
        texts = [json.dumps(row[key]) if key in row else None for row in rows]
        columns[key] = pyarrow.array(texts, pyarrow.json_())
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "json.parquet")
    check_same(read, tmp_path / "json.parquet", jsonl)
    full = [
        {key: row.get(key) for key in columns} for row in rows
    ]  # pyarrow reads the first's keys
    try:
        typed = write_rows(tmp_path / "typed.parquet", full)
    except (pyarrow.ArrowException, TypeError, OverflowError):
        return  # a column with values of several types
    check_same(read, typed, jsonl)


@pytest.mark.parametrize("name", ["train.jsonl", "train.json", "train.parquet"])
def test_a_folder_gives_the_rows_of_its_files(
    name: str, read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All values in one file, so that columns have mixed types."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    values = ["Oslo", 42, "42.0", "1/2", True, 0.12345678901234567, "2024-01-02"]
    rows = numbered(
        [
            {
                "prompt": [{"role": "user", "content": str(value), "calls": [value, {"x": value}]}],
                "label": value,
                "extra_info": {"city": value, "list": [value, [value]], "n": 1e-12} if i else {},
            }
            for i, value in enumerate(values)
        ]
    )
    folder = tmp_path / "folder"
    folder.mkdir()
    if name == "train.parquet":
        rows = [row for row in rows if row["label"] != "42.0"]  # which `datasets` makes a number
        rows = [row for row in rows if not isinstance(row["label"], float)]  # cut to ten digits
        for row in rows:
            row["extra_info"].pop("n", None)
        datasets.Dataset.from_list(rows, on_mixed_types="use_json").to_parquet(folder / name)
    elif name == "train.json":
        (folder / name).write_text(json.dumps(rows))
    else:
        write_rows(folder / name, rows)
    expected = read(write_rows(tmp_path / "t.jsonl", rows))
    found = read(fetch_data("data.train", f"{folder}:train"))
    assert [row.ground_truth for row in found.rows] == [row.ground_truth for row in expected.rows]
    assert found.rows == expected.rows
    part = read(fetch_data("data.train", f"{folder}:train[1:3]+train[-1:]"))
    assert [row.prompt_id for row in part.rows] == [
        expected.rows[i].prompt_id for i in (1, 2, len(rows) - 1)
    ]


def test_a_key_that_stands_twice_is_refused_in_a_list_of_json_too(tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text('[{"prompt": "a", "label": 1, "label": 2}]')
    with pytest.raises(ValueError, match=r"data\.train=.*the key 'label' stands twice"):
        fetch_data("data.train", f"{tmp_path}:train")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.csv", "prompt,label,label\na,1,2\n", "train.csv: the column 'label' stands twice"),
        ("train.csv", "prompt,label\na,1,\nb,2,\n", "train.csv: its rows have more cells than"),
        ("test.jsonl", '{"prompt": "a"}', "Unknown split|Bad split"),
    ],
)
def test_what_a_folder_does_not_hold_is_named(
    name: str, content: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / name).write_text(content)
    with pytest.raises(ValueError, match=rf"^data\.train='{tmp_path}/folder:train': .*({message})"):
        fetch_data("data.train", f"{tmp_path}/folder:train")


def test_a_cell_of_csv_is_the_text_that_stands_there(
    read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    labels = ["042", "0.10", "1e5", "NA", "None", "True", "2024-01-02", "a, b", "x\ny", "é"]
    for name, separator in (("a.csv", ","), ("b.tsv", "\t")):
        rows = [
            ["prompt", "label", "id", "system"],
            *([f"t{i}", label, str(i), ""] for i, label in enumerate(labels)),
        ]
        lines = [separator.join(f'"{cell}"' if cell else "" for cell in row) for row in rows]
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / f"train{name[1:]}").write_text("\n".join(lines))
        found = read(fetch_data("data.train", f"{folder}:train")).rows
        assert [row.ground_truth for row in found] == labels
        assert [row.prompt_id for row in found] == [str(i) for i in range(len(labels))]


def test_keys_of_other_rows_do_not_come_into_prompts(read: Read, tmp_path: Path) -> None:
    """Parquet gives each object the keys of all objects of its column, with the value null."""
    calls = [{"weather": {"city": "Oslo"}}, {"convert": {"amount": 3, "to": {"unit": "NOK"}}}]
    rows = numbered(
        [
            {
                "prompt": [{"role": "user", "content": "a", "calls": [call]}],
                "label": 1,
                "extra_info": {"deep": [{"call": call}], "own": call, "list": [None, 1]},
            }
            for call in calls
        ]
    )
    found = read(write_rows(tmp_path / "t.parquet", rows)).rows
    assert [row.messages[0]["calls"] for row in found] == [[call] for call in calls]
    assert [row.extra_info for row in found] == [row["extra_info"] for row in rows]


def test_a_split_with_files_of_two_kinds_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("prompt,label\na,1\n")
    (tmp_path / "train.jsonl").write_text('{"prompt": "b", "label": 2}\n')
    with pytest.raises(ValueError, match=r"the split train has files of another kind.* train\.csv"):
        fetch_data("data.train", f"{tmp_path}:train")


def test_a_saved_data_set_is_read_although_json_describes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.Dataset.from_list([{"prompt": "a", "label": "1"}]).save_to_disk(tmp_path / "d/train")
    assert fetch_data("data.train", f"{tmp_path}/d:train").suffix == ".parquet"


@pytest.mark.parametrize("has_categories", [False, True])
@pytest.mark.parametrize("kind", [pyarrow.float16(), pyarrow.float32(), pyarrow.float64()])
def test_short_floats_are_the_shortest_text_that_gives_them(
    kind: pyarrow.DataType,
    has_categories: bool,
    read: Read,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    values = numpy.array([0.1, 2.5, 3.0, 1e-3])
    labels = pyarrow.array(values.astype(kind.to_pandas_dtype()))
    columns = {
        "prompt": pyarrow.array(["a"] * 4),
        "label": labels.dictionary_encode() if has_categories else labels,
        "extra_info": pyarrow.array([{"x": [0.1]}] * 4, pyarrow.struct({"x": pyarrow.list_(kind)})),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    caplog.set_level(logging.WARNING)
    found = read(tmp_path / "t.parquet").rows
    assert [row.ground_truth for row in found] == ["0.1", "2.5", "3", "0.001"]
    assert {row.extra_info["x"][0] for row in found} == {0.1}  # pyright: ignore[reportIndexIssue]
    is_warned = "t.parquet: label, extra_info: numbers of 16 or 32 bits" in caplog.text
    assert is_warned == (kind != pyarrow.float64())


def test_arrays_of_datasets_are_lists_of_the_shortest_floats(read: Read, tmp_path: Path) -> None:
    kinds = {"x": datasets.Array2D((1, 2), "float32")}
    features = {**dict.fromkeys(["prompt", "label"], datasets.Value("string")), "extra_info": kinds}
    rows = [{"prompt": "a", "label": "1", "extra_info": {"x": [[0.1, 0.2]]}}]
    table = datasets.Dataset.from_list(rows, features=datasets.Features(features))
    table.to_parquet(tmp_path / "t.parquet")
    assert read(tmp_path / "t.parquet").rows[0].extra_info == {"x": [[0.1, 0.2]]}


def test_maps_of_parquet_are_objects(read: Read, tmp_path: Path) -> None:
    kind = pyarrow.map_(pyarrow.string(), pyarrow.float32())
    columns = {
        "prompt": pyarrow.array(["a"]),
        "label": pyarrow.array(["1"]),
        "extra_info": pyarrow.array([[("x", 0.1), ("y", None)]], kind),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    assert read(tmp_path / "t.parquet").rows[0].extra_info == {"x": 0.1}
