"""The critic of PPO: a language model whose head gives one number, the value of the text so far."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModel, PreTrainedModel

from streamrl.config.optimizer import Recomputation
from streamrl.config.run import MODEL_KEY
from streamrl.training.attention import SHARED_PREFIX
from streamrl.training.compute_copies import ComputeCopies
from streamrl.training.hidden_states import predicting_states
from streamrl.training.packing import PackedBatch
from streamrl.training.policy_model import load_model
from streamrl.training.sequence_parallel import SequenceRanks
from streamrl.training.sliced_loading import fill
from streamrl.training.tensor_parallel import plain_tensor


class Critic(nn.Module):
    """A value model: packed batch in, one value per completion token out.

    The value of token t is read where the token is predicted (`source_index`), before it is chosen. The head starts at
    0, so a fresh critic gives 0 everywhere and the first advantages come from the rewards alone.
    """

    def __init__(self, model: PreTrainedModel, separate: bool, ranks: SequenceRanks | None) -> None:
        super().__init__()
        self.model = model
        self.separate = separate
        """Whether every completion runs in a row of its own (`hidden_states.py`)."""
        self.ranks = ranks
        """Ranks that share every row with this one (`sequence_parallel.py`); None: it has them to itself."""
        self.copies: ComputeCopies | None = None
        """Copies of the weights in the type that it computes in; None: it computes with the weights themselves."""
        self.head = nn.Linear(_width(model), 1, bias=False)
        nn.init.zeros_(self.head.weight)

    def fill(self, device: torch.device) -> None:
        """Read this rank's part of an empty model's weights.

        Args:
            device: this rank's device.
        """
        fill(self.model, device)

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Return the values [N], fp32."""
        states = predicting_states(self.model, batch, self.separate, None, self.ranks)
        # a product with a vector, because FSDP warns of outputs that are views, such as the column of a matrix
        values: torch.Tensor = (states.hidden @ plain_tensor(self.head.weight)[0]).float()
        return values if states.shares is None else states.shares.whole(values)


def _width(model: PreTrainedModel) -> int:
    """Return the size of a trunk's hidden states.

    Some of the OPT family project them to the size of the embeddings, as their output head is tied to those.
    """
    config = model.config.get_text_config()
    width: int = getattr(config, "word_embed_proj_dim", None) or config.hidden_size
    return width


def load_critic(
    path: str,
    recomputation: Recomputation = False,
    attention: str = SHARED_PREFIX,
    ranks: SequenceRanks | None = None,
    shards: int | None = None,
    key: str = MODEL_KEY,
    resumed: bool = False,
) -> Critic:
    """Load a Hugging Face model's trunk in fp32, with a value head of zeros.

    Args:
        path: folder or hub id.
        recomputation: what the backward pass computes again.
        attention: see `load_model`.
        ranks: the ranks that share every row; None: this one has them to itself.
        shards: see `load_model`.
        key: the model's key in the run file, for errors.
        resumed: see `load_model`.

    Raises:
        RunFailed: as `load_model`.
    """
    model = load_model(AutoModel, path, recomputation, attention, ranks, shards, key, resumed)
    return Critic(model, attention != SHARED_PREFIX, ranks)
