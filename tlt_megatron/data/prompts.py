"""The prompts of a run: read once, then drawn in an order that depends on the seed alone.

Called by `trainer/build.py`. Rank 0 reads the file and sends the set to all, so they draw the same
prompts. A resume continues with the next draw. Rows use slime's keys (prompt, label, metadata) or
verl's (data_source, prompt, reward_model.ground_truth, extra_info).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tlt_megatron.config.schema import DataSection
from tlt_megatron.data.answer_tokens import encode_answer
from tlt_megatron.data.rows import Kind, Row, read_rows
from tlt_megatron.data.tokenizer import Tokenizer
from tlt_megatron.runtime.collectives import call_on_first
from tlt_megatron.runtime.process_groups import SINGLE, Group
from tlt_megatron.types import Answer, Prompt

log = logging.getLogger(__name__)

_MAX_NAMED = 10  # most prompts or rows that a warning names


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """The usable prompts of a file, in file order; `draw_index` is the index in this order."""

    path: str
    rows: tuple[Prompt, ...]
    fingerprint: str  # hashes ids, tokens and ground truths
    num_left_out: int = 0  # longer than data.max_prompt_tokens
    parts: Mapping[str, str] = field(default_factory=dict)  # what makes the tokens, by name


@dataclass
class PromptSampler:
    """Draws prompts without end. An epoch is a permutation that depends on (seed, epoch) alone.

    A batch may cross into the next epoch, so it can hold one prompt twice, with two values of
    `draw_index`.
    """

    prompt_set: PromptSet
    shuffle: bool
    seed: int
    _draw_index: int = field(default=0, init=False)

    @property
    def epoch(self) -> int:
        """Return the epoch of the next draw, from 0."""
        return self._draw_index // len(self.prompt_set.rows)

    def next_batch(self, num_prompts: int) -> list[Prompt]:
        """Draw the next `num_prompts` prompts. `draw_index` grows by one per draw."""
        first = self._draw_index
        self._draw_index += num_prompts
        return [self.prompt_at(index) for index in range(first, self._draw_index)]

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next draw, as values that JSON can hold."""
        return {
            "draw_index": self._draw_index,
            "path": self.prompt_set.path,
            "fingerprint": self.prompt_set.fingerprint,
            "parts": dict(self.prompt_set.parts),
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """ValueError if `state` belongs to another data set.

        trainer/saving/identity.py refuses a checkpoint of another seed or order.
        """
        if state["fingerprint"] != self.prompt_set.fingerprint:
            before, now = state.get("parts", {}), self.prompt_set.parts
            changes = [
                f"{name} ({before[name]} -> {now[name]})"
                for name in now
                if name in before and before[name] != now[name]
            ]
            raise ValueError(
                f"the state belongs to the data set {state['path']} (fingerprint {state['fingerprint']}), "
                f"this run has {self.prompt_set.path} (fingerprint {self.prompt_set.fingerprint}): "
                f"{', '.join(changes or now)} must be the same"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, which `check_state` accepts."""
        self.check_state(state)
        self._draw_index = int(state["draw_index"])

    def prompt_at(self, draw_index: int) -> Prompt:
        """Return the prompt of any draw, from 0."""
        rows = self.prompt_set.rows
        epoch, cursor = divmod(draw_index, len(rows))
        if self.shuffle:
            cursor = _permutation(self.seed, epoch, len(rows))[cursor]
        return dataclasses.replace(rows[cursor], draw_index=draw_index)


@functools.lru_cache(maxsize=1)  # a batch is within one epoch, seldom in two
def _permutation(seed: int, epoch: int, num_rows: int) -> list[int]:
    # Python keeps `random()` the same for a seed in every version, but not `shuffle()`
    generator = random.Random(f"{seed}/{epoch}")
    keys = [generator.random() for _ in range(num_rows)]
    return sorted(range(num_rows), key=keys.__getitem__)


def load_prompts(
    path: str | Path,
    tokenizer: Tokenizer,
    section: DataSection,
    world: Group = SINGLE,
    *,
    kind: Kind = Kind.SCORED,
    max_answer_tokens: int = 0,
) -> PromptSet:
    """Read, check and tokenize all rows of a .jsonl or .parquet file.

    Every rank of `world` must call it; the first one reads, and all return the same set or raise
    the same error. Prompts longer than `section.max_prompt_tokens` are left out and reported, never
    cut, and so are answers of more than `max_answer_tokens`. ValueError names the file, the row
    (from 1), the key and the allowed values.
    """
    read = functools.partial(_read_prompts, max_answer_tokens=max_answer_tokens)
    return call_on_first(lambda: read(Path(path), tokenizer, section, kind), world)


def _read_prompts(
    path: Path, tokenizer: Tokenizer, section: DataSection, kind: Kind, *, max_answer_tokens: int
) -> PromptSet:
    found = list(read_rows(path, section, kind))
    if not found:
        raise ValueError(f"{path}: holds no rows, must hold at least one")
    if kind is Kind.ANSWERED:
        encoded = _encode_answered(path, found, tokenizer)
    else:
        encoded = _encode_prompts(path, found, tokenizer, section)
    rows: list[Prompt] = []
    overlong: list[str] = []
    for row, (ids, answer) in zip(found, encoded, strict=True):
        is_long = answer is not None and len(answer.token_ids) > max_answer_tokens
        if is_long or len(ids) > section.max_prompt_tokens:
            overlong.append(row.prompt.prompt_id)
            continue
        own: dict[str, Any] = {"draw_index": len(rows), "token_ids": tuple(ids), "answer": answer}
        rows.append(dataclasses.replace(row.prompt, **own))
    limit = str(section.max_prompt_tokens)
    if kind is Kind.ANSWERED:
        limit += f", or their answers than rollout.max_new_tokens={max_answer_tokens},"
    _warn(path, found, overlong, limit)
    if not rows:
        raise ValueError(
            f"{path}: all {len(found)} prompts are longer than data.max_prompt_tokens={limit.rstrip(',')}"
        )
    fingerprint, answers = _fingerprint(rows), [row.answer for row in rows]
    return PromptSet(
        path=str(path),
        rows=tuple(rows),
        fingerprint=_digest((fingerprint, answers)) if any(answers) else fingerprint,
        num_left_out=len(overlong),
        parts=_parts(found, tokenizer, section),
    )


Encoded = list[tuple[Sequence[int], Answer | None]]  # the tokens of each prompt, and its answer


def _encode_answered(path: Path, found: list[Row], tokenizer: Tokenizer) -> Encoded:
    encoded: Encoded = []
    for row in found:
        label, template_kwargs = row.prompt.ground_truth, row.prompt.template_kwargs
        try:
            encoded.append(encode_answer(tokenizer, row.text, label, template_kwargs))
        except ValueError as error:
            raise ValueError(f"{path} row {row.number}: {error}") from error
    return encoded


def _encode_prompts(
    path: Path, found: list[Row], tokenizer: Tokenizer, section: DataSection
) -> Encoded:
    texts = tokenizer.encode_texts([_render(path, row, tokenizer, section) for row in found])
    for row, token_ids in zip(found, texts, strict=True):
        if not token_ids:
            raise ValueError(
                f"{path} row {row.number}: {section.input_key}={row.text!r} gives no tokens, must give at least one"
            )
    return [
        (ids if row.prompt.messages else tokenizer.with_first(ids), None)
        for row, ids in zip(found, texts, strict=True)
    ]


def _render(path: Path, row: Row, tokenizer: Tokenizer, section: DataSection) -> str:
    try:
        return tokenizer.render(row.text, row.prompt.template_kwargs)
    except ValueError as error:
        where = f"{path} row {row.number}: {section.input_key}"
        raise ValueError(f"{where} cannot be encoded: {error}") from error


def _warn(path: str | Path, found: list[Row], overlong: list[str], limit: str) -> None:
    by_kind: dict[str, list[int]] = defaultdict(list)
    for row in found:
        for kind in row.conversions:
            by_kind[kind].append(row.number)
    for kind, numbers in by_kind.items():
        log.warning("%s: %s, in %d rows: %s", path, kind, len(numbers), _name_some(numbers))
    if unread := {name: None for row in found for name in row.unread}:
        log.warning(
            f"{path}: {_name_some([*unread])}: keys that nothing reads. A reward gets data_source, the label and the"
            " contents of extra_info and metadata"
        )
    if overlong:
        log.warning(
            f"{path}: {len(overlong)} of {len(found)} prompts are longer than data.max_prompt_tokens={limit} and left out:"
            f" {_name_some(overlong)}"
        )


def load_held_out(
    section: DataSection,
    tokenizer: Tokenizer,
    world: Group = SINGLE,
    *,
    limit: int = 0,
    **kind: Any,
) -> dict[str, PromptSet]:
    """Return the first `limit` prompts (0: all) of each file of `data.eval`, by its name.

    As `load_prompts`, with its `kind`. `draw_index` counts on from file to file.
    """
    found: dict[str, PromptSet] = {}
    num_prompts = 0
    for name, path in section.eval_files.items():
        whole = load_prompts(path, tokenizer, section, world, **kind)
        rows = tuple(
            dataclasses.replace(prompt, draw_index=num_prompts + index)
            for index, prompt in enumerate(whole.rows[: limit or None])
        )
        found[name] = dataclasses.replace(whole, rows=rows)
        num_prompts += len(rows)
    return found


def _name_some(items: Sequence[object]) -> str:
    return ", ".join(map(str, items[:_MAX_NAMED])) + (", ..." if len(items) > _MAX_NAMED else "")


def _fingerprint(rows: list[Prompt]) -> str:
    return _digest(
        (row.prompt_id, row.token_ids, row.data_source, row.ground_truth) for row in rows
    )


def _parts(found: list[Row], tokenizer: Tokenizer, section: DataSection) -> dict[str, str]:
    """Return what the tokens of the prompts depend on, by its name in messages."""
    given = section.chat_template_kwargs
    rows = (
        (
            *(row.text, row.prompt.prompt_id, row.prompt.data_source, row.prompt.ground_truth),
            {k: v for k, v in row.prompt.template_kwargs.items() if given.get(k) != v},
        )
        for row in found
    )
    return {
        "the rows": _digest(rows),
        "the tokenizer": _digest([tokenizer.definition]),
        "the chat template": _digest([str(tokenizer.hf.chat_template)]),
        "data.chat_template_kwargs": repr(given),
        "data.template_date": repr(section.template_date),
        "data.max_prompt_tokens": str(section.max_prompt_tokens),
    }


def _digest(items: Iterable[object]) -> str:
    digest = hashlib.sha256()
    for item in items:
        digest.update(repr(item).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:16]
