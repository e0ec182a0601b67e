"""The drafter without a model: what followed the same n-gram before, in this prompt's responses or in any other.

Kept by an engine from one `generate` to the next, so that a prompt's earlier epochs are remembered; lives on the host and
costs a few microseconds for each row and step. Nothing depends on what it proposes: verification accepts what the target
draws, so a lost, stale or wrong entry costs time alone, and checkpoints need not hold the index.

One thing to know: it maps a context to the ONE token that followed last, and a proposal looks its own context up again
after every token. So no response is stored, and a proposal does not end where the response that it follows has ended.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Texts are strings with one character for each token: to slice and look up a short string costs a third of what a tuple of
# numbers does. Token t is chr(t + 1); chr(0) pads proposals.
_PAD = "\0"


class IndexedText:
    """A response that grows behind its prompt; `NgramIndex.start` makes it and the request keeps it."""

    __slots__ = ("table", "tail")

    def __init__(self, table: dict[str, str]) -> None:
        self.table = table  # shared by the responses to one prompt
        self.tail = ""  # the latest tokens, as many as the longest context has


class NgramIndex:
    """Contexts of fixed sizes -> the token that followed last. The longest context decides; of one size, what was seen
    with the same prompt (siblings as they grow, earlier epochs) goes before what was seen with any.

    Example: prompt [5 6 7 8 5 6], sizes (2, 1): after [5 6] came 7, after [6 7] came 8, so [7 8 5 6 7 ...] is proposed.
    """

    def __init__(
        self, *, sizes: Sequence[int] = (16, 8, 5, 3, 2), max_entries: int = 4_000_000
    ) -> None:
        """`sizes` are context lengths in tokens; at the start of a text all there is counts as one. Half of `max_entries`
        is for single prompts, half for all texts. An entry takes 60 to 100 bytes; a token makes at most two for each size.
        """
        if not sizes or min(sizes) < 1:
            raise ValueError(f"sizes={tuple(sizes)}: must be one or more numbers >= 1")
        if max_entries < 4:
            raise ValueError(f"max_entries={max_entries}: must be >= 4")
        self._sizes = tuple(sorted(set(sizes), reverse=True))
        self._max_by_prompt = max_entries // 2
        self._max_generation = max_entries // 4
        self._by_prompt: dict[str, dict[str, str]] = {}  # the latest started last
        self._num_by_prompt = 0
        # Of all texts, in two generations: what is not seen again while the newer fills goes with the older.
        self._newer: dict[str, str] = {}
        self._older: dict[str, str] = {}
        self._num_evicted = 0

    @property
    def num_entries(self) -> int:
        """Held now: at most `max_entries`, and what the latest text brought."""
        return sum(map(len, self._by_prompt.values())) + len(self._newer) + len(self._older)

    @property
    def num_evicted(self) -> int:
        """Entries given up so far for want of room."""
        return self._num_evicted

    def start(self, prompt_id: str, token_ids: Sequence[int]) -> IndexedText:
        """A response to this prompt begins. Its siblings, and later epochs, come with the same `prompt_id`."""
        table = self._by_prompt[prompt_id] = self._by_prompt.pop(prompt_id, {})
        text = IndexedText(table)
        tokens, longest = _characters(token_ids), self._sizes[0]
        if table.get(tokens[-longest - 1 : -1]) == tokens[-1:]:
            text.tail = tokens[-longest:]  # the prompt is known
        else:
            self._extend(text, tokens)
        return text

    def append(self, texts: Sequence[IndexedText], token_ids: Sequence[Sequence[int]]) -> None:
        """Tokens were committed, any number to each text, all in [0, 1114109]. That a text has ended need not be told."""
        for text, row in zip(texts, token_ids, strict=True):
            self._extend(text, _characters(row))

    def propose(self, texts: Sequence[IndexedText], num_tokens: int) -> tuple[Tensor, list[int]]:
        """What may follow: ([B, num_tokens] int64 on the CPU, how many of each row were found). `tree.UNUSED` stands
        behind those."""
        found = [self._continue(text, num_tokens) for text in texts]
        padded = "".join([tokens.ljust(num_tokens, _PAD) for tokens in found])
        codes = bytearray(padded.encode("utf-32-le", "surrogatepass"))
        token_ids = torch.frombuffer(codes, dtype=torch.int32).view(len(found), num_tokens)
        return token_ids.long() - 1, [len(tokens) for tokens in found]

    def _continue(self, text: IndexedText, num_tokens: int) -> str:
        of_prompt, newer, older = text.table.get, self._newer.get, self._older.get
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
        of_prompt, of_all, sizes = text.table, self._newer, self._sizes
        num_known, start, whole = len(of_prompt), len(text.tail), text.tail + tokens
        for end in range(start, len(whole)):
            token = whole[end]
            for size in sizes:
                context = whole[end - size if end > size else 0 : end]
                of_prompt[context] = of_all[context] = token
        text.tail = whole[-sizes[0] :]
        self._num_by_prompt += len(of_prompt) - num_known
        if len(of_all) >= self._max_generation:
            self._num_evicted += len(self._older)
            self._older, self._newer = of_all, {}
        if self._num_by_prompt > self._max_by_prompt:
            self._make_room()

    def _make_room(self) -> None:
        """Empty an eighth of the prompts' tables, the longest not started first."""
        # Counted anew: a response may outlive its table's place here, and then adds what is not held.
        self._num_by_prompt = sum(map(len, self._by_prompt.values()))
        for prompt_id, table in list(self._by_prompt.items()):
            if self._num_by_prompt <= self._max_by_prompt * 7 // 8:
                break
            if table:
                self._num_by_prompt -= len(table)
                self._num_evicted += len(table)
                table.clear()  # in place: its responses may still run
            else:
                del self._by_prompt[prompt_id]  # nothing was added since it was emptied


def _characters(token_ids: Sequence[int]) -> str:
    return "".join([chr(token + 1) for token in token_ids])
