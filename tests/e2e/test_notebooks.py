"""The notebooks of examples/notebooks run from top to bottom on a tiny policy, and are saved with
what they print.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.tiny_task import REPO

pytestmark = pytest.mark.e2e

NOTEBOOKS = REPO / "examples" / "notebooks"
SMALL = {
    "data.max_prompt_tokens": 16,
    "rollout.num_prompts": 4,
    "rollout.num_samples": 4,
    "rollout.max_new_tokens": 24,
    "mcore.micro_batch_tokens": 128,
    "run.num_steps": 2,
}


def cells(name: str) -> list[dict[str, Any]]:
    return json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]


def run_notebook(name: str, parameters: dict[str, Any], wanted: tuple[str, ...]) -> list[Any]:
    """Run its code cells in a forked process with other parameters.

    Return the values of the names `wanted`.
    """

    def run() -> list[Any]:
        place: dict[str, Any] = {"__name__": "notebook"}
        for number, cell in enumerate(cells(name)):
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), f"{name} cell {number}", "exec"), place)
                if "parameters" in cell["metadata"].get("tags", ()):
                    place |= parameters
        return [place[each] for each in wanted]

    (values,) = run_ranks(1, run, has_world=False)
    return values


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_saved_with_what_it_printed(path: Path) -> None:
    code = [cell for cell in cells(path.stem) if cell["cell_type"] == "code"]
    assert sum("parameters" in cell["metadata"].get("tags", ()) for cell in code) == 1
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    outputs = [output for cell in code for output in cell["outputs"]]
    printed = [output for output in outputs if output["output_type"] == "stream"]
    plots = [output for output in outputs if "image/png" in output.get("data", {})]
    assert printed
    assert plots
    assert len(printed) + len(plots) == len(outputs)  # no error
    for output in printed:
        assert output["name"] == "stdout"
        assert not re.search(r"/(home|root|tmp|Users)/|WARNING", "".join(output["text"]))


def test_the_quickstart_draws_the_same_tokens_with_speculation(
    config: Path, tmp_path: Path
) -> None:
    parameters = {
        "MODEL": str(config.parent / "model"),
        "TRAIN": str(config.parent / "train.jsonl"),
        "EVAL": str(config.parent / "eval.jsonl"),
        "RUNS": str(tmp_path),
        "SETTINGS": {"reward.function": f"{config.parent}/reward.py:compute_score"} | SMALL,
        "STRATEGY": "ngram_4",
    }
    compared, summary, report_code = run_notebook(
        "quickstart", parameters, ("compared", "summary", "report_code")
    )
    assert compared == 0
    assert summary["num_steps"] == 2
    assert report_code == 0
    assert (tmp_path / "speculative" / "report.html").is_file()


def test_what_speculation_gives_is_measured_for_every_variant(config: Path, tmp_path: Path) -> None:
    task = config.parent
    parameters = {
        "MODEL": str(task / "model"),
        "TRAIN": str(task / "train.jsonl"),
        "EVAL": str(task / "eval.jsonl"),
        "DRAFTER": str(tmp_path / "drafter"),
        "MAX_NEW_TOKENS": 24,
        "NUM_PROMPTS": 4,
        "ROUNDS": 1,
        "MINUTES": 0.1,
        "DTYPE": "float64",
    }
    (table,) = run_notebook("what_would_speculation_give_me", parameters, ("table",))
    assert len(table) == 5
    assert all(accepted >= 1 and differing == 0 for accepted, _, differing in table.values())
    measured = json.loads((tmp_path / "drafter" / "warm_up.json").read_text())
    # The rows depend on what the selector finds fast here.
    assert max(row["accept_length"] for row in measured) > 1


def test_a_drafter_is_trained_changes_no_token_and_is_exported(
    config: Path, tmp_path: Path
) -> None:
    task = config.parent
    parameters = {
        "MODEL": str(task / "model"),
        "PROMPTS": str(task / "train.jsonl"),
        "DRAFTER": str(tmp_path / "drafter"),
        "SERVED": str(tmp_path / "served"),
        "MINUTES": 0.2,
        "MAX_NEW_TOKENS": 24,
        "STRATEGIES": ["2_1_2"],
    }
    fast, folder = run_notebook("train_a_drafter", parameters, ("fast", "folder"))
    assert any(each.accept_lengths for each in fast)
    assert (folder / "model.safetensors").is_file()
