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

from ranker.distribution import LEVELS, Distribution
from ranker.errors import RankerError
from ranker.features import FeatureSchema, featurise
from ranker.model_kinds import LengthScorer, predict_spread
from ranker.projection import Projection
from ranker.rare import RareWords
from ranker.segments import Array
from ranker.training_report import Report
from ranker.unfamiliar import COLUMNS, Unfamiliar

FORMAT = "streamrl-ranker"
TABLES = ("centres", "medians", "tables", "runaway")
"""Names of the distribution's arrays."""
VERSION = 3
"""Version of the file format; raised by any change, also of `ranker.text` and `ranker.history`, after which older files
would be misread.
"""


@dataclass(frozen=True)
class Prediction:
    """Predicted lengths of N requests."""

    levels: Array
    """Levels of the quantiles [Q], ascending, 0.5 included."""
    quantiles: Array
    """Tokens [N, Q], monotone in Q."""
    score: Array
    """Score to rank by [N]; greater is longer. Its unit depends on the kind of model."""


@dataclass(frozen=True)
class LengthModel:
    """A trained model; without `scorer`, `spread` and `unfamiliar` it knows only the distribution of all lengths."""

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

    @property
    def limit(self) -> int:
        """Upper bound of all quantiles: the cap, or twice the greatest training length."""
        return self.cap or 2 * self.longest

    def predict(
        self,
        prompts: Sequence[str],
        tasks: Sequence[str | None] | None = None,
        difficulty: Sequence[float] | Array | None = None,
        history: Array | None = None,
        threads: int = 1,
    ) -> Prediction:
        """Predict the lengths of N requests; everything but the prompts may be missing.

        Args:
            prompts: texts [N].
            tasks: names [N]; unknown ones are treated as missing.
            difficulty: difficulties [N].
            history: [N, 12], columns `ranker.history.HISTORY`.
            threads: LightGBM's threads.
        """
        if self.scorer is None:
            return self._of_score(np.zeros(len(prompts)), np.ones(len(prompts)))
        if not len(prompts):
            return self._of_score(np.zeros(0), np.ones(0))
        return self.predict_features(featurise(self.schema, prompts, tasks, difficulty, history), threads)

    def predict_features(self, features: Array, threads: int = 1) -> Prediction:
        """Predict from columns [N, F] of `featurise`; N is at least 1."""
        if self.scorer is None or self.spread is None or self.unfamiliar is None:
            return self._of_score(np.zeros(len(features)), np.ones(len(features)))
        score = self.scorer.score(features, threads)
        spread = predict_spread(self.spread, features, score, threads)
        columns = features[:, [self.schema.names.index(name) for name in COLUMNS]]
        rows, log = self.unfamiliar.predict(columns)
        if len(rows):
            score[rows] = self.distribution.score_of(log)
            spread[rows] = self.unfamiliar.spread
        return self._of_score(score, spread)

    def _of_score(self, score: Array, spread: Array) -> Prediction:
        return Prediction(LEVELS, self.distribution.quantiles(score, spread, self.limit), score)

    def save(self, path: str | Path) -> None:
        """Write the file atomically.

        Raises:
            RankerError: the file cannot be written.
        """
        scorer = self.scorer
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "kind": self.kind,
            "features": list(self.schema.names),
            "tasks": list(self.schema.tasks),
            "cap": self.cap,
            "longest": self.longest,
            "shift": scorer.shift if scorer else 0.0,
            "scale": scorer.scale if scorer else 1.0,
            "report": self.report.to_json(),
        }
        arrays = {f"table_{kind}": table for kind, table in self.schema.projection.tables.items()}
        arrays |= {f"weight_{kind}": weight for kind, weight in self.schema.projection.weights.items()}
        arrays["common"] = np.packbits(self.schema.rare.common)
        arrays |= {name: getattr(self.distribution, name) for name in TABLES}
        if self.unfamiliar is not None:
            arrays |= {"unfamiliar_means": self.unfamiliar.means, "unfamiliar_slopes": self.unfamiliar.slopes}
            manifest["unfamiliar"] = [getattr(self.unfamiliar, name) for name in ("bound", "typical", "spread")]
        packed = io.BytesIO()
        np.savez(packed, **arrays)  # type: ignore[arg-type]
        parts: dict[str, str | bytes] = {
            "manifest.json": json.dumps(manifest, indent=1),
            "arrays.npz": packed.getvalue(),
        }
        if scorer is not None and self.spread is not None:
            parts |= {"score.txt": scorer.booster.model_to_string(), "spread.txt": self.spread.model_to_string()}
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
                if manifest.get("version") != VERSION:
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
        schema = FeatureSchema(projection, RareWords(common), tuple(manifest["tasks"]))
        if list(schema.names) != manifest["features"]:
            raise ValueError("its features differ from those of this version of the program")
        if manifest["kind"] != "constant" and not (score and spread):
            raise ValueError("a booster is missing")
        scorer = LengthScorer(lgb.Booster(model_str=score), manifest["shift"], manifest["scale"]) if score else None
        unfamiliar = None
        if scorer is not None:
            bound, typical, width = manifest["unfamiliar"]
            sizes = arrays["unfamiliar_means"], arrays["unfamiliar_slopes"]
            unfamiliar = Unfamiliar(bound, *sizes, typical, width)
        return cls(
            kind=manifest["kind"],
            schema=schema,
            scorer=scorer,
            spread=lgb.Booster(model_str=spread) if spread else None,
            unfamiliar=unfamiliar,
            distribution=Distribution(*(arrays[name] for name in TABLES)),
            cap=manifest["cap"],
            longest=manifest["longest"],
            report=Report.from_json(manifest["report"]),
        )
