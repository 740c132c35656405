"""Rewards of a file task that die at random, in the ways in which users' rewards do; void_rewards.py trains with them.

Each call draws anew from the operating system's randomness, so that equal completions do not die together and a
restarted worker does not repeat its deaths. Who died, and of what, is in the run's rollouts.
"""

from __future__ import annotations

import os
import random
import signal
import time
from decimal import Decimal
from typing import Any

from streamrl.tasks.answers import last_number

DEATHS = {"verifier": 0.4, "crash": 0.3, "provider": 0.2, "timeout": 0.1}
"""Cause under which a death is to be found in the rollouts -> its share of the deaths."""
HANG_S = 3600.0
_random = random.SystemRandom()


def undisturbed(completion: str, *, prompt: str, answer: Any) -> float:
    """Return 1.0 if the last number of the completion is the answer, else 0.0, as chain_sum's own verifier does."""
    number = last_number(completion)
    return float(number is not None and Decimal(number) == Decimal(str(answer)))


def killed_5(completion: str, *, prompt: str, answer: Any) -> float:
    """Die in 5 % of the calls, else judge the completion."""
    return _judge_or_die(0.05, completion, prompt, answer)


def killed_15(completion: str, *, prompt: str, answer: Any) -> float:
    """Die in 15 % of the calls, else judge the completion."""
    return _judge_or_die(0.15, completion, prompt, answer)


def _judge_or_die(share: float, completion: str, prompt: str, answer: Any) -> float:
    if _random.random() < share:
        _die(_random.choices(list(DEATHS), list(DEATHS.values()))[0])
    return undisturbed(completion, prompt=prompt, answer=answer)


def _die(cause: str) -> None:
    match cause:
        case "verifier":
            raise ValueError("the verifier has a bug")
        case "provider":
            raise ConnectionResetError("the judge has hung up")
        case "timeout":
            time.sleep(HANG_S)
        case "crash":
            os.kill(os.getpid(), signal.SIGKILL)
