"""Results of a long experiment that are kept as they come, so that it can go on where it was stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bilevax.experiments.report import as_plain


class Kept:
    """Named results in one JSON file, which belongs to the options that it was begun with.

    Args:
      path: the file.
      options: of the experiment; a dataclass, or what JSON can hold.
      resume: whether to take over what the file holds; otherwise it is begun anew.

    Raises:
      ValueError: the file was begun with other options.

    Example:
      >>> import tempfile
      >>> path = Path(tempfile.mkdtemp()) / "kept.json"
      >>> Kept(path, {"seeds": 3}).get("a", lambda: 1.5)
      1.5
      >>> Kept(path, {"seeds": 3}, resume=True).get("a", lambda: 2.5)
      1.5
    """

    def __init__(self, path: str | Path, options: Any, *, resume: bool = False):
        self.path, self.options = Path(path), as_plain(options)
        self.results: dict[str, Any] = {}
        if not resume or not self.path.exists():
            return
        stored = json.loads(self.path.read_text(encoding="utf-8"))
        different = sorted(
            name
            for name in set(stored["options"]) | set(self.options)
            if stored["options"].get(name) != self.options.get(name)
        )
        if different:
            got = {name: self.options.get(name) for name in different}
            was = {name: stored["options"].get(name) for name in different}
            raise ValueError(f"resume needs the options that {self.path} was begun with: {was}, got {got}")
        self.results = stored["results"]

    def get(self, name: str, compute: Callable[[], Any]) -> Any:
        """The result of that name: the one that is kept, or a new one, which is written at once."""
        if name not in self.results:
            self.results[name] = as_plain(compute())
            text = json.dumps({"options": self.options, "results": self.results}, indent=1)
            part = self.path.with_suffix(".part")
            part.write_text(text + "\n", encoding="utf-8")
            os.replace(part, self.path)
        return self.results[name]
