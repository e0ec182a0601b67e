"""The fields of TransformerConfig that `mcore.transformer` may set, from mcore_fields.yaml.

They change only how and where the same numbers are computed. A list of forbidden fields could miss
one of some 230 that changes the model: the trained policy would differ from the one that rolls out.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tlt_megatron.config.ranges import require, require_divides

_STAGE_FIELDS = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"


class _Fields(NamedTuple):
    allowed: frozenset[str]
    values: dict[str, list[str]]  # allowed for a field; recompute_modules is a list of them
    instead: dict[str, str]  # field that may not be set -> what to do instead


@functools.cache
def read_fields() -> _Fields:
    """Return the fields that mcore_fields.yaml names."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    fields = yaml.safe_load(text)
    allowed = frozenset(chain(*fields["allowed"].values()))
    return _Fields(allowed, fields["values"], fields["instead"])


def check_transformer_fields(fields: Mapping[str, object]) -> None:
    """Raise ValueError for a field or a value that is not allowed, and say what to do instead."""
    allowed, values, instead = read_fields()
    for name, value in fields.items():
        if name == "moe_aux_loss_coeff":
            is_number = isinstance(value, float | int) and value >= 0
            require(is_number, f"mcore.transformer.{name}", value, "a number >= 0")
        if name in values:
            is_list = name == "recompute_modules"
            given = value if is_list else [value]
            is_known = isinstance(given, list) and all(each in values[name] for each in given)
            rule = f"{'a list' if is_list else 'one'} of {', '.join(values[name])}"
            require(is_known, f"mcore.transformer.{name}", value, rule)
        if name in allowed:
            continue
        if name in instead:
            raise ValueError(f"mcore.transformer.{name}={value!r}: not allowed; {instead[name]}")
        near = difflib.get_close_matches(str(name), allowed, n=1, cutoff=0.9)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(
            f"mcore.transformer.{name}={value!r}: not allowed{meant}; the model is that of model.path, and only "
            "kernels, fusions, memory, communication and pipeline stages may be set (tlt_megatron/config/mcore_fields.yaml lists them)"
        )


def layers_of_stages(
    num_layers: int, pipeline: int, virtual: int, fields: Mapping[str, Any], *, path: str = ""
) -> list[list[int]]:
    """Return the layers of each pipeline stage, as Megatron distributes those of the model `path`.

    Example: 5 layers on 3 stages with `num_layers_in_first_pipeline_stage=1` are `[[0], [1, 2],
    [3, 4]]`, and 4 on 2 stages of 2 `virtual` ones `[[0, 2], [1, 3]]`. ValueError if the stages
    between, or the virtual ones, cannot have the same number.
    """
    numbers = iter(range(num_layers))
    if virtual == 1:
        counts = _layer_counts(num_layers, pipeline, fields, path)
        return [[*islice(numbers, count)] for count in counts]
    for name in _STAGE_FIELDS:
        count, rule = fields.get(name), f"null with parallel.virtual_pipeline={virtual}"
        require(count is None, f"mcore.transformer.{name}", count, rule)
    num_chunks = pipeline * virtual
    cut = f"parallel.pipeline={pipeline} x parallel.virtual_pipeline={virtual} = {num_chunks}"
    require_divides(num_chunks, num_layers, cut, f"num_hidden_layers={num_layers} of {path}")
    chunks = [[*islice(numbers, num_layers // num_chunks)] for _ in range(num_chunks)]
    return [[*chain(*chunks[stage::pipeline])] for stage in range(pipeline)]


def _layer_counts(
    num_layers: int, pipeline: int, fields: Mapping[str, Any], path: str
) -> list[int]:
    """Return the number of layers of each stage."""
    given = {name: n for name in _STAGE_FIELDS if (n := fields.get(name)) is not None}
    for name, count in given.items():
        setting, is_count = f"mcore.transformer.{name}", type(count) is int and count >= 1
        require(is_count, setting, count, "an integer >= 1")
        require(pipeline > 1, setting, count, "null with parallel.pipeline=1")
    if not given:
        whole = f"num_hidden_layers={num_layers} of {path}"
        require_divides(pipeline, num_layers, f"parallel.pipeline={pipeline}", whole)
        return [num_layers // pipeline] * pipeline
    rest, stages = num_layers - sum(given.values()), pipeline - len(given)
    is_even = rest == 0 if not stages else rest >= stages and rest % stages == 0
    if not is_even:
        settings = "".join(f" and mcore.transformer.{name}={n}" for name, n in given.items())
        raise ValueError(
            f"parallel.pipeline={pipeline}{settings} leave {rest} of num_hidden_layers={num_layers} of {path} for "
            f"{stages} stages: must be the same number, at least 1, for each"
        )
    first, last = ([given[name]] if name in given else [] for name in _STAGE_FIELDS)
    return [*first, *[rest // max(stages, 1)] * stages, *last]
