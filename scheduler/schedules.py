"""When generation may issue and when training may start: the schedules of the pipeline, as pure objects.

A batch is `batch` groups, trained in one optimizer step; version v of the weights is that after v steps. With eta the
bound on staleness (steps between the weights that a group was issued under and those that train on it), all of them
admit the next group, the `issued`-th (from 0), under

    floor(issued / batch) <= version + eta,

so new work waits and nothing is dropped. `sync` and `stream` have eta = 0, `one_step_off` 1.

Admission alone does not bound the staleness of a group that others overtake: training takes complete groups as they
come. A group issued under version v must be taken in step v + eta at the latest. So a complete group is taken out of
turn only while every group that is due earlier still fits: those due in the steps n .. m (n the one under way) into the
(m - n + 1) batch - taken places that these steps have left. Admission keeps this true: all groups issued so far are
due in a step m >= version + eta at the latest, and there are at most (m + 1) batch of them. The group that is due first
may always be taken, so training never locks up; it waits.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class State:
    """What a schedule may know."""

    batch: int
    """Groups of an optimizer step."""
    issued: int
    """Groups issued so far."""
    generated: int
    """Groups of which every sample has ended."""
    version: int
    """Newest weights that generation has."""
    step: int
    """Optimizer steps done: the version that the trainer has."""
    taken: int
    """Groups of the step under way that are trained or being trained."""
    complete: int
    """Groups with all rewards that no step has taken."""
    due: tuple[int, ...]
    """[max_staleness] groups issued and not taken that must be taken within the next 1, 2, .. steps, counting the one
    under way."""


@dataclass(frozen=True)
class Schedule:
    """One schedule; `make_schedule` knows them by name."""

    name: str
    max_staleness: int
    whole_batches: bool
    """Training waits until the step's whole batch is complete, instead of starting with what is there."""
    issue_barrier: bool
    """A batch is issued only when all that was issued before is generated."""

    def may_issue(self, state: State) -> bool:
        """Whether the next group may be issued now."""
        if self.issue_barrier and state.issued % state.batch == 0 and state.generated < state.issued:
            return False
        return state.issued // state.batch <= state.version + self.max_staleness

    def may_take(self, state: State, issued_under: int) -> bool:
        """Whether training may take a complete group into the step under way.

        Args:
            state: as it is.
            issued_under: version of the weights when the group was issued.
        """
        room = state.batch - state.taken
        if room <= 0 or (self.whole_batches and state.complete < room):
            return False
        steps_left = issued_under + self.max_staleness - state.step
        return all(due < ahead * state.batch + room for ahead, due in enumerate(state.due[:steps_left]))


def make_schedule(name: str, max_staleness: int | None = None) -> Schedule:
    """A schedule by name.

    Args:
        name: sync, stream, one_step_off or async.
        max_staleness: of `async`, 1 unless given; the others set their own.

    Raises:
        ValueError: unknown name, or a bound that the schedule does not have.
    """
    fixed = {
        "sync": Schedule("sync", 0, whole_batches=True, issue_barrier=True),
        "stream": Schedule("stream", 0, whole_batches=False, issue_barrier=True),
        "one_step_off": Schedule("one_step_off", 1, whole_batches=True, issue_barrier=True),
    }
    if name == "async":
        bound = 1 if max_staleness is None else max_staleness
        if bound < 1:
            raise ValueError(f"async needs a staleness of 1 or more, got {bound}; with 0 it is `stream`")
        return Schedule(name, bound, whole_batches=False, issue_barrier=False)
    if name not in fixed:
        raise ValueError(f"unknown schedule {name!r}; known: {', '.join([*fixed, 'async'])}")
    if max_staleness is not None and max_staleness != fixed[name].max_staleness:
        raise ValueError(f"{name} has a staleness of {fixed[name].max_staleness}; only async takes a bound")
    return fixed[name]
