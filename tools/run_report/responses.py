"""The newest responses of a run, for the table of the report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
    prompt: str
    response: str


def read_responses(run_dir: Path, limit: int) -> list[Response]:
    """Return the newest `limit` responses, the newest step first; [] for a run without logging.rollouts."""
    found: list[Response] = []
    for path in sorted((run_dir / "rollouts").glob("step_*.jsonl"), reverse=True):
        rows = read_lines(path, _MAX_FILE_BYTES)[-(limit - len(found)) :]
        try:
            found += [
                Response(
                    step=int(path.stem.removeprefix("step_")),
                    reward=float(row["reward"]),
                    length=len(row["token_ids"]),
                    data_source=row.get("data_source", ""),  # older runs have none
                    prompt=_cut(row["prompt"]),
                    response=_cut(row["response"]),
                )
                for _, row in rows
            ]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}: a response lacks {error}; not of logging.rollouts") from None
        if len(found) >= limit:
            break
    return found


def _cut(text: str) -> str:
    num_more = len(text) - _MAX_CHARACTERS
    return f"{text[:_MAX_CHARACTERS]} … and {num_more:,} characters" if num_more > 0 else text
