"""Tokenize a prompt file: each rank encodes a share of the rows, then the ranks exchange them.

Called by `prompts.load_prompts`.
"""

from __future__ import annotations

import hashlib
from itertools import islice
from pathlib import Path
from typing import TypeAlias

from tlt_megatron.config.schema import DataSection
from tlt_megatron.data.rows import Row, read_rows
from tlt_megatron.data.tokenizer import Tokenizer
from tlt_megatron.runtime.collectives import gather_objects
from tlt_megatron.runtime.process_groups import Group

_CHUNK_ROWS = 1000  # rows that a rank encodes with one call
_Chunks: TypeAlias = dict[int, list[list[int]]]  # chunk number -> token ids of each row


def encode_file(
    path: Path, tokenizer: Tokenizer, section: DataSection, world: Group
) -> tuple[list[Row], list[tuple[int, ...]]]:
    """Return all rows in file order with their token ids. The result is the same on every rank.

    Every rank of `world` must call it. If a rank fails, every rank raises the ValueError of the
    first one that did. Raises ValueError too if ranks read different files.
    """
    rows: list[Row] = []
    digest, own, cause = "", {}, None
    try:
        rows, own = _encode_share(path, tokenizer, section, world)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError) as error:
        cause = error
    shares = gather_objects((str(cause or ""), digest, own), world)
    errors = [error for error, _, _ in shares if error]
    if errors:
        raise ValueError(errors[0]) from cause
    chunks: _Chunks = {}
    for rank, (_, other_digest, other) in enumerate(shares):
        if other_digest != shares[0][1]:
            raise ValueError(
                f"{path}: rank {rank} reads another file than rank 0; it must be the same on every host"
            )
        chunks |= other
    token_ids = [tuple(row) for number in sorted(chunks) for row in chunks[number]]
    assert len(token_ids) == len(rows)
    return rows, token_ids


def _encode_share(
    path: Path, tokenizer: Tokenizer, section: DataSection, world: Group
) -> tuple[list[Row], _Chunks]:
    """Return every row, and the token ids of the chunks `rank`, `rank + size`, and so on."""
    rows: list[Row] = []
    own: _Chunks = {}
    found = read_rows(path, section)
    for number, chunk in enumerate(iter(lambda: list(islice(found, _CHUNK_ROWS)), [])):
        rows += chunk
        if number % world.size == world.rank:
            own[number] = tokenizer.encode_texts(
                [_render(path, row, tokenizer, section) for row in chunk]
            )
    return rows, own


def _render(path: Path, row: Row, tokenizer: Tokenizer, section: DataSection) -> str:
    where = f"{path} row {row.number}: {section.input_key}"
    try:
        text = tokenizer.render(row.prompt)
        text.encode()  # UnicodeEncodeError, a ValueError, for half of a surrogate pair
    except ValueError as error:
        raise ValueError(f"{where} cannot be encoded: {error}") from error
    return text
