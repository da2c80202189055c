"""The methods, one short file each. `bilevax.solvers.toolkit` holds what a method of your own needs."""

from bilevax.solvers.base import AbstractSolver
from bilevax.solvers.block_newton import BlockNewton
from bilevax.solvers.block_page import BlockPAGE
from bilevax.solvers.block_saga import BlockSAGA
from bilevax.solvers.bsvrb_v1 import BSVRBv1
from bilevax.solvers.bsvrb_v2 import BSVRBv2
from bilevax.solvers.f2sa import F2SA, F3SA
from bilevax.solvers.ksong import KSONG
from bilevax.solvers.ma_soba import MASOBA
from bilevax.solvers.mmbo import MMBO
from bilevax.solvers.msvr import MSVR
from bilevax.solvers.recipe import Recipe
from bilevax.solvers.restart import Restart
from bilevax.solvers.rsvrb import RSVRB
from bilevax.solvers.soba import SOBA
from bilevax.solvers.song import SONG

__all__ = [
    "F2SA",
    "F3SA",
    "KSONG",
    "MASOBA",
    "MMBO",
    "MSVR",
    "RSVRB",
    "SOBA",
    "SONG",
    "AbstractSolver",
    "BSVRBv1",
    "BSVRBv2",
    "BlockNewton",
    "BlockPAGE",
    "BlockSAGA",
    "Recipe",
    "Restart",
]
