"""Arrays and a note in one file, without pickle."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

_NOTE, _FORMAT = "about.json", 1


def save_arrays(path: str | Path, about: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """Writes arrays and a note that JSON can hold; the file appears only when it is whole."""
    path = Path(path)
    text = json.dumps({"format": _FORMAT, **about})
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        columns: dict[str, Any] = {name: np.asarray(array) for name, array in arrays.items()}
        np.savez(file, allow_pickle=False, **columns, **{_NOTE: np.frombuffer(text.encode(), np.uint8)})
    os.replace(part, path)


def load_arrays(path: str | Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Reads what `save_arrays` wrote.

    Raises:
      ValueError: if the file is another's.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        about = json.loads(arrays.pop(_NOTE).tobytes().decode())
    except (KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} must be a file that save() wrote, got something else: {error}") from error
    if about.get("format") != _FORMAT:
        raise ValueError(f"{path} has the format {about.get('format')!r}, expected {_FORMAT}")
    return about, arrays
