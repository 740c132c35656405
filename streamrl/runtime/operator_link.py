"""What a person's command asks of a running job: one message to its controller, one answer."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from streamrl.errors import RunFailed, UserError
from streamrl.protocol.message import MessageReader, TypedMessage, wire
from streamrl.protocol.operator import FROM_CONTROLLER
from streamrl.runtime.inside_keys import OPERATOR
from streamrl.runtime.process_context import RoleContext
from streamrl.runtime.site_connections import CONTROLLER
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Link

ANSWER_S = 15.0
"""Deadline of the controller's answer, in seconds."""


async def ask_controller(run_dir: Path, order: TypedMessage) -> TypedMessage:
    """Send a message of `protocol/operator.py` to the controller of a run and return its answer.

    Raises:
        UserError: the controller does not answer, or its keys are those of another launch or open to others.
    """
    name = f"{OPERATOR}-{os.getpid()}"
    link = Link(name, "operator", WaitRegistry("command"))
    link.reads = MessageReader(FROM_CONTROLLER)
    try:
        context = RoleContext.load(OPERATOR, "", run_dir, False)
        security = context.inside_client_security(CONTROLLER)
        await link.connect(context.addresses.controller, ANSWER_S, security, CONTROLLER)
        await link.send(*wire(order))
        async with link.waits.deadline("the controller's answer", ANSWER_S):
            delivery = await link.receive()
        delivery.ack()
        answer: TypedMessage = delivery.body
        return answer
    except (OSError, RunFailed) as error:
        raise UserError(f"{run_dir}: its controller does not answer: {error}") from error
    finally:
        with contextlib.suppress(RunFailed):
            await link.close()
