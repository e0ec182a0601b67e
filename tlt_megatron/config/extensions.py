"""Settings that name a function or a class, by a built-in name or by an import path.

A new built-in one is one line in `REGISTRY`. Nothing here imports torch.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from tlt_megatron.config.ranges import Range, require
from tlt_megatron.config.user_files import import_file


class ExtensionPoint(NamedTuple):
    """A setting that names a function or a class."""

    # a user's is called with these keywords; () if its owner checks the call
    parameters: tuple[str, ...]
    built_in: dict[str, str]  # name -> import path


def _point(parameters: str, **built_in: str) -> ExtensionPoint:
    """Return the point with these parameters, and built-in names for places in the package."""
    paths = {name: f"tlt_megatron.{place}" for name, place in built_in.items()}
    return ExtensionPoint(tuple(parameters.split()), paths)


REGISTRY = {
    "reward.function": _point(
        "data_source solution_str ground_truth extra_info",
        math="rewards.builtin:score_math",
        exact="rewards.builtin:score_exact",
        environment="rewards.environment_answer:score_conversation",
        none="rewards.no_reward:score_none",
    ),
    "rollout.environment": _point("messages data_source ground_truth extra_info"),
    "rollout.tools": _point(
        "",  # rewards/tool_set.py checks its calls
        python="rewards.sandbox:run_python",
        python_without_sandbox="rewards.sandbox:run_python",
    ),
    "algorithm.advantage": _point(
        "rewards",
        grpo="rewards.advantage:grpo",
        dr_grpo="rewards.advantage:dr_grpo",
        rloo="rewards.advantage:rloo",
        reinforce_plus_plus="rewards.advantage:reinforce_plus_plus",
        reinforce_plus_plus_baseline="rewards.advantage:reinforce_plus_plus_baseline",
        gae="rewards.advantage:gae",
        sft="rewards.advantage:sft",
    ),
    "algorithm.loss": _point(
        "logprobs old_logprobs batch section",
        ppo="policy.policy_loss:ppo",
        gspo="policy.policy_loss:gspo",
        cispo="policy.policy_loss:cispo",
    ),
    "speculation.selector": _point(
        "",
        cost_model="speculation.cost_model:CostModelSelector",
        beg_mab="speculation.beg_mab:BegMabSelector",
        fixed="speculation.selector:FixedSelector",
    ),
    "logging.trackers": _point(
        "run_dir project config resume_step",
        tensorboard="runtime.trackers:TensorBoard",
        wandb="runtime.trackers:Wandb",
    ),
    "rollout.engine": _point(
        "config device run_dir world",
        embedded="trainer.build_embedded:build_embedded_engine",
        sglang="trainer.build_sglang:build_sglang_engine",
    ),
}


UNSAFE_PYTHON = "python_without_sandbox"
MCP = "mcp:"  # begins an entry of rollout.tools that starts a server


def named_code(config: Any) -> Iterator[tuple[str, str]]:
    """Yield every setting that names a function or a class, with a name that it has."""
    for key in REGISTRY:
        value = config.reward.weights if key == "reward.function" else attrgetter(key)(config)
        for spec in [value] if isinstance(value, str) else value:
            if spec or key != "rollout.environment":
                yield key, spec


# Their functions also get the keywords of another setting, such as algorithm.loss_args.
WITH_ARGUMENTS = ("algorithm.advantage", "algorithm.loss")
# A further parameter that a user's function may have: the ScoredGroup of each prompt.
OPTIONAL = {"algorithm.advantage": "groups"}


def named(key: str) -> Range:
    """Return the range of a setting that names a function or a class."""
    built_in = REGISTRY[key].built_in
    names = f"one of {', '.join(built_in)}, " if built_in else ""
    optional = ("",) if key == "rollout.environment" else ()
    names += "mcp:COMMAND, " if key == "rollout.tools" else ""
    return Range(
        lambda spec: spec in (*REGISTRY[key].built_in, *optional) or all(spec.rpartition(":")[::2]),
        f"{names}path/to/file.py:name or package.module:name",
    )


def check_extension(key: str, spec: str) -> None:
    """Raise ValueError unless `spec` is a registered name or looks like a path. Imports nothing."""
    allowed = named(key)
    require(allowed.holds(spec), key, spec, allowed.allowed)


def check_extension_file(key: str, spec: str) -> None:
    """Raise ValueError if `spec` names a file that is absent. Imports nothing."""
    place = "" if spec.startswith(MCP) else spec.rpartition(":")[0]
    if _is_file(place) and not Path(place).is_file():
        raise ValueError(f"{key}={spec!r}: no such file: {Path(place).absolute()}")


@functools.cache
def load_extension(key: str, spec: str) -> Callable[..., Any]:
    """Return the function or class that setting `key` names. A process loads a file once.

    ValueError names the setting and what is wrong: no such file, module or name, code that fails on
    import, not callable, wrong parameters.
    """
    check_extension(key, spec)
    check_extension_file(key, spec)
    point = REGISTRY[key]
    place, _, name = point.built_in.get(spec, spec).rpartition(":")
    try:
        is_file, path = _is_file(place), Path(place)
        module = import_file(path.resolve()) if is_file else importlib.import_module(place)
    except Exception as error:
        raise ValueError(f"{key}={spec!r}: {place} fails to load: {error!r}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{key}={spec!r}: {place} has no {name!r} that can be called")
    if spec in point.built_in or not point.parameters:
        return function
    if key == "rollout.environment" and inspect.isclass(function):
        if not callable(getattr(function, "step", None)):
            raise ValueError(f"{key}={spec!r}: is a class without a method step(turn)")
        parameters: tuple[str, ...] = ()
    else:
        parameters = point.parameters
    signature = inspect.signature(function)
    bind = signature.bind_partial if key in WITH_ARGUMENTS else signature.bind
    try:
        bind(**dict.fromkeys(parameters))
    except TypeError as error:
        raise ValueError(
            f"{key}={spec!r}: has parameters {signature}, must accept ({', '.join(parameters)}): {error}"
        ) from error
    return function


def takes_optional(key: str, spec: str) -> bool:
    """Return whether the function has the parameter of `OPTIONAL`."""
    return OPTIONAL.get(key) in inspect.signature(load_extension(key, spec)).parameters


def load_code(config: Any, key: str, spec: str) -> None:
    """Import what a setting names. ValueError also for arguments that it does not take."""
    function, point = load_extension(key, spec), REGISTRY[key]
    if key not in WITH_ARGUMENTS or spec in point.built_in:
        return
    arguments, signature = attrgetter(f"{key}_args")(config), inspect.signature(function)
    given = [*point.parameters, *([OPTIONAL[key]] if takes_optional(key, spec) else [])]
    try:
        signature.bind(**dict.fromkeys(given), **arguments)
    except TypeError as error:
        raise ValueError(
            f"{key}_args={arguments!r}: must be the parameters of {spec}{signature} behind"
            f" {', '.join(point.parameters)}: {error}"
        ) from error


def call_extension(key: str, spec: str, **arguments: object) -> Any:
    """Return what the function returns. RuntimeError names the setting if a user's one fails."""
    function = load_extension(key, spec)
    try:
        return function(**arguments)
    except Exception as error:
        if spec in REGISTRY[key].built_in:
            raise
        raise RuntimeError(f"{key}={spec!r}: raised {error!r}") from error


def shapes_of(result: object) -> Any:
    """Return shapes of tensors in nested lists, and the text of anything else, for messages."""
    if isinstance(result, list | tuple):
        return [shapes_of(each) for each in result]
    shape = getattr(result, "shape", None)
    return repr(result)[:80] if shape is None else list(shape)


def _is_file(place: str) -> bool:
    return place.endswith(".py") or "/" in place
