"""Identity and settings of a run, stored in every checkpoint and compared at a resume.

`build.py` compares them before any model is built. A different model or seed is an error, because the run would train a
wrong policy. Other settings may change. If a learned part (the strategy selector, the drafter) does not fit the new settings,
that part starts anew.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tlt_megatron.config.schema import RunConfig
from tlt_megatron.models.config import ModelConfig
from tlt_megatron.trainer.checkpoint import SavedRun

log = logging.getLogger(__name__)

_IDENTITY, _SETTINGS, _NUM_RANKS = "identity", "settings", "num_ranks"
# Settings whose change makes the learned state of a part useless.
_OF_SELECTOR = (
    "rollout.engine",
    "speculation.enabled",
    "speculation.drafter",
    "speculation.strategies",
    "speculation.selector",
    "speculation.beg_thresholds",
    "speculation.ranking",
)
_OF_DRAFTER = (
    "speculation.drafter",
    "drafter.algorithm",
    "drafter.aux_layer_ids",
    "spot.enabled",
)
# Sections and settings that do not affect results: location, output and length of a run.
_FREE = (
    "run.",
    "checkpoint.",
    "logging.",
    "eval.",
    "reward.num_workers",
    "data.train",
    "data.eval",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Which learned parts resume from the checkpoint. The others start anew."""

    has_selector: bool
    has_drafter: bool


def describe_run(
    config: RunConfig, model: ModelConfig, stop_token_ids: Sequence[int], num_ranks: int
) -> dict[str, object]:
    """Return the identity and settings for the state of every checkpoint, as JSON types."""
    function = dataclasses.asdict(model)
    del function["max_position_embeddings"]  # only a bound: it does not affect results
    identity = {
        "config.json": function,
        "stop_token_ids": list(stop_token_ids),
        "run.seed": config.run.seed,
        "data.seed": config.data.seed,
        "data.shuffle": config.data.shuffle,
    }
    about = {
        _IDENTITY: _flatten(identity),
        _SETTINGS: _flatten(dataclasses.asdict(config)),
        _NUM_RANKS: num_ranks,
    }
    return json.loads(json.dumps(about))


def check_identity(saved: SavedRun, about: Mapping[str, object]) -> None:
    """Raise ValueError if model or seeds differ. It names every differing value, saved and current."""
    before, now = (_part(values, _IDENTITY) for values in (saved.state, about))
    changes = _changes(before, now)
    if changes:
        raise ValueError(
            f"checkpoint {saved.folder} belongs to another run: {_describe(changes)} (saved -> now): "
            "model and seeds must be those that the run was started with"
        )


def compare_settings(saved: SavedRun, about: Mapping[str, object], *, is_warning: bool) -> Resumed:
    """Return which learned parts resume.

    With `is_warning` (set it on one rank), one warning names the changed settings and the parts that start anew.
    """
    before, now = (_part(values, _SETTINGS) for values in (saved.state, about))
    changes = {
        name: change for name, change in _changes(before, now).items() if not name.startswith(_FREE)
    }
    num_ranks = (saved.state.get(_NUM_RANKS), about[_NUM_RANKS])
    is_same_world = num_ranks[0] == num_ranks[1]
    has_selector = is_same_world and changes.keys().isdisjoint(_OF_SELECTOR)
    has_drafter = changes.keys().isdisjoint(_OF_DRAFTER)
    if not is_same_world:
        changes["ranks"] = num_ranks
    if changes and is_warning:
        anew = [
            part
            for part, goes_on in (("strategy selector", has_selector), ("drafter", has_drafter))
            if not goes_on and now["speculation.enabled"]
        ]
        log.warning(
            "the checkpoint was written with other settings: %s%s",
            _describe(changes),
            f"; {' and '.join(anew)} start anew" if anew else "",
        )
    return Resumed(has_selector=has_selector, has_drafter=has_drafter)


def _part(values: Mapping[str, object], name: str) -> dict[str, object]:
    part = values.get(name)
    if not isinstance(part, dict):
        raise ValueError(f"the checkpoint's state lacks {name}")
    return part


def _flatten(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat |= _flatten(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return flat


def _changes(
    before: Mapping[str, object], now: Mapping[str, object]
) -> dict[str, tuple[object, object]]:
    """Return the differing values by name. A name that only one side has counts as None in the other."""
    names = sorted(before.keys() | now.keys())
    return {n: (before.get(n), now.get(n)) for n in names if before.get(n) != now.get(n)}


def _describe(changes: Mapping[str, tuple[object, object]]) -> str:
    return ", ".join(f"{name} {old!r} -> {new!r}" for name, (old, new) in changes.items())
