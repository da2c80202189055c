"""A recommender: from a table of ratings to the items that each user should see next."""

from __future__ import annotations

import json
import math
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import bilevax as bx
from bilevax.applications import interrupted
from bilevax.applications.ranking import saved_values
from bilevax.applications.ranking.array_file import full_path, load_arrays, read_file, save_arrays
from bilevax.applications.ranking.defaults import WARM_UP, method_settings, table_settings
from bilevax.applications.ranking.fitted import Fitted, check_ids
from bilevax.applications.ranking.held_out import hold_out
from bilevax.applications.ranking.methods import BILEVEL, TrainingSettings, checked_method
from bilevax.applications.ranking.models import MF, NeuMF
from bilevax.applications.ranking.presets import tuned
from bilevax.applications.ranking.ratings import Ratings
from bilevax.applications.ranking.training import Trained, parse_metric, train
from bilevax.data import Interactions, load_interactions, make_interactions, split_last
from bilevax.data.tables import usual_columns

MODELS: dict[str, Any] = {"neumf": NeuMF, "mf": MF}
_KEPT = ("user_ids", "item_ids", "offsets", "items")
_NOTED = ("arguments", "best_epoch", "outcome", "history")
_LEAST_SECONDS = 1e-3
_CONFIGURATION_LIMIT = 2**20  # bytes


