"""The stages of simulated iterations beside generation, and what came of a simulation."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SimulatedLink:
    """Link between trainer and generation."""

    gbit_s: float = float("inf")
    """10^9 bits per second."""
    delay_s: float = 0.0

    def seconds(self, gigabytes: float) -> float:
        """Return the seconds to send so many 10^9 bytes."""
        return self.delay_s + 8 * gigabytes / self.gbit_s


@dataclass(frozen=True)
class Stages:
    """Rates and times of the stages after generation."""

    train_tokens_s: float
    """Tokens, prompts included, that the trainer processes per second, in all passes together."""
    optimizer_s: float = 0.0
    """Seconds at the end of every step."""
    reward_s: float = 0.0
    """Seconds from a sample's end to its reward."""
    weights_gb: float = 0.0
    """Size of a version in 10^9 bytes."""
    link: SimulatedLink = field(default_factory=SimulatedLink)
    switch_s: float = 0.0
    """Seconds from the end of one's turn to the beginning of the other's, where generation and training share their
    devices: one goes to sleep, the other wakes up, with new weights if it generates.
    """
    load_s: float = 0.0
    """Seconds for which all instances pause when new weights have reached them."""
    train_ranks: float = 1.0
    """Data-parallel ranks of the trainer; each has an equal share of the rate."""
    environment_s: float = 0.0
    """Seconds for which an environment steps in one sample, all its resets and steps together."""
    environment_processes: int = 1
    """Processes that step, each for one sample at a time."""
    after_batch: float = 0.0
    """Share of a group's training that begins only once the step's last group is there: that of all passes but the
    first, or all of it where advantages are relative to the whole batch.
    """

    def __post_init__(self) -> None:
        if not self.train_tokens_s > 0:
            raise ValueError(f"the trainer needs a rate above 0 tokens/s, got {self.train_tokens_s}")
        if not 0 <= self.after_batch <= 1:
            raise ValueError(f"a share of training is within 0 and 1, got {self.after_batch}")
        if not self.train_ranks >= 1:
            raise ValueError(f"the trainer needs one rank or more, got {self.train_ranks}")
        if not self.environment_processes >= 1:
            raise ValueError(f"an environment needs one process or more, got {self.environment_processes}")
        if not self.link.gbit_s > 0:
            raise ValueError(f"a link needs a bandwidth above 0 Gbit/s, got {self.link.gbit_s}")
        times = (self.optimizer_s, self.reward_s, self.environment_s, self.link.delay_s, self.switch_s, self.load_s)
        if min(*times, self.weights_gb) < 0:
            raise ValueError("times and sizes of the stages must not be negative")


@dataclass(frozen=True)
class PipelineOutcome:
    """Result of a simulation; times in seconds from the start."""

    stepped: tuple[float, ...]
    """[iterations] when each step had ended."""
    published: tuple[float, ...]
    """[publications] when the weights had reached generation; the last are those of the last step."""
    trained: tuple[tuple[str, ...], ...]
    """[iterations] groups of each step, in the order in which they were trained."""
    samples: int
    """Number of trained samples."""
    tokens: float
    """Tokens of the trained samples, prompts left out."""
    generation_busy: float
    """Mean over the instances of the time in which they had something to do."""
    training_busy: float
    busy_until: tuple[tuple[float, float], ...]
    """[iterations] (generation_busy, training_busy) until each step's end."""
    staleness: dict[int, int]
    """Number of groups by staleness: steps between their policy version at issue and the weights that trained on
    them."""
    staleness_by_step: tuple[float, ...]
    """[iterations] mean staleness of each step's groups."""
    deferred: int
    """Number of times that a group was deferred to a later round; for tests and studies."""
    left: int
    """Groups that were issued and not trained by the end; for tests and studies."""

    @property
    def total(self) -> float:
        """The end: when the last weights have arrived."""
        return self.published[-1] if self.published else 0.0

    def iteration_times(self) -> list[float]:
        """Return [iterations] seconds from one step's end to the next's."""
        return [later - earlier for earlier, later in itertools.pairwise((0.0, *self.stepped))]

    @property
    def generation_bubble(self) -> float:
        """Share of the instances' time in which they had nothing to do."""
        return 1.0 - self.generation_busy / self.total if self.total else 0.0

    @property
    def training_bubble(self) -> float:
        """Share of the trainer's time in which it had nothing to do."""
        return 1.0 - self.training_busy / self.total if self.total else 0.0

    @property
    def samples_per_second(self) -> float:
        """Trained samples divided by the total time."""
        return self.samples / self.total if self.total else 0.0

    def cost_per_1k(self, usd_per_hour: float) -> float:
        """Return the USD per 1,000 trained samples.

        Args:
            usd_per_hour: price of all instances and the trainer together.
        """
        return usd_per_hour * self.total / 3600 / self.samples * 1000 if self.samples else 0.0
