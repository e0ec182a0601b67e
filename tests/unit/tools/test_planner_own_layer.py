"""`tlt plan` with the checkpoint's own layer as the drafter."""

from __future__ import annotations

from pathlib import Path

from tests.tiny_models import make_tiny_hf
from tests.unit.tools.test_planner import _record, plan  # noqa: F401


def test_the_checkpoints_own_layer_counts_as_a_trained_drafter(plan, tmp_path: Path) -> None:  # noqa: F811
    """Also where there is config.json alone, and as a drafter that need not be trained first."""
    run = _record(tmp_path / "run")
    _, _, table = plan("--simulate", str(run))
    make_tiny_hf(tmp_path / "model", "mimo", has_mtp=True)
    code, text, own = plan("--simulate", str(run), "speculation.drafter=own")
    assert code == 0, text
    assert own["gen"][-1] == own["gen"][-2] <= table["gen"][-1]  # TLT is as fast as frozen at once
    for file in (tmp_path / "model").glob("*.safetensors"):
        file.unlink()
    code, text, _ = plan("speculation.drafter=own")
    assert code == 0, text
    assert "engine drafter" in text
