"""A trained ranker, which predicts output lengths of requests and is stored in one file.

The file is a zip of plain parts: `manifest.json` (format, version, schema of the features, training report), the
boosters in LightGBM's own text format, and `arrays.npz` (numbers only; loaded with `allow_pickle=False`).
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightgbm as lgb
import numpy as np

from ranker.distribution import LEVELS, Distribution, expected_length
from ranker.errors import RankerError
from ranker.features import UNKNOWN, FeatureSchema, featurise
from ranker.history import NOTHING, Remembered, earlier_lengths
from ranker.model_kinds import Columns, LengthScorer, predict_spread
from ranker.projection import Projection
from ranker.rare import RareWords
from ranker.segments import Array
from ranker.shrinkage import Shrunk
from ranker.training_report import Report
from ranker.unfamiliar import Unfamiliar

FORMAT = "streamrl-ranker"
TABLES = ("centres", "medians", "tables", "runaway", "means")
"""Names of the distribution's arrays."""
UNFAMILIAR = ("means", "slopes", "prior", "inside")
"""Names of the arrays of `Unfamiliar`."""
VERSION = 6
"""Version of the file format; raised by any change, also of `ranker.text` and `ranker.history`, after which older files
would be misread.
"""
READ = (5, VERSION)
"""Versions that are read: runs that began with an older file can be resumed."""


@dataclass(frozen=True)
class Prediction:
    """Predicted lengths of N requests."""

    levels: Array
    """Levels of the quantiles [Q], ascending, 0.5 included."""
    quantiles: Array
    """Tokens [N, Q], monotone in Q."""
    mean: Array
    """Expected lengths in tokens [N], those of the quantiles: dispatch goes by them, so they are what is ranked by."""


@dataclass(frozen=True)
class Judged:
    """Expected and true lengths of samples that took no part in the choice or the fit of what predicted them."""

    expected: Array
    """[N], tokens."""
    length: Array
    """[N], tokens."""


def _prediction(quantiles: Array) -> Prediction:
    return Prediction(LEVELS, quantiles, expected_length(quantiles))


NOT_JUDGED = Judged(np.zeros(0), np.zeros(0))


