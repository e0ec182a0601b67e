"""The n-gram drafter: proposes the tokens that followed the same n-gram before, in responses to
this prompt or any other.

An engine keeps the index across `generate` calls, so it remembers earlier epochs. It runs on the
host and takes a few microseconds per row and decode pass. Verification accepts only what the target
draws, so a lost, stale or wrong entry costs only time, and checkpoints do not hold the index.

The index maps a context to the one token that followed it last. A proposal looks up its own context
again after every token. So no response is stored, and a proposal can continue past the end of the
response that it follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Texts are strings with one character per token: slicing and looking up a short string costs a
# third of a tuple's cost. Token t is chr(t + 1); chr(0) pads proposals.
_PAD = "\0"


@dataclass(slots=True, eq=False)
class IndexedText:
    """A prompt and its growing response. `NgramIndex.start` makes it and the request keeps it."""

    table: dict[str, str]  # shared by the responses to one prompt
    tail: str = ""  # the latest tokens, up to the length of the longest context
    num_appended: int = 0  # tokens of the response


@dataclass(slots=True)
class _Generation:
    of_all: dict[str, str] = field(default_factory=dict)  # the table of all texts
    by_prompt: dict[str, dict[str, str]] = field(default_factory=dict)  # started in its time
    num_entries: int = 0  # counts both, and what running responses add to older tables


class NgramIndex:
    """Maps contexts of fixed sizes to the token that followed last. The longest known context
    decides.

    For one size, entries of the same prompt (running siblings, earlier epochs) take precedence over
    entries of all texts. Example: prompt [5 6 7 8 5 6], sizes (2, 1): after [5 6] came 7, after [6
    7] came 8, so it proposes [7 8 5 6 7 ...].
    """

    def __init__(
        self, *, sizes: Sequence[int] = (16, 8, 5, 3, 2), max_entries: int = 4_000_000
    ) -> None:
        """`sizes` are context lengths in tokens. At the start of a text, all tokens so far are one
        context.

        An entry takes 60 to 100 bytes; a token adds at most two entries per size.
        """
        self._sizes = tuple(sorted(set(sizes), reverse=True))
        self._max_generation = max_entries // 2
        # Two generations: a full newer one replaces the older, whose entries are lost.
        self._newer, self._older = _Generation(), _Generation()

    def start(self, prompt_id: str, token_ids: Sequence[int]) -> IndexedText:
        """Start a response to this prompt. Siblings and later epochs must use the same
        `prompt_id`.
        """
        table = self._newer.by_prompt.get(prompt_id)
        if table is None:
            table = self._newer.by_prompt[prompt_id] = self._older.by_prompt.pop(prompt_id, {})
            self._newer.num_entries += len(table)
        text = IndexedText(table)
        tokens, longest = _characters(token_ids), self._sizes[0]
        if table.get(tokens[-longest - 1 : -1]) == tokens[-1:]:
            text.tail = tokens[-longest:]  # the prompt is known
        else:
            self._extend(text, tokens)
        return text

    def append(self, texts: Sequence[IndexedText], token_ids: Sequence[Sequence[int]]) -> None:
        """Add committed tokens, any number per text, all in [0, 1114109]. No call is needed when a
        text ends.
        """
        for text, row in zip(texts, token_ids, strict=True):
            self._extend(text, _characters(row))
            text.num_appended += len(row)

    def propose(self, texts: Sequence[IndexedText], num_tokens: int) -> Tensor:
        """Propose the next tokens: [B, num_tokens] int64 on the CPU. `tree.UNUSED` pads each
        row.
        """
        found = [self._continue(text, num_tokens) for text in texts]
        padded = "".join([tokens.ljust(num_tokens, _PAD) for tokens in found])
        codes = bytearray(padded.encode("utf-32-le", "surrogatepass"))
        token_ids = torch.frombuffer(codes, dtype=torch.int32).view(len(found), num_tokens)
        return token_ids.long() - 1

    def _continue(self, text: IndexedText, num_tokens: int) -> str:
        of_prompt, newer, older = text.table.get, self._newer.of_all.get, self._older.of_all.get
        tokens, sizes = text.tail, self._sizes
        for _ in range(num_tokens):
            for size in sizes:
                context = tokens[-size:]
                token = of_prompt(context) or newer(context) or older(context)
                if token:
                    break
            else:
                break
            tokens += token
        return tokens[len(text.tail) :]

    def _extend(self, text: IndexedText, tokens: str) -> None:
        of_prompt, of_all, sizes = text.table, self._newer.of_all, self._sizes
        num_known, start = len(of_prompt) + len(of_all), len(text.tail)
        whole = text.tail + tokens
        for end in range(start, len(whole)):
            token = whole[end]
            for size in sizes:
                context = whole[end - size if end > size else 0 : end]
                of_prompt[context] = of_all[context] = token
        text.tail = whole[-sizes[0] :]
        self._newer.num_entries += len(of_prompt) + len(of_all) - num_known
        if self._newer.num_entries >= self._max_generation:
            self._newer, self._older = _Generation(), self._newer


def _characters(token_ids: Sequence[int]) -> str:
    return "".join([chr(token + 1) for token in token_ids])
