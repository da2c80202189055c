"""The random parts of a family: block means and row deviations, all drawn from one seed."""

from __future__ import annotations

import numpy as np

from bilevax.testing.settings import FamilySettings


class Draws:
    """Random arrays of a family.

    Block means and row deviations come from two separate streams, so that the means depend on neither
    `noise` nor `rows`.
    """

    def __init__(self, settings: FamilySettings):
        self.settings = settings
        self.means = np.random.default_rng([settings.seed, 0])
        self.deviation = np.random.default_rng([settings.seed, 1])

    def normal(self, *shape: int) -> np.ndarray:
        """Standard normal entries for every block: (m, …)."""
        return self.means.normal(size=(self.settings.m, *shape))

    def orthonormal(self, rows: int, columns: int) -> np.ndarray:
        """Matrices (m, rows, columns) with orthonormal columns; needs rows ≥ columns."""
        return np.linalg.qr(self.normal(rows, columns))[0]

    def eigenvalues(self, size: int) -> np.ndarray:
        """Evenly spaced on [1, conditioning]."""
        return np.linspace(1.0, self.settings.conditioning, size)

    def positive_definite(self, size: int) -> np.ndarray:
        """Symmetric matrices (m, size, size) with these eigenvalues, in random bases."""
        bases = self.orthonormal(size, size)
        return np.einsum("mij,j,mkj->mik", bases, self.eigenvalues(size), bases)

    def design(self, observations: int, size: int) -> np.ndarray:
        """Matrices A (m, observations, size) whose AᵀA has these eigenvalues; needs observations ≥ size."""
        left, right = self.orthonormal(observations, size), self.orthonormal(size, size)
        return np.einsum("mij,j,mkj->mik", left, np.sqrt(self.eigenvalues(size)), right)

    def deviations(self, *shape: int) -> np.ndarray:
        """noise · normal for every row, (m, rows, …), with mean zero over the rows of each block."""
        drawn = self.deviation.normal(size=(self.settings.m, self.settings.rows, *shape))
        return self.settings.noise * (drawn - drawn.mean(1, keepdims=True))

    def factors(self) -> np.ndarray:
        """One factor per row, (m, rows), in (0, 2) with mean one: every row's curvature stays positive."""
        drawn = self.deviation.uniform(-1, 1, size=(self.settings.m, self.settings.rows))
        drawn = drawn - drawn.mean(1, keepdims=True)
        drawn /= np.maximum(1, np.abs(drawn).max(1, keepdims=True))
        return 1 + self.settings.noise / (1 + self.settings.noise) * drawn
