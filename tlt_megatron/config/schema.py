"""Every setting of a run, in one frozen section per component. Defaults are those of a small CPU run.

Each section checks itself. `layout.py` checks what depends on ranks and model sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from tlt_megatron.config.extensions import check_extension
from tlt_megatron.config.policy_sections import (
    AlgorithmSection,
    McoreSection,
    ModelSection,
    OptimizerSection,
    ParallelSection,
)
from tlt_megatron.config.ranges import one_of as _one_of
from tlt_megatron.config.ranges import require as _require

__all__ = [
    "AlgorithmSection",
    "CheckpointSection",
    "DataSection",
    "DrafterSection",
    "EvalSection",
    "LoggingSection",
    "McoreSection",
    "ModelSection",
    "OptimizerSection",
    "ParallelSection",
    "RewardSection",
    "RolloutSection",
    "RunConfig",
    "RunSection",
    "SglangSection",
    "SpeculationSection",
    "SpotSection",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection:
    """Prompts. Rows use slime's keys (prompt, label, metadata) or verl's (prompt, reward_model.ground_truth, ...)."""

    train: str = ""  # .jsonl or .parquet
    eval: str = ""  # the same; empty: no evaluation
    input_key: str = "prompt"  # string or list of chat messages
    label_key: str = ""  # empty: label, else reward_model.ground_truth
    apply_chat_template: bool = True  # for chat messages; a string prompt is used unchanged
    duplicate_ids: str = "refuse"  # rows with the same id and data_source: refuse | keep
    max_prompt_tokens: int = 1024  # longer prompts are skipped, counted and reported
    shuffle: bool = True
    seed: int = 0  # of the order of the prompts

    def __post_init__(self) -> None:
        _require(
            self.max_prompt_tokens >= 1, "data.max_prompt_tokens", self.max_prompt_tokens, ">= 1"
        )
        _one_of("data.duplicate_ids", self.duplicate_ids, ("refuse", "keep"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSection:
    """How responses are scored."""

    function: str = "math"  # math | exact | path/to/file.py:function | package.module:function
    num_workers: int = 1  # worker processes per rank, >= 1
    timeout_s: float = 30.0  # for one response, > 0
    on_error: str = "raise"  # raise: end the run, naming the prompt | zero: reward 0, counted

    def __post_init__(self) -> None:
        check_extension("reward.function", self.function)
        _require(self.num_workers >= 1, "reward.num_workers", self.num_workers, ">= 1")
        _require(self.timeout_s > 0, "reward.timeout_s", self.timeout_s, "> 0")
        _one_of("reward.on_error", self.on_error, ("raise", "zero"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSection:
    """Generation. One RL step draws `num_prompts` prompts and generates `num_samples` responses for each."""

    engine: str = "embedded"  # embedded | sglang
    dtype: str = "float32"  # float32 | bfloat16 | float64 (the same tokens in any batch shape)
    num_prompts: int = 16  # prompts per RL step over all ranks
    num_samples: int = 8  # responses per prompt (G)
    max_new_tokens: int = 512
    temperature: float = 1.0  # > 0
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 keeps all
    max_batch_size: int = 64  # sequences decoded at once per replica
    kv_cache_tokens: int = 0  # per replica; 0: room for max_batch_size full-length sequences
    prefill_chunk_tokens: int = 2048  # prompt tokens of one prefill pass
    cuda_graphs: bool = True  # embedded, on GPUs: capture and replay passes
    batch_invariant: bool = False  # embedded: a row's numbers do not depend on other rows

    def __post_init__(self) -> None:
        _one_of("rollout.engine", self.engine, ("embedded", "sglang"))
        _one_of("rollout.dtype", self.dtype, ("float32", "bfloat16", "float64"))
        for name in (
            "num_prompts",
            "num_samples",
            "max_new_tokens",
            "max_batch_size",
            "prefill_chunk_tokens",
        ):
            _require(getattr(self, name) >= 1, f"rollout.{name}", getattr(self, name), ">= 1")
        _require(
            0 < self.temperature <= 10,
            "rollout.temperature",
            self.temperature,
            "in (0, 10] for training",
        )
        _require(0 < self.top_p <= 1, "rollout.top_p", self.top_p, "in (0, 1]")
        _require(self.top_k >= 0, "rollout.top_k", self.top_k, ">= 0")
        _require(
            self.kv_cache_tokens >= 0,
            "rollout.kv_cache_tokens",
            self.kv_cache_tokens,
            ">= 0 (0: sized for max_batch_size)",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSection:
    """Speculative rollouts. They change only the time to draw tokens, not the tokens."""

    enabled: bool = False
    drafter: str = ""  # folder of an EAGLE drafter of this policy (tools/warmup_drafter.py)
    strategies: list[str] = field(
        default_factory=lambda: ["2_1_2", "4_1_4", "6_1_6", "4_2_8", "6_4_16"]
    )  # num_steps_topk_num_draft_tokens, ngram_N, both as 4_2_8+ngram_4; with beg_mab also off
    # cost_model | beg_mab | fixed (the first strategy, always) | path/to/file.py:Class | package.module:Class
    selector: str = "cost_model"
    beg_thresholds: list[int] = field(
        default_factory=list
    )  # beg_mab: smallest batch of each bucket, from 1
    measure_gain: bool = False  # at the end, time the last steps' rollouts with and without
    ranking: str = "noise"  # of drafts: noise (what the policy will draw) | probability (EAGLE-2)

    def __post_init__(self) -> None:
        _require(bool(self.strategies), "speculation.strategies", self.strategies, "not empty")
        for strategy in self.strategies:
            _require(
                isinstance(strategy, str),
                "speculation.strategies",
                strategy,
                "text such as '4_2_8' (in quotes: YAML reads 4_2_8 as a number)",
            )
        check_extension("speculation.selector", self.selector)
        _one_of("speculation.ranking", self.ranking, ("noise", "probability"))

    @property
    def is_learned(self) -> bool:
        """Return whether any strategy uses a learned drafter. Only off and plain n-grams do not."""
        return any(s != "off" and not s.startswith("ngram") for s in self.strategies)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSection:
    """The learned drafter and its training. One optimizer step trains on one packed batch per member."""

    algorithm: str = "eagle"  # eagle | hass | eagle3
    aux_layer_ids: list[int] = field(default_factory=list)  # eagle3: three layers; empty: default
    dtype: str = "float32"  # of training arithmetic: float32 | bfloat16; weights stay float32
    unroll_steps: int = 0  # draft steps trained; 0: 1 for eagle, 3 for hass, 5 for eagle3
    unroll_decay: float = 0.8  # weight of each further step, (0, 1]
    feature_weight: float | None = None  # smooth L1 per 1 of cross entropy; None: 10, eagle3 0
    batch_tokens: int = 4096  # packed rows of one batch; longer sequences are cut into windows
    head_chunk_tokens: int = 512  # rows whose vocabulary-sized logits are held at once
    lr: float = 1e-3  # constant after warm-up
    warmup_steps: int = 20  # optimizer steps, over the drafter's whole life, not per session
    weight_decay: float = 0.0  # not on norms and biases
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0  # of the gradient norm; 0: off
    seed: int = 0  # of random weights

    def __post_init__(self) -> None:
        _one_of("drafter.algorithm", self.algorithm, ("eagle", "hass", "eagle3"))
        _one_of("drafter.dtype", self.dtype, ("float32", "bfloat16"))
        is_eagle3 = self.algorithm == "eagle3"
        _require(
            not self.aux_layer_ids or (is_eagle3 and len(self.aux_layer_ids) == 3),
            "drafter.aux_layer_ids",
            self.aux_layer_ids,
            "three layers with drafter.algorithm=eagle3, else empty",
        )
        _require(
            self.unroll_steps >= 0 and (self.algorithm != "eagle" or self.unroll_steps <= 1),
            "drafter.unroll_steps",
            self.unroll_steps,
            ">= 0, and at most 1 for eagle (hass is eagle with more)",
        )
        _require(0 < self.unroll_decay <= 1, "drafter.unroll_decay", self.unroll_decay, "in (0, 1]")
        weight = self.feature_weight
        _require(
            weight is None or (weight >= 0 and not (is_eagle3 and weight > 0)),
            "drafter.feature_weight",
            weight,
            ">= 0, and 0 for eagle3 (its output is not the target's feature)",
        )
        for name in ("batch_tokens", "head_chunk_tokens"):
            _require(getattr(self, name) >= 1, f"drafter.{name}", getattr(self, name), ">= 1")
        for name in ("lr", "eps"):
            _require(getattr(self, name) > 0, f"drafter.{name}", getattr(self, name), "> 0")
        for name in ("warmup_steps", "weight_decay", "clip_grad"):
            _require(getattr(self, name) >= 0, f"drafter.{name}", getattr(self, name), ">= 0")
        for name in ("beta1", "beta2"):
            _require(
                0 <= getattr(self, name) < 1, f"drafter.{name}", getattr(self, name), "in [0, 1)"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotSection:
    """Drafter training on ranks that have finished their rollouts. It ends when the last rank finishes."""

    enabled: bool = False
    min_idle_replicas: int = 1  # sessions start when this many rollout replicas are idle
    publish: str = "step"  # to the engines: step (phase boundaries) | live (also mid-rollout)
    data_bytes: int = 256 << 20  # budget of a rank's DataBuffer
    keep_steps: int = 1  # earlier RL steps whose sequences are kept, within data_bytes
    long_tail_share: float = 0.5  # of a batch, from the longest responses of earlier steps
    holdout_share: float = 0.05  # of the samples: never trained on, used to compare candidates
    max_updates: int = 0  # drafter updates per RL step; 0: as many as fit into the idle time
    member_timeout_s: float = 20.0  # a member silent for this long is lost; > one drafter step
    seed: int = 0  # of the order of the data

    def __post_init__(self) -> None:
        _one_of("spot.publish", self.publish, ("step", "live"))
        for name in ("min_idle_replicas", "data_bytes", "keep_steps"):
            _require(getattr(self, name) >= 1, f"spot.{name}", getattr(self, name), ">= 1")
        for name in ("long_tail_share", "holdout_share"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"spot.{name}", value, "in [0, 1)")
        _require(self.max_updates >= 0, "spot.max_updates", self.max_updates, ">= 0")
        _require(
            self.publish != "live" or self.holdout_share > 0,
            "spot.holdout_share",
            self.holdout_share,
            "> 0 where spot.publish='live' (a drafter is compared on the hold-out before it is published)",
        )
        timeout_s = self.member_timeout_s
        _require(0 < timeout_s < math.inf, "spot.member_timeout_s", timeout_s, "> 0 and finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangSection:
    """The SGLang engine. `engine_args` are passed unchanged to its Engine, after ours."""

    start_timeout_s: float = 600.0  # if an engine is not up by then, every rank raises an error
    # An engine that sends nothing for this long after a request is considered hung, which ends the run. Set it longer than any
    # prefill.
    request_timeout_s: float = 300.0
    engine_args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("start_timeout_s", "request_timeout_s"):
            _require(getattr(self, name) > 0, f"sglang.{name}", getattr(self, name), "> 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSection:
    """Checkpoints. Written to <run.dir>/checkpoints in Megatron's layout."""

    interval: int = 0  # steps between checkpoints; 0: only at the end and on SIGTERM
    keep: int = 2  # newest checkpoints that are kept; 0: all
    resume: str = "never"  # auto: from the newest, if any | never | folder of checkpoints, or one
    export_hf: bool = True  # export the final policy as a Hugging Face model to <run.dir>/hf

    def __post_init__(self) -> None:
        _require(self.interval >= 0, "checkpoint.interval", self.interval, ">= 0")
        _require(self.keep >= 0, "checkpoint.keep", self.keep, ">= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSection:
    """Evaluation on data.eval before the first and after the last RL step, and every `interval` steps."""

    interval: int = 0  # 0: first and last only
    num_prompts: int = 0  # 0: all of data.eval
    num_samples: int = 1
    temperature: float = 1.0  # 0 is greedy

    def __post_init__(self) -> None:
        for name in ("interval", "num_prompts"):
            _require(getattr(self, name) >= 0, f"eval.{name}", getattr(self, name), ">= 0")
        _require(self.num_samples >= 1, "eval.num_samples", self.num_samples, ">= 1")
        _require(0 <= self.temperature <= 10, "eval.temperature", self.temperature, "in [0, 10]")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingSection:
    """What a run writes for its users."""

    tensorboard: bool = True  # <run.dir>/tensorboard
    wandb_project: str = ""  # empty: off; needs the wandb package
    progress: str = (
        "auto"  # auto: live display on a terminal, lines elsewhere | live | lines | none
    )
    rollouts: bool = (
        False  # every response, tokens and reward: <run.dir>/rollouts/step_0000001.jsonl
    )
    trace: bool = True  # spans of every rank, merged to <run.dir>/trace.json (Perfetto)

    def __post_init__(self) -> None:
        _one_of("logging.progress", self.progress, ("auto", "live", "lines", "none"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    """The run as a whole."""

    dir: str = ""  # run folder; empty: runs/<config name>-<time>
    on_used_dir: str = (
        "refuse"  # if dir holds a run that is not resumed: refuse | set_aside (rename it)
    )
    num_steps: int = 10  # RL steps
    seed: int = 0  # of sampling noise
    device: str = "auto"  # auto: cuda if there is one | cpu | cuda
    group_timeout_s: float = 1800.0  # a collective that waits longer fails and names the ranks
    heartbeat_timeout_s: float = 60.0  # a rank silent for this long ends the run; 0: off, else >= 1
    max_bad_updates: int = 3  # skipped or not finite, in a row; the run then ends with exit code 1

    def __post_init__(self) -> None:
        _require(self.num_steps >= 0, "run.num_steps", self.num_steps, ">= 0")
        _one_of("run.on_used_dir", self.on_used_dir, ("refuse", "set_aside"))
        _one_of("run.device", self.device, ("auto", "cpu", "cuda"))
        _require(self.max_bad_updates >= 1, "run.max_bad_updates", self.max_bad_updates, ">= 1")
        _require(self.group_timeout_s > 0, "run.group_timeout_s", self.group_timeout_s, "> 0")
        silence_s = self.heartbeat_timeout_s
        _require(
            silence_s == 0 or 1 <= silence_s < math.inf,
            "run.heartbeat_timeout_s",
            silence_s,
            "0 (off), or >= 1 and finite",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """All sections."""

    run: RunSection = field(default_factory=RunSection)
    model: ModelSection = field(default_factory=ModelSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    data: DataSection = field(default_factory=DataSection)
    reward: RewardSection = field(default_factory=RewardSection)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    speculation: SpeculationSection = field(default_factory=SpeculationSection)
    drafter: DrafterSection = field(default_factory=DrafterSection)
    spot: SpotSection = field(default_factory=SpotSection)
    sglang: SglangSection = field(default_factory=SglangSection)
    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    mcore: McoreSection = field(default_factory=McoreSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    eval: EvalSection = field(default_factory=EvalSection)
    logging: LoggingSection = field(default_factory=LoggingSection)

    @property
    def ranks_per_engine(self) -> int:
        """Return the number of ranks whose GPUs one rollout engine uses: SGLang's `tp_size`."""
        if self.rollout.engine != "sglang":
            return 1
        return int(self.sglang.engine_args.get("tp_size", 1))

    def __post_init__(self) -> None:
        _require(
            self.algorithm.num_minibatches <= self.rollout.num_prompts,
            "algorithm.num_minibatches",
            self.algorithm.num_minibatches,
            f"<= rollout.num_prompts={self.rollout.num_prompts}",
        )
        _require(
            self.rollout.num_samples > 1
            or self.algorithm.advantage not in ("grpo", "dr_grpo", "rloo"),
            "rollout.num_samples",
            self.rollout.num_samples,
            f"> 1 where algorithm.advantage={self.algorithm.advantage!r} (it compares siblings)",
        )
        _require(
            self.rollout.engine == "embedded" or not self.rollout.batch_invariant,
            "rollout.batch_invariant",
            self.rollout.batch_invariant,
            f"false where rollout.engine={self.rollout.engine!r}",
        )
        _require(
            self.rollout.engine == "embedded" or self.spot.publish != "live",
            "spot.publish",
            self.spot.publish,
            f"step where rollout.engine={self.rollout.engine!r} (its drafter changes between rollouts alone)",
        )
        _require(
            self.eval.interval == 0 or bool(self.data.eval),
            "eval.interval",
            self.eval.interval,
            "0 where data.eval is empty (there is nothing to evaluate)",
        )
        needs_drafter = self.speculation.enabled and self.speculation.is_learned
        _require(
            bool(self.speculation.drafter) or not needs_drafter or self.spot.enabled,
            "speculation.drafter",
            self.speculation.drafter,
            "the folder of a drafter where a strategy needs one and spot.enabled, which trains one, is false",
        )
        _require(
            needs_drafter or not self.spot.enabled,
            "spot.enabled",
            self.spot.enabled,
            "false where speculation is off, or none of its strategies uses a learned drafter",
        )
