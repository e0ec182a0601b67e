"""The sampled tokens of the running batch with their logprobs, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tlt_megatron.engines.embedded.request import DrawnTokens, Request


class Outputs:
    """A range of token ids (int64), logprobs and policy logprobs (float32) per request."""

    def __init__(self, num_ranges: int, size: int, device: torch.device) -> None:
        """`size`: the most tokens of a response, and those that a step may write after it."""
        num_outputs = num_ranges * size
        self._tensors = (
            torch.zeros(num_outputs, dtype=torch.int64, device=device),
            torch.zeros(num_outputs, device=device),
            torch.zeros(num_outputs, device=device),
        )
        self._starts: dict[Request, int] = {}
        self._free = [number * size for number in range(num_ranges)]

    def open(self, request: Request) -> int:
        """Give a request its range, with its saved tokens. Return the index of its next token."""
        start = self._starts[request] = self._free.pop()
        if request.saved is not None:
            for output, saved in zip(self._tensors, request.saved, strict=True):
                output[start : start + request.num_saved] = saved
        return start + request.num_saved

    def close(self, request: Request) -> None:
        self._free.append(self._starts.pop(request))

    def write(self, index_P: Tensor, *values_P: Tensor) -> None:
        for output, value_P in zip(self._tensors, values_P, strict=True):
            output.index_copy_(0, index_P, value_P)

    def read(self, request: Request, count: int) -> DrawnTokens:
        """Return copies of the first `count` entries of a request."""
        part = slice(self._starts[request], self._starts[request] + count)
        return DrawnTokens(*(output[part].cpu().clone() for output in self._tensors))

    def read_spans(self, spans: Sequence[tuple[Request, int, int]]) -> list[DrawnTokens]:
        """Return copies of the entries `start` to `end` - 1 of each (request, start, end)."""
        index = [
            self._starts[request] + place for request, *span in spans for place in range(*span)
        ]
        index_P = torch.tensor(index, device=self._tensors[0].device)
        lengths = [end - start for _, start, end in spans]
        values = [output.index_select(0, index_P).cpu().split(lengths) for output in self._tensors]
        return [DrawnTokens(*parts) for parts in zip(*values, strict=True)]

    def latest(self, index_B: Tensor, count: int) -> list[list[int]]:
        """Return the `count` token ids up to each index; undefined before the start of a range."""
        back_U = torch.arange(1 - count, 1, device=index_B.device)
        return self._tensors[0][(index_B.unsqueeze(1) + back_U).clamp_(min=0)].tolist()
