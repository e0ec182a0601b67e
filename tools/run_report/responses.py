"""The newest responses of a run, for the table of the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from tools.run_report.data import read_lines

NUM_SHOWN = 200
_MAX_FILE_BYTES = 32 << 20  # of a step's file only the end is read
_MAX_CHARACTERS = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A row of the table. Long texts are cut."""

    step: int
    reward: float
    length: int  # tokens
    data_source: str
    logprob_diff: float | None  # of engine and trainer, mean over tokens; None: had no pass
    prompt: str
    parts: list[tuple[str, bool]]  # of the response: text, and whether the drafter proposed it


def read_responses(run_dir: Path, limit: int) -> list[Response]:
    """Return the newest `limit` responses, the newest step first; [] for a run without
    logging.rollouts.
    """
    found: list[Response] = []
    for path in sorted((run_dir / "rollouts").glob("step_*.jsonl"), reverse=True):
        rows = read_lines(path, _MAX_FILE_BYTES)[-(limit - len(found)) :]
        try:
            found += [_response(int(path.stem.removeprefix("step_")), row) for _, row in rows]
        except KeyError as error:
            raise ValueError(f"{path}: a response lacks {error}; not of logging.rollouts") from None
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: a response is not of logging.rollouts: {error}") from None
        if len(found) >= limit:
            break
    return found


def _response(step: int, row: dict[str, Any]) -> Response:
    return Response(
        step=step,
        reward=float(row["reward"]),
        length=len(row["token_ids"]),
        data_source=row.get("data_source", ""),  # older runs have none
        logprob_diff=None if row.get("logprob_diff") is None else float(row["logprob_diff"]),
        prompt="".join(text for text, _ in _cut([(str(row["prompt"]), False)])),
        parts=_cut(_parts(row)),
    )


def _parts(row: dict[str, Any]) -> list[tuple[str, bool]]:
    """Return the response in parts that the drafter or the policy proposed.

    Of the tokens of a verify pass, all but the last are accepted drafts. All others are the
    policy's.
    """
    response, sizes = str(row["response"]), row.get("token_characters")
    if not sizes:  # of an older run, or of a tokenizer whose tokens have no text of their own
        return [(response, False)]
    drafted: set[int] = set()
    after = 0  # passes follow each other; in a file that holds anything, no token is visited twice
    for start, count in zip(row["verify_starts"], row["accept_lengths"], strict=True):
        drafted.update(range(max(start, after), min(start + count - 1, len(sizes))))
        after = max(start + count, after)
    parts, end = [], 0
    for is_drafted, indices in groupby(range(len(sizes)), drafted.__contains__):
        start, end = end, end + sum(sizes[index] for index in indices)
        parts.append((response[start:end], is_drafted))
    return parts


def _cut(parts: Sequence[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Return the parts up to _MAX_CHARACTERS, and how many characters follow."""
    kept, room = [], _MAX_CHARACTERS
    for text, is_drafted in parts:
        if text[:room]:
            kept.append((text[:room], is_drafted))
        room = max(room - len(text), 0)
    num_more = sum(len(text) for text, _ in parts) - _MAX_CHARACTERS
    return [*kept, (f" … and {num_more:,} characters", False)] if num_more > 0 else kept
