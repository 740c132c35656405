"""The routers of a mixture of experts, as its configuration describes them, and the form in which choices travel.

With `algorithm.router_replay` a sample carries the experts that the generator chose for each position that it computed:
all of prompt and completion but the last token. They are rows of bytes, [positions, `RouterShape.row_bytes`] uint8,
which only this module reads: per layer with experts, in order, `top_k` numbers of one or two bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from streamrl.errors import UserError
from streamrl.machine.model_files import read_config

REPLAYED = ("qwen3_moe", "gpt_oss")
"""Types of models whose routers are replayed. Each is proven by tests/training/test_router_replay.py;
`training/router_replay.py` has what their routers compute."""
EXPERTS = ("num_experts", "num_local_experts")
"""Names of the number of experts: transformers writes the second where released models have the first."""
MOST_EXPERTS = 2**16
"""Most experts of a layer that two bytes can name."""


@dataclass(frozen=True)
class RouterShape:
    """The layers with experts of a model, and how many experts each of them chooses."""

    kind: str
    """The model's type, one of `REPLAYED`."""
    layers: tuple[int, ...]
    """Numbers of the layers with experts, ascending."""
    experts: int
    """Experts of a layer."""
    top_k: int
    """Experts of a token in a layer."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of an expert's number: the narrowest that has all."""
        return np.dtype(np.uint8 if self.experts <= 256 else "<u2")

    @property
    def row_bytes(self) -> int:
        """Bytes of one position."""
        return len(self.layers) * self.top_k * self.dtype.itemsize

    def to_rows(self, chosen: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        """Return the rows of choices of any integer type, [positions, layers with experts, top_k]."""
        flat = np.ascontiguousarray(chosen, dtype=self.dtype).reshape(len(chosen), len(self.layers) * self.top_k)
        return flat.view(np.uint8)

    def from_rows(self, rows: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
        """Return the choices, [positions, layers with experts, top_k], of rows; the inverse of `to_rows`."""
        return np.ascontiguousarray(rows).view(self.dtype).reshape(len(rows), len(self.layers), self.top_k)

    def wrong_with(self, rows: object, positions: int) -> str | None:
        """Return why something from another process cannot be the choices of so many positions; None: it can."""
        if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.ndim != 2:
            return "has no rows of experts"
        if rows.shape != (positions, self.row_bytes):
            return f"has experts of shape {rows.shape}, expected {(positions, self.row_bytes)}"
        chosen = np.sort(self.from_rows(rows), axis=-1)
        if chosen.size and int(chosen.max()) >= self.experts:
            return f"names expert {int(chosen.max())}, there are {self.experts}"
        if (chosen[..., 1:] == chosen[..., :-1]).any():
            return "names an expert twice for one token"
        return None


def router_shape(model: Path) -> RouterShape:
    """Return the routers of a model's folder.

    Raises:
        UserError: it is no mixture of experts, or of a family whose replay is not proven.
    """
    return shape_of(read_config(model))


def shape_of(config: Mapping[str, Any]) -> RouterShape:
    """Return the routers that a configuration (`config.json`) describes; errors as `router_shape`."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in REPLAYED:
        raise UserError(
            f"algorithm.router_replay: it is proven for models of type {' and '.join(REPLAYED)}, this one is "
            f"{kind!r:.99}; set router_replay: false"
        )
    count, top_k = config.get("num_hidden_layers"), config.get("num_experts_per_tok")
    experts = next((config[name] for name in EXPERTS if name in config), None)
    if not (isinstance(count, int) and isinstance(experts, int) and isinstance(top_k, int)):
        raise UserError(
            f"algorithm.router_replay: the model's config.json must have num_hidden_layers, num_experts_per_tok and "
            f"{' or '.join(EXPERTS)}, all integers"
        )
    layers = tuple(range(count))
    if kind == "qwen3_moe":  # it may have layers without experts
        dense, every = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step") or 1
        layers = tuple(layer for layer in layers if layer not in dense and (layer + 1) % every == 0)
    if not layers or not 0 < top_k <= experts <= MOST_EXPERTS:
        raise UserError(
            f"algorithm.router_replay: {len(layers)} layers that choose {top_k} of {experts} experts cannot be replayed"
        )
    return RouterShape(kind, layers, experts, top_k)
