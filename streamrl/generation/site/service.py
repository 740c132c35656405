"""The generation service of a site: dispatches requests to instances, returns finished samples, brings in weights.

controller   - generate, park, resume, use ->   service   - generate, release ->   instances
             <- samples, parked -                          <- sample, released -
             - weights ->                    (relay)       - apply_weights ->
             - sleep ->                                    - sleep ->
             - scale ->                                    - retire ->
             <- fleet -
             - finish ->

                                                service   - run_episode, turn_done ->   agents
                                                          <- order_turn, episode_done -

A service of another site reaches the controller over a link: samples go over it in batches (`uplink.py`), and all
times are converted to the controller's clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from scheduler.dispatch.registry import make_policy, objective_of, policy_for
from streamrl.errors import RestartNeeded, RunFailed
from streamrl.generation.site.dispatcher import Dispatcher
from streamrl.generation.site.ended_samples import in_home_time, readable
from streamrl.generation.site.fleet import SiteFleet
from streamrl.generation.site.pushed_weights import PushedWeights
from streamrl.generation.site.reports import Reports
from streamrl.generation.site.site_episodes import AnsweredTurn, PrefixCache, RequestedTurn, SiteEpisodes, is_turn
from streamrl.generation.site.site_journals import SiteJournals
from streamrl.generation.site.site_state import SiteState
from streamrl.generation.site.site_weights import SiteWeights
from streamrl.generation.site.token_journal import TokenJournal
from streamrl.generation.site.turn_journal import TurnJournal
from streamrl.generation.site.uplink import make_uplink
from streamrl.generation.site.version_room import VersionRoom
from streamrl.generation.site.whole_orders import WholeOrder
from streamrl.protocol import controller_site, site_agents, site_instance
from streamrl.protocol.instance_reports import read_report, wrong_with_hello
from streamrl.protocol.message import MessageReader, TypedMessage, body_of, wire
from streamrl.protocol.samples import (
    UNREADABLE,
    GeneratedTokens,
    IncomingGroup,
    fleet_to_wire,
    groups_from_wire,
    parts_from_wire,
)
from streamrl.protocol.speakers import RIGHTS
from streamrl.rollouts.types import PartialSample
from streamrl.run_dir import layout
from streamrl.run_dir.site_status import write_site_end
from streamrl.run_dir.start_stages import READY, waiting_for
from streamrl.runtime.inside_keys import inside_admission, inside_roles
from streamrl.runtime.process_context import RoleContext
from streamrl.runtime.site_connections import CONTROLLER, connect_home, to_home
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Delivery, Hub, PeerLost
from streamrl.transport.wire import Arrays

log = logging.getLogger(__name__)

TO_AN_INSTANCE = 100_000
"""Messages that may be in flight to one instance.

