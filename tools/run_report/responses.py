"""The newest responses of a run, for the table of the report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt_megatron.saved_files import errors_named
from tools.run_report.files import read_lines

_NUM_SHOWN = 200
_MAX_FILE_BYTES = 32 << 20  # only the end of a step's file is read


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A turn of the policy, an answer of the environment, or its end."""

    title: str  # such as "turn 2" or "tool calculate"
    note: str = ""  # the numbers of a turn or of the end
    text: str = ""
    is_turn: bool = False


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
    parts: tuple[Part, ...] = ()  # of a conversation


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
    messages = row.get("messages") or []  # only conversations have them
    num_first = int(row.get("num_prompt_messages", 1))  # older runs have only one
    first = "\n".join(str(message["content"]) for message in messages[:num_first])
    return Response(
        step=step,
        reward=float(row["reward"]),
        length=len(row["token_ids"]),
        data_source=row.get("data_source", ""),  # older runs have none
        logprob_diff=None if row.get("logprob_diff") is None else float(row["logprob_diff"]),
        prompt=first or str(row["prompt"]),
        response=str(row["response"]),
        parts=tuple(_parts(row, messages[num_first:])),
    )


def _parts(row: dict[str, Any], messages: list[dict[str, Any]]) -> Iterator[Part]:
    index = 0
    for message in messages:
        role, text = str(message["role"]), str(message["content"])
        if role == "assistant":
            yield Part(
                title=f"turn {index + 1}", note=_turn_note(row, index), text=text, is_turn=True
            )
            index += 1
        else:
            yield Part(title=f"{role} {message.get('name', '')}".rstrip(), text=text)
    if end := row.get("end"):
        yield Part(title="end", note=" · ".join(f"{k} {v:.4g}" for k, v in end.items()))
    if row.get("has_failed"):
        yield Part(title="failed", note="the environment failed, so the reward is 0")


def _turn_note(row: dict[str, Any], index: int) -> str:
    """Return the numbers of a turn. A turn without an answer has no reward, and older runs have no
    lengths.
    """
    rewards, lengths, drafted = (
        row.get(f"turn_{name}") or () for name in ("rewards", "lengths", "drafted")
    )
    facts = [f"reward {rewards[index]:.4g}"] if index < len(rewards) else []
    if index < len(lengths):
        facts.append(f"{lengths[index]} tokens")
    if row.get("accept_lengths") and index < len(drafted):  # speculation was on
        facts.append(f"{drafted[index] / lengths[index]:.0%} drafted")
    return " · ".join(facts)
