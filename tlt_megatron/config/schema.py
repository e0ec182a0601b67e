"""Every setting of a run, in one frozen section per component, with defaults for a small CPU run.

Each section checks itself. `layout.py` checks what depends on ranks and model sizes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from tlt_megatron.config.drafter_sections import DrafterSection, SpeculationSection, SpotSection
from tlt_megatron.config.extensions import named
from tlt_megatron.config.policy_sections import (
    AlgorithmSection,
    CriticSection,
    McoreSection,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    ReferenceSection,
    RewardSection,
)
from tlt_megatron.config.ranges import (
    Fraction,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Range,
    Section,
    Seed,
    one_of,
)
from tlt_megatron.config.rules import check_rules
from tlt_megatron.stop_strings import check_stop_strings


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

    @property
    def train_in_eval(self) -> str:
        """Return the file of `eval` that is `train`; "" for none."""
        train = Path(self.train).resolve()
        found = [file for file in self.eval_files.values() if Path(file).resolve() == train]
        return found[0] if self.train and found else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSection(Section):
    """Generation. An RL step draws `num_prompts` prompts, each with `num_samples` responses."""

    engine: Annotated[str, named("rollout.engine")] = (
        "embedded"  # embedded | sglang | import path of a function that builds one
    )
    # float64 gives the same tokens in any batch shape
    dtype: Annotated[str, one_of("float32", "bfloat16", "float64")] = "float32"
    num_prompts: PositiveInt = 16  # prompts per RL step over all ranks
    num_samples: PositiveInt = 8  # responses per prompt (G)
    max_new_tokens: PositiveInt = 512  # tokens of a response, at most
    # of softmax: below 1 the likeliest tokens gain
    temperature: Annotated[float, Range(lambda value: 0 < value <= 10, "in (0, 10]")] = 1.0
    top_p: Fraction = 1.0  # 1 keeps all
    top_k: NonNegativeInt = 0  # 0 keeps all
    # strings that end a response or a turn, also within a token, whose text stays whole
    stop: list[str] = field(default_factory=list)
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
    # empty: one turn | path/to/file.py:name | package.module:name of a class with the methods of
    # Environment, or of a function that answers each turn of the policy; max_new_tokens then limits
    # the policy's tokens of the whole conversation. reward.timeout_s and reward.on_error hold for
    # its answers too
    environment: Annotated[str, named("rollout.environment")] = ""
    # tools that the policy may call, without an environment: python (in a sandbox) |
    # path/to/file.py:function | package.module:function | mcp:COMMAND, which starts a server |
    # python_without_sandbox
    tools: list[str] = field(default_factory=list)
    # of a call that fails: return the error to the policy as the result, or end the conversation
    tool_errors: Annotated[str, one_of("return", "end")] = "return"
    # tokens of one tool's result, at most; a longer one is cut. 0: max_observation_tokens alone
    max_tool_tokens: NonNegativeInt = 0
    max_turns: PositiveInt = 4  # of the policy, at most
    # of all observations of a conversation, with the messages and tools of its start; one that does
    # not fit ends it
    max_observation_tokens: PositiveInt = 1024

    def check(self) -> None:
        check_stop_strings(self.stop, "rollout.stop")

    @property
    def observation_tokens(self) -> int:
        """Return the most observation tokens of a conversation; 0 without an environment."""
        return self.max_observation_tokens if self.has_conversations else 0

    @property
    def has_conversations(self) -> bool:
        """Return whether an environment or tools answer the turns of the policy."""
        return bool(self.environment or self.tools)


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
    # 0 is greedy
    temperature: Annotated[float, Range(lambda value: 0 <= value <= 10, "in [0, 10]")] = 1.0
    top_p: float | None = None  # (0, 1]; null: rollout.top_p
    top_k: int | None = None  # 0 keeps all, 1 is greedy; null: rollout.top_k
    stop: list[str] | None = None  # []: no stop strings; null: rollout.stop

    def check(self) -> None:
        if self.stop is not None:
            check_stop_strings(self.stop, "eval.stop")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection(Section):
    """The run as a whole."""

    dir: str = ""  # run folder; empty: runs/<config name>-<time>
    num_steps: NonNegativeInt = 10  # RL steps
    seed: Seed = 0  # of sampling noise, the order of prompts and the weights of a new drafter
    device: Annotated[str, one_of("auto", "cpu", "cuda")] = "auto"  # auto: cuda if there is one
    group_timeout_s: Positive = 1800.0  # a collective that waits longer fails and names the ranks
    # a rank silent for this long ends the run
    heartbeat_timeout_s: Annotated[
        float, Range(lambda value: 1 <= value < float("inf"), ">= 1 and finite")
    ] = 60.0


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
    reference: ReferenceSection = field(default_factory=ReferenceSection)
    critic: CriticSection = field(default_factory=CriticSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    mcore: McoreSection = field(default_factory=McoreSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    eval: EvalSection = field(default_factory=EvalSection)
    logging: LoggingSection = field(default_factory=LoggingSection)

    @property
    def layout_paths(self) -> list[str]:
        """Return the folders of the models that `parallel` cuts: policy, critic, reference."""
        second = self.reference.path if self.has_reference else ""
        critic = self.critic_path if self.has_critic else ""
        return [self.model.path, *filter(None, (critic, second))]

    @property
    def has_critic(self) -> bool:
        """Return whether the run loads a critic. An evaluation, a run of 0 steps, needs none."""
        return self.algorithm.has_critic and self.run.num_steps > 0

    @property
    def has_reference(self) -> bool:
        """Return whether the run has a reference policy. An evaluation needs none."""
        return self.algorithm.has_reference and self.run.num_steps > 0

    @property
    def second_path(self) -> str:
        """Return the folder of the reference if that is a second model beside the policy, else
        "": a reference that is replaced cannot be the policy's initial weights.
        """
        is_second = bool(self.reference.path or self.reference.refresh_steps)
        return (self.reference.path or self.model.path) if self.has_reference and is_second else ""

    @property
    def critic_path(self) -> str:
        return self.critic.path or self.model.path

    @property
    def num_updates(self) -> int:
        """Return the optimizer steps of the policy, over which its learning rate decays."""
        return self.run.num_steps * self.algorithm.num_epochs * self.algorithm.num_minibatches

    @property
    def needs_drafter(self) -> bool:
        return self.speculation.enabled and self.speculation.is_learned

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
        if self.rollout.engine != "sglang" or self.algorithm.is_sft:
            return 1
        return self.sglang.engine_args.get("tp_size", 1)

    def __post_init__(self) -> None:
        check_rules(self)
