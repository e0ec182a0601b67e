"""What a checkpoint says of its run: what a resumed run must have in common with it, and which settings it had.

`build.py` puts both into every checkpoint and compares them at a resume, before any model is built. A different model or
seed is refused, as it would train a wrong policy. Other settings may change; where a learned part does not fit them (the
strategy selector, the drafter), that part starts anew.
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
# Sections and settings that change no result: where a run is, what it writes, how long it goes on.
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
    """Which learned parts go on where the checkpoint stood; the others start anew."""

    has_selector: bool
    has_drafter: bool


def describe_run(
    config: RunConfig, model: ModelConfig, stop_token_ids: Sequence[int], num_ranks: int
) -> dict[str, object]:
    """What goes into the state of every checkpoint, as JSON holds it."""
    function = dataclasses.asdict(model)
    del function["max_position_embeddings"]  # a bound: it changes no number
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
    """ValueError names every value of the model or seed that differs, the saved and the present one."""
    before, now = (_part(values, _IDENTITY) for values in (saved.state, about))
    changes = _changes(before, now)
    if changes:
        raise ValueError(
            f"checkpoint {saved.folder} belongs to another run: {_describe(changes)} (saved -> now): "
            "model and seeds must be those that the run was started with"
        )


def compare_settings(saved: SavedRun, about: Mapping[str, object], *, is_warning: bool) -> Resumed:
    """What goes on. One warning names the settings that changed and the parts that start anew because of them; one rank
    gives it."""
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
    """By name, what differs; a name that only one of them has counts as None in the other."""
    names = sorted(before.keys() | now.keys())
    return {n: (before.get(n), now.get(n)) for n in names if before.get(n) != now.get(n)}


def _describe(changes: Mapping[str, tuple[object, object]]) -> str:
    return ", ".join(f"{name} {old!r} -> {new!r}" for name, (old, new) in changes.items())
