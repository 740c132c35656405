"""What a site makes of finished samples and ended episodes before the controller gets them. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from streamrl.protocol.samples import TOKEN_ARRAYS, UNREADABLE, sample_from_wire
from streamrl.protocol.site_instance import FinishedSample
from streamrl.rollouts.trajectory import Trajectory
from streamrl.rollouts.types import Sample
from streamrl.rollouts.void import VoidCause
from streamrl.transport.wire import Arrays

OWN_TIMES = ("t_dispatched", "t_first_token", "t_finished", "t_last_part")
"""Times of a sample that the instance takes from its site's clock, those that it has."""


def in_home_time(sample: FinishedSample, home: Callable[[float], float]) -> FinishedSample:
    """Convert a sample's times to the controller's clock; `t_queued` is in it already.

    Args:
        sample: the sample.
        home: converts unix seconds of the site's clock.
    """
    times = ("started", "finished")
    changes: dict[str, Any] = {key: home(at) for key in OWN_TIMES if (at := getattr(sample, key)) is not None}
    if (trajectory := sample.trajectory) is not None:
        steps = [
            msgspec.structs.replace(step, **{key: home(getattr(step, key)) for key in times})
            for step in trajectory.steps
        ]
        changes["trajectory"] = msgspec.structs.replace(trajectory, steps=steps)
    return msgspec.structs.replace(sample, **changes)


def readable(sample: FinishedSample, arrays: Arrays, sender: str) -> tuple[FinishedSample, Arrays, str]:
    """Return an episode's sample and its arrays, and '' if they fit each other.

    If not, the episode is void, without tokens, and the text says what is wrong: its agents process would send the
    same again.

    Args:
        sample: the sample.
        arrays: its arrays, as received.
        sender: name of the agents process, for the text.
    """
    try:
        sample_from_wire(Sample, msgspec.structs.asdict(sample), arrays)
    except UNREADABLE as error:
        wrong = f"the end of {sample.sample_id!r:.99} from {sender} cannot be read: {error!s:.200}"
    else:
        return sample, arrays, ""
    trajectory = Trajectory(rows=[], reward=None, void_cause=VoidCause.CRASH, void_text=wrong, messages=[], steps=[])
    void = msgspec.structs.replace(sample, finish_reason="stop", text="", trajectory=trajectory)
    return void, {name: np.empty(0, dtype) for name, dtype in TOKEN_ARRAYS.items()}, wrong
