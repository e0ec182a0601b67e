"""Writes our config from one of verl (YAML, or the script with its overrides) or of slime (the launch script).

    tlt migrate run_qwen3_grpo.sh --out my.yaml

What has no counterpart is printed and stands as a comment at the end of the config, with its value: nothing is lost.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tlt_megatron.config.load import load_config
from tlt_megatron.config.other_names import our_name

Values = Mapping[str, Any]  # theirs, by dotted key of verl or flag of slime (with _)
# Returns our settings; None if the value has no counterpart.
Convert = Callable[[Any, Values], dict[str, Any] | None]


def _word(key: str, **words: str) -> Convert:
    return lambda value, _: {key: words[value]} if value in words else None


def _at_least_0(key: str) -> Convert:
    return lambda value, _: {key: max(0, int(value or 0))}


def _file(key: str) -> Convert:
    def convert(value: Any, _: Values) -> dict[str, Any] | None:
        files = value if isinstance(value, list) else [value]
        return {key: str(files[-1])} if len(files) == 1 else None

    return convert


def _if(switch: str, key: str, **more: Any) -> Convert:
    """Their value counts only with their `switch`; a switch that is off means 0."""
    return lambda value, given: {key: value, **more} if given.get(switch) else {}


def _minibatches(*factors: str) -> Convert:
    """Their value is the size of a minibatch; a batch is the product of these settings of theirs."""

    def convert(size: Any, given: Values) -> dict[str, Any] | None:
        numbers = [given.get(name) for name in factors]
        if not all(isinstance(number, int) and number > 0 for number in (size, *numbers)):
            return None  # a script may leave one open
        return {"algorithm.num_minibatches": max(1, math.prod(numbers) // size)}

    return convert


def _verl_reward(path: Any, given: Values) -> dict[str, Any] | None:
    name = given.get("custom_reward_function.name", "compute_score")
    return {"reward.function": f"{path}:{name}"} if path else {}


def _advantage(value: Any, given: Values) -> dict[str, Any] | None:
    if value == "grpo" and given.get("algorithm.norm_adv_by_std_in_grpo") is False:
        return {"algorithm.advantage": "dr_grpo"}
    names = ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
    if value == "gspo":
        return {"algorithm.loss": "gspo", "algorithm.aggregation": "sequence_mean"}
    return {"algorithm.advantage": value} if value in names else None


_KL = _word("algorithm.kl_estimator", low_var_kl="k3", k3="k3", mse="k2", k2="k2")
_RESUME = _word("checkpoint.resume", auto="auto", disable="never")
VERL: dict[str, str | Convert] = {
    "data.train_files": _file("data.train"),
    "data.val_files": _file("data.eval"),
    "data.prompt_key": "data.input_key",
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": "rollout.max_new_tokens",
    "data.train_batch_size": "rollout.num_prompts",
    "data.shuffle": "data.shuffle",
    "custom_reward_function.path": _verl_reward,
    "algorithm.adv_estimator": _advantage,
    "algorithm.norm_adv_by_std_in_grpo": lambda value, _: {},  # see _advantage
    "algorithm.kl_ctrl.kl_coef": _if(
        "algorithm.use_kl_in_reward", "algorithm.kl_coef", **{"algorithm.kl_placement": "reward"}
    ),
    "algorithm.filter_groups.enable": "algorithm.dynamic_sampling",
    "algorithm.filter_groups.max_num_gen_batches": "algorithm.max_num_gen_batches",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.rollout.n": "rollout.num_samples",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.rollout.top_p": "rollout.top_p",
    "actor_rollout_ref.rollout.top_k": _at_least_0("rollout.top_k"),
    "actor_rollout_ref.rollout.dtype": _word("rollout.dtype", bfloat16="bfloat16"),
    "actor_rollout_ref.rollout.max_num_seqs": "rollout.max_batch_size",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "sglang.engine_args.tp_size",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "sglang.engine_args.mem_fraction_static",
    "actor_rollout_ref.rollout.name": _word("rollout.engine", sglang="sglang"),
    "actor_rollout_ref.rollout.val_kwargs.n": "eval.num_samples",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "eval.temperature",
    "actor_rollout_ref.actor.optim.lr": "optimizer.lr",
    "actor_rollout_ref.actor.optim.weight_decay": "optimizer.weight_decay",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": _at_least_0("optimizer.warmup_steps"),
    "actor_rollout_ref.actor.grad_clip": "optimizer.clip_grad",
    "actor_rollout_ref.actor.ppo_epochs": "algorithm.num_epochs",
    "actor_rollout_ref.actor.ppo_mini_batch_size": _minibatches("data.train_batch_size"),
    "actor_rollout_ref.actor.clip_ratio": lambda value, given: {
        "algorithm.clip_low": given.get("actor_rollout_ref.actor.clip_ratio_low", value),
        "algorithm.clip_high": given.get("actor_rollout_ref.actor.clip_ratio_high", value),
    },
    "actor_rollout_ref.actor.clip_ratio_low": "algorithm.clip_low",
    "actor_rollout_ref.actor.clip_ratio_high": "algorithm.clip_high",
    "actor_rollout_ref.actor.clip_ratio_c": "algorithm.dual_clip",
    "actor_rollout_ref.actor.loss_agg_mode": _word(
        "algorithm.aggregation",
        **{"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"},
        **{"seq-mean-token-sum-norm": "sequence_sum"},
    ),
    "actor_rollout_ref.actor.entropy_coeff": "algorithm.entropy_coef",
    "actor_rollout_ref.actor.kl_loss_coef": _if(
        "actor_rollout_ref.actor.use_kl_loss", "algorithm.kl_coef"
    ),
    "actor_rollout_ref.actor.kl_loss_type": _KL,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "mcore.micro_batch_tokens",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": "parallel.tensor",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": "parallel.pipeline",
    "trainer.total_training_steps": "run.num_steps",
    "trainer.default_local_dir": "run.dir",
    "trainer.save_freq": _at_least_0("checkpoint.interval"),
    "trainer.max_actor_ckpt_to_keep": _at_least_0("checkpoint.keep"),
    "trainer.test_freq": _at_least_0("eval.interval"),
    "trainer.resume_mode": _RESUME,
}
SLIME: dict[str, str | Convert] = {
    "hf_checkpoint": "model.path",
    "prompt_data": _file("data.train"),
    "eval_prompt_data": lambda value, _: {"data.eval": value[-1]},  # a name, then the file
    "input_key": "data.input_key",
    "label_key": "data.label_key",
    "apply_chat_template": "data.apply_chat_template",
    "rollout_shuffle": "data.shuffle",
    "rollout_max_prompt_len": "data.max_prompt_tokens",
    "rollout_max_response_len": "rollout.max_new_tokens",
    "rollout_batch_size": "rollout.num_prompts",
    "n_samples_per_prompt": "rollout.num_samples",
    "rollout_temperature": "rollout.temperature",
    "rollout_top_p": "rollout.top_p",
    "rollout_top_k": _at_least_0("rollout.top_k"),
    "rollout_num_gpus_per_engine": "sglang.engine_args.tp_size",
    "sglang_mem_fraction_static": "sglang.engine_args.mem_fraction_static",
    "rm_type": _word("reward.function", math="math", deepscaler="math", dapo="math"),
    "custom_rm_path": lambda value, _: {"reward.function": ":".join(value.rsplit(".", 1))},
    "advantage_estimator": _advantage,
    "dynamic_sampling_filter_path": lambda value, _: {"algorithm.dynamic_sampling": bool(value)},
    "global_batch_size": _minibatches("rollout_batch_size", "n_samples_per_prompt"),
    "num_steps_per_rollout": "algorithm.num_minibatches",
    "eps_clip": "algorithm.clip_low",
    "eps_clip_high": "algorithm.clip_high",
    "eps_clip_c": "algorithm.dual_clip",
    "calculate_per_token_loss": lambda value, _: {"algorithm.aggregation": "token_mean"},
    "kl_loss_coef": _if("use_kl_loss", "algorithm.kl_coef"),
    "kl_coef": lambda value, _: (
        {"algorithm.kl_coef": value, "algorithm.kl_placement": "reward"} if value else {}
    ),
    "kl_loss_type": _KL,
    "entropy_coef": "algorithm.entropy_coef",
    "tis_clip": _if("use_tis", "algorithm.tis_cap"),
    "lr": "optimizer.lr",
    "lr_decay_style": _word("optimizer.decay", constant="constant"),
    "weight_decay": "optimizer.weight_decay",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "clip_grad": "optimizer.clip_grad",
    "max_tokens_per_gpu": "mcore.micro_batch_tokens",
    "recompute_granularity": _word("mcore.recompute", full="full", selective="selective"),
    "tensor_model_parallel_size": "parallel.tensor",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "sequence_parallel": lambda value, given: {
        "parallel.sequence": given.get("tensor_model_parallel_size", 1) > 1
    },
    "num_rollout": "run.num_steps",
    "save": "run.dir",
    "save_interval": "checkpoint.interval",
    "eval_interval": "eval.interval",
    "n_samples_per_eval_prompt": "eval.num_samples",
    "eval_temperature": "eval.temperature",
    "wandb_project": "logging.wandb_project",
}
# Read together with another key.
_SWITCHES = {
    "custom_reward_function.name",
    "algorithm.use_kl_in_reward",
    "actor_rollout_ref.actor.use_kl_loss",
    "use_kl_loss",
    "use_tis",
}


def main(arguments: list[str] | None = None) -> int:
    """Write the config. Return 2 if it does not pass the checks of settings; it is written then, too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, metavar="FILE", help=".yaml of verl, or a script")
    parser.add_argument("--out", type=Path, help="default: <name>.tlt.yaml in this folder")
    options = parser.parse_args(arguments)
    out: Path = options.out or Path(f"{options.source.stem}.tlt.yaml")
    if out.exists():
        raise ValueError(f"--out {out}: exists already")
    given = read(options.source)
    if not given:
        raise ValueError(f"{options.source}: holds no settings of verl or slime")
    ours, left = convert(given)
    nested: dict[str, dict[str, Any]] = {}
    for key, value in ours.items():
        section, *path = key.split(".")
        node = nested.setdefault(section, {})
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = value
    lines = [f"{key}: {value!r}{_hint(key)}" for key, value in left.items()]
    text = (
        f"# From {options.source.name}, by tlt migrate.\n{yaml.safe_dump(nested, sort_keys=False)}"
    )
    if lines:
        text += "# Not taken over:\n" + "".join(f"#   {line}\n" for line in lines)
    out.write_text(text, encoding="utf-8")
    print(f"{out}: {len(ours)} settings; not taken over: {len(lines)}")
    for line in lines:
        print(f"  {line}")
    try:
        load_config(out)
    except ValueError as error:
        print(f"to be changed before a run: {error}", file=sys.stderr)
        return 2
    print(f"tlt train {out} --nproc-per-node N")
    return 0


