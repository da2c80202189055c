"""The options of `bilevax reproduce rates`."""

from __future__ import annotations

import dataclasses

from bilevax.experiments.theorems.base_options import TheoremOptions
from bilevax.experiments.theorems.problems import FAMILIES
from bilevax.experiments.theorems.scalings import METHODS, Method

PARTS = ("epsilon", "control", "sizes", "errors", "lemmas")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RatesOptions(TheoremOptions):
    """The options of `bilevax reproduce rates`, besides `TheoremOptions`.

    Attributes:
      methods: names from `scalings.METHODS`.
      family: "quadratic", or "curved": blocks whose Hessian and Jacobian move with x and y. It has no mean
        blocks, so methods for those are left out.
      parts: what to measure: "epsilon", "control", "sizes" (m, I and B), "errors", "lemmas".
      epsilons: values of ε for variance-reduced methods; c is tuned at the first one.
      averaged_epsilons: values of ε for moving averages, which need more steps.
      constants: candidates for c.
      max_steps: maximum number of steps of a run.
      tuning_max_steps: the same for tuning.
      control_epsilons, control_max_steps: number of ε and of steps of the control (`control.py`).
      size_methods: the methods for which m, I and B vary.
      size_epsilon: the ε at which they vary.
      block_copies: multiples of `blocks` for m; I and B vary at the second of these m.
      blocks_per_steps, batch_sizes: values of I and of B; those in both are used for I = B.
      full_epsilon, full_batch_sizes: ε and the values of B for I = m.
      error_epsilon, error_steps: ε and number of steps of the runs whose error terms are recorded.
      lemma_epsilon, lemma_steps, lemma_seeds: ε, steps and runs with which the lemmas are checked; their
        expectations are means over these runs.
    """

    methods: tuple[str, ...] = tuple(METHODS)
    family: str = "quadratic"
    parts: tuple[str, ...] = PARTS
    epsilons: tuple[float, ...] = (0.2, 0.1414, 0.1, 0.0707, 0.05, 0.0354)
    averaged_epsilons: tuple[float, ...] = (0.2, 0.1414, 0.1, 0.0707, 0.05)
    constants: tuple[float, ...] = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0)
    max_steps: int = 2_000_000
    tuning_max_steps: int = 8000
    control_epsilons: int = 4
    control_max_steps: int = 400_000
    size_methods: tuple[str, ...] = ("BSVRB v1", "BSVRB v2", "RSVRB", "MSVR-v2", "K-SONG", "MMBO-v2")
    size_epsilon: float = 0.1414
    block_copies: tuple[int, ...] = (1, 2, 4, 8)
    blocks_per_steps: tuple[int, ...] = (1, 2, 4, 8, 16)
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    full_epsilon: float = 0.05
    full_batch_sizes: tuple[int, ...] = (1, 2, 4)
    error_epsilon: float = 0.1
    error_steps: int = 20_000
    lemma_epsilon: float = 0.2
    lemma_steps: int = 2000
    lemma_seeds: int = 64

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"family must be among {list(FAMILIES)}, got {self.family!r}")
        for name, known in (("methods", METHODS), ("parts", PARTS)):
            unknown = [one for one in getattr(self, name) if one not in known]
            if unknown:
                raise ValueError(f"{name} must be among {list(known)}, got {unknown[0]!r}")
        for name in ("epsilons", "averaged_epsilons"):
            values = getattr(self, name)
            if not values or min(values) <= 0 or list(values) != sorted(set(values), reverse=True):
                raise ValueError(f"{name} must be positive, the largest first, got {values}")

    @property
    def run_methods(self) -> tuple[str, ...]:
        """The methods that the family has blocks for."""
        return tuple(name for name in self.methods if self.family == "quadratic" or not METHODS[name].mean)

    def kind(self, method: Method) -> str:
        """The kind of blocks that a method runs on."""
        return "mean" if method.mean else self.family

    def quick(self) -> RatesOptions:
        """A short check of every part: few methods, seeds and values, and large ε."""
        return dataclasses.replace(
            self,
            methods=self.methods if len(self.methods) < len(METHODS) else ("BSVRB v2", "MMBO-v2"),
            epsilons=(0.3, 0.2, 0.1414),
            averaged_epsilons=(0.3, 0.2),
            constants=(0.5, 0.7),
            seeds=3,
            max_steps=50_000,
            control_epsilons=2,
            control_max_steps=20_000,
            size_methods=("BSVRB v2",),
            size_epsilon=0.2,
            block_copies=(1, 2),
            blocks_per_steps=(4, 8),
            batch_sizes=(4, 8),
            full_epsilon=0.1,
            full_batch_sizes=(2, 4),
            error_steps=2000,
            lemma_steps=60,
            lemma_seeds=8,
        )
