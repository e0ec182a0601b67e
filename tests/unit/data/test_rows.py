"""What a row of slime's or verl's keys becomes; what is refused or named in a warning, with row and
key.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.unit.data.conftest import write_rows, write_tokenizer
from tlt_megatron.config.schema import DataSection
from tlt_megatron.data.prompts import PromptSet, load_prompts
from tlt_megatron.data.tokenizer import Tokenizer, load_tokenizer

Load = Callable[..., PromptSet]

USER = [{"role": "user", "content": "1+1?"}]
TURNS = [*USER, {"role": "assistant", "content": "2"}]
SLIME = {"prompt": "1+1=", "label": "2", "metadata": {"source_name": "sums", "level": 3}}
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": USER,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 7, "split": "train"},
}
ROW = {"prompt": "a", "label": "1"}
DEEP = "[" * 200_000


def test_the_keys_of_slime_and_verl(load: Load, tokenizer: Tokenizer) -> None:
    first, second = load([SLIME, {**SLIME, "label": "02"}]).rows
    assert first.token_ids == tokenizer.encode("1+1=")
    assert (first.ground_truth, second.ground_truth) == ("2", "02")
    assert (first.data_source, first.extra_info) == ("sums", {"source_name": "sums", "level": 3})
    assert (first.prompt_id, second.prompt_id) == ("t:1", "t:2")
    (prompt,) = load([VERL]).rows
    assert prompt.token_ids == tokenizer.encode(USER)
    assert (prompt.ground_truth, prompt.data_source, prompt.prompt_id) == ("2", "openai/gsm8k", "7")
    assert prompt.extra_info == {"index": 7, "split": "train"}


def test_a_turn_of_tool_calls_needs_no_content(load: Load, tokenizer: Tokenizer) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    (row,) = load([{**ROW, "prompt": [*USER, call, *USER]}]).rows
    user = "<|user|>1+1?<eot><|assistant|>"
    assert row.token_ids == tokenizer.encode(f"{user}<eot>{user}")
    assert row.messages[1] == {"role": "assistant", "tool_calls": [{"name": "f"}]}


def test_texts_and_parts_mean_what_they_stand_for(load: Load) -> None:
    """As CSV and other tables store objects, and as OpenAI's clients write messages."""
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]
    named = [{"name": "Ann", **USER[0]}]
    rows = [
        {
            "prompt": [{"role": "user", "content": parts}],
            "label": "2",
            "extra_info": '{"index": 7}',
        },
        {"prompt": json.dumps(named), "reward_model": '{"ground_truth": 3}', "metadata": {"x": 1}},
    ]
    for suffix in (".jsonl", ".parquet"):
        first, second = (load([row], suffix).rows[0] for row in rows)
        assert [*first.messages, *second.messages] == [*USER, *named]
        assert (first.prompt_id, first.extra_info) == ("7", {"index": 7})
        assert (second.ground_truth, second.extra_info) == ("3", {"x": 1})


