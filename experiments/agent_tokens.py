"""Play random agent sessions with a real model's tokenizer; compare every token with an independent reconstruction.

    .venv/bin/python experiments/agent_tokens.py                  # 10,000 sessions of SmolLM2, 4 minutes of a core
    .venv/bin/python experiments/agent_tokens.py --sessions 500

Sampled tokens are random ones of the whole vocabulary, so many answers change under decoding and encoding. Writes
experiments/results/agent_tokens.json and fails if one token is not what it must be.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parents[1]))

from running import RESULTS, results_folder

from streamrl.agents.rendering import ChatRenderer
from streamrl.cli.main import error_lines
from streamrl.machine.model_files import resolve_model
from tests.agents.random_sessions import SYSTEM, play, same_rows

OUT = RESULTS / "agent_tokens.json"


@click.command()
@click.option("--sessions", default=10_000, show_default=True)
@click.option("--first", default=0, show_default=True, help="seed of the first session")
@click.option("--model", default="smollm2-135m", show_default=True, help="a model whose template is ChatML")
def main(sessions: int, first: int, model: str) -> None:
    """Play random sessions, and compare."""
    target = results_folder(None, "sessions", "first", "model") / OUT.name
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(model))
    renderer = ChatRenderer(tokenizer, SYSTEM)
    counts = dict.fromkeys(
        ("turns", "rows", "tokens", "trained_tokens", "answers_changed_by_encoding", "sessions_wrong"), 0
    )
    started = time.perf_counter()
    for seed in range(first, first + sessions):
        played = play(tokenizer, renderer, seed)
        rows = played.session.rows()
        counts["sessions_wrong"] += not same_rows(rows, played.rows())
        counts["turns"] += len(played.turns)
        counts["rows"] += len(rows)
        counts["tokens"] += sum(len(row.tokens) for row in rows)
        counts["trained_tokens"] += sum(int(row.sampled.sum()) for row in rows)
        for turn in played.turns:
            end = tokenizer.convert_tokens_to_ids("<|im_end|>")
            sampled = [token for token in turn.generated.tokens.tolist() if token != end]
            counts["answers_changed_by_encoding"] += (
                tokenizer.encode(turn.generated.text, add_special_tokens=False) != sampled
            )
    found = {
        "model": model,
        "sessions": sessions,
        "first": first,
        **counts,
        "seconds": round(time.perf_counter() - started, 1),
    }
    target.write_text(json.dumps(found, indent=2) + "\n")
    click.echo(json.dumps(found, indent=2))
    sys.exit(counts["sessions_wrong"] > 0)


if __name__ == "__main__":
    with error_lines():
        main()
