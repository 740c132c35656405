"""What monitoring and the loading of weights need of a site's fleet."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from scheduler.simulation.generation_simulator import SimulatedInstance
from streamrl.config.recovery import DeadlineConfig, RecoveryConfig
from streamrl.generation.site.dispatcher import Dispatcher
from streamrl.generation.site.instance_life import InstanceLife
from streamrl.generation.site.pending_answers import Answers
from streamrl.generation.site.step_curves import FleetCurves
from streamrl.runtime.process_context import RoleContext
from streamrl.transport.endpoint import Hub


class FleetView(Protocol):
    """A site's instances, and what may be done with one of them."""

    context: RoleContext
    hub: Hub
    dispatcher: Dispatcher
    limits: DeadlineConfig
    recovery: RecoveryConfig
    curves: FleetCurves
    answers: Answers
    changed: Callable[[], Awaitable[None]]

    @property
    def lives(self) -> Mapping[str, InstanceLife]:
        """All instances, by name."""

    @property
    def ready(self) -> list[str]:
        """Sorted names of the instances that get requests."""

    @property
    def present(self) -> list[str]:
        """Sorted names of the instances that are connected and not about to leave; silent ones included."""

    def simulated(self, name: str) -> SimulatedInstance:
        """Return an instance as plans see it."""

    def ended(self) -> dict[str, str]:
        """Return how those processes ended that have, by instance."""

    async def admit(self, name: str) -> None:
        """Give an instance requests."""

    async def give_up(self, life: InstanceLife) -> None:
        """Let others continue what a silent instance runs."""

    async def take_back(self, life: InstanceLife) -> None:
        """Readmit an instance that is heard again."""

    async def died(self, life: InstanceLife, why: str) -> None:
        """Handle an instance's death."""
