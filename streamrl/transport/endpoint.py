"""ZeroMQ endpoints: a `Hub` (ROUTER, binds) that many `Link`s (DEALER, connect) talk to.

Both offer reliable messages with credits and acknowledgements (`delivery.py`, `flow.py`), and heartbeats that carry the
peer's state and compare the clocks (`clock.py`). `receive()` returns a message as a `Delivery`; its handler calls
`ack()` once the message is committed.

The endpoints handle these kinds themselves: hello, welcome, refused, unknown, heartbeat, ack, bye. All others go to the
owner.

    link -> hello {name, role, meta, begun, first} hub -> welcome {hub}, or refused {hub, reason}
    link -> heartbeat {..., clock: {sent}, first}  hub -> heartbeat {..., clock: {sent, hub}}
    either -> ack {n: number, s: session that sent it}
    hub -> unknown {}                              to a connection that has not said hello: the link says hello (again)

`first` is the number of the link's first message that is not acknowledged, `begun` the unix time at which its process
made it.
"""

from streamrl.transport.endpoint_base import Delivery, PeerLost, Refused, Speaker
from streamrl.transport.flow import Flow
from streamrl.transport.hub import Hub
from streamrl.transport.link import Link
from streamrl.transport.peer import Peer

__all__ = ["Delivery", "Flow", "Hub", "Link", "Peer", "PeerLost", "Refused", "Speaker"]
