"""The pages of KV memory that a request of the embedded engine needs, for the engine and for the checks before a run."""

from __future__ import annotations

PAGE_TOKENS = 64  # positions of one KV page


def pages_of(num_prompt: int, num_new: int, *, copies_partial: bool) -> int:
    """Return the pages of a prompt, which its responses share, and of one response.

    `copies_partial`: a response starts with a copy of its prompt's last partial page (batch-invariant).
    """
    num_own = num_new + num_prompt % PAGE_TOKENS * copies_partial
    return -(-num_prompt // PAGE_TOKENS) + -(-num_own // PAGE_TOKENS)


def most_pages_of(num_tokens: int, *, copies_partial: bool) -> int:
    """Return the pages that suffice for `num_tokens`, wherever a prompt ends that holds earlier turns or tokens."""
    return -(-num_tokens // PAGE_TOKENS) + 1 + copies_partial