def test_keys_that_nothing_reads_are_named_once(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    """A template's argument, a system prompt or tools under another name would be lost."""
    caplog.set_level(logging.WARNING)
    load([VERL, {**SLIME, "functions": [], "id": 1}])
    load([{"question": "a", "answer": {"x": "b"}}], input_key="question", label_key="answer.x")
    assert caplog.text == ""
    load(
        [
            {**ROW, "functions": [1], "history": None},
            {**ROW, "enable_thinking": True, "functions": [1]},
        ]
    )
    assert caplog.text.count("keys that nothing reads") == 1
    assert "t.jsonl: functions, enable_thinking: keys that nothing reads" in caplog.text


@pytest.mark.parametrize("arguments", ['{"x": 1}', {"x": 1}, " "])
def test_arguments_of_a_call_are_objects(arguments: object, load: Load) -> None:
    """Clients of OpenAI write texts, and some leave out what is around the function."""
    bare, value = {"name": "f", "arguments": arguments}, {} if arguments == " " else {"x": 1}
    call = {"role": "assistant", "tool_calls": [bare, {"id": "a", "function": bare}]}
    (row,) = load([{**ROW, "prompt": [*USER, call, *USER]}]).rows
    plain = {"name": "f", "arguments": value}
    assert row.messages[1]["tool_calls"] == [plain, {"id": "a", "function": plain}]


def test_labels_become_text_and_numbers_their_plain_form(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    labels = ["x", 7, 0, True, "42.0", 42.0, 0.5, -3.0, 1e-7, 1e22]
    expected = ["x", "7", "0", "true", "42.0", "42", "0.5", "-3", "0.0000001", "1" + 22 * "0"]
    assert [
        row.ground_truth for row in load([{**ROW, "label": n} for n in labels]).rows
    ] == expected
    assert "t.jsonl: label is a number that no response would write so" in caplog.text
    assert "in 4 rows: 6, 8, 9, 10" in caplog.text
    decimals = [{**ROW, "label": Decimal(text)} for text in ("42.00", "0.50", "7.25")]
    assert [row.ground_truth for row in load(decimals, ".parquet").rows] == ["42", "0.5", "7.25"]


def test_messages_as_json_text_are_read_as_messages_and_the_rows_named(
    load: Load, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [json.dumps(USER), '{"a": 1}', '[{"name": "a text about JSON"}]', "[1, 2]"]
    found = [prompt.token_ids for prompt in load([{**ROW, "prompt": text} for text in texts]).rows]
    assert found == [tokenizer.encode(text) for text in (USER, *texts[1:])]
    assert "t.jsonl: prompt is JSON text, read as chat messages, in 1 rows: 1" in caplog.text


def test_ids_differ_within_a_data_source_alone(load: Load) -> None:
    row = {**ROW, "extra_info": {"index": 7}}
    rows = [{**row, "data_source": "x"}, {**row, "data_source": "y"}]
    assert [prompt.prompt_id for prompt in load(rows).rows] == ["7", "7"]
    with pytest.raises(ValueError, match=r"row 3: id '7' of data_source 'x' stands in row 1"):
        load([*rows, rows[0]])


def test_own_keys(load: Load) -> None:
    row = {"question": "a", "answer": {"final": 3}, "label": "not this"}
    keys = {"input_key": "question", "label_key": "answer.final"}
    assert load([row], **keys).rows[0].ground_truth == "3"
    with pytest.raises(ValueError, match=r"row 1: answer\.final is missing"):
        load([{**row, "answer": {}}], **keys)


def test_ids_come_from_the_row_where_it_has_one(load: Load) -> None:
    """An index may be a float that is a whole number, as tables with gaps store it."""
    ids = [{"id": "own", "metadata": {"id": "not this"}}, {"id": "", "metadata": {"id": 12}}]
    ids += [{"extra_info": {"index": index}} for index in (0, 3.0)]
    found = load([ROW | extra for extra in [*ids, {}]]).rows
    assert [prompt.prompt_id for prompt in found] == ["own", "12", "0", "3", "t:5"]


def test_the_data_source_comes_from_the_row_before_its_metadata(load: Load) -> None:
    both = {"data_source": "gsm8k", "source_name": "sums"}
    sources = [{"data_source": "math", "metadata": both}, {"metadata": both}]
    sources += [{"metadata": {"source_name": "sums"}}, {"metadata": {"level": 3}}]
    found = load([ROW | source for source in sources]).rows
    assert [prompt.data_source for prompt in found] == ["math", "gsm8k", "sums", ""]


def test_blank_lines_are_passed_over_and_counted(load: Load) -> None:
    found = load('\n{"prompt": "a", "label": 1}\n\n{"prompt": "b", "label": 2}\n\n').rows
    assert [prompt.prompt_id for prompt in found] == ["t:2", "t:4"]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"prompt": None}, r"prompt is missing, .*\(the row has prompt, label\)"),
        ({"label": None}, r"label \(or reward_model.ground_truth\) is missing"),
        ({"label": [1]}, r"label=\[1\] must be a string, number"),
        ({"label": None, "reward_model": {"ground_truth": {}}}, r"reward_model.ground_truth=\{\} must be a string"),
        ({"prompt": 5}, "prompt=5 must be a string or a list"),
        ({"prompt": []}, r"prompt=\[\] must be a string or a list"),
        ({"prompt": ""}, "prompt='' gives no tokens"),
        ({"prompt": ["a"]}, r"prompt\[0\]='a' must be a message"),
        ({"prompt": [{"role": "user"}]}, r"prompt\[0\]=.* must be a message with the strings role and content"),
        ({"prompt": '[{"role": "user"}]'}, r"prompt\[0\]=.* must be a message with the strings role and content"),
        ({"prompt": "[{'role': 'user'}]"}, "prompt=.* must be JSON: "),
        ({"prompt": '[{"role":' + DEEP}, "prompt=.* must be JSON: .*recursion"),
        ({"prompt": [{"role": "judge", "content": ""}]}, "prompt cannot be encoded: .*no judges"),
        ({"prompt": TURNS}, "prompt ends with a turn of the assistant"),
        ({"prompt": "\ud83d"}, "prompt='.*' holds half of a surrogate"),
        ({"prompt": [{**USER[0], "own": "\ud83d"}]}, "prompt=.* holds half of a surrogate"),
        ({"prompt": USER, "tools": [{"name": "\ud83d"}]}, "the template's arguments=.* holds half of a surrogate"),
        ({"images": ["a.png"]}, "images is not empty"),
        *[({key: "a.png"}, f"{key} is not empty") for key in ("image_url", "image_paths", "video_path", "pixel_values")],
        ({"prompt": [{**USER[0], "images": ["a"]}]}, r"prompt\[0\]: images is not empty"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, r"prompt\[0\]: content\[0\] has the type 'image'"),
        ({"id": True}, "id=True must be a string or a whole number"),
        *[({key: [{"path": "a"}]}, f"{key} is not empty") for key in ("image", "video", "audio", "multi_modal_data")],
        ({"tools": [{"name": "f"}]}, "tools is not empty, and prompt is a string"),
        ({"system": "be brief"}, "system is not empty, and prompt is a string"),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs is not empty, and prompt is a string"),
        ({"prompt": USER, "system": 3}, "system=3 must be a string"),
        ({"prompt": [{"role": "system", "content": "a"}, *USER], "system": "b"}, "system is not empty, and the messages have"),
        ({"prompt": USER, "tools": "no json"}, "tools='no json' must be JSON"),
        ({"prompt": USER, "tools": {"name": "f"}}, "tools=.* must be a list of objects"),
        ({"prompt": USER, "chat_template_kwargs": [1]}, "chat_template_kwargs=.* must be an object"),
        ({"prompt": USER, "tools": [{"name": "f"}]}, "prompt cannot be encoded: .* has no argument 'tools'"),
        ({"prompt": USER, "chat_template_kwargs": {"tokenize": 1}}, "prompt cannot be encoded: .*tokenize: is set by the trainer"),
        ({"id": "\ud83d"}, "id='.*' holds half of a surrogate"),
        ({"data_source": "\udc00"}, "data_source='.*' holds half of a surrogate"),
        ({"label": "\udc00"}, "label='.*' holds half of a surrogate"),
        ({"metadata": "m"}, "metadata='m' must be an object"),
        ({"extra_info": 3}, "extra_info=3 must be an object"),
        ({"data_source": 3}, "data_source=3 must be a string"),
        ({"metadata": {"data_source": 7}}, r"metadata\.data_source=7 must be a string"),
        ({"id": [1]}, r"id=\[1\] must be a string or"),
        ({"id": float("nan")}, "id=nan must be a string or a whole number"),
        ({"extra_info": {"index": 1.5}}, r"extra_info\.index=1\.5 must be a string or a whole"),
        ({"label": float("nan")}, "label=nan must be a finite number"),
        ({"label": -float("inf")}, "label=-inf must be a finite"),
        ({"label": " \n"}, "label=.* must not be empty"),
        ({"label": None, "reward_model": {"ground_truth": ""}}, "reward_model.ground_truth='' must not be empty"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_unusable_rows_are_refused(load: Load, change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=rf"t\.jsonl row 2: {message}"):
        load([ROW, ROW | change])


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"prompt": "a"', "must be one JSON object"),
        ("[1]", "is a list, must be an object"),
        ('{"prompt": "a", "label": 1, "label": 2}', "must be one JSON object: the key 'label'"),
        ('{"prompt": "a", "label": 1, "extra_info": {"x": 1, "x": 1}}', ".*key 'x' stands twice"),
        (DEEP, "must be one JSON object: .*recursion"),
        ("\x00" + json.dumps(ROW), "must be one JSON object: Expecting value"),
    ],
    ids=["cut", "list", "key", "inner key", "deep", "zero"],
)
def test_lines_that_are_not_one_object_are_refused(load: Load, line: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"t\.jsonl row 2: {message}"):
        load(json.dumps(ROW) + "\n" + line)


