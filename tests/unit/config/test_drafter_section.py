"""What the drafter's section allows."""

from __future__ import annotations

import pytest

from tlt_megatron.config.schema import DrafterSection


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": "medusa"},
        {"dtype": "float16"},
        {"aux_layer_ids": [0, 1, 2]},
        {"algorithm": "eagle3", "aux_layer_ids": [0, 1]},
        {"algorithm": "eagle3", "aux_layer_ids": [0, 1, 1]},
        {"algorithm": "eagle3", "aux_layer_ids": [-1, 0, 1]},
        {"unroll_steps": 2},
        {"unroll_steps": -1},
        {"unroll_decay": 0.0},
        {"unroll_decay": 1.1},
        {"feature_weight": -1.0},
        {"algorithm": "eagle3", "feature_weight": 1.0},
        {"batch_tokens": 0},
        {"head_chunk_tokens": 0},
        {"lr": 0.0},
        {"eps": 0.0},
        {"warmup_steps": -1},
        {"weight_decay": -0.1},
        {"clip_grad": -1.0},
        {"beta1": 1.0},
        {"beta2": -0.1},
    ],
    ids=str,
)
def test_wrong_setting_is_named(settings: dict[str, object]) -> None:
    last = list(settings)[-1]
    with pytest.raises(ValueError, match=rf"drafter\.{last}="):
        DrafterSection(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"algorithm": "hass", "unroll_steps": 4, "feature_weight": 0.0},
        {"algorithm": "eagle3", "aux_layer_ids": [0, 1, 2], "feature_weight": 0.0},
        {"clip_grad": 0.0, "warmup_steps": 0, "unroll_decay": 1.0},
    ],
    ids=str,
)
def test_right_settings_are_taken(settings: dict[str, object]) -> None:
    section = DrafterSection(**settings)
    assert all(getattr(section, name) == value for name, value in settings.items())
