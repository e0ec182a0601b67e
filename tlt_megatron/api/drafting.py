"""`Drafter`: a drafter for a model, made from the model's own responses, and its folder for an
inference server.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tlt_megatron.cli import run_tool
from tlt_megatron.types import Message


class Drafter:
    """A drafter in a folder.

    Example: `Drafter.train("Qwen/Qwen3-0.6B", "prompts.jsonl", minutes=10).export("served",
    format="sglang")`.
    """

    def __init__(self, folder: str | Path) -> None:
        """Name the drafter of a run (its `hf_drafter`), or one that `train` made."""
        self.folder = Path(folder)

    def __fspath__(self) -> str:
        """Return the folder: `Engine(model, drafter=...)` takes the drafter itself."""
        return str(self.folder)

    @classmethod
    def train(
        cls,
        model: str | Path,
        prompts: str | Path | Sequence[str | Sequence[Message]],
        *,
        minutes: float = 10.0,
        out: str | Path = "drafter",
        algorithm: str = "hass",
    ) -> Drafter:
        """Let `model` answer `prompts`, and train a drafter on the answers for `minutes` in all. It
        is in the folder `out`.

        `prompts` is a file as `data.train` takes it, or a list of texts or chat messages; every
        eighth one measures the accept length and is not trained on. `algorithm` is eagle, hass or
        eagle3. ValueError for bad input.
        """
        with tempfile.TemporaryDirectory() as folder:
            if not isinstance(prompts, str | Path):
                rows = [{"prompt": prompt, "label": "-"} for prompt in prompts]
                prompts = Path(folder) / "prompts.jsonl"
                prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
            given = {"model": model, "prompts": prompts, "out": out, "minutes": minutes}
            words = [f"--{name}={value}" for name, value in given.items()]
            run_tool("train-drafter", [*words, f"drafter.algorithm={algorithm}"])
        return cls(out)

    @property
    def accept_length(self) -> float:
        """Return tokens out per verify pass on prompts that were not trained on, the bonus token
        included. For one that `train` made.
        """
        measured = json.loads((self.folder / "warm_up.json").read_text("utf-8"))
        return measured[-1]["accept_length"]

    def export(self, folder: str | Path, *, format: str = "sglang") -> Path:
        """Write the drafter to the new folder in the layout of `format`, sglang or vllm, and print
        the server's command.
        """
        words = [f"--from={self.folder}", f"--to={folder}", f"--format={format}"]
        run_tool("export-drafter", words)
        return Path(folder)
