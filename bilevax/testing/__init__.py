"""Problems with known solutions, for testing and comparing methods: see docs/testing.md."""

from collections.abc import Callable

from bilevax.testing.curved import curved_blocks
from bilevax.testing.family import Family, Region
from bilevax.testing.kinds import kinds_blocks
from bilevax.testing.logistic import logistic_blocks
from bilevax.testing.means import mean_blocks
from bilevax.testing.mixture import mixture_blocks
from bilevax.testing.nested import nested_blocks
from bilevax.testing.pl import pl_blocks, pl_constant
from bilevax.testing.quadratic import quadratic_blocks
from bilevax.testing.ridge import ridge_blocks
from bilevax.testing.settings import FamilySettings

FAMILIES: dict[str, Callable[..., Family]] = {
    "quadratic": quadratic_blocks,
    "ridge": ridge_blocks,
    "logistic": logistic_blocks,
    "mean": mean_blocks,
    "mixture": mixture_blocks,
    "pl": pl_blocks,
    "curved": curved_blocks,
}

__all__ = [
    "FAMILIES",
    "Family",
    "FamilySettings",
    "Region",
    "curved_blocks",
    "kinds_blocks",
    "logistic_blocks",
    "mean_blocks",
    "mixture_blocks",
    "nested_blocks",
    "pl_blocks",
    "pl_constant",
    "quadratic_blocks",
    "ridge_blocks",
]
