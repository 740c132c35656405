"""Present and target numbers of instances of each pool.

Targets come from the operator (`streamrl scale`) and from the run's elasticity (`scheduler/capacity/elasticity.py`).
Pools are named "site/pool" here. The last targets are kept in the run's folder, for a resume.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import json
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from scheduler.capacity.elasticity import Change, Elasticity, PoolLimits, fleet_of, generation_time
from scheduler.simulation.generation_simulator import SimulatedInstance
from streamrl.atomic_files import replace_json
from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.controller.schedule_tuner import group_lengths, policy_factory
from streamrl.controller.site_services import Services
from streamrl.controller.spending import Spending
from streamrl.controller.step_batch import StepBatch
from streamrl.controller.step_times import Interval, StepTimes
from streamrl.errors import RunFailed, UserError, why_unusable, writing
from streamrl.protocol.controller_site import FleetChanged
from streamrl.protocol.message import TypedMessage, wire
from streamrl.protocol.operator import PoolScaled, ScalePool, ScalingRefused
from streamrl.rollouts.types import Sample
from streamrl.run_dir import layout
from streamrl.runtime.process_plan import ProcessSpec
from streamrl.transport.endpoint import Delivery, Hub

log = logging.getLogger(__name__)


MOST_COMING = 256
"""Instances added most recently that are remembered; a pool that is reported to come and go is no more than that."""


@dataclass
class Coming:
    """An instance that was added during the run; times are unix seconds, None: not yet."""

    instance: str
    requested_at: float
    """Time at which its service first reported it."""
    ready_at: float | None = None
    """Time from which it holds the served weights and may get requests."""
    first_sample_at: float | None = None
    """Arrival of its first sample."""


@dataclass(frozen=True)
class _Target:
    """The number of instances that a pool was scaled to."""

    wanted: int
    replicas: int
    """`replicas` of the cluster file then."""


class Scaling:
    """The numbers of instances of a run's pools: scales them and keeps track of what is there."""

    def __init__(
        self,
        cluster: ClusterConfig,
        run: RunConfig,
        run_dir: Path,
        plan: Sequence[ProcessSpec],
        services: Services,
        times: StepTimes,
        resume: bool,
    ) -> None:
        """Begin with the processes of `plan`; `times` gets the instances that can work.

        A pool of a resumed run gets the number that it was scaled to last, unless its `replicas` in the cluster file
        have changed since; any other pool gets those. So do all if the last targets cannot be read: the log names the
        file. The status has these targets from the beginning, and `begin` tells the services.
        """
        self.run, self.services, self.times = run, services, times
        self._pools = {f"{site}/{pool.name}": pool for site, s in cluster.sites.items() for pool in s.generation}
        self._instances: dict[str, dict[str, str]] = {key: {} for key in self._pools}
        """Life stage of each instance (`generation/site/instance_life.py`), by pool."""
        self._dead: set[str] = set()
        """Instances that are dead for good."""
        self._buried: set[str] = set()
        """Those that are not waited for any more."""
        self._short_since: dict[str, tuple[int, float]] = {}
        """Target that a pool falls short of, and since when, monotonic seconds: nobody sets them."""
        limits_s = run.deadlines
        self._patience_s = limits_s.startup_s + limits_s.training_s + limits_s.weights_s
        """Seconds in which an added instance starts and gets weights, maybe after a step of the trainer."""
        self._file = run_dir / layout.REPLICAS
        self._resume = resume
        recorded = self._recorded() if resume and self._file.exists() else None
        self._to_rewrite = recorded is not None
        """Whether the file has to be written again, without what does not hold any more."""
        self._scaled = self._still_valid(recorded or {})
        """Targets on record, of the pools that were scaled."""
        sizes = {key: pool.replicas for key, pool in self._pools.items()}
        self._wanted = sizes | {key: target.wanted for key, target in self._scaled.items()}
        self.coming: deque[Coming] = deque(maxlen=MOST_COMING)
        """Instances that were added during the run, the newest last."""
        fixed = [spec for spec in plan if spec.role != "instance"]
        self._fixed_prices = {(spec.site, spec.name): spec.price_per_hour for spec in fixed if spec.price_per_hour}
        self._names: dict[str, str] = {spec.name: spec.role for spec in fixed}
        for spec in plan:
            if spec.role == "instance":
                self._instances[f"{spec.site}/{spec.pool}"][spec.name] = "starting"
        times.set_instances(self._living(), time.time())
        self.spending = Spending(self._prices())
        self.elasticity: Elasticity | None = None
        if (options := run.elasticity).enabled:
            limits = {
                key: PoolLimits(pool.min_replicas, pool.most_replicas, pool.price_per_hour)
                for key, pool in self._pools.items()
            }
            self.elasticity = Elasticity(limits, options.patience, options.settle, options.margin, options.min_saving)
        self._kinds: dict[str, SimulatedInstance] = {}
        """One instance of each pool, as a model of the others."""
        self._choosing: asyncio.Task[Change | None] | None = None

    # -- targets of the operator

    async def handle_request(self, delivery: Delivery, hub: Hub) -> None:
        """Handle a request of `streamrl scale` and answer it.

        One whose command has ended before, as it may during a start, is left out: the command has said that it failed.
        """
        order: ScalePool = delivery.body
        if delivery.peer not in hub.peers:
            log.warning("pool %s is not scaled to %d: the command has not waited for it", order.pool, order.replicas)
            return
        answer: TypedMessage
        try:
            key = self._find(order.pool, order.site)
            before = self._wanted[key]
            self._check_replicas(key, order.replicas)
            self._set_target(key, order.replicas)
        except (UserError, RunFailed) as error:
            answer = ScalingRefused(error=str(error))
        else:
            await self._announce(key, replace_dead=True)
            answer = PoolScaled(pool=key, before=before, after=self._wanted[key])
        if delivery.peer in hub.peers:
            await hub.send(delivery.peer, *wire(answer))

    def _find(self, pool: str, site: str) -> str:
        """Return the pool's full name, "site/pool"; raise `UserError` unless exactly one matches."""
        keys = [(key, *key.split("/")) for key in self._pools]
        found = [key for key, its_site, name in keys if name == pool and site in ("", its_site)]
        if len(found) == 1:
            return found[0]
        if found:
            raise UserError(f"pool {pool!r} could be {' or '.join(found)}: name its --site")
        near = difflib.get_close_matches(pool, [name for _, _, name in keys], n=3)
        where = f" at a site {site!r}" if site else ""
        hint = f"did you mean {' or '.join(near)}?" if near and not site else f"pools: {', '.join(self._pools)}"
        raise UserError(f"no pool {pool!r}{where}; {hint}")

    def _check_replicas(self, key: str, replicas: int) -> None:
        """Raise `UserError` if the pool cannot have that many instances, or the run cannot be scaled."""
        pool = self._pools[key]
        if replicas < pool.min_replicas:
            raise UserError(f"pool {key} must keep {pool.min_replicas} or more, not {replicas} (min_replicas)")
        if replicas > pool.most_replicas:
            key_set = "max_replicas" if pool.max_replicas else "replicas; max_replicas can be more"
            raise UserError(
                f"the cluster file gives pool {key} {pool.most_replicas} instances at most, not {replicas} ({key_set})"
            )
        if self.run.schedule.name == "auto":
            raise UserError("schedule: auto has divided the devices among the instances that the run began with")

    async def _scale(self, key: str, replicas: int) -> None:
        self._set_target(key, replicas)
        await self._announce(key)

    def _set_target(self, key: str, replicas: int) -> None:
        """Set a pool's target.

        Raises:
            RunFailed: it cannot be recorded; the target is the one before.
        """
        self._record(self._scaled | {key: _Target(replicas, self._pools[key].replicas)})

    def _record(self, scaled: dict[str, _Target]) -> None:
        """Record the targets of pools that were scaled, and set them; raises as `_set_target`."""
        with writing(self._file):
            replace_json(self._file, {key: asdict(target) for key, target in scaled.items()}, lasting=True)
        self._scaled = scaled
        self._wanted = self._wanted | {key: target.wanted for key, target in scaled.items()}

    async def _announce(self, key: str, replace_dead: bool = False) -> None:
        """Send a pool's target to its site.

        Only the operator has dead instances replaced: elasticity would start one again that has used up its restarts.
        """
        site, _, pool = key.partition("/")
        await self.services.scale(site, pool, self._wanted[key], replace_dead)

    async def begin(self) -> None:
        """Tell the services, which have all connected, the targets that differ from the cluster file.

        Raises:
            RunFailed: the targets cannot be recorded.
        """
        if not self._resume:
            self._file.unlink(missing_ok=True)
        elif self._to_rewrite:
            self._record(self._scaled)
        for key in self._scaled:
            await self._announce(key)

    def _still_valid(self, recorded: dict[str, _Target]) -> dict[str, _Target]:
        """Return the targets on record that hold and differ from the cluster file; the log has them, and why not."""
        valid = {}
        for key, target in recorded.items():
            if left_out := self._obsolete(key, target):
                log.warning("pool %s was scaled to %d, which is left out: %s", key, target.wanted, left_out)
            elif target.wanted != (replicas := self._pools[key].replicas):
                valid[key] = target
                text = "pool %s gets the %d instances that it was scaled to; the cluster file has %d"
                log.info(text, key, target.wanted, replicas)
        return valid

    def _obsolete(self, key: str, target: _Target) -> str:
        """Return why a target on record does not hold any more; '': it holds."""
        if (pool := self._pools.get(key)) is None:
            return "the cluster file has no such pool"
        if target.replicas != pool.replicas:
            return f"its replicas in the cluster file were {target.replicas} then, and are {pool.replicas}"
        if not pool.min_replicas <= target.wanted <= pool.most_replicas:
            return f"the cluster file gives it {pool.min_replicas} to {pool.most_replicas} instances"
        return ""

    def _recorded(self) -> dict[str, _Target] | None:
        """Return the targets on record by pool; None: they cannot be read.

        Bare numbers are left out, and the log says so: earlier versions recorded all pools once one was scaled.
        """
        try:
            found = json.loads(self._file.read_bytes())
            try:
                targets = msgspec.convert(found, dict[str, int | _Target])
            except msgspec.ValidationError as error:
                raise ValueError("expected the number of instances of each pool") from error
        except ValueError as error:
            log.warning("%s: %s; pools get the sizes of the cluster file", self._file, why_unusable(error))
            return None
        if bare := [f"{key}: {one}" for key, one in targets.items() if isinstance(one, int)]:
            text = "%s: an earlier version has recorded %s, scaled or not; they get the sizes of the cluster file"
            log.warning(text, self._file, ", ".join(bare))
        return {key: one for key, one in targets.items() if isinstance(one, _Target)}

    async def returned(self, service: str) -> None:
        """Send a restarted service the targets of its site; it has adopted the instances that it found."""
        for key, pool in self._pools_of(service).items():
            await self.services.scale(self.services.site_of(service), pool, self._wanted[key])

    def _pools_of(self, service: str) -> dict[str, str]:
        """Return the pools of a service's site: their own names by their full ones."""
        site = self.services.site_of(service)
        return {key: pool.name for key, pool in self._pools.items() if key == f"{site}/{pool.name}"}

    # -- present instances

    def fleet_changed(self, service: str, report: FleetChanged) -> None:
        """Record a service's report on its instances."""
        now, before = time.time(), set(self._living())
        for key, pool in self._pools_of(service).items():
            self._instances[key] = {name: one.life for name, one in report.instances.items() if one.pool == pool}
        self._dead -= report.instances.keys()
        dead = {name for name, one in report.instances.items() if one.for_good and one.life == "dead"}
        self._buried -= report.instances.keys() - dead
        self._dead |= dead
        self.services.fleet_changed(service, report.fleet)
        self.spending.change(time.monotonic(), self._prices())
        lives = {name: life for some in self._instances.values() for name, life in some.items()}
        self.coming += [Coming(name, now) for name in sorted(lives.keys() - before)]
        for one in self.coming:
            if one.ready_at is None and lives.get(one.instance) == "ready":
                one.ready_at = now
        self.times.set_instances((name for name, life in lives.items() if life == "ready"), now)

    def sample_came(self, sample: Sample, now: float) -> None:
        """Record a finished sample, which may be the first of an added instance."""
        for one in self.coming:
            if one.instance == sample.instance and one.ready_at is not None and one.first_sample_at is None:
                one.first_sample_at = now

    def _living(self) -> list[str]:
        return [name for some in self._instances.values() for name in some]

    def _ready(self) -> dict[str, int]:
        """Return the number of instances of each pool that may get requests."""
        return {key: sum(life == "ready" for life in self._instances[key].values()) for key in self._pools}

    def _prices(self) -> dict[tuple[str, str], float]:
        """Return the prices per hour of all processes that have one, including those that start or leave."""
        return self._fixed_prices | {
            (key.partition("/")[0], name): price
            for key, some in self._instances.items()
            if (price := self._pools[key].price_per_hour)
            for name in some
        }

    def roles(self) -> dict[str, str]:
        """Return the role of every process, by name."""
        return self._names | dict.fromkeys(self._living(), "instance")

    def status(self) -> dict[str, Any]:
        """Return the scaling part of the run's status (`run_dir/status.py` ScalingStatus)."""
        return {
            "wanted": self._wanted,
            "ready": self._ready(),
            "there": {key: len(some) for key, some in self._instances.items()},
            "dead": {key: sorted(self._dead & some.keys()) for key, some in self._instances.items()},
            "coming": [asdict(one) for one in list(self.coming)[-8:]],
            "note": self.elasticity.note if self.elasticity is not None else "",
        }

    # -- the run's own elasticity

    async def step_done(self, batch: StepBatch, times: Interval) -> None:
        """Apply the change chosen since the previous step, and start the next choice in a thread."""
        if self.elasticity is None:
            return
        change = await self._choosing if self._choosing is not None else None
        self._choosing = None
        for service in self.services.excluded:
            for key in self._pools_of(service):
                self.elasticity.leave_out(key)
        if change is not None and change is self.elasticity.waiting and self._wanted[change.pool] == change.before:
            log.info("elasticity: %s", change.why)
            await self._scale(change.pool, change.after)
        self._kinds |= {pool: one for one in self.services.fleet() if (pool := self._pool_of(one.name)) is not None}
        replicas = {key: count for key, count in self._ready().items() if key in self.elasticity.limits}
        await self._give_up(replicas, time.monotonic())
        if any(count != self._wanted[key] for key, count in replicas.items()):
            return  # a change is in flight
        if (waiting := self.elasticity.waiting) is not None:
            if replicas[waiting.pool] == waiting.before:
                self.elasticity.failed()  # the operator has changed the pool back
            else:
                self.elasticity.changed(replicas)
        groups, kinds = group_lengths(batch), dict(self._kinds)
        policy = policy_factory(self.run, self.services.train_tokens_s)

        def predict(counts: Mapping[str, int]) -> float:
            return generation_time(groups, fleet_of(kinds, counts), policy)

        choose = functools.partial(self.elasticity.step_done, times.generate_s, times.train_s, replicas, predict)
        self._choosing = asyncio.ensure_future(asyncio.to_thread(choose))

    async def _give_up(self, ready: Mapping[str, int], now: float) -> None:
        """Lower the targets of pools by instances that will not come, so that the rule goes on.

        These are the ones that are dead for good. In a pool that has fallen short for too long it is the last one, the
        first to leave, unless that is there.
        """
        for key, count in ready.items():
            wanted, some = self._wanted[key], self._instances[key]
            dead = self._dead & some.keys()
            lost = len(dead - self._buried)
            self._buried |= dead
            if count >= wanted:
                self._short_since.pop(key, None)
                continue
            if self._short_since.get(key, (0, 0.0))[0] != wanted:
                self._short_since[key] = wanted, now
            if not lost and count and now - self._short_since[key][1] > self._patience_s:
                staying = [name for name, life in some.items() if name not in dead and life != "draining"]
                last = max(staying, key=lambda name: int(name.rpartition("-")[2]), default="")
                lost = int(len(staying) < wanted or some[last] != "ready")
            if lost := min(lost, wanted):
                log.warning("%s gets no more than %d of %d instances: elasticity goes on", key, wanted - lost, wanted)
                await self._scale(key, wanted - lost)

    def _pool_of(self, instance: str) -> str | None:
        """Return the pool of an instance; None: its service has told of it in its hello, and not reported it yet."""
        return next((key for key, some in self._instances.items() if instance in some), None)