@dataclass(frozen=True)
class LengthModel:
    """A trained model; without `scorer` and `unfamiliar` it knows only the distribution of all lengths.

    A scorer that is a table has no `spread`: all requests of a score have the same distribution.
    """

    kind: str
    schema: FeatureSchema
    scorer: LengthScorer | None
    spread: lgb.Booster | None
    unfamiliar: Unfamiliar | None
    distribution: Distribution
    cap: int | None
    """Length limit of the training samples in tokens; None if no sample was cut off."""
    longest: int
    """Greatest length in the training samples, tokens."""
    report: Report
    judged: Judged
    """Held-out samples by which a run trusts the model until it has its own; none after a refit."""
    written_by: tuple[str, ...] = ()
    """Names of the language models that wrote the training samples, where known."""
    remembered: Remembered = NOTHING
    """Lengths of the training prompts; of a refit none, as a run has its own history."""
    returning: Shrunk | None = None
    """How far expected lengths move to the earlier ones of the same prompt, where the booster saw no prompt that came
    again, and so could not learn it; None: the scorer itself goes by them."""

    @property
    def limit(self) -> int:
        """Bound of quantiles where no other is given: the cap, or twice the greatest training length."""
        return self.cap or 2 * self.longest

    def predict(
        self,
        prompts: Sequence[str],
        tasks: Sequence[str | None] | None = None,
        history: Array | None = None,
        threads: int = 1,
        limit: Array | float | None = None,
    ) -> Prediction:
        """Predict the lengths of N requests; everything but the prompts may be missing.

        Args:
            prompts: texts [N].
            tasks: names [N]; see `ranker.unfamiliar` for those that were not trained on.
            history: [N, 9], columns `ranker.history.HISTORY`.
            threads: LightGBM's threads.
            limit: most tokens of each request [N], or of all; None: `LengthModel.limit`. It may differ from the limit
                of the training samples.
        """
        most = self.limit if limit is None else limit
        if self.scorer is None or not len(prompts):
            one = np.zeros(len(prompts))
            return _prediction(self.distribution.quantiles(one, one + 1, most))
        return self.predict_features(featurise(self.schema, prompts, tasks, history), threads, most)

    def predict_features(self, features: Array, threads: int = 1, limit: Array | float | None = None) -> Prediction:
        """Predict from columns [N, F] of `featurise`; N is at least 1."""
        most = self.limit if limit is None else limit
        if self.scorer is None or self.unfamiliar is None:
            return _prediction(self.distribution.quantiles(np.zeros(len(features)), np.ones(len(features)), most))
        score = self.scorer.score(features, threads)
        spread = predict_spread(self.spread, features, score, threads)
        returned = self._returned(score, features[:, self.schema.history])
        quantiles = self.distribution.quantiles(returned, spread, most)
        if self.scorer.booster is None and self.schema.tasks and self.scorer.table.all_named:
            # a table knows nothing of a request without a task, where every sample had one
            features = features.copy()
            column = self.scorer.columns.task
            features[np.isnan(features[:, column]), column] = UNKNOWN
        rows, logs = self.unfamiliar.predict(features, self.schema.names, self.scorer.columns)
        most = np.broadcast_to(np.asarray(most, dtype=np.float64), (len(features),))[rows]
        quantiles[rows] = np.exp(np.clip(logs, 0.0, np.log(most)[:, None]))
        return _prediction(quantiles)

    def _returned(self, score: Array, history: Array) -> Array:
        """Return the scores [N], moved to the lengths of earlier samples (columns `HISTORY`) where there are any."""
        mean, count = earlier_lengths(history)
        if self.returning is None or not count.any():
            return score
        moved = self.returning.given(self.distribution.expected(score), mean, count)
        return np.where(count > 0, self.distribution.score_of(moved), score)

    def save(self, path: str | Path) -> None:
        """Write the file atomically.

        Raises:
            RankerError: the file cannot be written.
        """
        scorer = self.scorer
        boosters = {"score.txt": scorer.booster if scorer else None, "spread.txt": self.spread}
        boosters = {name: booster for name, booster in boosters.items() if booster is not None}
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "kind": self.kind,
            "features": list(self.schema.names),
            "tasks": list(self.schema.tasks),
            "cap": self.cap,
            "longest": self.longest,
            "distribution": [self.distribution.slope, self.distribution.limit],
            "boosters": sorted(boosters),
            "written_by": list(self.written_by),
            "report": self.report.to_json(),
        }
        arrays = {f"table_{kind}": table for kind, table in self.schema.projection.tables.items()}
        arrays |= {f"weight_{kind}": weight for kind, weight in self.schema.projection.weights.items()}
        arrays["common"] = np.packbits(self.schema.rare.common)
        arrays |= {name: getattr(self.distribution, name) for name in TABLES}
        arrays |= {"judged_expected": self.judged.expected, "judged_length": self.judged.length}
        arrays |= {"remembered_keys": self.remembered.keys, "remembered_columns": self.remembered.columns}
        if scorer is not None and self.unfamiliar is not None:
            manifest["target"] = scorer.target
            manifest["table"] = _numbers(scorer.table, arrays, "scorer_tasks")
            own = self.unfamiliar
            manifest["unfamiliar_table"] = _numbers(own.table, arrays, "unfamiliar_tasks")
            if self.returning is not None:
                manifest["returning"] = _numbers(self.returning, arrays, "returning_tasks")
            arrays |= {f"unfamiliar_{name}": getattr(own, name) for name in UNFAMILIAR}
            manifest["unfamiliar"] = [own.bound, own.reach]
        packed = io.BytesIO()
        np.savez(packed, **arrays)  # type: ignore[arg-type]
        parts: dict[str, str | bytes] = {
            "manifest.json": json.dumps(manifest, indent=1),
            "arrays.npz": packed.getvalue(),
        }
        parts |= {name: booster.model_to_string() for name, booster in boosters.items() if booster is not None}
        target = Path(path)
        partial = target.with_name(target.name + ".partial")
        try:
            with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
                for name, part in parts.items():  # no timestamps, so that equal models are equal files
                    archive.writestr(zipfile.ZipInfo(name), part, zipfile.ZIP_DEFLATED)
            os.replace(partial, target)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise RankerError(f"{target}: the ranker cannot be written: {error}") from error

    @classmethod
    def load(cls, path: str | Path) -> LengthModel:
        """Read a file that `save` wrote.

        Raises:
            RankerError: the file does not exist, is not a ranker, is broken, or has another version.
        """
        file = Path(path)
        if not file.is_file():
            raise RankerError(f"{file}: no such ranker file; streamrl train-ranker writes one")
        try:
            with zipfile.ZipFile(file) as archive:
                manifest = json.loads(archive.read("manifest.json"))
                if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
                    raise RankerError(f"{file}: not a ranker file of streamrl train-ranker")
                if manifest.get("version") not in READ:
                    found = manifest.get("version")
                    raise RankerError(f"{file}: ranker file of version {found}; expected {VERSION}: train it again")
                names = set(archive.namelist())
                texts = [archive.read(n).decode() if n in names else "" for n in ("score.txt", "spread.txt")]
                with np.load(io.BytesIO(archive.read("arrays.npz")), allow_pickle=False) as loaded:
                    arrays = dict(loaded)
            return cls._of_parts(manifest, arrays, texts[0], texts[1])
        except RankerError:
            raise
        except Exception as error:  # a damaged file may cause any error, in any of its parts
            raise RankerError(
                f"{file}: broken ranker file ({type(error).__name__}: {error}); train it again"
            ) from error

    @classmethod
    def _of_parts(cls, manifest: dict[str, Any], arrays: dict[str, Array], score: str, spread: str) -> LengthModel:
        kinds = [name.removeprefix("table_") for name in arrays if name.startswith("table_")]
        projection = Projection({k: arrays[f"table_{k}"] for k in kinds}, {k: arrays[f"weight_{k}"] for k in kinds})
        common = np.unpackbits(arrays["common"]).astype(bool)
        schema = FeatureSchema(
            projection, RareWords(common), tuple(manifest["tasks"]), "difficulty" in manifest["features"]
        )
        if list(schema.names) != manifest["features"]:
            raise ValueError("its features differ from those of this version of the program")
        if manifest["boosters"] != [name for name, text in (("score.txt", score), ("spread.txt", spread)) if text]:
            raise ValueError("a booster is missing")
        scorer = unfamiliar = None
        if "table" in manifest:
            table = Shrunk(arrays["scorer_tasks"], *manifest["table"])
            booster = lgb.Booster(model_str=score) if score else None
            scorer = LengthScorer(manifest["target"], table, Columns.of(schema), booster)
            bound, reach = manifest["unfamiliar"]
            table = Shrunk(arrays["unfamiliar_tasks"], *manifest["unfamiliar_table"])
            fitted = {name: arrays[f"unfamiliar_{name}"] for name in UNFAMILIAR}
            unfamiliar = Unfamiliar(bound=bound, reach=reach, table=table, **fitted)
        remembered = NOTHING
        if manifest["version"] > 5:
            remembered = Remembered(arrays["remembered_keys"], arrays["remembered_columns"])
        returning = None
        if "returning" in manifest:  # files of before leave it out
            returning = Shrunk(arrays["returning_tasks"], *manifest["returning"])
        slope, limit = manifest["distribution"]
        in_tokens = scorer is not None and scorer.in_tokens
        tables = {name: arrays[name] for name in TABLES}
        return cls(
            kind=manifest["kind"],
            schema=schema,
            scorer=scorer,
            spread=lgb.Booster(model_str=spread) if spread else None,
            unfamiliar=unfamiliar,
            distribution=Distribution(**tables, slope=slope, limit=limit, in_tokens=in_tokens),
            cap=manifest["cap"],
            longest=manifest["longest"],
            report=Report.from_json(manifest["report"]),
            judged=Judged(arrays["judged_expected"], arrays["judged_length"]),
            written_by=tuple(manifest["written_by"]),
            remembered=remembered,
            returning=returning,
        )


def _numbers(table: Shrunk, arrays: dict[str, Array], name: str) -> list[float]:
    """Add a table's means to `arrays` by name, and return its numbers."""
    arrays[name] = table.tasks
    return [table.prior, table.between, table.within]
