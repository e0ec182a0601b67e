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
        self._texts: dict[Request, IndexedText] = {}

    def start(self) -> None:
        """Forget the requests of the last call, which a stop may have left unfinished."""
        self._texts.clear()

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
        texts = [self._text_of(request) for request in requests]
        unseen = [
            position + 1 - request.state.num_tokens - text.num_appended
            for request, position, text in zip(requests, positions, texts, strict=True)
        ]
        rows = latest(max(unseen))
        new = [row[len(row) - count :] for row, count in zip(rows, unseen, strict=True)]
        self._index.append(texts, new)
        return self._index.propose(texts, num_tokens)

    def finish(self, request: Request, token_ids: Sequence[int]) -> None:
        """Add the rest of a complete response to the index, also if it was decoded plainly."""
        text = self._text_of(request)
        self._index.append([text], [token_ids[text.num_appended :]])
        del self._texts[request]

    def _text_of(self, request: Request) -> IndexedText:
        text = self._texts.get(request)
        if text is None:
            prompt = request.state.prompt
            text = self._texts[request] = self._index.start(prompt.prompt_id, prompt.token_ids)
        return text
