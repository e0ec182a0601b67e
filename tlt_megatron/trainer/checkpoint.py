"""Checkpoints of the whole run in Megatron's layout: <root>/iter_0000010/ + latest_checkpointed_iteration.txt.

Each is written beside, fsynced, renamed, and only then does the pointer move: a crash at any instant leaves the last
good one loadable. Inside: policy/ (torch_dist, reshards on load) and trainer_state.json.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from tlt_megatron.policy.interfaces import PolicyModel
from tlt_megatron.runtime.collectives import barrier, broadcast_object
from tlt_megatron.runtime.durable import replace_text, sync_path, sync_tree
from tlt_megatron.runtime.process_groups import Group

log = logging.getLogger(__name__)

POINTER = "latest_checkpointed_iteration.txt"
STATE_FILE = "trainer_state.json"


class CheckpointManager:
    """Saves and restores. Every method is a collective of all ranks; rank 0 alone renames and deletes."""

    def __init__(self, root: Path, model: PolicyModel, *, keep: int, world: Group) -> None:
        self.root = root
        self.model = model
        self.keep = keep
        self.world = world
        self._current: int | None = None  # the step that this run has saved or restored last

    def folder(self, step: int, root: Path | None = None) -> Path:
        """Where the checkpoint of `step` under `root` (default: where this run saves) stands."""
        return (root or self.root) / f"iter_{step:07d}"

    def save(
        self,
        step: int,
        state: Mapping[str, object],
        save_part: Callable[[Path], None] | None = None,
    ) -> Path:
        """Write the checkpoint of `step`, unless it stands already; `state` is rank 0's, JSON-able. `save_part` is called
        by every rank to write what is its own into the given folder."""
        final = self.folder(step)
        if self._current == step:
            return final
        temporary = self.root / f"{final.name}.tmp"
        if self.world.is_first:
            self.root.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            (temporary / "policy").mkdir(parents=True)
        barrier(self.world)
        self.model.save(temporary / "policy")
        if save_part is not None:
            save_part(temporary)
        barrier(self.world)
        if self.world.is_first:
            (temporary / STATE_FILE).write_text(json.dumps(state), encoding="utf-8")
            sync_tree(temporary)
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
            sync_path(self.root)
            replace_text(self.root / POINTER, str(step))
            self._drop_old()
        barrier(self.world)
        self._current = step
        return final

    def load_latest(self, root: Path | None = None) -> dict[str, object] | None:
        """Restore the model from the newest checkpoint under `root` (default: where this run saves).

        Returns the trainer state, or None where there is no checkpoint. ValueError for a pointer to nothing.
        """
        root = root or self.root
        step = broadcast_object(read_pointer(root) if self.world.is_first else None, self.world)
        if step is None:
            return None
        folder = self.folder(step, root)
        if not (folder / STATE_FILE).is_file():
            raise ValueError(
                f"{root / POINTER} names step {step}, but {folder} is not a checkpoint"
            )
        self.model.load(folder / "policy")
        if root == self.root:
            self._current = step
        log.info("restored %s", folder)
        return json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))

    def _drop_old(self) -> None:
        if not self.keep:
            return
        for folder in sorted(p for p in self.root.glob("iter_*") if p.suffix != ".tmp")[
            : -self.keep
        ]:
            shutil.rmtree(folder)


def read_pointer(root: Path) -> int | None:
    """The step of the newest checkpoint under `root`, None where there is none."""
    pointer = root / POINTER
    if not pointer.is_file():
        return None
    text = pointer.read_text(encoding="utf-8").strip()
    if not text.isdigit():
        raise ValueError(f"{pointer} holds {text!r}: must be a step number")
    return int(text)