def read(path: Path) -> dict[str, Any]:
    """Return the settings of a YAML file or of a script, by dotted key (verl) or by flag with _ (slime)."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix in (".yaml", ".yml"):
            return _flatten(yaml.safe_load(text) or {}, "")
        text = text.replace("\\\n", " ").replace("=(", "=( ")
        text = re.sub(r"\)[ \t]*$", " )", text, flags=re.MULTILINE)  # ends an array
        words = shlex.split(text, comments=True)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    variables: dict[str, str] = {}
    found: dict[str, Any] = {}
    flag = ""
    for word in words:
        word = _expand(word, variables)
        name, equals, value = word.partition("=")
        if word.startswith("--") and len(word) > 2:
            flag = name[2:].replace("-", "_")
            found[flag] = _typed(value) if equals else True
            flag = "" if equals else flag
        elif equals and re.fullmatch(r"\w+", name):
            variables[name], flag = value, ""
        elif equals and re.fullmatch(r"\+*[\w.]+\.\w+", name):
            found[name.lstrip("+")], flag = _typed(value), ""
        elif word in ("(", ")", "--", "&&", "\n") or "[@]" in word or not flag:
            flag = ""
        elif found[flag] is True:
            found[flag] = _typed(word)
        else:  # a further value
            before = found[flag]
            found[flag] = [*(before if isinstance(before, list) else [before]), _typed(word)]
    return found


def convert(given: Values) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return our settings by dotted key, and theirs that have no counterpart."""
    ours: dict[str, Any] = {}
    left: dict[str, Any] = {}
    is_verl = any("." in key for key in given)
    table = VERL if is_verl else SLIME
    for key, value in given.items():
        meaning = table.get(key)
        if key in _SWITCHES or (value is None and meaning):
            continue
        settings = {meaning: value} if isinstance(meaning, str) else None
        if callable(meaning) and "$" not in str(value):
            settings = meaning(value, given)
        if settings is None or "$" in str(value):
            left[key] = value
            continue
        ours |= settings
    defaults = {"rollout.engine": "sglang", "model.dtype": "bfloat16", "rollout.dtype": "bfloat16"}
    if not is_verl:
        defaults["algorithm.aggregation"] = "sequence_mean"
    ours = defaults | ours
    if ours.get("algorithm.clip_low") and "algorithm.clip_high" not in ours:
        ours["algorithm.clip_high"] = ours["algorithm.clip_low"]
    if ours.get("eval.interval") and not ours.get("data.eval"):
        left["evaluation every"] = ours.pop("eval.interval")
    return ours, left


def _flatten(node: Any, prefix: str) -> dict[str, Any]:
    if not isinstance(node, dict):
        return {prefix: node}
    found: dict[str, Any] = {}
    for key, value in node.items():
        found |= _flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def _expand(word: str, variables: Mapping[str, str]) -> str:
    """Return `word` with the values of $NAME, ${NAME} and ${NAME:-default}; unknown names stay."""

    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[2], match[3]
        known = variables.get(name, os.environ.get(name, default))
        return match[0] if known is None else known

    for _ in range(4):  # a default may hold a name
        word = re.sub(r"\$(\w+)|\$\{(\w+)(?::-([^${}]*))?\}", value, word)
    return word


def _typed(text: str) -> Any:
    if re.fullmatch(r"[-+]?[\d.]+e[-+]?\d+", text):  # YAML reads 1e-6 as text
        return float(text)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _hint(key: str) -> str:
    ours = our_name(key)
    return f"  (see {ours})" if ours else ""


if __name__ == "__main__":
    sys.exit(main())
