"""Reads what users give as prompts: texts, chat messages, and token ids of Python, NumPy or
torch.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex

from tlt_megatron.data.rows import with_arguments, with_text
from tlt_megatron.data.tokenizer import Tokenizer
from tlt_megatron.types import Message

# An array or tensor of ids counts as a sequence of ids.
TextPrompt = str | Sequence[Message] | Sequence[SupportsIndex]


def as_prompts(given: TextPrompt | Sequence[TextPrompt]) -> list[Any]:
    """Return the prompts of what `Engine.generate` was given: one prompt, or several in a list.

    Example: "12" is one prompt, and so are [5, 7] and [{"role": "user", "content": "12"}].
    ["12", [5, 7]] is two.
    """
    if isinstance(given, str):
        return [given]
    items = _items(given, "prompts")
    is_one = any(isinstance(item, Mapping) or _is_number(item) for item in items)
    return [items] if is_one else items


class PromptReader:
    """Encodes prompts for an engine."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, max_tokens: int) -> None:
        """`max_tokens` is the longest prompt. A longer text may be refused before it is encoded,
        which takes hundreds of bytes for each of its characters.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._longest_token = max(map(len, tokenizer.hf.get_vocab()), default=1)

    def encode(
        self, prompt: Any, name: str, template_kwargs: Mapping[str, object]
    ) -> tuple[int, ...]:
        """Return the token ids of one prompt. ValueError for one that is none, by its `name`."""
        if template_kwargs.get("tools") and not _has_messages(prompt):
            raise ValueError(f"{name}: must be a list of messages where there are tools")
        if not isinstance(prompt, str):
            prompt = _items(prompt, name)
            if not _has_messages(prompt):
                most = self._vocab_size
                return tuple(_token_id(id_, f"{name}[{i}]", most) for i, id_ in enumerate(prompt))
            prompt = [_message(item, f"{name}[{index}]") for index, item in enumerate(prompt)]
        text = self._tokenizer.render(prompt, template_kwargs)
        check_text(text, name)
        if len(text) > self._max_tokens * self._longest_token:
            raise ValueError(
                f"{name} has {len(text)} characters: max_tokens={self._max_tokens} tokens hold at most"
                f" {self._max_tokens * self._longest_token}"
            )
        ids = self._tokenizer.encode_texts([text])[0]
        return tuple(self._tokenizer.with_first(ids) if isinstance(prompt, str) else ids)


def _has_messages(prompt: Any) -> bool:
    """Return whether a prompt goes through the chat template."""
    return isinstance(prompt, Sequence) and any(isinstance(item, Mapping) for item in prompt)


def as_number(name: str, value: Any) -> int | float:
    """Return a sampling setting as a number of Python. ValueError for one of another type."""
    kind, rule = (float, "a number") if name in ("temperature", "top_p") else (int, "an integer")
    try:
        number = kind(value) if kind is float else operator.index(value)
    except (TypeError, ValueError):
        number = None
    if number is None or isinstance(value, bool | str):
        raise ValueError(f"{name}={value!r:.80}: must be {rule}")
    return number


def check_text(text: str, name: str) -> None:
    """Raise ValueError for half a surrogate pair, which is no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name}: character {error.start} is {text[error.start]!a}, half of a surrogate pair"
        ) from None


def _items(given: Any, name: str) -> list[Any]:
    """Return the items of a sequence, an array or a tensor."""
    given = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(given, Mapping | bytes) or not isinstance(given, Sequence):
        raise ValueError(
            f"{name}={given!r:.80}: must be a text, a list of chat messages, or a list of token ids"
        )
    return list(given)


def _is_number(item: Any) -> bool:
    """Return whether an item of a list is a number, also one of NumPy or torch."""
    return isinstance(item, int | float | complex) or getattr(item, "ndim", None) == 0


def _token_id(item: Any, name: str, vocab_size: int) -> int:
    try:
        number = operator.index(item)
    except TypeError:
        number = -1
    if isinstance(item, bool) or not 0 <= number < vocab_size:
        raise ValueError(f"{name}={item!r:.80}: must be a token id, 0 to {vocab_size - 1}")
    return number


def _message(item: Any, name: str) -> dict[str, Any]:
    """Return a message whose content is a text. The parts of a content are joined."""
    if not isinstance(item, Mapping) or not isinstance(item.get("role"), str):
        raise ValueError(f"{name}={item!r:.80}: must be a message with the keys role and content")
    try:
        message = with_text(dict(item))
    except ValueError as error:
        raise ValueError(f"{name}.{error}") from None
    content = message.get("content")
    if not isinstance(content, str) and not (content is None and "tool_calls" in item):
        raise ValueError(f"{name}.content={content!r:.80}: must be a text or a list of text parts")
    try:
        return with_arguments(message)
    except ValueError as error:
        raise ValueError(f"{name}.tool_calls: {error}") from None
