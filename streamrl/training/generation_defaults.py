"""The defaults of generation (`generation_config.json`) that a checkpoint takes from its model's folder.

transformers reads a file with contradictions and refuses to write one, so that `save_pretrained` would end a run at its
first checkpoint.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator

from transformers import GenerationConfig

log = logging.getLogger(__name__)

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys that are kept in any case: the ids of tokens that begin, end and fill up a sequence."""


def writable(defaults: GenerationConfig) -> GenerationConfig:
    """Return the defaults as they are where transformers writes them, else the nearest to them that it does.

    A temperature without a word of `do_sample`, as in the folders of Llama 2, gets `do_sample: true`, by which vLLM
    reads the same as before. Of any other contradiction only `do_sample` and the ids of tokens remain.

    Args:
        defaults: what the model's folder says; it stays as it is.
    """
    found = next(one for one in _candidates(defaults) if _is_writable(one))
    if found is not defaults:
        log.warning(
            "the model's generation_config.json is contradictory: checkpoints get %s instead", found.to_diff_dict()
        )
    return found


def _candidates(defaults: GenerationConfig) -> Iterator[GenerationConfig]:
    yield defaults
    if defaults.do_sample is None:
        sampling = copy.deepcopy(defaults)
        sampling.do_sample = True
        yield sampling
    ids = {name: getattr(defaults, name) for name in TOKENS}
    yield GenerationConfig(do_sample=defaults.do_sample, **ids)
    yield GenerationConfig(**{name: value for name, value in ids.items() if _is_id(value)})


def _is_id(value: object) -> bool:
    return isinstance(value, list) or (isinstance(value, int) and value >= 0)


def _is_writable(defaults: GenerationConfig) -> bool:
    try:
        defaults.validate(strict=True)
    except ValueError:
        return False
    return True
