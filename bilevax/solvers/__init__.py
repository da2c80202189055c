"""The methods: one short file each, over the one step of `recipe`."""

from bilevax._step.state import Info, State
from bilevax.solvers.block_page import BlockPAGE
from bilevax.solvers.block_saga import BlockSAGA
from bilevax.solvers.bsvrb_v1 import BSVRBv1
from bilevax.solvers.bsvrb_v2 import BSVRBv2
from bilevax.solvers.ksong import KSONG
from bilevax.solvers.mmbo import MMBO
from bilevax.solvers.msvr import MSVR
from bilevax.solvers.recipe import Recipe
from bilevax.solvers.rsvrb import RSVRB
from bilevax.solvers.soba import SOBA
from bilevax.solvers.song import SONG

__all__ = [
    "KSONG",
    "MMBO",
    "MSVR",
    "RSVRB",
    "SOBA",
    "SONG",
    "BSVRBv1",
    "BSVRBv2",
    "BlockPAGE",
    "BlockSAGA",
    "Info",
    "Recipe",
    "State",
]
