"""Settings of verl and slime that are more than another name of ours: for
`tools/commands/migrate.py`.

Most are rows of their_settings.yaml. The functions here are those that its rows name.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tlt_megatron.config.mcore_fields import read_fields
from tlt_megatron.config.other_names import PROJECTS, rows

Values = Mapping[str, Any]  # theirs, by dotted key of verl or flag of slime (with _)
# Returns our settings; None if the value has no counterpart.
Convert = Callable[[Any, Values], dict[str, Any] | None]
_ACTOR = "actor_rollout_ref.actor."
_SGLANG = "actor_rollout_ref.rollout.engine_kwargs.sglang."
GPUS = ("trainer.n_gpus_per_node", "actor_num_gpus_per_node")
NODES = ("trainer.nnodes", "actor_num_nodes")


def read_tables() -> dict[str, Any]:
    """Return the tables of their_settings.yaml by name."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


def converters(project: str, table: Mapping[str, Any]) -> dict[str, Convert]:
    """Return a converter for each key of theirs: those of `table`, and those that differ from ours
    only in the name.
    """
    column = PROJECTS.index(project)
    given = [(row.theirs[column].replace("-", "_"), row) for row in rows() if row.theirs[column]]
    counts = Counter(name for name, _ in given)
    same = {name: {"to": row.ours} for name, row in given if not row.note and counts[name] == 1}
    return {
        key: _SEVERAL[row] if isinstance(row, str) else _declared(row)
        for key, row in (same | dict(table)).items()
    }


def passed_on(key: str, value: Any) -> dict[str, Any] | None:
    """Return an option that goes unchanged to SGLang or Megatron; None for other keys."""
    if (option := key.removeprefix(_SGLANG)) != key:
        return {f"sglang.engine_args.{option}": value}
    option = key.removeprefix(f"{_ACTOR}megatron.override_transformer_config.")
    return {f"mcore.transformer.{option}": value} if option in read_fields().allowed else None


def _declared(row: Mapping[str, Any]) -> Convert:
    """Return the converter that a row of their_settings.yaml describes."""

    def convert(value: Any, given: Values) -> dict[str, Any] | None:
        if given.get(row.get("unless", "")):
            return None
        if not all(given.get(switch) for switch in row.get("if", [])):
            return {}
        if "ignored_with" in row:
            return {} if given.get(row["ignored_with"]) else None
        if "here" in row:
            return {} if value in row["here"] else None
        if "set" in row:
            return {row["to"]: row["set"]} if value else {}
        if "as" in row:
            value = _ONE[row["as"]](value)
        elif "words" in row:
            words = row["words"]
            value = (
                words.get(value) if isinstance(words, dict) else value if value in words else None
            )
        return None if value is None else {row["to"]: value}

    return convert


# ---- functions that return the value of one setting; None: it has no counterpart


def _files(value: Any) -> str | list[str]:
    files = [str(file) for file in value] if isinstance(value, list) else [str(value)]
    return files[0] if len(files) == 1 else files


def _one_file(value: Any) -> str | None:
    files = _files(value)
    return files if isinstance(files, str) else None


def _named_files(words: Any) -> str | list[str] | None:
    is_complete = isinstance(words, list) and len(words) % 2 == 0  # a name, its file, and so on
    return _files(words[1::2]) if is_complete else None


def _trackers(value: Any) -> list[str] | None:
    names = [name for name in ([value] if isinstance(value, str) else value) if name != "console"]
    known = all(name in ("tensorboard", "wandb") for name in names)
    return names if known else None


_ONE: dict[str, Callable[[Any], Any]] = {
    "files": _files,
    "one_file": _one_file,
    "named_files": _named_files,
    "trackers": _trackers,
    "at_least_0": lambda value: max(0, int(value or 0)),
    "list": lambda value: value if isinstance(value, list) else [value],
    "object": lambda value: json.loads(value) if isinstance(value, str) else value,
    "cap": lambda value: max(0, value),
    "loss": lambda name: "ppo" if name == "vanilla" else name,
    "module_function": lambda path: ":".join(path.rsplit(".", 1)),
}

# ---- the reward that verl chooses

SCORER = "reward (verl chooses it by the data_source of a row)"


def choose_scorer(given: Values, ours: dict[str, Any], left: dict[str, Any]) -> None:
    """Set the reward of a run of verl without a reward function of its own, by the name of its
    data. Adds to `left` what differs, or that it is not known.
    """
    files = str(given.get("data.train_files", "")).lower()
    if "gsm8k" in files:
        ours["reward.function"] = "exact"
        left[SCORER] = "gsm8k: the text after ####, here exact, which keeps commas of numbers"
    elif "dapo" in files or "aime" in files:
        ours["reward.function"] = "math"
        left[SCORER] = "math_dapo gives 1 and -1, here math gives 1 and 0"
        if penalty := ours.get("reward.overlong_penalty"):
            ours["reward.overlong_penalty"] = penalty / 2
            left[SCORER] += f": overlong_penalty {penalty:g} is halved with the range of rewards"
    else:
        left[SCORER] = "not known from data.train_files; set reward.function: math, exact or yours"


