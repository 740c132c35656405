"""Stop strings of requests that go on from kept tokens, which are part of the prompt that vLLM gets.

vLLM looks for stop strings in the text of new tokens, so one that begins in the kept text and ends in the new one would
be missed. And a kept text that ends within a character has its tokenizer give the whole prompt out again as new text,
with stop strings that the prompt may mention. So the text of such a request is decoded from its first token on, as if
it had never been interrupted.

To draw the last kept tokens again would be no way out: with other noise, a completion that is about to stop would get a
second chance not to, and answers would be longer than the policy has them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any


def look_across(output_processor: Any, kept: Mapping[str, int]) -> None:
    """Have vLLM's output processor look for stop strings across the beginning of the new text.

    Args:
        output_processor: that of an `AsyncLLM`.
        kept: the number of kept tokens at the end of a prompt by request, whenever one is added.
    """
    add_request = output_processor.add_request

    def add(request: Any, *rest: Any, **named: Any) -> None:
        add_request(request, *rest, **named)
        state = output_processor.request_states[request.request_id]
        if getattr(state.detokenizer, "stop", ()) and (tokens := kept.get(state.external_req_id, 0)):
            state.detokenizer = detokenizer_after(output_processor.tokenizer, request, tokens)

    output_processor.add_request = add


def detokenizer_after(tokenizer: Any, request: Any, tokens: int) -> Any:
    """Return vLLM's detokenizer for a request, which has decoded the last `tokens` tokens of the prompt as output."""
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    whole = copy.copy(request)
    whole.prompt_token_ids, kept = request.prompt_token_ids[:-tokens], request.prompt_token_ids[-tokens:]
    made: Any = IncrementalDetokenizer.from_new_request(tokenizer, whole)
    for token in kept:
        made.token_ids.append(token)
        made.output_text += made.decode_next(token)
    if hasattr(made, "prompt_len"):  # vLLM's slow detokenizer has the prompt's tokens, too
        made.prompt_len += tokens
    else:
        made.token_ids.clear()
    return made
