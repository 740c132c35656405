"""Projection of hashed n-grams to a few columns: TF-IDF weights and a truncated SVD, fitted on the training prompts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ranker.segments import Array, sum_between
from ranker.text import BUCKETS, PackedTexts, ngrams, pack

DIMENSIONS = {"word": 12, "char": 6}
"""Number of columns of each kind; fewer are enough to distinguish some tens of tasks."""

FIT_PROMPTS = 2000
"""Number of prompts that the projection is fitted on: a dense matrix of 16 MB."""


@dataclass(frozen=True)
class Projection:
    """One linear map per kind of n-gram; a prompt's vector is the sum of its n-grams' rows divided by their norm."""

    tables: dict[str, Array]
    """Rows by bucket [BUCKETS, dimensions], float32, weighted by the inverse document frequency."""
    weights: dict[str, Array]
    """Squared inverse document frequency [BUCKETS], float32."""

    @property
    def names(self) -> tuple[str, ...]:
        """Column names."""
        return tuple(f"{kind}_{n}" for kind, table in self.tables.items() for n in range(table.shape[1]))

    def apply(self, packed: PackedTexts) -> Array:
        """Return the columns [N, len(names)], float32."""
        parts = []
        for kind, (begin, bucket) in ngrams(packed).items():
            total = sum_between(self.tables[kind][bucket], begin)
            norm = sum_between(self.weights[kind][bucket], begin)
            parts.append(total / np.sqrt(np.maximum(norm, 1e-9))[:, None])
        return np.concatenate(parts, axis=1)


def fit_projection(texts: list[str], seed: int) -> Projection:
    """Fit on (at most `FIT_PROMPTS`) distinct prompts, by a randomised SVD (Halko et al. 2011, two power steps)."""
    rng = np.random.default_rng(seed)
    if len(texts) > FIT_PROMPTS:
        texts = [texts[i] for i in np.sort(rng.choice(len(texts), FIT_PROMPTS, replace=False))]
    tables, weights = {}, {}
    for kind, (begin, bucket) in ngrams(pack(texts)).items():
        prompt = np.repeat(np.arange(len(texts)), np.diff(begin))
        counts = np.bincount(prompt * BUCKETS + bucket, minlength=len(texts) * BUCKETS).reshape(len(texts), BUCKETS)
        idf = np.log((1 + len(texts)) / (1 + np.count_nonzero(counts, axis=0))).astype(np.float32) + 1
        matrix = counts.astype(np.float32) * idf
        matrix /= np.sqrt(np.maximum(counts @ idf**2, 1e-9)).astype(np.float32)[:, None]
        dimensions = DIMENSIONS[kind]
        basis = matrix @ rng.standard_normal((BUCKETS, dimensions + 8), dtype=np.float32)
        for _ in range(2):
            basis = matrix @ (matrix.T @ np.linalg.qr(basis)[0])
        small = np.linalg.qr(basis)[0].T @ matrix
        right = np.linalg.svd(small, full_matrices=False)[2]
        table = np.zeros((BUCKETS, dimensions), dtype=np.float32)
        table[:, : min(dimensions, len(right))] = right[:dimensions].T
        tables[kind], weights[kind] = table * idf[:, None], idf**2
    return Projection(tables, weights)
