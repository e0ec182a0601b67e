"""Every setting of a run, in one frozen section per component, with defaults for a small CPU run.

Each section checks itself. `layout.py` checks what depends on ranks and model sizes.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Annotated, Any

from tlt_megatron.config.drafter_sections import DrafterSection, SpeculationSection, SpotSection
from tlt_megatron.config.extensions import check_extension
from tlt_megatron.config.policy_sections import (
    AlgorithmSection,
    CriticSection,
    McoreSection,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    RewardSection,
)
from tlt_megatron.config.ranges import (
    Fraction,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Section,
    Seed,
    one_of,
    require,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection(Section):
    """Prompts. Rows use slime's keys (prompt, label) or verl's (reward_model.ground_truth)."""

    train: str = ""  # .jsonl or .parquet
    eval: str | list[str] = ""  # a file, or a list of files; empty: no evaluation
    # a string is encoded behind BOS, a list of chat messages goes through the chat template
    input_key: str = "prompt"
    label_key: str = ""  # empty: label, else reward_model.ground_truth
    # for the chat template, such as enable_thinking: false; a row's chat_template_kwargs go before
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    # "2026-11-28", for a chat template that writes the date; empty: the day on which the run starts
    template_date: str = ""
    max_prompt_tokens: PositiveInt = 1024  # longer prompts are skipped, counted and reported
    shuffle: bool = True  # anew in every epoch, by run.seed

    @property
    def eval_files(self) -> dict[str, str]:
        """Return the files of `eval` by name: test, or folder-test where files have the same
        name.
        """
        files = self.eval if isinstance(self.eval, list) else [self.eval] if self.eval else []
        paths = [Path(file).absolute() for file in files]
        counts = Counter(path.stem for path in paths)
        names = [p.stem if counts[p.stem] == 1 else f"{p.parent.name}-{p.stem}" for p in paths]
        return dict(zip(names, files, strict=True))

    def check(self) -> None:
        is_date = bool(re.fullmatch(r"\d{4}-\d\d-\d\d", self.template_date))
        try:
            date.fromisoformat(self.template_date or "2026-11-28")
        except ValueError:
            is_date = False
        self.require(is_date or not self.template_date, "template_date", "YYYY-MM-DD")
        if isinstance(self.eval, list):
            self.require(all(self.eval), "eval", "a file or a list of files")
            self.require(
                len(self.eval_files) == len(self.eval),
                "eval",
                "files with different names, or in folders with different names",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSection(Section):
    """Generation. An RL step draws `num_prompts` prompts, each with `num_samples` responses."""

    engine: str = "embedded"  # embedded | sglang | import path of a function that builds one
    # float64 gives the same tokens in any batch shape
    dtype: Annotated[str, one_of("float32", "bfloat16", "float64")] = "float32"
    num_prompts: PositiveInt = 16  # prompts per RL step over all ranks
    num_samples: PositiveInt = 8  # responses per prompt (G)
    max_new_tokens: PositiveInt = 512  # tokens of a response, at most
    temperature: float = 1.0  # (0, 10]
    top_p: Fraction = 1.0  # 1 keeps all
    top_k: NonNegativeInt = 0  # 0 keeps all
    # partial rollouts, not lossless: most tokens of a response in a generation round; 0: off
    partial_rollout_tokens: NonNegativeInt = 0
    over_sampling_prompts: NonNegativeInt = 0  # drawn per step of partial rollouts; 0: num_prompts
    max_batch_size: PositiveInt = 64  # sequences decoded at once per replica
    kv_cache_tokens: NonNegativeInt = 0  # per replica; 0: max_batch_size full-length sequences
    prefill_chunk_tokens: PositiveInt = 2048  # prompt tokens of one prefill pass
    # embedded, on GPUs: free: passes are captured as graphs, which are freed during updates, as are
    # KV and weights; keep: all three stay, so graphs are captured once; off: no graphs
    graphs: Annotated[str, one_of("free", "keep", "off")] = "free"
    batch_invariant: bool = False  # embedded: a row's numbers do not depend on other rows
    # R3: training sends each token to the experts that the rollout sent it to
    routing_replay: bool = False
    # empty: one turn | path/to/file.py:function | package.module:function, which answers each turn
    # of the policy; max_new_tokens then limits the policy's tokens of the whole conversation.
    # reward.timeout_s and reward.on_error hold for its answers too
    environment: str = ""
    max_turns: PositiveInt = 4  # of the policy, at most
    # of all observations of a conversation; one that does not fit ends it
    max_observation_tokens: PositiveInt = 1024

    @property
    def observation_tokens(self) -> int:
        """Return the most observation tokens of a conversation; 0 without an environment."""
        return self.max_observation_tokens if self.environment else 0

    def check(self) -> None:
        check_extension("rollout.engine", self.engine)
        if self.environment:
            check_extension("rollout.environment", self.environment)
            self.require(self.max_turns > 1, "max_turns", "> 1 where rollout.environment is set")
        self.require(0 < self.temperature <= 10, "temperature", "in (0, 10] for training")


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangSection(Section):
    """The SGLang engine. `engine_args` are passed unchanged to its Engine, after ours."""

    # An engine that sends nothing for this long after a request is considered hung, which ends the
    # run. Set it longer than any prefill.
    request_timeout_s: Positive = 300.0
    engine_args: dict[str, Any] = field(default_factory=dict)  # such as tp_size: 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSection(Section):
    """Checkpoints. Written to <run.dir>/checkpoints in Megatron's layout."""

    interval: NonNegativeInt = 0  # steps between checkpoints; 0: only at the end and on SIGTERM
    keep: NonNegativeInt = 2  # newest checkpoints that are kept; 0: all
    resume: str = "never"  # auto: from the newest, if any | never | folder of checkpoints, or one
    export_hf: bool = True  # export the final policy as a Hugging Face model to <run.dir>/hf


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSection(Section):
    """Evaluation on data.eval before the first RL step, after the last, and at `interval`."""

    interval: NonNegativeInt = 0  # 0: first and last only
    num_prompts: NonNegativeInt = 0  # of each file of data.eval; 0: all
    num_samples: PositiveInt = 1  # responses per prompt
    temperature: float = 1.0  # 0 is greedy
    top_p: float | None = None  # (0, 1]; null: rollout.top_p
    top_k: int | None = None  # 0 keeps all, 1 is greedy; null: rollout.top_k

    def check(self) -> None:
        self.require(0 <= self.temperature <= 10, "temperature", "in [0, 10]")
        self.require(self.top_p is None or 0 < self.top_p <= 1, "top_p", "in (0, 1] or null")
        self.require(self.top_k is None or self.top_k >= 0, "top_k", ">= 0 or null")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingSection(Section):
    """What a run writes for its users."""

    # tensorboard (in <run.dir>/tensorboard), wandb, path/to/file.py:Class or package.module:Class
    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])
    project: str = "tlt_megatron"  # of the run in wandb and trackers of yours
    # lines: one per step; auto: a live display on a terminal, else lines
    progress: Annotated[str, one_of("auto", "lines", "none")] = "auto"
    rollouts: bool = (
        False  # every response with its reward: <run.dir>/rollouts/step_0000001.rank_00000.jsonl
    )

    def check(self) -> None:
        is_set = len(set(self.trackers)) == len(self.trackers)
        self.require(is_set, "trackers", "each tracker once")
        for spec in self.trackers:
            self.require(
                spec not in ("mlflow", "swanlab"),
                "trackers",
                "examples/trackers.py:MlFlow or examples/trackers.py:SwanLab for these",
            )
            check_extension("logging.trackers", spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection(Section):
    """The run as a whole."""

    dir: str = ""  # run folder; empty: runs/<config name>-<time>
    num_steps: NonNegativeInt = 10  # RL steps
    seed: Seed = 0  # of sampling noise, the order of prompts and the weights of a new drafter
    device: Annotated[str, one_of("auto", "cpu", "cuda")] = "auto"  # auto: cuda if there is one
    group_timeout_s: Positive = 1800.0  # a collective that waits longer fails and names the ranks
    heartbeat_timeout_s: float = 60.0  # a rank silent for this long ends the run; >= 1

    def check(self) -> None:
        is_allowed = 1 <= self.heartbeat_timeout_s < math.inf
        self.require(is_allowed, "heartbeat_timeout_s", ">= 1 and finite")


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
    critic: CriticSection = field(default_factory=CriticSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    mcore: McoreSection = field(default_factory=McoreSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    eval: EvalSection = field(default_factory=EvalSection)
    logging: LoggingSection = field(default_factory=LoggingSection)

    @property
    def trained_paths(self) -> list[str]:
        """Return the folders of the models that are trained: the policy's, and the critic's."""
        return [self.model.path, *([self.critic_path] if self.has_critic else [])]

    @property
    def has_critic(self) -> bool:
        """Return whether the run loads a critic. An evaluation, a run of 0 steps, needs none."""
        return self.algorithm.has_critic and self.run.num_steps > 0

    @property
    def critic_path(self) -> str:
        return self.critic.path or self.model.path

    @property
    def num_updates(self) -> int:
        """Return the optimizer steps of the policy, over which its learning rate decays."""
        return self.run.num_steps * self.algorithm.num_epochs * self.algorithm.num_minibatches

    @property
    def sampling_metric(self) -> str:
        """Return what must differ within a group; "" without dynamic sampling."""
        metric = self.algorithm.filter_groups
        if metric == "acc" and self.reward.is_built_in:
            return "score"
        return "" if metric == "none" else metric

    @property
    def longest_context(self) -> int:
        """Return the most positions before and between the policy's own tokens."""
        return self.data.max_prompt_tokens + self.rollout.observation_tokens

    @property
    def ranks_per_engine(self) -> int:
        """Return the number of ranks whose GPUs one rollout engine uses: SGLang's `tp_size`."""
        if self.rollout.engine != "sglang":
            return 1
        return self.sglang.engine_args.get("tp_size", 1)

    def __post_init__(self) -> None:
        rollout, speculation, spot = self.rollout, self.speculation, self.spot
        size = self.ranks_per_engine
        is_size = type(size) is int and size >= 1
        require(is_size, "sglang.engine_args.tp_size", size, "an integer >= 1")
        self.algorithm.require(
            self.algorithm.num_minibatches <= rollout.num_prompts,
            "num_minibatches",
            f"<= rollout.num_prompts={rollout.num_prompts}",
        )
        advantage = self.algorithm.advantage
        rollout.require(
            rollout.num_samples > 1
            or advantage not in ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"),
            "num_samples",
            f"> 1 where algorithm.advantage={advantage!r} (it compares siblings)",
        )
        self.algorithm.require(
            rollout.num_samples > 1 or self.algorithm.filter_groups == "none",
            "filter_groups",
            "none where rollout.num_samples=1 (it compares siblings)",
        )
        metric = self.sampling_metric
        known = ("score", "reward", *["acc"] * self.reward.is_built_in)
        self.algorithm.require(
            not metric or metric in known or self.reward.may_return(metric),
            "filter_groups",
            f"one of none, {', '.join(known)}, or a further number of {', '.join(self.reward.weights)}",
        )
        self.reward.require(
            self.reward.overlong_tokens < rollout.max_new_tokens,
            "overlong_tokens",
            f"< rollout.max_new_tokens={rollout.max_new_tokens}",
        )
        _check_partial_rollouts(rollout, self.algorithm)
        if self.model.lora_rank:
            where = f"where model.lora_rank={self.model.lora_rank}"
            algorithm, has_fp8 = self.algorithm, "fp8" in self.mcore.transformer
            algorithm.require(not algorithm.has_critic, "advantage", f"one without critic {where}")
            self.mcore.require(not has_fp8, "transformer", f"without fp8 {where}")
        rollout.require(
            rollout.engine == "embedded" or not rollout.batch_invariant,
            "batch_invariant",
            f"false where rollout.engine={rollout.engine!r}",
        )
        self.mcore.require(
            not (rollout.routing_replay and self.mcore.transformer.get("moe_router_fusion")),
            "transformer",
            "without moe_router_fusion where rollout.routing_replay=true: the fused router takes no routes",
        )
        require(
            self.mcore.moe_aux_loss_coeff == 0 or self.algorithm.aggregation == "token_mean",
            "mcore.transformer.moe_aux_loss_coeff",
            self.mcore.moe_aux_loss_coeff,
            "0 where algorithm.aggregation is not token_mean: it is a mean over tokens",
        )
        self.mcore.require(
            self.model.dtype != "float32" or not self.mcore.offload_in_rollouts,
            "offload_in_rollouts",
            "false where model.dtype='float32' (the optimizer has no weights of its own to move)",
        )
        self.eval.require(
            self.eval.interval == 0 or bool(self.data.eval),
            "interval",
            "0 where data.eval is empty (there is nothing to evaluate)",
        )
        speculation.require(
            rollout.engine == "embedded" or not speculation.draft_vocab_size,
            "draft_vocab_size",
            f"0 or None where rollout.engine={rollout.engine!r} (tlt export-drafter writes"
            " drafters with a reduced vocabulary for SGLang)",
        )
        needs_drafter = speculation.enabled and speculation.is_learned
        speculation.require(
            bool(speculation.drafter) or not needs_drafter or spot.enabled,
            "drafter",
            "the folder of a drafter where a strategy needs one and spot.enabled, which trains one, is false",
        )
        spot.require(
            needs_drafter or not spot.enabled,
            "enabled",
            "false where speculation is off, or none of its strategies uses a learned drafter",
        )


def _check_partial_rollouts(rollout: RolloutSection, algorithm: AlgorithmSection) -> None:
    """Raise ValueError for partial rollouts without a correction, or limits that cannot hold."""
    num_tokens = rollout.partial_rollout_tokens
    rollout.require(
        num_tokens < rollout.max_new_tokens,
        "partial_rollout_tokens",
        f"0 (off), or < rollout.max_new_tokens={rollout.max_new_tokens}",
    )
    rollout.require(
        not num_tokens or algorithm.has_correction,
        "partial_rollout_tokens",
        "0 without a correction for tokens of earlier policies: set algorithm.tis_cap=2"
        " (truncated importance sampling) or algorithm.rollout_rs=token (masked)",
    )
    rollout.require(
        not num_tokens or not rollout.environment,
        "partial_rollout_tokens",
        f"0 where rollout.environment={rollout.environment!r} (conversations are not cut)",
    )
    num_drawn, num_prompts = rollout.over_sampling_prompts, rollout.num_prompts
    rollout.require(
        not num_drawn or (num_tokens > 0 and num_drawn >= num_prompts),
        "over_sampling_prompts",
        f"0, or >= rollout.num_prompts={num_prompts} with rollout.partial_rollout_tokens > 0",
    )
