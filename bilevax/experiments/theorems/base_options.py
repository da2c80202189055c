"""The options that all experiments on the theorems share."""

from __future__ import annotations

import dataclasses

from bilevax.experiments.theorems.scalings import Sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class TheoremOptions:
    """Common options: the size of the problem, the sampling and the seeds.

    Attributes:
      seeds: runs per table entry, side by side.
      seed: seed of the first of them; tuning uses other seeds.
      blocks, blocks_per_step, batch_size: m, I, B.
      dimension, rows: d_x = d_y, and rows per block.
    """

    seeds: int = 8
    seed: int = 0
    blocks: int = 20
    blocks_per_step: int = 5
    batch_size: int = 4
    dimension: int = 5
    rows: int = 100

    @property
    def sizes(self) -> Sizes:
        """m, I and B."""
        return Sizes(self.blocks, self.blocks_per_step, self.batch_size)
