"""Turns a public data set into rows for `data.train` or `data.eval`: a downloaded file, or an id of
the Hugging Face Hub.

    python convert.py gsm8k openai/gsm8k/main:train --out data/gsm8k/train.jsonl
    python convert.py dapo_math BytedTsinghua-SIA/DAPO-Math-17k:train --out data/dapo/train.jsonl
    python convert.py aime Maxwell-Jia/AIME_2024:train --out data/dapo/aime.jsonl
    python convert.py mbpp google-research-datasets/mbpp/full:train --out data/mbpp/train.jsonl
    python convert.py gsm8k gsm8k.jsonl --out data/gsm8k/train.jsonl

`gsm8k.yaml`, `dapo_math.yaml` and `mbpp.yaml` beside this file say how to train on them. Mind the
licence of each data set. The prompts are chat messages; `--text` writes plain strings, for a model
without a chat template.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tlt_megatron.config.hub import fetch_data

Json = dict[str, Any]
_BOXED = "Think step by step, and write the final answer within \\boxed{}."


class Example(NamedTuple):
    """One question, its answer as the reward function reads it, and its id in the source."""

    question: str
    label: str
    number: str


def gsm8k(row: Json, index: int) -> Example:
    """Read a row with question and answer. The answer is the number after "####", without thousands
    separators.
    """
    _, mark, number = row["answer"].rpartition("####")
    if not mark:
        raise ValueError(f"answer={row['answer'][-40:]!r}: must end with #### and a number")
    return Example(f"{row['question']}\n{_BOXED}", number.strip().replace(",", ""), str(index))


def dapo_math(row: Json, index: int) -> Example:
    """Read a row in verl's form. Its prompt asks for a last line "Answer: ..." already."""
    label = str(row["reward_model"]["ground_truth"])
    return Example(row["prompt"][0]["content"], label, str(row["extra_info"]["index"]))


def aime(row: Json, index: int) -> Example:
    """Read a row with ID, Problem and Answer (an integer from 0 to 999)."""
    if not str(row["Answer"]).strip().isdecimal():
        raise ValueError(f"Answer={row['Answer']!r}: must be an integer from 0 to 999")
    return Example(f"{row['Problem']}\n{_BOXED}", str(int(row["Answer"])), str(row["ID"]))


def mbpp(row: Json, index: int) -> Example:
    """Read a row with text and test_list. Its label is JSON: set-up code and tests, for
    code_reward.py.
    """
    tests = row["test_list"]
    question = (
        f"{row['text']} Your code must pass these tests:\n" + "\n".join(tests) + "\n"
        "Think, then write the whole program in one ```python block."
    )
    label = json.dumps({"setup": row.get("test_setup_code", ""), "tests": tests})
    return Example(question, label, str(row["task_id"]))


SOURCES: dict[str, Callable[[Json, int], Example]] = {
    "gsm8k": gsm8k,
    "dapo_math": dapo_math,
    "aime": aime,
    "mbpp": mbpp,
}


def convert(source: str, path: Path, *, as_text: bool = False) -> Iterator[Json]:
    """Yield the rows of `path` for a trainer. A repeated id or question is left out: DAPO-Math-17k
    repeats its rows.

    ValueError names the file and the row that is not one of `source`.
    """
    seen: set[str] = set()
    for index, raw in enumerate(read_file(path)):
        try:
            example = SOURCES[source](raw, index)
        except KeyError as error:
            raise ValueError(f"{path} row {index + 1}: lacks {error.args[0]}") from error
        except (ValueError, TypeError, IndexError) as error:
            raise ValueError(f"{path} row {index + 1}: {error}") from error
        if {example.number, example.question} & seen:
            continue
        seen |= {example.number, example.question}
        message = {"role": "user", "content": example.question}
        yield {
            "prompt": example.question if as_text else [message],
            "label": example.label,
            "id": example.number,
            "data_source": source,
        }


def read_file(path: Path) -> Iterator[Json]:
    """Yield the rows of a .jsonl or .parquet file. ValueError names a row that is no JSON
    object.
    """
    if path.suffix == ".parquet":
        import pyarrow.parquet

        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1024):
            yield from batch.to_pylist()
        return
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(filter(str.strip, file), start=1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path} row {number}: is no JSON: {error}") from error
            if not isinstance(row, dict):
                kind = type(row).__name__
                raise ValueError(f"{path} row {number}: is a {kind}, must be an object")
            yield row


def _ids(text: str) -> range:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected an id such as 7, or ids such as 601-974"
        )
    return range(int(match[1]), int(match[2] or match[1]) + 1)


def _select(rows: list[Json], ids: range) -> list[Json]:
    """Return the rows with one of these ids. ValueError if ids are no numbers."""
    for row in rows:
        if not row["id"].isdecimal():
            raise ValueError(f"--ids: ids of {row['data_source']} are no numbers: {row['id']!r}")
    return [row for row in rows if int(row["id"]) in ids]


def main(arguments: list[str] | None = None) -> None:
    """Write the rows to --out. Exit code 2 and one line for a file or a row that cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("source", choices=SOURCES)
    parser.add_argument("file", help="a .jsonl or .parquet, or an id of the Hub with its split")
    parser.add_argument("--out", type=Path, required=True, help=".jsonl")
    parser.add_argument("--text", action="store_true", help="prompts as strings")
    parser.add_argument(
        "--ids",
        type=_ids,
        metavar="A-B",
        help="only these numbers; mbpp trains on 601-974, tests on 11-510",
    )
    options = parser.parse_args(arguments)
    try:
        file = fetch_data("FILE", options.file)
        rows = list(convert(options.source, file, as_text=options.text))
        if options.ids is not None:
            rows = _select(rows, options.ids)
    except (OSError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    options.out.write_text(text, encoding="utf-8")
    print(f"{options.out}: {len(rows)} prompts of {options.source}")


if __name__ == "__main__":
    main()
