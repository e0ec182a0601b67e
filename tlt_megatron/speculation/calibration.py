"""Calibration of a tree's estimated acceptance: learns the error tau of draft logits from accepted tokens.

The engine keeps one calibrator per drafter. It passes `tau_D` to `TreeGrower.grow` and reports `calibration_counts` from time
to time. With noise ranking a child's estimate is softmax((draft logit + temperature * noise) / tau). A small tau trusts the
drafter; a large tau spreads the token budget over more branches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tlt_megatron.speculation.tree import UNUSED, DraftTree
from tlt_megatron.speculation.verify import Verdict

_LIMIT = math.log(30.0)  # of |log tau|
_MAX_STEP = 0.25  # largest change of log tau per report
_GAIN = 3.0  # about 1 / (change of the predicted acceptance per unit of log tau)
_MIN_RATE = 0.01  # per node with drafted children; the memory is about 1 / (gain * rate) such nodes


def calibration_counts(tree: DraftTree, verdict: Verdict) -> Tensor:
    """Return [3, depth] float32 counts by depth, over nodes whose parent was accepted.

    Rows: sum of estimated acceptances, number of accepted nodes, number of such parents. The result stays on the device; add up several passes before reading it.
    """
    batch_size, num_nodes = tree.token_ids_BQ.shape
    rows_BR = torch.zeros(
        batch_size, num_nodes + 1, dtype=torch.bool, device=tree.token_ids_BQ.device
    )
    rows_BR.scatter_(1, verdict.path_BS, True)
    parent_rows_BQ, scores_BQ = tree.parents_BQ + 1, tree.scores_BQ
    is_reached_BQ = rows_BR.gather(1, parent_rows_BQ) & (tree.token_ids_BQ != UNUSED)
    parent_scores_BQ = torch.nn.functional.pad(scores_BQ, (1, 0), value=1.0).gather(
        1, parent_rows_BQ
    )
    estimate_BQ = (scores_BQ / parent_scores_BQ).nan_to_num(0.0, 0.0, 0.0)
    is_accepted_BQ = is_reached_BQ & rows_BR[:, 1:]
    depth_D = torch.arange(1, tree.depth + 1, device=rows_BR.device)
    is_depth_DBQ = tree.depths_BQ == depth_D.view(-1, 1, 1)
    is_reached_DBQ = is_depth_DBQ & is_reached_BQ
    return torch.stack(
        [
            (is_reached_DBQ * estimate_BQ).sum((1, 2)).float(),
            (is_depth_DBQ & is_accepted_BQ).sum((1, 2)).float(),
            is_reached_DBQ.any(2).sum(1).float(),
        ]
    )


def first_counts(tree: DraftTree, verdict: Verdict) -> Tensor:
    """Return [depth] int64: requests whose accepted token at each depth is the first child of its parent.

    The learned drafter ranks children in node order.
    """
    is_sibling_BQQ = tree.parents_BQ.unsqueeze(2) == tree.parents_BQ.unsqueeze(1)
    is_first_BQ = ~is_sibling_BQQ.tril(-1).any(dim=2)
    is_first_BR = torch.nn.functional.pad(is_first_BQ, (1, 0))
    return is_first_BR.gather(1, verdict.path_BS)[:, 1:].sum(dim=0)


class AcceptanceCalibrator:
    """Adjusts tau of each depth until accepted matches predicted (Robbins and Monro 1951, on log tau)."""

    def __init__(self, max_steps: int, *, initial_tau: float = 0.7) -> None:
        self._log_tau = [math.log(initial_tau)] * max_steps
        self._num_parents = [0.0] * max_steps

    def tau(self) -> list[float]:
        """Return tau for depths 1 to max_steps. A depth without counts repeats the value of the depth above."""
        return [math.exp(value) for value in self._log_tau]

    def observe(self, counts: Sequence[Sequence[float]]) -> None:
        """Update tau. `counts` is `calibration_counts(...).tolist()`, or a sum of several."""
        predicted, accepted, parents = counts
        for depth, num_parents in enumerate(parents):
            if num_parents <= 0.0:
                continue
            self._num_parents[depth] += num_parents
            rate = max(_MIN_RATE, 1.0 / (20.0 + self._num_parents[depth]))
            step = _GAIN * rate * (predicted[depth] - accepted[depth])
            moved = self._log_tau[depth] + min(max(step, -_MAX_STEP), _MAX_STEP)
            self._log_tau[depth] = min(max(moved, -_LIMIT), _LIMIT)
        for depth in range(1, len(self._log_tau)):
            if self._num_parents[depth] == 0.0:
                self._log_tau[depth] = self._log_tau[depth - 1]

    def state_dict(self) -> dict[str, list[float]]:
        """Return the state as values that JSON can hold."""
        return {"log_tau": list(self._log_tau), "num_parents": list(self._num_parents)}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        """Restore `state_dict`. ValueError if its number of depths differs."""
        if len(state["log_tau"]) != len(self._log_tau):
            raise ValueError(
                f"max_steps={len(self._log_tau)}, but the calibrator state has {len(state['log_tau'])} depths"
            )
        self._log_tau = list(state["log_tau"])
        self._num_parents = list(state["num_parents"])
