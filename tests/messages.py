"""Every message of the protocol, and generated bodies of them."""

from __future__ import annotations

import functools
import random
from types import ModuleType
from typing import Any

from msgspec import inspect

from streamrl.protocol import (
    controller_rewards,
    controller_site,
    controller_trainer,
    operator,
    site_agents,
    site_instance,
    weights,
)
from streamrl.protocol.message import TypedMessage, kind_of

EDGES = (controller_site, site_instance, site_agents, controller_trainer, controller_rewards, operator, weights)
"""Modules with the messages between two kinds of processes."""


type_of = functools.cache(inspect.type_info)
"""What `generated` needs to know of a message; looking through its annotations takes ten times as long as a body."""


def messages(edge: ModuleType) -> list[type[TypedMessage]]:
    """Return the messages that a module names, those that it imports included."""
    return [one for one in vars(edge).values() if isinstance(one, type) and issubclass(one, TypedMessage)]


def every_message() -> list[type[TypedMessage]]:
    """Return all messages, each once, in the order of their kinds."""
    found = {one for edge in EDGES for one in messages(edge)}
    return sorted(found, key=lambda one: (kind_of(one), one.__module__))


def generated(of: inspect.Type, dice: random.Random) -> Any:
    """Return a random value that fits a type, often one at its boundary."""
    match of:
        case inspect.IntType():
            return dice.choice([0, 1, -1, 2**40, dice.randrange(100)])
        case inspect.FloatType():
            return dice.choice([0.0, -1.5, 1e300, dice.random()])
        case inspect.StrType():
            return dice.choice(["", "trainer-0", "p-0.000", "\u0000", "x" * dice.randrange(200)])
        case inspect.BoolType():
            return dice.random() < 0.5
        case inspect.ListType(item_type=item):
            return [generated(item, dice) for _ in range(dice.randrange(3))]
        case inspect.TupleType(item_types=items):
            return [generated(item, dice) for item in items]
        case inspect.VarTupleType(item_type=item):
            return [generated(item, dice) for _ in range(dice.randrange(3))]
        case inspect.DictType(value_type=value):
            return {str(n): generated(value, dice) for n in range(dice.randrange(3))}
        case inspect.UnionType(types=types):
            return generated(dice.choice(types), dice)
        case inspect.LiteralType(values=values):
            return dice.choice(list(values))
        case inspect.EnumType(cls=kind):
            return dice.choice(list(kind)).value
        case inspect.StructType(fields=fields):
            return {field.encode_name: generated(field.type, dice) for field in fields}
    return None
