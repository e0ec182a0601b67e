"""The model card of a trained policy: README.md beside its weights, with the recipe, the metrics
and how to serve it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tlt_megatron.config.own_layer import OWN
from tlt_megatron.config.schema import RunConfig
from tlt_megatron.version import __version__

_SHOWN = (
    "eval_accuracy_first",
    "eval_accuracy_last",
    "num_steps",
    "rollout_speedup",
    "accept_length_last",
)


def base_model(path: str) -> str:
    """Return the id on the Hub of a folder in its cache, with the commit; the name of any other
    folder.
    """
    for part in Path(path).parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/", 1)
    return Path(path).name


def model_card(config: RunConfig, summary: Mapping[str, float | None], *, has_drafter: bool) -> str:
    """Return the card as Markdown. `summary` is that of the run: summary.json."""
    base, algorithm = base_model(config.model.path), config.algorithm
    recipe = {
        "data": config.data.train,
        "arguments of the chat template (its defaults here)": config.data.chat_template_kwargs
        or "-",
        "advantage": algorithm.advantage,
        "learning rate": config.optimizer.lr,
        "seed": config.run.seed,
    }
    tag, how = "sft", "supervised training on the answers of its data"
    if not algorithm.is_sft:
        tag = how = "reinforcement learning"
        recipe |= {
            "reward": ", ".join(config.reward.weights),
            "loss": algorithm.loss,
            "prompts x responses of a step": f"{config.rollout.num_prompts} x {config.rollout.num_samples}",
            "tokens of a response, at most": config.rollout.max_new_tokens,
        }
    if algorithm.distill_coef:
        teacher = base_model(config.reference.path or config.model.path)
        recipe["teacher"] = f"{teacher}, distill_coef {algorithm.distill_coef:g}"
    if config.speculation.enabled:
        how += " whose rollouts are decoded speculatively, without a change of any token"
    if config.model.lora_rank:
        recipe["LoRA, merged"] = f"rank {config.model.lora_rank}, alpha {config.model.lora_alpha:g}"
    found = {name: value for name in _SHOWN if (value := summary.get(name)) is not None}
    lines = [
        "---",
        f"base_model: {base}",
        f"tags: [{tag.replace(' ', '-')}, tlt_megatron]",
        "---",
        f"# {base}, trained by {algorithm.advantage}",
        "",
        f"Trained with tlt_megatron {__version__}: {how}.",
        "",
        *_table("recipe", recipe),
        *_table("measured", {name: f"{value:.4g}" for name, value in found.items()}),
    ]
    if has_drafter:
        lines += [
            "The run also trained a drafter for this policy. To serve both:",
            "",
            "```bash",
            "tlt serve RUN --engine sglang   # or vllm; RUN is the run folder that holds hf/ and hf_drafter/",
            "```",
            "",
        ]
    if config.speculation.drafter == OWN:
        lines += [
            "Its MTP layer drafted in the rollouts, and is part of this folder. To serve both:",
            "",
            "```bash",
            "python -m sglang.launch_server --model-path HF --speculative-algorithm NEXTN --speculative-draft-model-path HF   # HF is this folder",
            "```",
            "",
        ]
    return "\n".join(lines)


def _table(title: str, rows: Mapping[str, object]) -> list[str]:
    return [f"| {title} | |", "|---|---|", *(f"| {k} | {v} |" for k, v in rows.items()), ""]
