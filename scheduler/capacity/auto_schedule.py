"""`schedule: auto`: picks a schedule and a split from a profile of the run's recent steps, and says why.

Every option (a schedule, the instances that generate under it, the trainer's rate) is simulated by `pipeline.py` on
lengths like those observed. The fastest wins, with two reservations. Staleness has a price: an option with a
larger bound must be faster than the best one with a smaller bound by `OFF_POLICY_GAIN`. Changing has one too: once an
option runs, another must be faster by `min_gain`, and changes are at least `min_steps` steps apart; only a return to
less staleness merely needs not to be slower. So an option is entered at a gain and left at a loss, and noise does not
make it flap.

    auto = AutoSchedule(options)
    decision = auto.choose(profile, make_policy, batch=64)                  # after the first steps
    ...
    if auto.drifted(recent):                                                # every few steps
        decision = auto.choose(recent, make_policy, batch=64, step=step)    # decision.changed: at this step's end

The objects are pure: no clock, no I/O, and the same profile and seed give the same decision. The caller leaves out
options that do not fit (memory, devices). A change takes effect between two steps, when the trainer's weights are
published to generation regardless of `sync_every`; until everything issued before is trained, the schedule of
`during_change` decides which groups may be taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from scheduler.capacity.elasticity import in_seconds
from scheduler.cost.decode import Floats
from scheduler.dispatch.policy import DispatchPolicy
from scheduler.schedule.schedules import Schedule
from scheduler.simulation.generation_simulator import SimulatedInstance, SimulatedRequest
from scheduler.simulation.pipeline import Pipeline
from scheduler.simulation.stages import SimulatedLink, Stages

MEASURED_STEPS = 6
"""Steady steps that a prediction averages over (more where weights are published rarely): enough that one group's
runaway answer does not decide, few enough to take a fraction of a second.
"""
OFF_POLICY_GAIN = 0.03
"""Share of a step's time that a larger staleness bound must save."""
DRIFT = 0.15
"""Share by which the mean length or the trainer's rate must have changed for options to be predicted again."""
DISTANCE = 0.25
"""Kolmogorov-Smirnov distance of the lengths' distributions, 0 to 1, from which they differ."""


@dataclass(frozen=True)
class Profile:
    """Measurements of the last few steps."""

    groups: Sequence[tuple[int, Sequence[int]]]
    """(prompt tokens, output lengths of all its samples) of each group; several batches."""
    train_tokens_s: float
    """Tokens, prompts included, that the trainer processes per second on devices of its own."""
    colocated_train_tokens_s: float | None = None
    """The same rate with all devices; None: as with its own."""
    optimizer_s: float = 0.0
    """Seconds at the end of every step."""
    reward_s: float = 0.0
    """Seconds from a sample's end to its reward, median over all samples."""
    weights_s: float = 0.0
    """Seconds to publish, send and load a version."""
    environment_s: float = 0.0
    """Seconds for which environments step in one sample, mean over all samples."""
    environment_processes: int = 1
    """Processes of environments, each of which steps for one sample at a time."""
    after_batch: float = 0.0
    """Share of the training that begins only once a step has all its groups (`Stages`)."""

    def __post_init__(self) -> None:
        if not self.groups or not all(lengths for _, lengths in self.groups):
            raise ValueError("a profile needs at least one group, and in each at least one sample")

    def lengths(self) -> Floats:
        """Return the output lengths of all samples, ascending."""
        return np.sort(np.concatenate([np.asarray(lengths, dtype=np.float64) for _, lengths in self.groups]))


@dataclass(frozen=True)
class Option:
    """A schedule with a split of the devices."""

    label: str
    """Label for users, such as "async, 1 of 2 instances"."""
    schedule: Schedule
    instances: tuple[SimulatedInstance, ...]
    """Instances that generate; those of all devices if the schedule is exclusive."""
    train_tokens_s: float | None = None
    """The trainer's rate under this split; None: the profile's."""

    @property
    def name(self) -> str:
        """Label and staleness."""
        bound = self.schedule.max_staleness
        return f"{self.label} (staleness {bound})" if bound else self.label