def test_unreadable_files_are_refused(tokenizer: Tokenizer, load: Load, tmp_path: Path) -> None:
    for name, message in (("none.jsonl", "no such file"), ("t.csv", r"must be a \.jsonl or")):
        with pytest.raises(ValueError, match=rf"{name}: {message}"):
            load_prompts(tmp_path / name, tokenizer, DataSection())
    with pytest.raises(ValueError, match=r"t\.parquet: is not a parquet file"):
        load("{}", ".parquet")
    with pytest.raises(ValueError, match=r"t\.jsonl: holds no rows"):
        load("")
    (tmp_path / "wide.jsonl").write_text(json.dumps(ROW), "utf-16")
    with pytest.raises(ValueError, match=r"wide\.jsonl: is UTF-16, must be UTF-8"):
        load_prompts(tmp_path / "wide.jsonl", tokenizer, DataSection())
    (tmp_path / "dos.jsonl").write_bytes(f"\ufeff{json.dumps(ROW)}\r\n".encode())
    assert len(load_prompts(tmp_path / "dos.jsonl", tokenizer, DataSection()).rows) == 1
    schema = pyarrow.schema([("prompt", pyarrow.string()), ("label", pyarrow.string())])
    pyarrow.parquet.write_table(schema.empty_table(), tmp_path / "e.parquet")
    with pytest.raises(ValueError, match=r"e\.parquet: holds no rows"):
        load_prompts(tmp_path / "e.parquet", tokenizer, DataSection())


