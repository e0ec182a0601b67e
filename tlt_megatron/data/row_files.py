"""Reads the raw rows of a prompt file, .jsonl or .parquet, so that both give the same values.

Called by `rows.read_rows`. Parquet has one type for a column: an object gets the keys of all rows,
a number may have fewer digits, and what has no one type is JSON text. All three are undone here.
"""

from __future__ import annotations

import codecs
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tlt_megatron.saved_files import first_twin, parse_json

if TYPE_CHECKING:
    from pyarrow import DataType

log = logging.getLogger(__name__)

_BATCH_ROWS = 1024
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # as > writes in a PowerShell


def read_raw_rows(path: Path) -> Iterator[tuple[int, object]]:
    """Yield the number of each row, from 1 (in .jsonl of its line), and its value.

    Keys whose value is null are left out of objects within the row, at every level. ValueError
    names file and row.
    """
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise ValueError(
            f"{path}: must be a .jsonl or .parquet file. FOLDER:train reads .json and .csv files too"
        )
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    for number, raw in readers[path.suffix](path):
        is_row = isinstance(raw, dict)  # whose own keys are the columns, which messages name
        yield number, {k: without_nulls(v) for k, v in raw.items()} if is_row else raw


def without_nulls(value: Any) -> Any:
    """Return a JSON value whose objects have no key with the value null."""
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def _read_jsonl(path: Path) -> Iterator[tuple[int, object]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            if number == 1 and line.startswith(_UTF_16):
                raise ValueError(f"{path}: is UTF-16, must be UTF-8")
            try:
                raw = parse_json(line.decode("utf-8-sig"))
            except ValueError as error:  # bad JSON or bad UTF-8
                raise ValueError(
                    f"{path} row {number}: must be one JSON object: {error}"
                ) from error
            yield number, raw


def _read_parquet(path: Path) -> Iterator[tuple[int, object]]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: is not a parquet file: {error}") from error
    with file:
        schema = file.schema_arrow
        if twin := first_twin(schema.names):
            raise ValueError(f"{path}: the column {twin!r} stands twice")
        restore = {field.name: _restorer(field.type) for field in schema}
        if short := [field.name for field in schema if _has_short_floats(field.type)]:
            log.warning(
                f"{path}: {', '.join(short)}: numbers of 16 or 32 bits, each read as the shortest text that gives it"
                " (0.1, not 0.10000000149011612). Store text or 64 bits if labels have more digits"
            )
        number = 0
        try:
            # no threads: ranks that are forked later would inherit their pool
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, use_threads=False):
                for raw in batch.to_pylist(maps_as_pydicts="strict"):
                    number += 1
                    yield number, {key: restore[key](part) for key, part in raw.items()}
        except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:
            raise ValueError(f"{path}: is damaged behind row {number}: {error}") from error


def _restorer(kind: DataType) -> Callable[[Any], Any]:
    """Return what turns a value of an Arrow type, as pyarrow gives it, into that of the row."""
    import numpy
    from pyarrow import types

    kind = _stored(kind)
    if _is_json(kind):
        return _unless_null(parse_json)
    if _is_short_float(kind):
        short = numpy.float16 if types.is_float16(kind) else numpy.float32
        return _unless_null(lambda value: float(str(short(value))))
    if types.is_struct(kind):
        fields = {part.name: _restorer(part.type) for part in _parts(kind)}
        return _unless_null(lambda value: {key: fields[key](value[key]) for key in value})
    if types.is_map(kind):
        item = _restorer(kind.item_type)
        return _unless_null(lambda value: {key: item(value[key]) for key in value})
    if parts := _parts(kind):
        each = _restorer(parts[0].type)
        return _unless_null(lambda value: [each(part) for part in value])
    return lambda value: value


def _unless_null(restore: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else restore(value)


def _parts(kind: DataType) -> list[Any]:
    """Return the fields of a nested type: of a list, that of its items."""
    return [kind.field(index) for index in range(kind.num_fields)]


def _stored(kind: DataType) -> DataType:
    """Return the type of the values of categories, and of an extension such as an array's."""
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    return kind if _is_json(kind) else getattr(kind, "storage_type", kind)


def _is_json(kind: DataType) -> bool:
    """Return whether values are JSON text, as `datasets` and DuckDB mark them."""
    return getattr(kind, "extension_name", "") == "arrow.json"


def _is_short_float(kind: DataType) -> bool:
    from pyarrow import types

    return types.is_float16(kind) or types.is_float32(kind)


def _has_short_floats(kind: DataType) -> bool:
    kind = _stored(kind)
    return _is_short_float(kind) or any(_has_short_floats(part.type) for part in _parts(kind))
