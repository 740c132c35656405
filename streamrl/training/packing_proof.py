"""The proof of a model's packing: its own architecture, small and random, run packed and run alone.

    reference   every sequence alone, through transformers' eager attention and its own head: the model's definition
    shared      packed groups with shared prompts, by both formulas of `attention.py`
    separate    each completion with its prompt in a row of its own: without padding, by `attention.py`; padded, with
                transformers' `sdpa` or, where that leaves something out, `eager`

All in fp32. Log-probabilities and gradients must agree to rounding, else the reason names the layer where they part.
`packing_choice.py` keeps the result and decides by it.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from streamrl.errors import RunFailed
from streamrl.rollouts.train_groups import TrainGroup, TrainSequence
from streamrl.training.attention import OWN_ROWS, SHARED_PREFIX, SHARED_PREFIX_LONG
from streamrl.training.decoder_layers import decoder_layers
from streamrl.training.hidden_states import own_rows, padded_rows
from streamrl.training.packing import PackedBatch, pack
from streamrl.training.packing_ways import PackingKind, PackingProof, PackingWay
from streamrl.training.policy_model import Policy, in_training
from streamrl.training.small_config import longest_exact, small_config

LOGPROB_BOUND = 2e-4
"""Largest difference of a log-probability, in nats, that counts as rounding; wrong masks give 0.1 and more."""
GRADIENT_BOUND = 2e-3
"""Largest relative difference of a parameter's gradient that counts as rounding."""
TEMPERATURE = 0.8
"""Temperature of the proof; not 1, so that its order with the head's scaling matters."""
FIRST_TOKEN = 3
"""Smallest token of the proof, unless the vocabulary is tiny; those before it are often special."""
ENOUGH_TOKENS = 250
"""Number of a vocabulary's first tokens from which the proof draws; a smaller vocabulary is used whole."""
WAYS: tuple[tuple[PackingKind, str], ...] = (
    ("shared", SHARED_PREFIX),
    ("shared", SHARED_PREFIX_LONG),
    ("separate", OWN_ROWS),
    ("separate", "sdpa"),
    ("separate", "eager"),
)
"""Packings and transformers' names of their attention, the fastest first."""
SENSES = ("vision_config", "audio_config")
"""Parts of a configuration that say that a model reads images, video or sound."""
SENSES_BY_TYPE = {
    "images": IMAGE_PROCESSOR_MAPPING_NAMES,
    "sound": FEATURE_EXTRACTOR_MAPPING_NAMES,
    "images, video or sound": MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
}
"""transformers' tables of the `model_type` of models that read more than text, also without a part that says so."""
MOST_LAYERS = 256
"""First layers of a model that are looked at for their kinds."""
LARGEST_MODEL = 50_000_000
"""Parameters of a small model above which it is not small: its configuration has keys that are not known here."""


def prove(config: PretrainedConfig) -> PackingProof:
    """Build the architecture small and random, and compare all ways to compute it; takes one or two seconds."""
    if refused := _no_text_model(config):
        return PackingProof(config.model_type, (), refuted=refused)
    kind = config.get_text_config().model_type
    try:
        small = _small_shape(config)
        if (layers := getattr(small.get_text_config(), "num_hidden_layers", 1)) < 1:
            return PackingProof(kind, (), refuted=f"its configuration has {layers} layers")
        model = _random_model(small)
        reference = _reference(model, proof_groups(vocabulary_of(model)))
        # an optimizer and a checkpoint would take the changed ones for the model's
        before = reference.tensors
        if changed := [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])]:
            return PackingProof(kind, (), refuted=f"computing changes its weights themselves ({changed[0]})")
        if not any(bool(gradient.any()) for gradient in reference.gradients.values()):
            return PackingProof(kind, (), refuted="no weight of its small model changes any log-probability")
        if later := _seen_later(model):
            return PackingProof(kind, (), refuted=f"it is no causal language model: {later}")
    except Exception as error:  # whatever a family's own code raises is the reason
        return PackingProof(kind, (), unproven=f"cannot be built and run small: {_first_line(error)}")
    return PackingProof(kind, tuple(_compare(small, *way, reference) for way in WAYS), longest_exact(config))