def test_damaged_parquet_is_refused_by_name(
    load: Load, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    load([{**ROW, "prompt": f"a{i}"} for i in range(99)], ".parquet")
    data = bytearray((tmp_path / "t.parquet").read_bytes())
    data[4:200] = bytes(196)
    (tmp_path / "t.parquet").write_bytes(data)
    with pytest.raises(ValueError, match=r"t\.parquet: is damaged behind row 0"):
        load_prompts(tmp_path / "t.parquet", tokenizer, DataSection())


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


def test_doubtful_rows_are_named_and_kept(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    both = {"extra_info": {"x": 1, "y": 2, "z": None}, "metadata": {"x": 3, "y": 2, "z": 1}}
    caplog.set_level(logging.WARNING)
    found = load([{**ROW, "label": "NaN", "images": []}, ROW | both]).rows
    assert [row.ground_truth for row in found] == ["NaN", "1"]
    assert found[1].extra_info == {"x": 3, "y": 2, "z": 1}
    assert "label is the text nan, as tables write a missing value, in 1 rows: 1" in caplog.text
    assert "metadata.x replaces another value of extra_info.x, in 1 rows: 2" in caplog.text
    assert caplog.text.count("extra_info") == 1


TEMPLATE = (
    "{% if tools %}[{% for t in tools %}{{ t.name }}{{ t.arguments | tojson }}{% endfor %}]{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eot>{% endfor %}<|assistant|>"
    "{% if enable_thinking is defined and enable_thinking is false %}-{% else %}+{% endif %}{{ effort }}"
)


def test_what_changes_a_prompt_is_rendered(tmp_path: Path) -> None:
    """Tools as objects and as JSON text, template arguments of the row over those of the run."""
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "model", chat_template=TEMPLATE))
    tools = [{"name": "f", "arguments": {"city": "text"}}], [{"name": "g", "arguments": {"n": 1}}]
    empty = {"tools": None, "system": None, "chat_template_kwargs": None}
    rows = [
        {**ROW, **empty, "prompt": USER, "tools": tools[0], "system": "be brief"},
        {**ROW, **empty, "prompt": USER, "tools": tools[1]},
        {**ROW, **empty, "prompt": USER, "chat_template_kwargs": {"enable_thinking": True}},
        {**ROW, **empty, "prompt": USER, "tools": []},
    ]
    path = write_rows(tmp_path / "t.parquet", rows)
    section = DataSection(chat_template_kwargs={"enable_thinking": False, "effort": "low"})
    found = load_prompts(path, tokenizer, section).rows
    texts = [tokenizer.decode(row.token_ids, skip_special_tokens=False) for row in found]
    user = "<|user|>1+1?<eot><|assistant|>"
    assert texts == [
        '[f{"city": "text"}]<|system|>be brief<eot>' + user + "-low",
        '[g{"n": 1}]' + user + "-low",
        user + "+low",
        user + "-low",
    ]
    assert found[0].messages[0] == {"role": "system", "content": "be brief"}
    as_text = [{**row, "tools": json.dumps(row["tools"] or [])} for row in rows]
    again = load_prompts(write_rows(tmp_path / "u.jsonl", as_text), tokenizer, section).rows
    assert [row.token_ids for row in again] == [row.token_ids for row in found]
    for key in ("enable_thinkin", "tools2"):
        section = DataSection(chat_template_kwargs={key: 1})
        with pytest.raises(ValueError, match=f"row 1: prompt cannot .* no argument '{key}'"):
            load_prompts(path, tokenizer, section)


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
    path = write_rows(tmp_path / "t.jsonl", [{**ROW, "prompt": USER}])
    plain = load_tokenizer(write_tokenizer(tmp_path / "plain", chat_template=None))
    with pytest.raises(ValueError, match=r"t\.jsonl row 1: prompt .* no chat template"):
        load_prompts(path, plain, DataSection())


def test_fingerprint_follows_content(load: Load) -> None:
    """test_doors.py has the same content in other places."""
    assert load([ROW]).fingerprint != load([{**ROW, "label": "2"}]).fingerprint


def test_template_arguments_of_the_run_warn_about_strings(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    load([ROW], chat_template_kwargs={"enable_thinking": False})
    assert "prompt is a string, on which data.chat_template_kwargs has no effect" in caplog.text
