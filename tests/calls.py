"""Keyword arguments of `bx.minimize` and `init`, written flat in tests and grouped here."""

import bilevax as bx

_STOP = ("seconds", "tolerance", "patience", "watch", "throw", "recover")
_CHECKPOINT = {"save_every": "steps", "save_seconds": "seconds", "keep": "keep", "resume": "resume"}
_SAMPLING = ("shuffle", "initial_batch_size", "strata")


def grouped(**flat):
    """The same arguments, with those that belong together as `Sampling`, `Stop` and `Checkpoint`."""
    stop = {name: flat.pop(name) for name in _STOP if name in flat}
    sampling = {name: flat.pop(name) for name in _SAMPLING if name in flat}
    saving = {new: flat.pop(old) for old, new in _CHECKPOINT.items() if old in flat}
    if stop:
        flat["stop"] = bx.Stop(**stop)
    if sampling:
        flat["sampling"] = bx.Sampling(**sampling)
    if saving and flat.get("checkpoint") is not None:
        flat["checkpoint"] = bx.Checkpoint(flat["checkpoint"], **saving)
    return flat