def _no_text_model(config: PretrainedConfig) -> str:
    """Return why a configuration is of no decoder of text alone, by what transformers says of it; '': it may be one."""
    senses = [name for name in config.sub_configs if name in SENSES and getattr(config, name, None) is not None]
    senses = senses or [name for name, types in SENSES_BY_TYPE.items() if config.model_type in types][:1]
    if senses:
        return f"it reads more than text ({', '.join(senses)}): expected a text model, such as its family's"
    if config.is_encoder_decoder:
        return "it is an encoder-decoder: expected a causal language model, which has a decoder alone"
    if type(config) not in AutoModelForCausalLM._model_mapping:
        return "transformers has no causal language model of this kind (AutoModelForCausalLM)"
    return ""


def small_model(config: PretrainedConfig, seed: int = 0, attention: str = "eager") -> PreTrainedModel:
    """Build a model's architecture small, in fp32, with random weights that make every part count.

    Args:
        config: configuration of the full model.
        seed: seed of the weights, which do not depend on the attention.
        attention: transformers' name of the attention. The model is built with it, as the trainer loads its model:
            `set_attn_implementation` leaves families without transformers' attention interface at `eager`.

    Raises:
        ValueError: its configuration has sizes under names that are not known here, or the family refuses the
            attention.
    """
    return _random_model(_small_shape(config), seed, attention)


def _small_shape(config: PretrainedConfig) -> PretrainedConfig:
    """Return a model's configuration made small, of which a model has been counted; errors as `small_model`.

    Families have keys of their own for which layer is of which kind: the model with all layers shows it.
    """
    small = small_config(config)
    model = _empty_model(small)
    kinds = _layer_kinds(_empty_model(small_config(config, MOST_LAYERS)))
    if not set(kinds) <= set(_layer_kinds(model)):
        small = small_config(config, max(kinds.index(kind) + 1 for kind in set(kinds)))
        model = _empty_model(small)
        if lacking := set(kinds) - set(_layer_kinds(model)):
            first = min(map(kinds.index, lacking))
            raise ValueError(f"its small model has no layer of the kind of layer {first} of {len(kinds)}")
    size = sum(parameter.numel() for parameter in model.parameters())
    if size > LARGEST_MODEL:
        raise ValueError(f"its small model has {size / 1e6:.0f} million parameters")
    return small


