"""Numbers that are known only so well, and together: a normal belief that measurements sharpen and time blurs.

Used by the two models of the cost-model selector. One thing to know: what two quantities share stands in the covariance, so
a measurement of one informs the other, and a difference of two can be surer than either.

Shapes: N quantities, M measurements taken at once.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


class Belief:
    """Mean and covariance of N quantities: a Kalman filter (Kalman 1960)."""

    def __init__(self, mean_N: np.ndarray, covariance_NN: np.ndarray) -> None:
        self.mean_N = mean_N.astype(np.float64)
        self.covariance_NN = covariance_NN.astype(np.float64)
        self._prior_NN = self.covariance_NN.copy()

    def learn(self, rows_MN: np.ndarray, innovations_M: np.ndarray, noises_M: np.ndarray) -> None:
        """`rows_MN` @ quantities was measured, `innovations_M` above its mean, with variances `noises_M`."""
        crossed_MN, gains_MN = self._gains(rows_MN, noises_M)
        self.mean_N += innovations_M @ gains_MN
        self.covariance_NN -= crossed_MN.T @ gains_MN

    def shift_N(
        self, rows_MN: np.ndarray, innovations_M: np.ndarray, noises_M: np.ndarray
    ) -> np.ndarray:
        """By how much `learn` would move the mean."""
        return innovations_M @ self._gains(rows_MN, noises_M)[1]

    def _gains(self, rows_MN: np.ndarray, noises_M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        crossed_MN = rows_MN @ self.covariance_NN
        total_MM = crossed_MN @ rows_MN.T
        total_MM.flat[:: len(total_MM) + 1] += noises_M
        return crossed_MN, np.linalg.solve(total_MM, crossed_MN)

    def fade(self, share: float) -> None:
        """Doubts go a share of the way back to those of the beginning; the mean stays."""
        self.covariance_NN *= 1.0 - share
        self.covariance_NN += share * self._prior_NN

    def doubt(self, share: float) -> None:
        """Add a share of the first doubts to the present ones."""
        self.covariance_NN += share * self._prior_NN

    def widen(self, index: int, variance: float, *, limit: float = float("inf")) -> None:
        """Doubt one quantity more, unless it is in doubt by `limit` already."""
        if self.covariance_NN[index, index] < limit:
            self.covariance_NN[index, index] += variance

    def relax(self, index: int, keep: float, variance: float) -> None:
        """A quantity that wanders about 0 keeps `keep` of its present value; left alone it ends with `variance`."""
        self.mean_N[index] *= keep
        self.covariance_NN[index] *= keep
        self.covariance_NN[:, index] *= keep
        self.covariance_NN[index, index] += (1.0 - keep * keep) * variance

    def state_dict(self) -> dict[str, object]:
        """JSON-able: the covariance as its lower triangle, row by row."""
        rows, columns = np.tril_indices(len(self.mean_N))
        lower = self.covariance_NN[rows, columns]
        self.covariance_NN[columns, rows] = lower  # rounding aside it was so
        return {"mean": self.mean_N.tolist(), "covariance": lower.tolist()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore `state_dict` of as many quantities."""
        rows, columns = np.tril_indices(len(self.mean_N))
        self.mean_N = np.array(state["mean"], dtype=np.float64)
        self.covariance_NN[rows, columns] = state["covariance"]
        self.covariance_NN[columns, rows] = state["covariance"]
