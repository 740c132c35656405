"""What may go wrong in a run: restarts, checkpoints, deadlines, rewards that fail."""

from __future__ import annotations

from pydantic import Field

from streamrl.config.cluster import StrictModel


class RecoveryConfig(StrictModel):
    """Restarts of processes that die."""

    restarts: int = Field(5, ge=0, description="restarts of one process within `window_s`; after that it stays dead")
    window_s: float = Field(600.0, gt=0, description="seconds over which restarts are counted")
    pause_s: float = Field(1.0, ge=0, description="seconds before the first restart; doubled before each further one")
    longest_pause_s: float = Field(60.0, ge=0, description="longest pause before a restart, seconds")
    suspect_s: float = Field(
        3.0,
        gt=0,
        description="seconds of silence after which other instances continue an instance's requests; if it is heard "
        "again, the answer that is finished first counts, which makes short ones a little likelier",
    )


class CheckpointConfig(StrictModel):
    """Frequency and number of checkpoints."""

    every: int = Field(
        10, ge=1, description="optimizer steps between checkpoints; evaluated steps and the last step always write one"
    )
    keep: int = Field(
        2,
        ge=1,
        description="newest checkpoints kept; older ones, except the best and those still to be evaluated, are deleted",
    )


class DeadlineConfig(StrictModel):
    """Longest waits in seconds; when one expires the run ends and names the process it waited for."""

    startup_s: float = Field(300, gt=0, description="until a process has started and connected")
    generation_s: float = Field(
        900, gt=0, description="without a new token of any sample while samples are being generated"
    )
    training_s: float = Field(900, gt=0, description="for one micro-batch or one optimizer step")
    checkpoint_s: float = Field(3600, gt=0, description="for a checkpoint to be written")
    weights_s: float = Field(
        300,
        gt=0,
        description="for a version to reach a site, then for an instance to load it; the controller waits twice as "
        "long for both together, so that a site's own limit comes first",
    )
    reward_s: float = Field(20, gt=0, description="for one try of a reward; after that the try counts as a timeout")
    heartbeat_s: float = Field(60, gt=0, description="without a sign of life from a process")


MOST_DOUBLINGS = 60
"""Most doublings of a pause, longer than any limit by then; a float overflows at 1024."""


def pause_after(failures: int, first_s: float, longest_s: float) -> float:
    """Return the seconds to wait after the n-th failure, at least the first: doubled each time up to a limit."""
    return min(longest_s, first_s * 2.0 ** min(failures - 1, MOST_DOUBLINGS))


class RewardsConfig(StrictModel):
    """Rewards that fail: how often they are tried, and when too many of them are void."""

    attempts: int = Field(
        2, ge=1, description="tries of a reward that times out, raises or dies; if the last one fails it is void"
    )
    retry_pause_s: float = Field(
        1.0, ge=0, description="seconds before the second try; doubled before each further one"
    )
    longest_pause_s: float = Field(600.0, ge=0, description="longest pause before a try, seconds")
    max_void_rate: float | None = Field(
        0.5,
        ge=0,
        lt=1,
        description="share of void rewards above which the run ends; it also ends if a task's first 32 rewards, "
        "of at least 8 prompts, are all void. null: never",
    )
    void_window: int = Field(
        2, ge=1, description="steps' worth of newest rewards, of at least 32 prompts, over which max_void_rate is taken"
    )
