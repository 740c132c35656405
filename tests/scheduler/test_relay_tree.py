"""Every site gets its weights as soon as any tree of relays could bring them."""

from __future__ import annotations

import itertools
import random

import pytest

from scheduler.sites.relay_tree import RelayPath, relay_tree


def between(**values: tuple[float, float]) -> dict[frozenset[str], RelayPath]:
    return {frozenset(pair.split("_")): RelayPath(*value) for pair, value in values.items()}


PATHS = between(home_a=(10.0, 0.1), home_b=(1.0, 0.1), a_b=(8.0, 0.1))


def test_a_site_behind_a_thin_link_gets_weights_from_a_relay_that_is_nearer() -> None:
    assert relay_tree("home", ["a", "b"], PATHS, ["a", "b"], 100.0) == {"a": "home", "b": "a"}


def test_few_bytes_go_straight_because_round_trips_count() -> None:
    assert relay_tree("home", ["a", "b"], PATHS, ["a", "b"], 0.01) == {"a": "home", "b": "home"}


def test_a_site_that_cannot_relay_does_not() -> None:
    assert relay_tree("home", ["a", "b"], PATHS, [], 100.0) == {"a": "home", "b": "home"}


def test_equal_ways_take_the_shorter_one_and_the_same_every_time() -> None:
    paths = between(home_a=(1.0, 0.0), home_b=(1.0, 0.0), a_b=(1.0, 0.0))
    assert relay_tree("home", ["b", "a"], paths, ["a", "b"], 0.0) == {"a": "home", "b": "home"}


def test_a_site_without_a_way_is_named() -> None:
    with pytest.raises(ValueError, match="no way from home to b"):
        relay_tree("home", ["a", "b"], between(home_a=(1.0, 0.0), a_b=(1.0, 0.0)), [], 1.0)


@pytest.mark.parametrize("value", [(0.0, 0.0), (-1.0, 0.0), (1.0, -0.1), (float("nan"), 0.0)])
def test_an_impossible_relay_path_is_refused(value: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="positive bandwidth"):
        RelayPath(*value)


def arrival(site: str, parents: dict[str, str], paths: dict[frozenset[str], RelayPath], nbytes: float) -> float:
    total = 0.0
    while site in parents:
        total += paths[frozenset((site, parents[site]))].seconds(nbytes)
        site = parents[site]
    return total


@pytest.mark.parametrize("seed", range(20))
def test_no_other_tree_brings_any_site_its_weights_earlier(seed: int) -> None:
    draw = random.Random(seed)
    sites = ["a", "b", "c", "d"]
    paths = {frozenset(("home", site)): RelayPath(draw.uniform(0.1, 10), draw.uniform(0, 1)) for site in sites}
    for pair in itertools.combinations(sites, 2):
        if draw.random() < 0.7:
            paths[frozenset(pair)] = RelayPath(draw.uniform(0.1, 10), draw.uniform(0, 1))
    relays = [site for site in sites if draw.random() < 0.7]
    nbytes = draw.choice([0.1, 10.0])
    found = relay_tree("home", sites, paths, relays, nbytes)
    for site in sites:
        ways = [
            [*way, site]
            for count in range(len(sites))
            for way in itertools.permutations([s for s in relays if s != site], count)
        ]
        times = []
        for way in ways:
            hops = list(itertools.pairwise(["home", *way]))
            if all(frozenset(hop) in paths for hop in hops):
                times.append(sum(paths[frozenset(hop)].seconds(nbytes) for hop in hops))
        assert arrival(site, found, paths, nbytes) == pytest.approx(min(times))
