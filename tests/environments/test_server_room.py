"""How many episodes a process may have that starts a server for each, before the servers have grown."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from streamrl.environments.environment_process import EnvironmentProcess, MemoryUse
from streamrl.environments.server_room import MOST_KEPT, ServerRoom


def process(own: int, sizes: list[int], opened: int, reset: int, first_pid: int = 1) -> EnvironmentProcess:
    used = MemoryUse(own, dict(enumerate(sizes, first_pid)))
    names = [str(number) for number in range(opened)]
    return cast(
        EnvironmentProcess, cast(Any, SimpleNamespace(used=used, episodes=set(names), reset=set(names[:reset])))
    )


def test_one_episode_has_room_until_a_server_is_known() -> None:
    room = ServerRoom(1000)
    assert room.fits(process(0, [], 0, 0)) and not room.fits(process(0, [], 1, 0))
    room.learn(process(100, [20], 1, 0))  # it is still starting
    assert not room.known
    room.learn(process(100, [90], 1, 1))
    assert room.known
    assert room.fits(process(100, [90], 9, 1))  # 100 + 10 x 90
    assert not room.fits(process(100, [90], 10, 1))


def test_servers_count_with_what_they_use_or_will_use() -> None:
    room = ServerRoom(1000)
    room.learn(process(100, [90], 1, 1))
    starting = [90, 90, *[5] * 6]
    room.learn(process(100, starting, 8, 2))
    assert room.fits(process(100, starting, 9, 2)) and not room.fits(process(100, starting, 10, 2))
    hungry = [500, 90]
    assert room.fits(process(100, hungry, 4, 2)) and not room.fits(process(100, hungry, 5, 2))


def test_one_that_is_larger_than_others_keeps_none_out_once_others_are_known() -> None:
    room = ServerRoom(1000)
    room.learn(process(0, [600], 1, 1))
    assert not room.fits(process(0, [600], 1, 1))
    room.learn(process(0, [100, 110], 2, 2, first_pid=2))
    assert room.fits(process(0, [100, 110], 8, 2))
    for number in range(3, 3 + 2 * MOST_KEPT):
        room.learn(process(0, [50], 1, 1, first_pid=number))
    assert room.fits(process(0, [50], 19, 1)) and not room.fits(process(0, [50], 20, 1))


def test_servers_elsewhere_take_no_memory_here() -> None:
    room = ServerRoom(1000)
    room.learn(process(100, [], 1, 1))
    assert room.fits(process(100, [], 127, 127)) and not room.fits(process(1001, [], 1, 1))
