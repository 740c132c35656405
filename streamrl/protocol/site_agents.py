"""Messages between a site's generation service and its agents process.

    service -> agents   run_episode, turn_done
    agents -> service   order_turn, episode_done

The agents process acknowledges a command at once. The service acknowledges an episode only when the controller has
committed it, and the agents process keeps it until then. A new agents process is given all open episodes again, and
their turns as they were: `TurnDone.from_before`.
"""

from __future__ import annotations

from typing import Any

from streamrl.protocol.message import TypedMessage
from streamrl.rollouts.trajectory import Trajectory

# service -> agents


class RunEpisode(TypedMessage, frozen=True, tag="run_episode"):
    """Have an agent lead one episode. Answered by `episode_done`."""

    sample_id: str
    group_id: str
    task: str
    """Key of the task in the run file."""
    item: dict[str, Any]
    """What the agent starts from."""
    seed: int
    temperature: float | None
    """Sampling temperature; 0: greedy; None: the run's."""


class TurnDone(TypedMessage, frozen=True, tag="turn_done"):
    """A model call of an episode has ended.

    Arrays: completion_tokens int32 [C], logprobs float32 [C], token_versions int32 [C].
    """

    turn_id: str
    finish_reason: str
    """'stop' or 'length'."""
    text: str
    cached_tokens: int = 0
    """Prompt tokens that the instance had in its prefix cache."""
    from_before: bool = False
    """Whether it was ordered before the episode was run again, by an agents process or a service that has died."""


# agents -> service


class OrderTurn(TypedMessage, frozen=True, tag="order_turn"):
    """Generate one turn of an episode that the sender leads. Answered by `turn_done`.

    Arrays: prompt_tokens int32 [P], everything that the model has seen so far.
    """

    turn_id: str
    """Never used twice, also after a restart."""
    sample_id: str
    seed: int
    extends: str | None = None
    """Turn whose prompt and output the prompt begins with, and whose KV cache it can use; None: none."""


class EpisodeDone(TypedMessage, frozen=True, tag="episode_done"):
    """An episode has ended. Acknowledged once the controller has committed it.

    Arrays: completion_tokens int32 [C], logprobs float32 [C], token_versions int32 [C], of all rows one after the other
    (`rollouts.types.Sample`).
    """

    sample_id: str
    finish_reason: str
    """'stop' or 'length'."""
    t_started: float
    """Unix seconds of the site's clock, as the other times."""
    t_first_token: float
    t_finished: float
    text: str
    """The last answer."""
    trajectory: Trajectory


FROM_SERVICE = (RunEpisode, TurnDone)
FROM_AGENTS = (OrderTurn, EpisodeDone)
