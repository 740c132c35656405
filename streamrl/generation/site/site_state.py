"""What a site's service says of itself: in each heartbeat to the controller, and in `site.json`."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from streamrl.generation.site.dispatcher import Dispatcher
from streamrl.generation.site.fleet import SiteFleet
from streamrl.generation.site.instance_life import Life
from streamrl.generation.site.site_weights import SiteWeights
from streamrl.generation.site.uplink import Uplink
from streamrl.protocol.heartbeats import MOST, passed_on
from streamrl.run_dir.site_status import STARTING, starting, touch_site, write_site
from streamrl.runtime.process_context import RoleContext
from streamrl.transport.endpoint import Hub

log = logging.getLogger(__name__)

TELL_EVERY_S = 1.0
SHOWN_OF_INSTANCES = ("state", "running", "tokens_per_s", "weight_version")


class SiteState:
    """The state of a site, gathered from the parts of its service when it is read."""

    def __init__(
        self,
        context: RoleContext,
        hub: Hub,
        dispatcher: Dispatcher,
        fleet: SiteFleet,
        weights: SiteWeights,
        uplink: Uplink,
        agents: str,
    ) -> None:
        """`agents` names the process that leads the site's episodes, in runs that have some."""
        self.state = STARTING
        """State in `site.json`: it starts, serves, or how the run has ended."""
        self._context, self._hub, self._agents = context, hub, agents
        self._dispatcher, self._fleet, self._weights, self._uplink = dispatcher, fleet, weights, uplink

    async def keep_written(self) -> None:
        """Write `site.json` once a second, by which this site's launcher sees that this process lives.

        A disk that is full ends nothing: what must last is at the trainer's site.
        """
        problem = ""
        while True:
            try:
                starts = self.state == STARTING
                write_site(self._context.run_dir, starting(self._context.site) if starts else self.status())
                problem = ""
            except OSError as error:
                if problem != (problem := error.strerror or str(error)):  # not the name of a temporary file
                    log.warning("cannot write this site's status: %s", problem)
                touch_site(self._context.run_dir)
            await asyncio.sleep(TELL_EVERY_S)

    def heartbeat(self) -> dict[str, Any]:
        """Return the state in a heartbeat to the controller."""
        requests = len(self._dispatcher.requests) - len(self._dispatcher.parked)
        waiting = self._dispatcher.policy.waiting
        return {
            "state": "dispatching" if requests else "idle",
            "waiting": waiting,
            "running": requests - waiting,
            "parked": len(self._dispatcher.parked),
            "moves": self._dispatcher.moves,
            "congested": self._uplink.congested,
            "uplink": self._uplink.state(),
            "weights_refetched": self._weights.corrupt,
            "controller_silent_s": self._uplink.link.silent_for if self._context.remote else None,
            "publisher_silent_s": self._weights.publisher_silent_s,
            "empty_connections": self._empty_connections,
            "instances": self._instances(),
            "agents": self._agents_state(),
        }

    def status(self) -> dict[str, Any]:
        """Return the contents of `site.json` (`run_dir/site_status.py`)."""
        uplink, clock = self._uplink, self._uplink.link.clock
        agents = self._agents_state().get(self._agents, {})
        saved = uplink.raw_bytes / uplink.sent_bytes if uplink.sent_bytes else None
        return {
            "site": self._context.site,
            "updated_at": time.time(),
            "state": self.state,
            "trainer_silent_s": self._uplink.link.silent_for,
            "publisher_silent_s": self._weights.publisher_silent_s,
            "empty_connections": self._empty_connections,
            "unresolved": self._uplink.link.unresolved or self._weights.home.link.unresolved,
            "rtt_ms": None if clock.rtt_s is None else clock.rtt_s * 1e3,
            "clock_offset_s": clock.offset_s,
            "weight_version": self._weights.version,
            "weight_bytes": self._weights.bytes_received,
            "samples_sent": uplink.samples,
            "samples_waiting": uplink.backlog_samples,
            "sample_bytes": uplink.sent_bytes,
            "compression": saved if uplink.choice.compressing else None,
            "congested": uplink.congested,
            "instances": {
                name: {key: state[key] for key in SHOWN_OF_INSTANCES if key in state}
                for name, state in self._instances().items()
            },
            "agents_silent_s": agents.get("silent_s"),
            "agents_session": agents.get("session", ""),
        }

    @property
    def _empty_connections(self) -> int:
        return max(link.empty_connections for link in (self._uplink.link, self._weights.home.link))

    def _instances(self) -> dict[str, dict[str, Any]]:
        """Return every instance's last heartbeat, as far as it is passed on: its requests' progress stays here."""
        states, of_fleet = {}, self._fleet.states()
        for name, life in self._fleet.lives.items():
            state = dict(self._hub.peers[name].state) if name in self._hub.peers else {}
            if state.get("busy_since"):
                since = self._uplink.link.clock.to_hub_time(state["busy_since"])
                state["busy_since"] = max(-MOST, min(since, MOST))
            if life.state is not Life.READY:
                state |= {"state": str(life.state), "detail": of_fleet[name]["detail"]}
                state["running"] = len(self._dispatcher.works_on(name))
            elif (factor := self._fleet.watch.slow.factors.get(name)) is not None:
                state["detail"] = f"{factor:.1f} times as slow as the others"
            elif note := self._fleet.curves.note(life.pool):
                state["detail"] = state.get("detail") or note
            states[name] = state
        return passed_on(states)

    def _agents_state(self) -> dict[str, dict[str, Any]]:
        """Return the agents process's last heartbeat, silence and session, by its name; {}: it has not connected."""
        if (peer := self._hub.peers.get(self._agents)) is None:
            return {}
        own = {"silent_s": self._hub.silent_for(peer.name), "session": peer.session}
        return passed_on({self._agents: peer.state | own})
