"""Fitted rankings in files of plain arrays and JSON, without pickle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

import bilevax as bx
from bilevax.applications.ranking.array_file import load_arrays, save_arrays

_LEFT_OUT = "model", "solver", "progress", "random_state"


def save(model: Any, path: str | Path) -> None:
    """Writes a fitted model."""
    from sklearn.utils.validation import check_is_fitted

    check_is_fitted(model)
    given = {name: one for name, one in model.get_params().items() if name not in _LEFT_OUT}
    classes = model.classes_
    note = {
        "kind": type(model).__name__,
        "parameters": {n: v.item() if isinstance(v, np.generic) else v for n, v in given.items()},
        "linear": model.model is None,
        "line": [model._slope, model._level],
        "outcome": str(model.outcome_),
        "steps": int(model.n_iter_),
        "features": [str(one) for one in getattr(model, "feature_names_in_", [])],
    }
    leaves = {f"x/{place}": leaf for place, leaf in enumerate(jax.tree.leaves(model._x))}
    if classes.dtype.kind == "O":
        classes = np.asarray([str(one) for one in classes])
    save_arrays(path, note, {"shift": model._shift, "scale": model._scale, "classes": classes} | leaves)


def load(kind: type[Any], path: str | Path, model: Any) -> Any:
    """Reads a model of this class.

    Raises:
      ValueError: the file is of another kind, damaged, or its contents do not fit together.
    """
    note, arrays = load_arrays(path)
    if note.get("kind") != kind.__name__:
        raise ValueError(f"{path} must hold a {kind.__name__}, got {note.get('kind')!r}")
    if note.get("linear") != (model is None):
        expected = "left out, as the saved one is linear" if note.get("linear") else "that of the saved one"
        raise ValueError(f"model must be {expected}, got {type(model).__name__}")
    try:
        return _restored(kind, note, arrays, model)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ValueError(f"{path} does not hold a valid {kind.__name__}: {error}") from error


def _restored(kind: type[Any], note: dict[str, Any], arrays: dict[str, np.ndarray], model: Any) -> Any:
    from bilevax.applications.auc.base import parameters_of

    out = kind(**note["parameters"], model=model)
    out._check_parameters()
    out._shift, out._scale, out.classes_ = arrays["shift"], arrays["scale"], arrays["classes"]
    size = len(out._shift)
    like = np.zeros(size, np.float32) if model is None else parameters_of(model)
    expected, structure = jax.tree.flatten(like)
    leaves = [arrays[f"x/{place}"] for place in range(len(expected))]
    if [one.shape for one in leaves] != [np.shape(one) for one in expected] or f"x/{len(leaves)}" in arrays:
        raise ValueError(f"the parameters must have the shapes {[np.shape(one) for one in expected]}")
    if out._scale.shape != (size,) or out.classes_.shape != (2,):
        raise ValueError("the scales and classes do not fit together")
    if not all(np.isfinite(one).all() for one in [*leaves, out._shift, out._scale, np.asarray(note["line"])]):
        raise ValueError("an array is not finite")
    out._x = jax.tree.unflatten(structure, leaves)
    out._slope, out._level = map(float, note["line"])
    out.n_iter_, out.outcome_, out.n_features_in_ = int(note["steps"]), bx.Outcome(note["outcome"]), size
    if note["features"]:
        out.feature_names_in_ = np.asarray(note["features"], object)
    out._publish()
    return out