Its slots are the actual limit: a send that waited for credits of a silent instance would hold up all others."""
RESTARTED = "the controller was restarted"


class GenerationService:
    """The service of one site: connects the controller, the dispatcher, the instances and the weight relay."""

    def __init__(self, context: RoleContext) -> None:
        self.context = context
        self.site = context.site
        self.limits = context.run.deadlines
        self.waits = WaitRegistry(context.name)
        self.hub = Hub(context.name, self.waits, flow=replace(context.local_flow, credits=TO_AN_INSTANCE))
        run = context.run
        schedule = run.schedule.name
        policy = make_policy(
            policy_for(schedule, run.dispatch.policy),
            run.sampling.max_tokens,
            run.batch.samples_per_prompt,
            objective_of(schedule),
        )
        self._orphaned = asyncio.Event()
        self.round = 0
        """The newest round that the controller has announced."""
        self._groups: WholeOrder[IncomingGroup] = WholeOrder()
        self._parking: WholeOrder[str] = WholeOrder()
        self._resuming: WholeOrder[str] = WholeOrder()
        self.journal = TokenJournal(context.run_dir / layout.TOKEN_JOURNAL)
        self.dispatcher = Dispatcher(policy, self._to_instance, self._produced)
        self.hub.reads = MessageReader(RIGHTS["service"])
        roles = inside_roles(context.cluster, run, context.site)
        self.hub.admit_inside = inside_admission(roles, "service", wrong_with_hello)
        self.hub.read_state = read_report
        self.controller = to_home(context, "service", self.waits)
        self.controller.reads = MessageReader(controller_site.FROM_CONTROLLER)
        self.controller.on_new_hub = self._controller_restarted
        self.uplink = make_uplink(context, self.controller)
        self.reports = Reports(self.controller)
        self.weights = SiteWeights(context, self.waits)
        self.fleet = SiteFleet(
            *(context, self.hub, self.dispatcher, self.waits, self.journal),
            *(self.weights.ensure, self._fleet_changed, self._tell_parked),
        )
        self.room = VersionRoom(self.weights, self.fleet.weights, self.limits, self.waits)
        self.controller.reports += [self.hub, *self.weights.endpoints]
        self.pushed = PushedWeights(
            self.fleet, self.fleet.weights, self.reports.put, self._pushed, self.controller.clock.to_hub_time
        )
        keeps_kv = run.schedule.on_update == "keep_kv"
        turns = TurnJournal(context.run_dir / layout.TURN_JOURNAL) if run.agent_tasks else TurnJournal()
        self.journals = SiteJournals(self.journal, turns, run.drawn_with)
        self.episodes = SiteEpisodes(
            *(self.site, run.model.max_context, run.sampling.max_tokens, self._prefix_cache, keeps_kv), journal=turns
        )
        self.agents = f"agents-{self.site}"
        """Name of the process that leads the site's episodes, in runs that have some."""
        self.hub.forwards_hellos = True
        self.site_state = SiteState(
            *(context, self.hub, self.dispatcher, self.fleet, self.weights, self.uplink, self.agents)
        )

    async def run(self) -> None:
        """Serve until the run is over (at the trainer's site until the process is ended).

        Raises:
            PeerLost: an instance, the controller or the publisher fell silent.
            Refused: the trainer's site refuses this one.
            RunFailed: the run has ended with an error.
            RestartNeeded: the controller was restarted: it may have gone back to a checkpoint, and issues all work
                again.
        """
        async with asyncio.TaskGroup() as tasks:
            status = tasks.create_task(self.site_state.keep_written()) if self.context.remote else None
            await self._serve()
            if status is not None:
                status.cancel()

    async def _serve(self) -> None:
        self.hub.bind(self.context.addresses.services[self.site], self.context.inside_server_security())
        await self.fleet.open()
        self.controller.meta |= {
            "fleet": fleet_to_wire(self.fleet.instances()),
            "passes_weights_on": self.weights.passes_on,
        }
        self.controller.state = self.site_state.heartbeat
        try:
            self.context.say(waiting_for(["the controller"]))
            await connect_home(self.context, self.controller, CONTROLLER, self.context.addresses.controller)
            self.context.say(waiting_for(["the trainer"]))
            await self.weights.connect()
            self.context.say(READY)
            if not self.context.run.weights.path.fetched:
                await self._fleet_changed()  # an earlier service's instances wait for the trainer to push weights
            async with asyncio.TaskGroup() as tasks:
                beside = [self._from_instances(), self.uplink.run(), self.reports.run(), self._throttle()]
                beside += [
                    self.weights.serve(),
                    self.fleet.run(),
                    self.journals.keep_written(),
                    self._end_if_orphaned(),
                ]
                self.site_state.state = "serving"
                running = [tasks.create_task(work) for work in beside]
                await self._from_controller(tasks)
                for task in running:
                    task.cancel()
        finally:
            await self.controller.close()
            await self.weights.close()
            await self.hub.close()
            self.journals.close()

    async def _throttle(self) -> None:
        """Throttle dispatch while finished samples do not leave fast enough."""
        while True:
            await self.dispatcher.throttle(await self.uplink.changed())

    async def _from_controller(self, tasks: asyncio.TaskGroup) -> None:
        """Carry out the controller's commands until the run is over.

        Raises:
            RunFailed: the run ended with an error.
        """
        while True:
            try:
                delivery = await self.controller.receive()
            except PeerLost as error:
                if not self.context.remote:
                    raise
                waiting = f"{self.uplink.backlog_samples} finished samples wait here for it"
                over = "if `streamrl status` says at the trainer's site that the run is done, it lacks nothing"
                raise PeerLost(f"{error}; {waiting}; {over}") from error
            match delivery.body:
                case controller_site.Finish() as end:
                    delivery.ack()
                    self.site_state.state = end.state
                    if self.context.remote:
                        write_site_end(self.context.run_dir, self.site_state.status())
                    if end.state != "done":
                        why = end.error or f"{end.state} at its trainer's site"
                        raise RunFailed(f"the run has ended: {why}")
                    return
                case controller_site.Generate() as order:
                    self.journals.heard_of(order.newest)
                    groups = groups_from_wire(order, delivery.arrays)
                    if order.train_tokens_s is not None:
                        self.dispatcher.policy.training_at(order.train_tokens_s)
                    await self._tell_agents(self.episodes.begin(groups))
                    completions = [group for group in groups if group.episode is None]
                    if (whole := self._groups.with_part(completions, order.more)) is not None:
                        await self._submit(whole)
                case controller_site.Park() as order:
                    if (named := self._parking.with_part(order.sample_ids, order.more)) is not None:
                        await self.dispatcher.park(named)
                case controller_site.Resume() as order:
                    self.round = order.round
                    if (named := self._resuming.with_part(order.sample_ids, order.more)) is not None:
                        await self.dispatcher.resume(named, order.budget)
                case controller_site.Use() as order:
                    await self.dispatcher.use(order.instances)
                case controller_site.ScalePools() as order:
                    await self.fleet.scale(order.replicas, order.replace_dead)
                case controller_site.Sleep():
                    tasks.create_task(self._sleep())
                case controller_site.LoadWeights() as order:
                    self.journals.heard_of(order.number)
                    tasks.create_task(self._update_weights(order))
                case controller_site.WeightCall() as call:
                    tasks.create_task(self.pushed.carry_out(call))
            delivery.ack()

    async def _submit(self, groups: Iterable[IncomingGroup]) -> None:
        """Place groups of single completions together."""
        await self.dispatcher.submit(
            [(self.journals.continued(group.requests, group.oldest), group.forecast) for group in groups]
        )

    async def _to_instance(self, name: str, kind: str, body: dict[str, Any], arrays: Arrays) -> None:
        await self.fleet.send(name, kind, body, arrays)

    def _tell_given_back(self, partial: PartialSample, instance: str) -> None:
        """Report to the controller for how long an instance had a request; it knows nothing of single turns."""
        if not is_turn(partial.sample_id):
            began, home = partial.t_last_part or partial.t_dispatched, self.controller.clock.to_hub_time
            ended = max(began, time.time())  # the clock may have been set back
            times = {"started": home(began), "ended": home(ended)}
            self.reports.put(controller_site.GivenBack(sample_id=partial.sample_id, instance=instance, **times))

    async def _tell_parked(self, partial: PartialSample, number: int | None = None) -> None:
        """Report to the controller that a request has used up its token budget in a round; None: in the newest."""
        number = self.round if number is None else number
        tokens = len(partial.completion_tokens)
        self.reports.put(controller_site.Parked(sample_id=partial.sample_id, tokens=tokens, round=number))

    def _controller_restarted(self) -> None:
        """End the link: a new controller is not owed what is not acknowledged, and would count it as foreign.

        Raises:
            RestartNeeded: always.
        """
        self._orphaned.set()
        raise RestartNeeded(RESTARTED)

    async def _end_if_orphaned(self) -> None:
        """End the service at once if the controller was restarted; what the link raises may wait to be received."""
        await self._orphaned.wait()
        raise RestartNeeded(RESTARTED)

    async def _fleet_changed(self) -> None:
        """Report the instances to the controller, now and in the hello of every later connection."""
        fleet = fleet_to_wire(self.fleet.instances())
        self.controller.meta["fleet"] = fleet
        instances = {name: controller_site.InstanceState(**values) for name, values in self.fleet.states().items()}
        self.reports.put(controller_site.FleetChanged(fleet=fleet, instances=instances))

    def _produced(self, instance: str, sample_id: str) -> float:
        """Return the tokens that the instance's last heartbeat reported for a sample, at most a second old."""
        if instance not in self.hub.peers:
            return 0.0
        return float(self.hub.peers[instance].state.get("produced", {}).get(sample_id, 0))

    async def _from_instances(self) -> None:
        while True:
            delivery = await self.hub.receive()
            match delivery.body:
                case site_instance.FinishedSample() | site_instance.ReleasedSample() | site_instance.Progress() as made:
                    await self._made(made, delivery)
                case site_instance.InstanceAsleep() | site_instance.WeightsTaken():
                    delivery.ack()
                    self.fleet.answers.take(delivery)
                case site_instance.WeightsApplied() | site_instance.WeightsMissed():
                    delivery.ack()
                    await self.fleet.weights.on_message(delivery)
                case controller_site.CanaryMeasured() as canary:
                    self.reports.put(canary, delivery.arrays, delivery.ack)
                case site_agents.OrderTurn() as turn:
                    await self._order_turn(turn, delivery)
                case site_agents.EpisodeDone() as episode:
                    await self._episode_done(episode, delivery)
                case _ if delivery.kind == "hello":
                    if delivery.peer == self.agents:
                        await self._new_agents()
                case _ if delivery.kind == "bye" and delivery.peer == self.agents:
                    pass  # its launcher restarts it, or the run is over
                case _ if delivery.kind == "bye" and not self.fleet.answers.take(delivery):
                    # the instance left without an order to
                    log.warning("%s has closed its connection", delivery.peer)  # the launcher reports why

    async def _made(self, message: GeneratedTokens, delivery: Delivery) -> None:
        """Take over tokens that an instance has produced."""
        try:
            parts = parts_from_wire(message, delivery.arrays)
        except UNREADABLE as error:
            await self._distrust(delivery, f"cannot be read: {error!r:.200}")
            return
        match message:
            case site_instance.FinishedSample() if is_turn(message.sample_id):
                await self._turn_done(message, delivery)
            case site_instance.FinishedSample():
                await self._sample_done(message, delivery)
            case site_instance.ReleasedSample():
                await self._released(parts[0][1], delivery)
            case site_instance.Progress():
                for start, part in parts:
                    if self.dispatcher.has(delivery.peer, part.sample_id):  # else another instance continues it
                        self.journal.add(start, part)
                delivery.ack()

    async def _distrust(self, delivery: Delivery, why: str) -> None:
        """Restart an instance whose message makes no sense.

        It no longer works on what it believes to have sent, so others continue its requests from what is known.
        """
        self.hub.refusals.count("unreadable", delivery.peer, f"{delivery.kind!r} {why}")
        delivery.ack()
        if (life := self.fleet.lives.get(delivery.peer)) is not None:
            await self.fleet.died(life, f"{delivery.peer} sent a message {delivery.kind!r} that {why}")

    async def _released(self, partial: PartialSample, delivery: Delivery) -> None:
        """Take back a request that its instance has released; one that belongs to another by now is ignored."""
        if not self.dispatcher.may_return(delivery.peer, partial):
            await self._distrust(delivery, f"returns {partial.sample_id!r:.99}, which nobody ordered")
            return
        if self.dispatcher.has(delivery.peer, partial.sample_id):
            self.journal.add(0, partial)
            self._tell_given_back(partial, delivery.peer)
        number = self.round  # the next may begin while the dispatcher starts other requests
        if await self.dispatcher.released(partial, delivery.peer):
            await self._tell_parked(partial, number)
        delivery.ack()

    async def _sample_done(self, sample: site_instance.FinishedSample, delivery: Delivery) -> None:
        """Send a finished sample to the controller; its instance and the journal keep it until it is committed."""

        def committed() -> None:
            self.journal.committed(sample.sample_id)
            delivery.ack()

        await self.uplink.put(
            body_of(in_home_time(sample, self.controller.clock.to_hub_time)), delivery.arrays, committed
        )
        self.journal.ended(sample.sample_id)
        await self.dispatcher.finished(sample.sample_id, len(delivery.arrays["completion_tokens"]), delivery.peer)

    # -- episodes

    async def _tell_agents(self, orders: Iterable[TypedMessage], arrays: Arrays | None = None) -> None:
        """Send commands to the agents process; one that is away gets its episodes when it says hello."""
        with contextlib.suppress(KeyError):
            for order in orders:
                await self.hub.send(self.agents, *wire(order), arrays)

    async def _new_agents(self) -> None:
        """Give a new agents process all open episodes."""
        await self._tell_agents(self.episodes.restart())

    async def _abandon(self, turns: list[str]) -> None:
        await self.dispatcher.abandon(turns)
        self.journal.forget(turns)

    async def _order_turn(self, turn: site_agents.OrderTurn, delivery: Delivery) -> None:
        """Give a turn to the dispatcher, unless its episode has it from before."""
        found = self.episodes.turn(turn, delivery.arrays, self.journals.newest)
        delivery.ack()
        if isinstance(found, str):
            self.hub.refusals.count("not its own", delivery.peer, found)
            return
        if isinstance(found, AnsweredTurn):
            await self._tell_agents([found.answer], found.arrays)
        if not isinstance(found, RequestedTurn):
            return
        (request,) = self.journals.continued([found.request])
        await self.dispatcher.submit_turn(request, found.forecast, found.home, found.cached)

    def _prefix_cache(self, instance: str) -> PrefixCache | None:
        """Return the identity of an instance's prefix cache; None: it is gone, or caches nothing."""
        peer, version = self.hub.peers.get(instance), self.weights.version
        if peer is None or version is None or not peer.meta.get("caches_prefixes"):
            return None
        return int(peer.meta["process"]), version

    async def _turn_done(self, sample: site_instance.FinishedSample, delivery: Delivery) -> None:
        """Return a finished turn to the agents process, whose session keeps it."""
        answer = self.episodes.turn_done(sample, delivery.arrays)
        delivery.ack()
        self.journal.forget([sample.sample_id])
        await self.dispatcher.finished(sample.sample_id, len(delivery.arrays["completion_tokens"]), delivery.peer)
        if answer is not None:
            await self._tell_agents([answer], delivery.arrays)

    async def _episode_done(self, episode: site_agents.EpisodeDone, delivery: Delivery) -> None:
        """Send an ended episode to the controller; the agents process keeps it until it is committed there."""
        sample = self.episodes.end(episode)
        if isinstance(sample, str):
            self.hub.refusals.count("not its own", delivery.peer, sample)
            delivery.ack()
            return
        sample, arrays, wrong = readable(sample, delivery.arrays, delivery.peer)
        if wrong:
            self.hub.refusals.count("unreadable", delivery.peer, wrong)
        await self._abandon(self.episodes.abandon(episode.sample_id))

        def committed() -> None:
            self.episodes.committed(episode.sample_id)
            delivery.ack()

        await self.uplink.put(body_of(in_home_time(sample, self.controller.clock.to_hub_time)), arrays, committed)

    async def _update_weights(self, order: controller_site.LoadWeights) -> None:
        """Fetch a version once and have every instance of the site load it."""
        started, began, before = time.time(), time.monotonic(), self.weights.bytes_received
        version, source = await self.room.fetch(order)
        fetched = started + time.monotonic() - began  # the clock may have been set back
        loaded = await self.fleet.weights.update(version)
        home = self.controller.clock.to_hub_time
        self.room.tidy()
        report = controller_site.WeightsReady(
            number=version.number,
            source=source,
            transfer_s=self.weights.last_s,
            bytes=self.weights.bytes_received - before,
            started=home(started),
            fetched=home(fetched),
            applied={name: (home(span.started), home(span.finished)) for name, span in loaded.items()},
        )
        self.reports.put(report)

    async def _sleep(self) -> None:
        """Have all instances free their devices for training; new weights wake them up."""
        await self.fleet.weights.sleep()
        self.reports.put(controller_site.SiteAsleep())

    def _pushed(self, number: int) -> None:
        """Record that instances have loaded a version that the trainer has pushed to them."""
        self.weights.version = number
        self.journals.heard_of(number)
