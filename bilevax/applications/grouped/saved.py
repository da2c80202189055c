"""Fitted models in files of plain arrays and JSON, without pickle."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

import bilevax as bx
from bilevax.applications.grouped.group_index import GroupIndex, from_json, to_json
from bilevax.applications.grouped.metadata import Encoder
from bilevax.applications.grouped.priors import FORMS, Prior
from bilevax.applications.grouped.steps import Steps
from bilevax.applications.ranking.array_file import load_arrays, save_arrays

_ARRAYS = ("beta", "share", "errors", "prior_errors", "history", "shift", "scale")


def save(model: Any, path: str | Path) -> None:
    """Writes a fitted model.

    Raises:
      TypeError: the model holds what JSON cannot.
    """
    from sklearn.utils.validation import check_is_fitted

    check_is_fitted(model)
    parameters = {
        name: value for name, value in model.get_params().items() if name not in ("progress", "random_state")
    }
    for name, value in parameters.items():
        if callable(value):
            raise TypeError(f"{name} must be given by name for a model to be saved, got a function")
    parameters = {n: v.item() if isinstance(v, np.generic) else v for n, v in parameters.items()}
    scaling = model._scaling
    classes = getattr(model, "classes_", None)
    note = {
        "kind": type(model).__name__,
        "parameters": parameters,
        "prior": dataclasses.asdict(model._prior),
        "groups": [to_json(one) for one in model._index.place],
        "default": model._default,
        "metadata": None if model._encoder is None else [list(one) for one in model._encoder.columns],
        "target": [scaling.target_shift, scaling.target_scale],
        "noise": model._noise,
        "level": model._level,
        "unit": model._unit,
        "judged": model._judged,
        "steps": int(model.n_iter_),
        "size": getattr(model, "_size", 1.0),
        "outcome": str(model.outcome_),
        "features": [str(one) for one in getattr(model, "feature_names_in_", [])],
    }
    arrays = {
        "beta": model._beta,
        "share": model.shrinkage_,
        "errors": model._errors,
        "prior_errors": model._prior_errors,
        "history": model.history_,
        "shift": scaling.shift,
        "scale": scaling.scale,
    } | {f"x/{name}": one for name, one in model._x.items()}
    for name in ("steps", "prior_steps"):
        steps = getattr(model, f"_{name}", None)
        if steps is not None:
            arrays |= {f"{name}/values": steps.values, f"{name}/thresholds": steps.thresholds}
    if model._variance is not None:
        arrays["variance"] = model._variance
    if classes is not None:
        if classes.dtype.kind == "O":
            wrong = [one for one in classes if not isinstance(one, str)]
            if wrong:
                raise TypeError(f"classes must be numbers or strings to be saved, got {wrong[0]!r}")
            classes = np.asarray(classes.tolist())
        arrays["classes"] = classes
    save_arrays(path, note, arrays)


def load(kind: type[Any], path: str | Path) -> Any:
    """Reads a model of this class.

    Raises:
      ValueError: the file is of another kind, damaged, or its contents do not fit together.
    """
    note, arrays = load_arrays(path)
    if note.get("kind") != kind.__name__:
        raise ValueError(f"{path} must hold a {kind.__name__}, got {note.get('kind')!r}")
    missing = {*_ARRAYS} - set(arrays)
    if missing:
        raise ValueError(f"{path} must be a file that save() wrote, got one without {sorted(missing)}")
    try:
        return _restored(kind, note, arrays)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ValueError(f"{path} does not hold a valid {kind.__name__}: {error}") from error


def _restored(kind: type[Any], note: dict[str, Any], arrays: dict[str, np.ndarray]) -> Any:
    from bilevax.applications.grouped.panel import Scaling

    model = kind(**note["parameters"])
    model._check_parameters()
    model._prior = Prior(**note["prior"])
    prior, groups = model._prior, [from_json(one) for one in note["groups"]]
    x = {name[2:]: one for name, one in arrays.items() if name.startswith("x/")}
    expected = prior.start(np.zeros((prior.size, prior.columns)), 1.0)
    shapes = {name: one.shape for name, one in expected.items()}
    if prior.form not in FORMS or {name: one.shape for name, one in x.items()} != shapes:
        raise ValueError(f"the prior must have arrays of the shapes {shapes}")
    if arrays["beta"].shape != (len(groups), prior.size, prior.columns):
        raise ValueError(f"the coefficients of {len(groups)} groups have the shape {arrays['beta'].shape}")
    if arrays["shift"].shape != (prior.size - 1,) or arrays["scale"].shape != (prior.size - 1,):
        raise ValueError("the scaling does not fit the coefficients")
    if not all(
        np.isfinite(one).all() for one in [*x.values(), *(arrays[n] for n in _ARRAYS if n != "scale")]
    ):
        raise ValueError("an array is not finite")
    if not (arrays["scale"] > 0).all():  # that of a constant feature is infinite
        raise ValueError("scales must be positive")
    model._x, model._index = x, GroupIndex(groups)
    model._beta, model.shrinkage_, model._errors = arrays["beta"], arrays["share"], arrays["errors"]
    model._prior_errors, model._variance = arrays["prior_errors"], arrays.get("variance")
    model._noise, model._size, model._default = (
        float(note["noise"]),
        float(note["size"]),
        int(note["default"]),
    )
    model._judged = int(note.get("judged", 2**31))  # files of older versions do not say
    model._level = float(note.get("level", 1.0))
    model._unit = float(note.get("unit", 1.0))
    model._scaling = Scaling(arrays["shift"], arrays["scale"], *map(float, note["target"]))
    columns = note["metadata"]
    model._encoder = (
        None if columns is None else Encoder([(name, one, known) for name, one, known in columns])
    )
    model.history_, model.n_iter_ = arrays["history"], int(note["steps"])
    model.outcome_, model.n_features_in_ = bx.Outcome(note["outcome"]), prior.size - 1
    if note["features"]:
        model.feature_names_in_ = np.asarray(note["features"], object)
    model._steps, model._prior_steps = (_steps(arrays, name) for name in ("steps", "prior_steps"))
    if "classes" in arrays:
        model.classes_ = arrays["classes"]
    model._publish()
    return model


def _steps(arrays: dict[str, np.ndarray], name: str) -> Steps | None:
    if f"{name}/values" not in arrays:
        return None
    values, thresholds = arrays[f"{name}/values"], arrays[f"{name}/thresholds"]
    if values.ndim != 1 or thresholds.shape != (len(values) - 1,) or not np.isfinite(values).all():
        raise ValueError(f"the {name.replace('_', ' ')} do not fit together")
    if np.isnan(thresholds).any() or (np.diff(values) <= 0).any() or (np.diff(thresholds) < 0).any():
        raise ValueError(f"the {name.replace('_', ' ')} must ascend")
    return Steps(values, thresholds)