@dataclass(frozen=True)
class SchedulePrediction:
    """Predicted steady state of an option."""

    option: Option
    step_s: float
    """Seconds per optimizer step."""
    generation_bubble: float
    """Share of the instances' time in which they have nothing to do."""
    training_bubble: float
    staleness_mean: float
    """Mean staleness in steps, over all groups."""

    @property
    def generation_s(self) -> float:
        """Seconds per step in which an instance works, on average."""
        return (1 - self.generation_bubble) * self.step_s

    @property
    def training_s(self) -> float:
        """Seconds per step in which the trainer works."""
        return (1 - self.training_bubble) * self.step_s


def predict(
    profile: Profile, option: Option, make_policy: Callable[[], DispatchPolicy], batch: int, seed: int = 0
) -> SchedulePrediction:
    """Simulate an option on whole groups drawn from the profile (a bootstrap; siblings stay together).

    One seed gives all options the same groups, so that they do not differ by the draws. The policy gets no
    forecasts. Weights in flight do not hold up generation, unless trainer and instances share their devices.

    Args:
        profile: measurements of recent steps.
        option: option to predict.
        make_policy: creates a new dispatch policy.
        batch: groups per optimizer step.
        seed: seed of the draws.
    """
    schedule = option.schedule
    every = schedule.sync_every

    def publications(steps: int) -> int:
        return -(-steps // every) * every

    # in the first steps all devices are free, in the last ones nothing is left to issue: both are left out
    first = publications(schedule.max_staleness + 2)
    last = first + publications(MEASURED_STEPS)
    iterations = last + publications(schedule.max_staleness + 1)
    chosen = np.random.default_rng(seed).integers(len(profile.groups), size=iterations * batch).tolist()
    groups = [
        [
            SimulatedRequest(f"{number}.{sample}", float(max(1, length)), f"{number}", profile.groups[index][0])
            for sample, length in enumerate(profile.groups[index][1])
        ]
        for number, index in enumerate(chosen)
    ]
    rate = profile.train_tokens_s
    if schedule.exclusive and profile.colocated_train_tokens_s is not None:
        rate = profile.colocated_train_tokens_s
    # on the same devices weights cross no link in the simulation, but instances still wait for them
    load_s = profile.weights_s if schedule.exclusive else 0.0
    stages = Stages(
        option.train_tokens_s or rate,
        profile.optimizer_s,
        profile.reward_s,
        link=SimulatedLink(delay_s=profile.weights_s),
        load_s=load_s,
        environment_s=profile.environment_s,
        environment_processes=profile.environment_processes,
        after_batch=profile.after_batch,
    )
    outcome = Pipeline(make_policy(), option.instances, stages, schedule, batch).run(groups, iterations)
    seconds = outcome.stepped[last - 1] - outcome.stepped[first - 1]
    before, after = outcome.busy_until[first - 1], outcome.busy_until[last - 1]
    loading = load_s * (last - first) / every  # counts as busy there
    return SchedulePrediction(
        option,
        seconds / (last - first),
        1 - max(0.0, after[0] - before[0] - loading) / seconds,
        1 - (after[1] - before[1]) / seconds,
        float(np.mean(outcome.staleness_by_step[first:last])),
    )


@dataclass(frozen=True)
class Decision:
    """An option to run, and the reason."""

    option: Option
    changed: bool
    """Whether another option ran before; false for the first decision."""
    why: str
    """Reason, one sentence with figures."""
    predictions: tuple[SchedulePrediction, ...]
    """Predictions of all options."""


class AutoSchedule:
    """Chooses among options by predicted step time, and decides when to change."""

    def __init__(
        self,
        options: Sequence[Option],
        min_gain: float = 0.05,
        min_steps: int = 20,
    ) -> None:
        """Create a chooser that has not decided yet.

        Args:
            options: options to choose among; of equal ones the first wins.
            min_gain: share of a step's time that a change must save.
            min_steps: smallest number of steps between two changes.

        Raises:
            ValueError: there are no options, two have the same label, or a share is outside of [0, 1).
        """
        labels = [option.label for option in options]
        if not options or len(set(labels)) < len(labels):
            raise ValueError(f"auto needs one or more options with different labels, got {labels}")
        if not (0 <= min_gain < 1 and min_steps >= 1):
            raise ValueError(f"auto needs gains within [0, 1) and min_steps of 1 or more: {min_gain}, {min_steps}")
        self.options = tuple(options)
        self.min_gain, self.min_steps = min_gain, min_steps
        self.current: Option | None = None
        """Option of the last decision."""
        self.changed_at: int | None = None
        """Optimizer steps done at the last change; None: there was none."""
        self._profile: Profile | None = None
        self._step_s = 0.0
        """Seconds of a step of the fastest option at the last choice."""

    def choose(
        self,
        profile: Profile,
        make_policy: Callable[[], DispatchPolicy],
        batch: int,
        step: int = 0,
        seed: int = 0,
        options: Sequence[Option] | None = None,
    ) -> Decision:
        """Predict every option (`predict`), decide, and remember the profile for `drifted`.

        Args:
            profile: measurements of recent steps.
            make_policy: creates a new dispatch policy.
            batch: groups per optimizer step.
            step: optimizer steps done.
            seed: seed of the draws.
            options: options that replace the earlier ones; an option is identified by its label.
        """
        self._profile = profile
        if options is not None:
            self.options = tuple(options)
        predictions = [predict(profile, option, make_policy, batch, seed) for option in self.options]
        self._step_s = min((p.step_s for p in predictions), default=0.0)
        return self.decide(predictions, step)

    def resume(self, label: str, changed_at: int | None) -> None:
        """Continue with the option that an earlier chooser had chosen.

        Args:
            label: the option's.
            changed_at: optimizer steps done at its last change; None: there was none.

        Raises:
            KeyError: no option has this label.
        """
        self.current = {option.label: option for option in self.options}[label]
        self.changed_at = changed_at

    def drifted(self, profile: Profile) -> bool:
        """Return whether the run has changed since the last choice, so that options should be predicted again.

        Returns:
            True if the lengths differ (`lengths_differ`), if the trainer's rate, the environments' seconds per sample
            or those of rewards are off by more than `DRIFT`, or if there was no choice (one that is continued has no
            profile to compare with). Rewards must also differ by `OFF_POLICY_GAIN` of a step: most take milliseconds,
            and vary. A false alarm costs a prediction, not a change.
        """
        before = self._profile
        if before is None:
            return self.current is None
        return (
            lengths_differ(before.lengths(), profile.lengths(), DRIFT)
            or _off(before.train_tokens_s, profile.train_tokens_s, DRIFT)
            or _off(before.environment_s, profile.environment_s, DRIFT)
            or (
                _off(before.reward_s, profile.reward_s, DRIFT)
                and abs(profile.reward_s - before.reward_s) > OFF_POLICY_GAIN * self._step_s
            )
        )

    def decide(self, predictions: Sequence[SchedulePrediction], step: int = 0) -> Decision:
        """Choose an option by the rules of the module.

        Args:
            predictions: predictions of all options that are possible now, including the current one if it still is.
            step: optimizer steps done.

        Raises:
            ValueError: there are no predictions.
        """
        if not predictions:
            raise ValueError("auto cannot decide without predictions")
        best = self._best(predictions)
        label = self.current.label if self.current is not None else None
        current = next((p for p in predictions if p.option.label == label), None)
        reservation = None if current is None or best is current else self._reservation(current, best, step)
        chosen = current if current is not None and reservation else best
        changed = label is not None and chosen.option.label != label
        if changed:
            self.changed_at = step
        self.current = chosen.option
        return Decision(chosen.option, changed, self._why(chosen, best, predictions, reservation), tuple(predictions))

    def _best(self, predictions: Sequence[SchedulePrediction]) -> SchedulePrediction:
        """Return the fastest prediction, where more staleness must gain `OFF_POLICY_GAIN`."""
        best: SchedulePrediction | None = None
        for bound in sorted({p.option.schedule.max_staleness for p in predictions}):
            of_bound = [p for p in predictions if p.option.schedule.max_staleness == bound]
            fastest = min(of_bound, key=lambda p: p.step_s)
            if best is None or fastest.step_s < best.step_s * (1 - OFF_POLICY_GAIN):
                best = fastest
        assert best is not None
        return best

    def _reservation(self, current: SchedulePrediction, best: SchedulePrediction, step: int) -> str | None:
        """Return why the current option stays although another is best; None: it does not stay."""
        if self.changed_at is not None and step - self.changed_at < self.min_steps:
            return f"the last change was {step - self.changed_at} steps ago, and {self.min_steps} must lie between two"
        if best.step_s <= current.step_s * (1 - self.min_gain):
            return None
        if best.option.schedule.max_staleness < current.option.schedule.max_staleness:
            return None if best.step_s <= current.step_s else "going back to less staleness must not be slower"
        return f"a change must save {self.min_gain:.0%}"

    def _why(
        self,
        chosen: SchedulePrediction,
        best: SchedulePrediction,
        predictions: Sequence[SchedulePrediction],
        reservation: str | None,
    ) -> str:
        others = sorted((p for p in predictions if p is not chosen), key=lambda p: p.step_s)
        against = ", ".join(f"{p.option.name} {in_seconds(p.step_s)}" for p in others)
        sentence = f"{chosen.option.name}: predicted {in_seconds(chosen.step_s)} a step"
        sentence += f" against {against}: {_overlap(chosen)}" if others else f", the only option: {_overlap(chosen)}"
        if chosen is not best and reservation:
            return f"{sentence}; it stays although {best.option.name} would be better: {reservation}"
        fastest = min(predictions, key=lambda p: p.step_s)
        if fastest.step_s < chosen.step_s:
            gain = 1 - fastest.step_s / chosen.step_s
            sentence += f"; {fastest.option.name} would save {gain:.1%}, which is not worth its staleness"
        return sentence


def during_change(before: Schedule, after: Schedule) -> Schedule:
    """Return the schedule that decides which groups training may take while groups from before a change are left.

    Compute `due` with its `max_staleness`. Without the wider of both bounds, groups admitted under it would lose their
    place to newer ones.
    """
    return replace(after, max_staleness=max(before.max_staleness, after.max_staleness))


def lengths_differ(before: Floats, now: Floats, drift: float) -> bool:
    """Return whether lengths have changed, by their mean or by their distribution.

    The mean may differ by a share `drift`, the distribution by `DISTANCE` (two-sample Kolmogorov-Smirnov: the largest
    difference between the shares of lengths up to some value).

    Args:
        before: [m] ascending.
        now: [n] ascending.
        drift: share of the mean.
    """
    if _off(float(before.mean()), float(now.mean()), drift):
        return True
    every = np.concatenate([before, now])
    shares = [np.searchsorted(some, every, side="right") / len(some) for some in (before, now)]
    return float(np.abs(shares[0] - shares[1]).max()) > DISTANCE


def _off(before: float, now: float, share: float) -> bool:
    return abs(now - before) > share * before


def _overlap(prediction: SchedulePrediction) -> str:
    """Describe how an option spends its step."""
    schedule = prediction.option.schedule
    generation, training = in_seconds(prediction.generation_s), in_seconds(prediction.training_s)
    if schedule.exclusive:
        return f"generation {generation} and training {training} take turns on all devices"
    if schedule.max_staleness >= schedule.sync_every:
        return f"generation {generation} and training {training} overlap"
    if schedule.whole_batches:
        return f"generation {generation} and training {training} follow one another"
    return f"training {training} begins while generation, {generation}, goes on"
