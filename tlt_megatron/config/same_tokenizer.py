"""Compares the tokenizers of two model folders, before torch is imported: see preflight.py."""

from __future__ import annotations

import json
from operator import itemgetter
from pathlib import Path
from typing import Any

_FILE = "tokenizer.json"
_OTHER_FILES = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "added_tokens.json")
# Parts of tokenizer.json that decide how a text becomes tokens.
_PARTS = ("normalizer", "pre_tokenizer", "model")


def tokenizer_difference(policy: Path, other: Path) -> str:
    """Return in words how the tokenizer in `other` differs from the policy's; "" if it is the same.

    A token of the policy must have the same id in `other`, which may have further tokens, and texts
    must be cut alike. Chat templates and special tokens that end a turn may differ.
    """
    if not ((policy / _FILE).is_file() and (other / _FILE).is_file()):
        return _compare_files(policy, other)
    (ids, parts), (other_ids, other_parts) = _read(policy / _FILE), _read(other / _FILE)
    for token, number in sorted(ids.items(), key=itemgetter(1)):
        found = other_ids.get(token)
        if found != number:
            has = "not there" if found is None else f"{found} there"
            return f"the token {token!r} is {number} in the policy's, and {has}"
    names = [name for name in _PARTS if parts[name] != other_parts[name]]
    return f"{names[0]} of {_FILE} differs" if names else ""


def _read(file: Path) -> tuple[dict[str, int], dict[str, Any]]:
    """Return the ids of all tokens, and the parts without their vocabulary."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises Exception itself
        raise ValueError(f"{file} cannot be loaded: {' '.join(str(error).split())}") from error
    parts = json.loads(tokenizer.to_str())
    parts["model"].pop("vocab", None)
    return tokenizer.get_vocab(with_added_tokens=True), parts


def _compare_files(policy: Path, other: Path) -> str:
    """Compare the files of tokenizers of which one has no tokenizer.json, byte by byte."""
    for name in (_FILE, *_OTHER_FILES):
        files = [folder / name for folder in (policy, other)]
        contents = [file.read_bytes() if file.is_file() else None for file in files]
        if contents[0] != contents[1]:
            return f"{name} differs"
    return ""