# ---- functions that return several settings


def _advantage(value: Any, given: Values) -> dict[str, Any]:
    without_std = given.get("algorithm.norm_adv_by_std_in_grpo") is False
    if value == "grpo" and (without_std or given.get("disable_grpo_std_normalization")):
        value = "dr_grpo"
    if value in ("gspo", "cispo"):  # slime's names
        return {"algorithm.loss": value}
    same = {"ppo": "gae", "grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
    return {"algorithm.advantage": same.get(value, value)}  # the checks refuse an unknown one


def _filter_groups(_: Any, given: Values) -> dict[str, Any]:
    if not given.get("algorithm.filter_groups.enable"):
        return {}
    metric = given.get("algorithm.filter_groups.metric", "score")
    metric = "reward" if metric in ("seq_reward", "seq_final_reward") else metric
    return {"algorithm.filter_groups": metric}


def _rs_bounds(_: Any, given: Values) -> dict[str, Any] | None:
    upper, lower = (
        given.get(f"algorithm.rollout_correction.rollout_rs_threshold{end}")
        for end in ("", "_lower")
    )
    upper = 2.0 if upper is None else upper
    if not isinstance(upper, int | float):  # newer versions: two bounds of 1 / ratio as text
        return None
    return {"algorithm.rollout_rs_threshold": [lower, upper] if lower else upper}


def _minibatches(*factors: str) -> Convert:
    """Convert the size of a minibatch to a count. The size of a batch is the product of `factors`,
    which are settings of theirs.
    """
    return lambda size, given: {
        "algorithm.num_minibatches": max(1, math.prod(given[name] for name in factors) // size)
    }


def _tokens_of_sharers(*sizes: str) -> Convert:
    """Convert the limit of one GPU to that of all GPUs that share the tokens of a sequence. `sizes`
    are the settings of theirs that say how many do.
    """
    return lambda tokens, given: {
        "mcore.micro_batch_tokens": tokens * math.prod(given.get(size) or 1 for size in sizes)
    }


def _kl(placement: str, coefficient: str) -> Convert:
    """Return KL at `placement`, if it is on. verl's coefficient is 0.001 by default."""

    def convert(value: Any, given: Values) -> dict[str, Any] | None:
        if value and placement == "loss" and given.get("algorithm.use_kl_in_reward"):
            return None  # both have no counterpart
        kl_coef = given.get(coefficient, 0.001)
        return {"algorithm.kl_placement": placement, "algorithm.kl_coef": kl_coef} if value else {}

    return convert


def _clip_ratio(value: Any, given: Values) -> dict[str, Any]:
    bounds = {bound: given.get(f"{_ACTOR}clip_ratio_{bound}", value) for bound in ("low", "high")}
    return {f"algorithm.clip_{bound}": ratio for bound, ratio in bounds.items()}


def _temperature(value: Any, given: Values) -> dict[str, Any]:
    evaluation = {} if "eval_temperature" in given else {"eval.temperature": value}
    return {"rollout.temperature": value, **evaluation}


_SEVERAL: dict[str, Convert] = {
    "advantage": _advantage,
    "filter_groups": _filter_groups,
    "rs_bounds": _rs_bounds,
    "verl_minibatches": _minibatches("data.train_batch_size"),
    "slime_minibatches": _minibatches("rollout_batch_size", "n_samples_per_prompt"),
    "verl_tokens": _tokens_of_sharers(
        f"{_ACTOR}megatron.context_parallel_size", f"{_ACTOR}ulysses_sequence_parallel_size"
    ),
    "slime_tokens": _tokens_of_sharers("context_parallel_size"),
    "kl_in_reward": _kl("reward", "algorithm.kl_ctrl.kl_coef"),
    "kl_in_loss": _kl("loss", f"{_ACTOR}kl_loss_coef"),
    "clip_ratio": _clip_ratio,
    "temperature": _temperature,
    "reward_function": lambda path, given: {
        "reward.function": f"{path}:{given.get('custom_reward_function.name', 'compute_score')}"
    },
    "betas": lambda betas, _: {"optimizer.betas": [*betas]},
    "slime_betas": lambda _, given: {
        "optimizer.betas": [given.get("adam_beta1", 0.9), given.get("adam_beta2", 0.999)]
    },
    "kl_of_rewards": lambda value, _: (
        {"algorithm.kl_coef": value, "algorithm.kl_placement": "reward"} if value else {}
    ),
    "resume": lambda value, given: (  # a folder; ours is that of the run
        {"checkpoint.resume": "auto"} if value == given.get("save") else None
    ),
}