def _empty_model(small: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"), no_init_weights():  # torch would compute initial values even here
        model: PreTrainedModel = AutoModelForCausalLM.from_config(deepcopy(small))
    model.tie_weights()
    return model


def _layer_kinds(model: PreTrainedModel) -> list[str]:
    """Return each decoder layer's type in the configuration, its modules with their types, and its parameters."""
    types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    kinds = []
    for number, layer in enumerate(_layers(model)):
        names = [f"{name}:{type(part).__name__}" for name, part in layer.named_modules()]
        names += [name for name, _ in layer.named_parameters()]
        made_of = sorted({re.sub(r"\d+", "*", name) for name in names})
        kinds.append(" ".join([*types[number : number + 1], *made_of]))
    return kinds


def _random_model(small: PretrainedConfig, seed: int = 0, attention: str = "eager") -> PreTrainedModel:
    """Build a model of a small configuration, which stays as it is; arguments and errors as `small_model`."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            deepcopy(small), attn_implementation=attention, dtype=torch.float32
        )
    embeddings = {id(parameter) for parameter in model.get_input_embeddings().parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if id(parameter) in embeddings:
                parameter.copy_(0.3 * noise)
            elif parameter.ndim > 1:  # activations and scores of about 1
                parameter.copy_(noise * 1.2 / parameter.shape[-1] ** 0.5)
            else:  # scales, biases and sinks, which families start at 0 or 1
                parameter.add_(0.3 * noise)
        _fill_buffers(model)
    return in_training(model)


def _same_model(small: PretrainedConfig, attention: str, tensors: dict[str, torch.Tensor]) -> PreTrainedModel:
    """Build a model of a small configuration with these weights and buffers; initial values would be overwritten."""
    with no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            deepcopy(small), attn_implementation=attention, dtype=torch.float32
        )
    model.tie_weights()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor.copy_(tensors[name])
    return in_training(model)


def _tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return a model's weights and buffers, those too that are not saved, by all of their names."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach().clone() for name, tensor in named}


def _fill_buffers(model: PreTrainedModel) -> None:
    """Give random values to what a model has learned and no optimizer changes, such as the biases of its router.

    All seeds have the same ones: they are in the files of a model, and never in new weights.
    """
    generator = torch.Generator().manual_seed(0)
    saved = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in saved and buffer.is_floating_point() and buffer.unique().tolist() in ([0.0], [1.0]):
            # families start there; other constants are limits or masks
            buffer.add_(0.3 * torch.randn(buffer.shape, generator=generator))


def vocabulary_of(model: PreTrainedModel) -> int:
    """Return how many tokens a model's embedding has."""
    return int(model.get_input_embeddings().weight.shape[0])


def proof_groups(vocabulary: int = ENOUGH_TOKENS) -> list[TrainGroup]:
    """Return groups whose prompts and completions are shorter and longer than a window, and as short as 1.

    Args:
        vocabulary: number of tokens of the model that computes them.
    """
    rng = np.random.default_rng(0)
    most = min(vocabulary, ENOUGH_TOKENS)
    first = FIRST_TOKEN if most > 2 * FIRST_TOKEN else 0

    def tokens(count: int) -> Any:
        return rng.integers(first, most, count).astype(np.int32)

    return [
        TrainGroup(
            f"group-{number}",
            tokens(prompt),
            [TrainSequence(tokens(n), np.zeros(n, np.float32), float(rng.normal())) for n in completions],
        )
        for number, (prompt, completions) in enumerate([(11, (9, 1, 14, 6)), (1, (3, 12)), (5, (20, 4))])
    ]


@dataclass(frozen=True)
class _Reference:
    """The batch computed by the model's definition."""

    batch: PackedBatch
    weights: torch.Tensor
    """Weight of each token in the loss whose gradient is compared, [N]."""
    logprobs: torch.Tensor
    gradients: dict[str, torch.Tensor]
    states: list[torch.Tensor]
    """Each layer's output before each completion token, [N, d]."""
    tensors: dict[str, torch.Tensor]
    """The model's weights and buffers before it computed."""


def _reference(model: PreTrainedModel, groups: Sequence[TrainGroup]) -> _Reference:
    batch, tensors = pack(list(groups)), _tensors(model)
    weights = torch.randn(batch.loss_tokens, generator=torch.Generator().manual_seed(1))
    parts, states = [], []
    for group in groups:
        for seq in group.sequences:
            ids = torch.from_numpy(np.concatenate([group.prompt_tokens, seq.completion_tokens]).astype(np.int64))[None]
            with _LayerOutputs(model) as layers:
                logits = model(input_ids=ids, use_cache=False).logits[0].float() / TEMPERATURE
            rows = slice(len(group.prompt_tokens) - 1, ids.shape[1] - 1)
            parts.append(torch.log_softmax(logits[rows], -1).gather(-1, ids[0, rows.start + 1 :, None])[:, 0])
            states.append([output[0, rows] for output in layers.outputs])
    logprobs = torch.cat(parts)
    gradients = _gradients(model, logprobs, weights)
    layer_states = [torch.cat(list(layer)) for layer in zip(*states, strict=True)]
    return _Reference(batch, weights, logprobs.detach(), gradients, layer_states, tensors)


def _compare(small: PretrainedConfig, kind: PackingKind, attention: str, reference: _Reference) -> PackingWay:
    separate = kind == "separate"
    try:
        model = _same_model(small, attention, reference.tensors)
        policy = Policy(model, separate)
        with _LayerOutputs(model) as layers:
            logprobs = policy(reference.batch, TEMPERATURE)[0]
        gradients = _gradients(model, logprobs, reference.weights)
    except Exception as error:
        return PackingWay(kind, attention, differs=f"it cannot run ({type(error).__name__}: {_first_line(error)})")
    largest = float((logprobs.detach() - reference.logprobs).abs().max())
    name, worst = _worst_gradient(gradients, reference.gradients)
    differs = ""
    if not largest <= LOGPROB_BOUND:
        separated = (own_rows if attention == OWN_ROWS else padded_rows)(reference.batch.layout).sources
        sources = separated if separate else reference.batch.source_index
        where = _first_layer_that_differs(model, layers.outputs, reference, sources)
        differs = f"{where}; log-probabilities differ by up to {largest:.2g} nats"
    elif not worst <= GRADIENT_BOUND:
        differs = f"the gradient of {name} differs by {worst:.1%}"
    return PackingWay(kind, attention, largest, worst, differs)


def _gradients(model: nn.Module, logprobs: torch.Tensor, weights: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (logprobs * weights).sum().backward()
    found = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }
    model.zero_grad()
    return found


def _worst_gradient(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> tuple[str, float]:
    """Return the parameter with the largest relative difference, and that; tiny gradients count by the largest."""
    norms = {name: float(gradient.norm()) for name, gradient in theirs.items()}
    floor = 1e-3 * max(norms.values())
    errors = {name: float((ours[name] - theirs[name]).norm()) / (norms[name] + floor) for name in theirs}
    worst = max(errors, key=lambda name: errors[name] if math.isfinite(errors[name]) else math.inf)
    return worst, errors[worst]


def _first_layer_that_differs(
    model: PreTrainedModel, outputs: Sequence[torch.Tensor], reference: _Reference, rows: torch.Tensor
) -> str:
    """Name the first layer whose output differs, by its type in the configuration, else the head.

    Args:
        model: the model.
        outputs: output of each layer.
        reference: what it should be.
        rows: place in an output before each completion token, [N].
    """
    types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    layers = _layers(model)
    for number, (ours, theirs) in enumerate(zip(outputs, reference.states, strict=False)):
        difference = float((ours.flatten(0, 1)[rows] - theirs).norm() / theirs.norm())
        if not difference <= GRADIENT_BOUND:
            kind = f"{types[number]}, " if number < len(types) else ""
            return f"layer {number} ({kind}{type(layers[number]).__name__}) differs by {difference:.0%}"
    return "all layers agree, the output head differs"


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    with contextlib.suppress(RunFailed):
        return list(decoder_layers(model))
    return []


class _LayerOutputs:
    """Collects the outputs of the decoder layers, [B, L, d] each, during one forward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.outputs: list[torch.Tensor] = []
        self._modules = _layers(model)
        self._hooks: list[Any] = []

    def __enter__(self) -> _LayerOutputs:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            states = (output if isinstance(output, torch.Tensor) else output[0]).detach()
            self.outputs.append(states[0] if states.ndim > 3 else states)  # Gemma 3n has several streams

        self._hooks = [module.register_forward_hook(keep) for module in self._modules]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()


@torch.no_grad()
def _seen_later(model: PreTrainedModel) -> str:
    """Return how much a token's prediction changes with the tokens after it; '': not at all."""
    vocabulary = vocabulary_of(model)
    ids = torch.arange(5, 21)[None] % vocabulary
    other = ids.clone()
    other[0, 12:] = (other[0, 12:] + min(100, vocabulary // 2)) % vocabulary
    ours, theirs = (model(input_ids=x, use_cache=False).logits[0, :12].log_softmax(-1) for x in (ids, other))
    change = float((ours - theirs).abs().max())
    return "" if change <= LOGPROB_BOUND else f"later tokens change a log-probability by {change:.2g} nats"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
