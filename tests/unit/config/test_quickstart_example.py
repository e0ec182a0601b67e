"""The quickstart shows the whole system: nobody who runs it has to turn anything on."""

from __future__ import annotations

from pathlib import Path

from tlt_megatron.config.load import load_config

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def test_the_quickstart_speculates_and_trains_its_drafter_and_says_what_that_gained(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    for file in ("train.jsonl", "eval.jsonl"):
        (tmp_path / file).touch()
    here = [f"model.path={tmp_path}", f"data.train={tmp_path}/train.jsonl"]
    config = load_config(EXAMPLES / "quickstart.yaml", [*here, f"data.eval={tmp_path}/eval.jsonl"])
    assert config.speculation.enabled
    assert config.speculation.selector == "cost_model"
    assert config.speculation.drafter == ""  # from random weights
    assert config.spot.enabled
    assert config.speculation.measure_gain
