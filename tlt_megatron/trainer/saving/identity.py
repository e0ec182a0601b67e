"""Identity and settings of a run, stored in every checkpoint and compared at a resume.

A different model or seed is an error, because the run would train a wrong policy. Other settings
may change. A drafter that does not fit the new settings starts anew. The strategy selector compares
its own state (speculation/selector.py).
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from tlt_megatron.config.schema import RunConfig
from tlt_megatron.models.config import ModelConfig
from tlt_megatron.models.hf_io import fingerprint_weights
from tlt_megatron.runtime.collectives import broadcast_object
from tlt_megatron.runtime.process_groups import Group
from tlt_megatron.speculation.noise import DEFINITION
from tlt_megatron.trainer.saving.run_checkpoint import SavedRun, find_saved_run
from tlt_megatron.trainer.saving.run_folder import resume_path

log = logging.getLogger(__name__)

_IDENTITY, _SETTINGS, _NUM_RANKS = "identity", "settings", "num_ranks"
_REFERENCE = "weights in model.path (the KL reference)"
_ADAPTERS = "LoRA"
_NOISE = "sampling noise (another one draws other tokens from the same seed)"
# Settings whose change makes the saved drafter useless.
_OF_DRAFTER = ("speculation.drafter", "drafter.algorithm", "spot.enabled")
# Sections and settings that do not affect results: location, output and length of a run.
_FREE = (
    "run.",
    "checkpoint.",
    "logging.",
    "eval.",
    "reward.num_workers",
    "reward.right_score",
    "data.train",
    "data.eval",
    # the prompts' fingerprint compares their effect
    "data.template_date",
    "data.chat_template_kwargs",
)


def saved_run_of(config: RunConfig, run_dir: Path, world: Group) -> SavedRun | None:
    """Return the verified checkpoint to resume from, if any. ValueError if none is intact, or if it
    is beyond the last step.
    """
    path = resume_path(run_dir, config.checkpoint.resume)
    saved = None if path is None else find_saved_run(path, world)
    if path is not None and saved is None and world.is_first:
        log.warning("%s holds no checkpoint yet: the run starts at step 0", path)
    if saved is not None:
        rule = f">= {saved.step}, the step of the checkpoint {saved.folder}"
        rule += " (tlt evaluate measures a checkpoint)"
        config.run.require(config.run.num_steps >= saved.step, "num_steps", rule)
    return saved


def with_template_date(config: RunConfig, saved: SavedRun | None, world: Group) -> RunConfig:
    """Return the settings with the date that chat templates write: the day on which the run was
    started. A collective of all ranks.
    """
    before = saved.state.get(_SETTINGS, {}).get("data.template_date") if saved else None
    day = config.data.template_date or before or date.today().isoformat()
    day = broadcast_object(day, world)  # ranks may start on two sides of midnight
    return dataclasses.replace(config, data=dataclasses.replace(config.data, template_date=day))


def describe_run(
    config: RunConfig, model: ModelConfig, stop_token_ids: Sequence[int], num_ranks: int
) -> dict[str, Any]:
    """Return the identity and settings for the state of every checkpoint, as JSON types."""
    function = dataclasses.asdict(model)
    del function["max_position_embeddings"]  # only a bound: it does not affect results
    identity = {
        "config.json": function,
        "stop_token_ids": list(stop_token_ids),
        "run.seed": config.run.seed,
        "data.shuffle": config.data.shuffle,
    }
    if config.has_reference:
        identity[_REFERENCE] = _describe_reference(config)
    if config.model.lora_rank:  # a checkpoint holds the adapters alone
        identity[_ADAPTERS] = {
            "rank": config.model.lora_rank,
            "alpha": config.model.lora_alpha,
            "targets": sorted(config.model.lora_targets),
            "frozen weights": fingerprint_weights(config.model.path),
        }
    about = {
        _IDENTITY: _flatten(identity),
        _SETTINGS: _flatten(dataclasses.asdict(config)) | {_NOISE: DEFINITION},
        _NUM_RANKS: num_ranks,
    }
    return json.loads(json.dumps(about))


def compare_run(saved: SavedRun, about: Mapping[str, Any], *, is_warning: bool) -> bool:
    """Return whether the saved drafter fits. ValueError, naming every change, if model or seeds
    differ.

    With `is_warning` (set it on one rank), one warning names the changed settings.
    """
    strangers = _changes(_IDENTITY, saved.state, about)
    if None in strangers.get(_REFERENCE, ()):  # a run without a reference, or an older version
        del strangers[_REFERENCE]
    if strangers:
        raise ValueError(
            f"checkpoint {saved.folder} belongs to another run: {_describe(strangers)} (saved -> now): "
            "model and seeds must be those that the run was started with"
        )
    changes = {
        name: change
        for name, change in _changes(_SETTINGS, saved.state, about).items()
        if not name.startswith(_FREE)
    }
    num_ranks = (saved.state.get(_NUM_RANKS), about[_NUM_RANKS])
    if num_ranks[0] != num_ranks[1]:
        changes["ranks"] = num_ranks
    fits_drafter = changes.keys().isdisjoint(_OF_DRAFTER)
    if changes and is_warning:
        is_told = not fits_drafter and about[_SETTINGS]["spot.enabled"]
        log.warning(
            "the checkpoint was written with other settings: %s%s",
            _describe(changes),
            "; the drafter starts anew" if is_told else "",
        )
    return fits_drafter


def _describe_reference(config: RunConfig) -> str:
    """Return the fingerprint of the reference's first weights, where they are not those of
    model.path, and when they change.
    """
    path, refresh_steps = config.reference.path, config.reference.refresh_steps
    text = fingerprint_weights(path or config.model.path)
    text += " of reference.path" if path else ""
    return f"{text}, replaced every {refresh_steps} steps" if refresh_steps else text


def _flatten(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat |= _flatten(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return flat


def _changes(
    part: str, saved: Mapping[str, Any], about: Mapping[str, Any]
) -> dict[str, tuple[object, object]]:
    """Return the differing values by name. A name that one side lacks counts as None."""
    if not isinstance(saved.get(part), dict):
        raise ValueError(f"the checkpoint's state lacks {part}")
    before, now = saved[part], about[part]
    names = sorted(before.keys() | now.keys())
    return {n: (before.get(n), now.get(n)) for n in names if before.get(n) != now.get(n)}


def _describe(changes: Mapping[str, tuple[object, object]]) -> str:
    return ", ".join(f"{name} {old!r} -> {new!r}" for name, (old, new) in changes.items())