class TopKRecommender:
    """Learns to rank items for users, with the weight on the top of each list.

    Args:
      method: one of `METHODS`; "k-song" is the cheapest bilevel method with a top-K threshold.
      model: "mf" or "neumf", matrix factorisation or its neural form, which is slower.
      width: the length of the model's vectors.
      dropout: of "neumf".
      epochs: how many times every user is visited, at most.
      warm_up: epochs of softmax cross-entropy before that, with the tuned settings of softmax; by default 20
        for the bilevel methods and 0 for the others.
      held_out: the number of each user's last items that are held out to select the best epoch; with 0,
        training uses all items and runs for all epochs. Users with too few items keep all of them.
      refit: train again with all items, for the best number of epochs; without it the model has not learnt
        from the held-out items.
      watch: the metric that selects the best epoch.
      every: epochs between two measurements.
      patience: training stops after this many measurements without improvement; None never stops early.
      seed: of all random choices.
      settings: hyper-parameters by name, see `TrainingSettings`. The defaults are what a search on MovieLens
        1M found for the method, with fewer users per step where there are fewer users, and more weight decay
        where users have fewer pairs; if you give a surrogate or a discount, those of `TrainingSettings`. The
        default cutoff is at most half of the items.

    Attributes:
      settings_: the `TrainingSettings` of the training.
      history_: the measurements of the training that selected the epoch.
      best_epoch_: the best epoch by the watched metric.
      outcome_: why the training ended, a `bx.Outcome`: `bx.Outcome.INTERRUPTED` after a signal. If that or
        the time ended it, the model is that of the best epoch so far, without the held-out items.

    Example:
      >>> from bilevax.applications.ranking import TopKRecommender
      >>> from bilevax.data import generate
      >>> table = generate.interactions(30, 40, 600, seed=0).table
      >>> small = {"users_per_step": 10, "negatives": 10, "cutoff": 20, "learning_rate": 0.01}
      >>> recommender = TopKRecommender(model="mf", width=4, epochs=2, held_out=2, every=1, settings=small)
      >>> recommender = recommender.fit(table, progress=None)
      >>> [len(recommender.recommend(user, k=3)) for user in (0, 29)]
      [3, 3]
    """

    def __init__(
        self,
        method: str = "k-song",
        *,
        model: str = "mf",
        width: int = 64,
        dropout: float = 0.0,
        epochs: int = 200,
        warm_up: int | None = None,
        held_out: int = 5,
        refit: bool = True,
        watch: str = "ndcg@10",
        every: int = 5,
        patience: int | None = 10,
        seed: int = 0,
        settings: dict[str, Any] | None = None,
    ):
        self.method = checked_method(method)
        if model not in list(MODELS):
            raise ValueError(f"model must be one of {list(MODELS)}, got {model!r}")
        self.model = model
        self.width = bx.checks.whole_number("width", width, 1)
        bx.checks.coefficient("dropout", dropout, high=0.99, zero=True, optional=False)
        self.dropout = dropout
        self.epochs = bx.checks.whole_number("epochs", epochs, 1)
        self.warm_up = None if warm_up is None else bx.checks.whole_number("warm_up", warm_up, 0)
        self.held_out = bx.checks.whole_number("held_out", held_out, 0)
        if not isinstance(refit, bool):
            raise TypeError(f"refit must be True or False, got {refit!r}")
        self.refit = refit
        parse_metric(watch)
        self.watch = watch
        self.every = bx.checks.whole_number("every", every, 1)
        self.patience = None if patience is None else bx.checks.whole_number("patience", patience, 1)
        self.seed = bx.checks.whole_number("seed", seed, 0, 2**63 - 1)
        if not isinstance(settings, Mapping | None):
            raise TypeError(f"settings must be a dict, got {type(settings).__name__}")
        self.settings = {name: _plain(value) for name, value in (settings or {}).items()}
        TrainingSettings().replace(**method_settings(method, self.settings))
        self._fitted: Fitted | None = None
        self.settings_: TrainingSettings | None = None
        self.history_: bx.History | None = None
        self.best_epoch_: float | None = None
        self.outcome_: bx.Outcome | None = None

    @classmethod
    def from_file(cls, path: str | Path) -> TopKRecommender:
        """A recommender configured by a .toml or .json file with the arguments of the class.

        Args:
          path: the file; "~" is the home folder.

        Raises:
          ValueError: the file is of another kind, names an unknown argument, or has an invalid value.
          OSError: the file cannot be read.
        """
        name = Path(path).name
        if not name.endswith((".toml", ".json")):
            raise ValueError(f"a configuration must be a .toml or .json file, got {name}")
        content = read_file(path, _CONFIGURATION_LIMIT)
        try:
            parse: Any = tomllib.loads if name.endswith(".toml") else json.loads
            arguments = parse(content.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name} is not valid {name[-4:].upper()}: {error}") from error
        return cls._configured(arguments, name)

    @bx.program_cache()
    def fit(
        self,
        table: Any,
        *,
        progress: bx.Progress | str | None = "auto",
        seconds: float | None = None,
        checkpoint: str | Path | None = None,
        resume: bool = False,
        raise_on_interrupt: bool = True,
    ) -> TopKRecommender:
        """Trains on a table of interactions.

        An interrupted training (SIGINT or SIGTERM) keeps the model it has, sets `outcome_` and raises
        `KeyboardInterrupt`.

        Args:
          table: `bilevax.data.Interactions`; a path or the name of a known data set; a pandas frame or a dict
            with the columns user and item, and optionally rating and time, under these or other usual names
            (user_id, timestamp, …).
          progress: as in `bx.minimize`.
          seconds: stop after about this much time, the warm-up included.
          checkpoint: a directory for checkpoints; "~" is the home folder.
          resume: continue from the latest checkpoint, if there is one.
          raise_on_interrupt: False prints a line and returns after a signal.

        Returns:
          The recommender itself.

        Raises:
          DataError: the table cannot be used: duplicate pairs, ratings that are not numbers, no rows.
          ValueError: a size in the settings does not fit the table.
          KeyboardInterrupt: the training was interrupted.
        """
        table = as_interactions(table)
        check_ids("user_ids", table.user_ids)
        check_ids("item_ids", table.item_ids)
        _, cutoff = parse_metric(self.watch)
        if self.held_out and cutoff > table.items:
            raise ValueError(
                f"watch must have a cutoff of at most the {table.items} items, got {self.watch!r}"
            )
        everything = Ratings.of(table.csr())
        ratings, dev = everything, None
        if self.held_out:
            parts = split_last(table, self.held_out, 0, short="train")
            ratings = Ratings.of(parts.train)
            dev = hold_out(Ratings.of(parts.dev, empty_users=True), [ratings])
        model = self._make_model(table.users, table.items)
        settings = self.settings_ = table_settings(self.method, self.settings, ratings)
        warm_up = self.warm_up
        if warm_up is None:
            warm_up = WARM_UP if self.method in BILEVEL else 0
        softmax = settings.replace(**tuned("ml-1m", "softmax") | {"positives": settings.positives})
        began, folder = time.monotonic(), None if checkpoint is None else full_path(checkpoint)

        def run(ratings: Ratings, epochs: int, left: float | None, folder: Path | None, dev: Any) -> Trained:
            try:
                return train(
                    ratings,
                    model,
                    self.method,
                    settings,
                    key=jax.random.key(self.seed),
                    epochs=epochs,
                    warm_up=warm_up,
                    warm_settings=softmax,
                    dev=dev,
                    watch=self.watch,
                    every=self.every,
                    patience=self.patience if dev is not None else None,
                    progress=progress,
                    seconds=left,
                    checkpoint=folder,
                    resume=resume,
                    raise_on_interrupt=True,
                )
            except KeyboardInterrupt as interrupt:
                return interrupted.result_of(interrupt)

        def keep(x: Any, outcome: bx.Outcome) -> None:
            owned = np.asarray(everything.offsets), np.asarray(everything.items)
            self._fitted = Fitted(model, x, table.user_ids, table.item_ids, *owned)
            self.outcome_ = outcome

        trained = run(ratings, self.epochs, seconds, folder, dev)
        self.history_, self.best_epoch_, outcome = trained.history, trained.epoch, trained.outcome
        keep(trained.x, outcome)
        if self.refit and dev is not None and outcome in (bx.Outcome.FINISHED, bx.Outcome.PATIENCE):
            epochs = max(1, math.ceil(trained.epoch))
            left = None if seconds is None else max(seconds - (time.monotonic() - began), _LEAST_SECONDS)
            again = run(everything, epochs, left, None if folder is None else folder / "refit", None)
            # A refit that was cut short is no better than the model that was selected.
            finished = again.outcome is bx.Outcome.FINISHED
            outcome = outcome if finished else again.outcome
            keep(again.x if finished else trained.x, outcome)
        if outcome is bx.Outcome.INTERRUPTED:
            more = "" if checkpoint is None else "; fit again with resume=True to continue"
            interrupted.end_fit(
                f"TopKRecommender.fit was interrupted: the model is that of epoch {trained.epoch:.1f} of "
                f"{self.epochs}{more}",
                raises=raise_on_interrupt,
            )
        return self

    def recommend(self, user: Any, k: int = 10, *, seen: bool = False) -> list[tuple[Any, float]]:
        """The k items that a user should see next, the best first.

        Args:
          user: the user's id, as in the table.
          k: the number of items; a user with fewer unseen items gets all of those.
          seen: whether to include items that the user has in the table.

        Returns:
          Pairs of an item's id and its score.

        Raises:
          KeyError: the user is unknown.
          ValueError: k exceeds the number of items.
        """
        fitted = self._require()
        k = bx.checks.whole_number("k", k, 1, len(fitted.item_ids))
        code = fitted.user_code(user)
        scores = fitted.catalogue_scores(code)
        own = fitted.items[fitted.offsets[code] : fitted.offsets[code + 1]]
        if not seen:
            scores[own] = -np.inf
        best = np.argsort(-scores, kind="stable")[: k if seen else min(k, len(scores) - len(own))]
        return [(fitted.item_ids[item].item(), float(scores[item])) for item in best]

    def score(self, user: Any, items: Any) -> np.ndarray:
        """The scores of some items for a user; higher is better.

        Args:
          user: the user's id, as in the table.
          items: ids of items.

        Returns:
          A score per item.

        Raises:
          KeyError: the user or an item is unknown.
        """
        fitted = self._require()
        if isinstance(items, str) or np.ndim(items) != 1:
            raise TypeError(f"items must be a list of ids, got {items!r}")
        code = fitted.user_code(user)
        places = np.array([fitted.item_code(item) for item in items], int)
        return fitted.catalogue_scores(code)[places]

    def save(self, path: str | Path) -> None:
        """Writes the recommender to one .npz file of plain arrays and JSON, with a checksum.

        Args:
          path: the file; "~" is the home folder. It appears only when it is complete.

        Raises:
          ValueError: `path` is a folder, a device or a pipe.
          OSError: the file cannot be written.
        """
        fitted = self._require()
        note = {
            "arguments": _arguments(self),
            "best_epoch": self.best_epoch_,
            "outcome": str(self.outcome_),
            "history": self.history_.entries if self.history_ else [],
        }
        arrays = {name: getattr(fitted, name) for name in _KEPT}
        save_arrays(path, note, arrays | {f"x/{name}": array for name, array in fitted.x.items()})

    @classmethod
    def load(cls, path: str | Path) -> TopKRecommender:
        """Reads what `save` wrote.

        Args:
          path: the file; "~" is the home folder.

        Raises:
          ValueError: the file is of another kind, damaged, or its contents do not fit together.
          OSError: the file cannot be read.
        """
        note, arrays = load_arrays(path)
        missing = {*_NOTED} - set(note) | {*_KEPT} - set(arrays)
        if missing:
            raise ValueError(f"{path} must be a file that save() wrote, got one without {sorted(missing)}")
        recommender = cls._configured(note["arguments"], path)
        x = {name[2:]: arrays.pop(name) for name in list(arrays) if name.startswith("x/")}
        unknown = sorted(set(arrays) - {*_KEPT})
        if unknown:
            raise ValueError(f"{path} must be a file that save() wrote, got one with {unknown}")
        try:
            model = recommender._make_model(len(arrays["user_ids"]), len(arrays["item_ids"]))
            recommender._fitted = Fitted(model, saved_values.parameters(model, x), **arrays)
            recommender.outcome_ = bx.Outcome(note["outcome"])
            recommender.best_epoch_ = saved_values.epoch(note["best_epoch"])
            recommender.history_ = saved_values.history(note["history"])
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{path} does not hold a valid recommender: {error}") from error
        return recommender

    @classmethod
    def _configured(cls, arguments: Any, where: str | Path) -> TopKRecommender:
        """A recommender from arguments that a file holds."""
        known = list(_arguments(cls()))
        if not isinstance(arguments, dict) or not set(arguments) <= set(known):
            got = sorted(set(arguments) - set(known)) if isinstance(arguments, dict) else arguments
            raise ValueError(f"{where}: arguments must be among {sorted(known)}, got {got!r}")
        try:
            return cls(**arguments)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{where}: {error}") from error

    def _make_model(self, users: int, items: int) -> Any:
        extra = {"dropout": self.dropout} if self.model == "neumf" else {}
        return MODELS[self.model](users, items, self.width, **extra)

    def _require(self) -> Fitted:
        if self._fitted is None:
            raise RuntimeError("the recommender must be fitted first: call fit(table)")
        return self._fitted


def as_interactions(table: Any) -> Interactions:
    """The table from any of the forms that `fit` accepts."""
    if isinstance(table, Interactions):
        return table
    if isinstance(table, (str, Path)):
        return load_interactions(table)
    try:
        names = usual_columns([name for name in table if isinstance(name, str)])
        columns: dict[str, Any] = {name: np.asarray(table[column]) for name, column in names.items()}
    except (TypeError, KeyError, IndexError) as error:
        raise TypeError(
            "table must be Interactions, a path, a frame or a dict with the columns user and item, got "
            f"{type(table).__name__}"
        ) from error
    if "time" in columns and columns["time"].dtype.kind == "M":
        columns["time"] = columns["time"].astype("datetime64[s]").astype(np.int64)
    return make_interactions(**columns)


def _arguments(recommender: TopKRecommender) -> dict[str, Any]:
    names = (
        "method", "model", "width", "dropout", "epochs", "warm_up", "held_out", "refit", "watch", "every",
        "patience", "seed", "settings",
    )  # fmt: skip
    return {name: getattr(recommender, name) for name in names}


def _plain(value: Any) -> Any:
    """A NumPy number as a Python number, which JSON can hold."""
    return value.item() if isinstance(value, np.generic) else value
