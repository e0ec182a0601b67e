"""What `algorithm.stream_update` needs of other settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tlt_megatron.config.schema import RunConfig

_OF_SIBLINGS = ("grpo", "dr_grpo", "rloo")  # advantages of a response from its siblings alone


def check_stream_update(config: RunConfig) -> None:
    """Raise ValueError if gradients cannot be computed before the batch is complete.

    The message names the setting that is in the way, and its allowed value.
    """
    algorithm, mcore, rollout, spot = config.algorithm, config.mcore, config.rollout, config.spot
    if not algorithm.stream_update:
        return
    # a user's engine may stream
    engine = rollout.engine if rollout.engine == "sglang" else "embedded"
    needed: tuple[tuple[str, object, object, str], ...] = (
        ("algorithm.num_minibatches", algorithm.num_minibatches, 1, "a batch must get one update"),
        ("algorithm.num_epochs", algorithm.num_epochs, 1, "a batch must get one update"),
        (
            "algorithm.recompute_log_probs",
            algorithm.recompute_log_probs,
            "auto",
            "a log-prob pass needs the batch",
        ),
        ("algorithm.kl_coef", algorithm.kl_coef, 0.0, "its reference pass needs the batch"),
        ("algorithm.dynamic_sampling", algorithm.dynamic_sampling, False, "it may drop a group"),
        (
            "rollout.partial_rollout_tokens",
            rollout.partial_rollout_tokens,
            0,
            "a response may be unfinished",
        ),
        ("rollout.engine", engine, "embedded", "SGLang holds the memory"),
        (
            "mcore.offload_in_rollouts",
            mcore.offload_in_rollouts,
            False,
            "gradients must stay on the device",
        ),
        ("spot.enabled", spot.enabled, True, "idle ranks wait without it"),
    )
    algorithm.require(
        algorithm.advantage in _OF_SIBLINGS,
        "stream_update",
        f"false where algorithm.advantage={algorithm.advantage!r} (must be {', '.join(_OF_SIBLINGS)}:"
        " another one may need the whole batch)",
    )
    for name, value, allowed, why in needed:
        algorithm.require(
            value == allowed,
            "stream_update",
            f"false where {name}={value!r} (must be {allowed!r}: {why})",
        )
