"""The model card says what a run has done, and no more."""

from __future__ import annotations

import pytest

from tlt_megatron.config.load import load_config
from tlt_megatron.trainer.model_card import model_card


@pytest.mark.parametrize(
    ("overrides", "has", "lacks"),
    [
        (["algorithm.advantage=sft"], ["tags: [sft,", "supervised training on"], ["reward", "reinforcement", "specul"]),
        (
            ["algorithm.distill_coef=0.5", "reference.path=a/teacher", "reward.function=none"],
            ["tags: [reinforcement-learning,", "| teacher | teacher, distill_coef 0.5 |"], ["specul"],
        ),
        (["speculation.enabled=true", "speculation.strategies=[ngram_4]", "model.lora_rank=8"], ["decoded speculatively", "rank 8, alpha 32"], ["teacher"]),
    ],
    ids=["sft", "distillation", "lora"],
)  # fmt: skip
def test_the_card_names_the_recipe(overrides: list[str], has: list[str], lacks: list[str]) -> None:
    config = load_config(None, ["model.path=a/policy", *overrides])
    card = model_card(config, {}, has_drafter=False)
    assert "base_model: policy" in card
    assert [text for text in has if text not in card] == []
    assert [text for text in lacks if text in card] == []
