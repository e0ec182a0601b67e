"""The newest responses of a run, for the table of the report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt_megatron.saved_files import errors_named
from tools.run_report.files import read_lines

_NUM_SHOWN = 200
_MAX_FILE_BYTES = 32 << 20  # only the end of a step's file is read


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A row of the table, which cuts long texts."""

    step: int
    reward: float
    length: int  # tokens
    data_source: str
    logprob_diff: float | None  # between engine and trainer, mean over tokens; None: had no pass
    prompt: str
    response: str


def read_responses(run_dir: Path, limit: int = _NUM_SHOWN) -> list[Response]:
    """Return the newest `limit` responses, the newest step first; [] for a run without
    logging.rollouts.
    """
    found: list[Response] = []
    for path in sorted((run_dir / "rollouts").glob("step_*.jsonl"), reverse=True):
        with errors_named(path):
            rows = read_lines(path, _MAX_FILE_BYTES)[-(limit - len(found)) :]
            found += [_response(int(path.name[5:12]), row) for row in rows]
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
        prompt=str(row["prompt"]),
        response=str(row["response"]),
    )
