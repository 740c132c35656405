"""The same game as a program with the plain `openai` package: it knows its environment, and nothing of streamrl.

    OPENAI_BASE_URL, OPENAI_API_KEY   read by the package itself
    TASK                              the item as JSON

It prints its reward as its last line.
"""

from __future__ import annotations

import json
import os

from guess_number import GUESSES, hint
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam


def main() -> None:
    """Play one episode."""
    task, client = json.loads(os.environ["TASK"]), OpenAI()
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": task["prompt"]}]
    reward = 0.0
    for guesses in range(GUESSES):
        answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content or ""
        said, reward = hint(answer, task["number"])
        if reward == 1.0:
            reward -= 0.1 * guesses
            break
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": said}]
    print(json.dumps({"reward": reward}))


if __name__ == "__main__":
    main()
