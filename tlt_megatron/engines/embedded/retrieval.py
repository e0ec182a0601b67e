"""The n-gram drafter inside the embedded engine: finds continuations in earlier text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from tlt_megatron.engines.embedded.scheduler import Request
from tlt_megatron.speculation.ngram import IndexedText, NgramIndex


class Retriever:
    """Keeps the index up to date with the running requests. It outlives them."""

    def __init__(self) -> None:
        self._index = NgramIndex()

    def propose(
        self,
        requests: Sequence[Request],
        positions: Sequence[int],
        latest: Callable[[int], list[list[int]]],
        num_tokens: int,
    ) -> Tensor:
        """Return [B, num_tokens] continuations after the roots at `positions`, on the CPU.

        `latest(n)` returns the last n tokens of each response, the root included.
        """
        unseen = []
        for request, position in zip(requests, positions, strict=True):
            num_drawn = position + 1 - request.state.num_tokens
            unseen.append(num_drawn - request.num_indexed)
            request.num_indexed = num_drawn
        rows = latest(max(unseen))
        new = [row[len(row) - count :] for row, count in zip(rows, unseen, strict=True)]
        texts = [self._text_of(request) for request in requests]
        self._index.append(texts, new)
        return self._index.propose(texts, num_tokens)[0]

    def finish(self, request: Request, token_ids: Sequence[int]) -> None:
        """Add the rest of a complete response to the index, also if it was decoded plainly."""
        self._index.append([self._text_of(request)], [token_ids[request.num_indexed :]])

    def _text_of(self, request: Request) -> IndexedText:
        if request.text is None:
            prompt = request.state.prompt
            request.text = self._index.start(prompt.prompt_id, prompt.token_ids)
        return request.text
