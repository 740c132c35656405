"""Instances that fall silent: others go on with what they had, and no sample is made of two instances' tokens."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.dispatch.baselines import LeastLoaded
from scheduler.dispatch.policy import REGULAR
from streamrl.generation.site.dispatcher import Dispatcher
from streamrl.generation.site.token_journal import TokenJournal
from streamrl.protocol.message import parse
from streamrl.protocol.samples import request_from_wire
from streamrl.protocol.site_instance import GenerateSample
from streamrl.rollouts.types import PartialSample
from streamrl.transport.wire import Arrays
from tests.generation.dispatching import dispatcher, part, requests


def test_what_a_silent_instance_had_goes_on_elsewhere_and_it_is_told_to_give_it_up() -> None:
    work, sent = dispatcher(LeastLoaded(), {})

    async def body() -> None:
        for name in ("a", "b"):
            await work.join(name, 4, None, REGULAR)
        await work.submit([(requests("g.0", "g.1", "g.2", "g.3"), None)])
        first, second = work.works_on("a")
        sent.clear()
        await work.hold("a", requeue=False, why="silent")
        assert await work.hand_over("a", lambda name: part(name, 3)) == []
        assert [(to, kind, b["sample_id"]) for to, kind, b, _ in sent] == [
            ("a", "release", first),
            ("a", "release", second),
            ("b", "generate", first),
            ("b", "generate", second),
        ]
        assert work.works_on("a") == [] and work.owes("a") == 2
        sent.clear()
        assert await work.released(part(first, 9), "a") is False  # it is back: others go on from what was known
        assert work.has("b", first) and not sent and work.owes("a") == 1
        await work.finished(second, 9, "a")  # it had that one ready all the time
        assert sent == [("b", "release", {"sample_id": second}, {})] and work.owes("a") == 0
        await work.released(part(second, 5), "b")
        assert second not in work.requests and not work.has("b", second)
        await work.unhold("a", "silent")
        sent.clear()
        await work.submit([(requests("h.0"), None)])
        assert [to for to, *_ in sent] == ["a"]

    asyncio.run(body())


class Playing:
    """An instance that handles what it is told in order, and only when it is its turn; every token is another."""

    def __init__(self, drawn: dict[int, tuple[int, ...]]) -> None:
        self.told: list[tuple[str, str, list[int]]] = []
        self.running: dict[str, list[int]] = {}
        self.drawn = drawn

    def draw(self) -> None:
        for tokens in self.running.values():
            token = len(self.drawn)
            self.drawn[token] = tuple(tokens)
            tokens.append(token)


NAMES = ("a", "b", "c")
EVENTS = ("handle", "draw", "tell", "listen", "end", "silent", "back", "dies")


def sequences() -> st.SearchStrategy[list[tuple[str, str]]]:
    """What happens to which instance, 5 to 60 times; drawn as one list, since a draw by itself takes far longer."""
    one = st.sampled_from(list(itertools.product(EVENTS, NAMES)))
    return st.integers(5, 60).flatmap(lambda count: st.lists(one, min_size=count, max_size=count))


@settings(max_examples=200)
@given(sequences())
def test_no_sample_is_made_of_two_instances_tokens_whoever_falls_silent_and_comes_back(
    events: list[tuple[str, str]],
) -> None:
    """A service, its journal, and instances that stand still, speak late, die or end their requests, in any order."""
    drawn: dict[int, tuple[int, ...]] = {}
    playing = {name: Playing(drawn) for name in NAMES}

    async def send(instance: str, kind: str, body: dict[str, Any], arrays: Arrays) -> None:
        kept = request_from_wire(parse(GenerateSample, body), arrays).kept if kind == "generate" else None
        tokens = kept.completion_tokens.tolist() if kept is not None else []
        playing[instance].told.append((kind, body["sample_id"], tokens))

    def made(sample_id: str, tokens: list[int], start: int = 0) -> PartialSample:
        ids = np.asarray(tokens[start:], np.int32)
        return PartialSample(sample_id, ids, ids.astype(np.float32), np.zeros(len(ids), np.int32), 1.0, 2.0)

    def whole(tokens: list[int]) -> None:
        assert all(drawn[token] == tuple(tokens[:n]) for n, token in enumerate(tokens))

    async def body() -> None:
        work = Dispatcher(LeastLoaded(), send, lambda *_: 0)
        said: dict[str, list[tuple[str, str, list[int], int]]] = {name: [] for name in NAMES}
        known: dict[str, int] = {}
        finished: set[str] = set()
        silent: set[str] = set()
        with tempfile.TemporaryDirectory() as folder:
            journal = TokenJournal(Path(folder) / "journal")
            for name in NAMES:
                await work.join(name, 3, None, REGULAR)
            everything = requests(*(f"g.{n}" for n in range(6)))
            await work.submit([(everything, None)])

            def handle(name: str) -> None:
                one = playing[name]
                for kind, sample_id, tokens in one.told:
                    if kind == "generate":
                        assert sample_id not in one.running
                        one.running[sample_id] = list(tokens)
                        known[name + sample_id] = len(tokens)
                    elif (had := one.running.pop(sample_id, None)) is not None:
                        said[name].append(("released", sample_id, had, 0))
                one.told.clear()

            async def listen(name: str) -> None:
                """As `GenerationService._from_instances` does."""
                while said[name]:
                    kind, sample_id, tokens, start = said[name].pop(0)
                    if kind == "sample":
                        whole(tokens)
                        journal.forget([sample_id])
                        await work.finished(sample_id, len(tokens), name)
                        finished.add(sample_id)
                    elif kind == "released":
                        if work.has(name, sample_id):
                            journal.add(0, made(sample_id, tokens))
                        await work.released(made(sample_id, tokens), name)
                    elif work.has(name, sample_id):
                        journal.add(start, made(sample_id, tokens, start))

            def end_one(name: str) -> None:
                if running := sorted(playing[name].running):
                    sample_id = running[0]
                    said[name].append(("sample", sample_id, playing[name].running.pop(sample_id), 0))

            async def back(name: str) -> None:
                if name in silent and not work.owes(name):
                    silent.discard(name)
                    await work.unhold(name, "silent")

            for event, name in events:
                match event:
                    case "handle":
                        handle(name)
                    case "draw":
                        playing[name].draw()
                    case "tell":
                        for sample_id, tokens in playing[name].running.items():
                            start = known[name + sample_id]
                            said[name].append(("progress", sample_id, list(tokens), start))
                            known[name + sample_id] = len(tokens)
                    case "listen":
                        await listen(name)
                    case "end":
                        end_one(name)
                    case "silent" if name not in silent and len(silent) < 2:
                        silent.add(name)
                        await work.hold(name, requeue=False, why="silent")
                        await work.hand_over(name, journal.kept)
                    case "back":
                        await back(name)
                    case "dies":
                        playing[name], said[name] = Playing(drawn), []
                        silent.discard(name)
                        await work.lost(name, journal.kept)
                        await work.join(name, 3, None, REGULAR)
                for sample_id in work.requests:
                    if (kept := journal.kept(sample_id)) is not None:
                        whole(kept.completion_tokens.tolist())
            for _ in range(4 * len(everything)):  # all are there again: everything ends
                for name in NAMES:
                    handle(name)
                    await listen(name)
                    await back(name)
                    end_one(name)
            assert finished == {request.sample_id for request in everything}
            assert not work.requests and all(journal.kept(name) is None for name in finished)
            journal.close()

    asyncio.run(body())
