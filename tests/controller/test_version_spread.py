"""The spread of weight versions: one in flight to a site at a time, then the newest."""

from __future__ import annotations

from typing import Any

from streamrl.config.cluster import ClusterConfig
from streamrl.controller.version_spread import VersionSpread
from streamrl.protocol.controller_site import LoadWeights, WeightsReady

SITES = {"service-home": "home", "service-far": "far", "service-near": "near"}


def spread() -> VersionSpread:
    """Three sites, of which far and near are close to each other and far from home."""
    links = [("home", "far", 0.1), ("home", "near", 0.1), ("far", "near", 10)]
    cluster = ClusterConfig.model_validate(
        {
            "hardware": "cpu",
            "sites": {
                "home": {"port": 5600, "trainer": {}, "generation": [{}]},
                "far": {"port": 5700, "generation": [{}]},
                "near": {"port": 5800, "generation": [{}]},
            },
            "links": [{"between": [a, b], "bandwidth_gbit_s": rate, "rtt_ms": 30} for a, b, rate in links],
        }
    )
    return VersionSpread(SITES, cluster)


def announced(number: int) -> LoadWeights:
    return LoadWeights(number=number, content_hash="h", source=None)


def report(number: int, **changes: Any) -> WeightsReady:
    values: dict[str, Any] = {"source": None, "transfer_s": 1.0, "bytes": 10, "started": 0.0, "fetched": 1.0}
    return WeightsReady(number=number, applied={}, **(values | changes))


def test_a_site_takes_one_version_at_a_time_and_then_the_newest() -> None:
    versions = spread()
    assert versions.made(announced(0), SITES) == list(SITES)
    assert [versions.start(name, ()).number for name in SITES] == [0, 0, 0]
    assert versions.made(announced(1), SITES) == [] == versions.made(announced(2), SITES)
    assert versions.ready("service-far", report(0))
    assert versions.start("service-far", ()).number == 2
    assert not versions.ready("service-home", report(2))  # it has loaded the newest already
    assert (versions.version(["service-home"]), versions.version(["service-home", "service-far"])) == (2, 0)
    assert versions.made(announced(2), ["service-home"]) == []
    assert versions.newest == 2
    versions.delivered(3)
    assert versions.newest == 3 == versions.version([]), "no site is left that would have to serve it"


def test_a_relay_is_a_source_only_while_it_has_what_the_site_holds() -> None:
    versions = spread()
    for number in range(2):
        versions.made(announced(number), SITES)
        for name in SITES:
            versions.start(name, ())
            slow = 100.0 if name == "service-near" else 1.0  # so that a detour is worth it
            versions.ready(name, report(number, bytes=2_000_000, transfer_s=slow))
    versions.made(announced(2), SITES)
    assert versions.start("service-home", ()).source is None
    assert versions.start("service-far", ()).source is None  # nobody else is able
    assert versions.start("service-near", ["service-far"]).source == "far"
    versions.made(announced(3), SITES)
    assert versions.restarted("service-far") and versions.restarted("service-near")
    assert versions.start("service-near", ["service-far"]).source is None  # the other has forgotten its versions


def test_a_restarted_site_gets_its_first_weights_from_the_trainers_site() -> None:
    versions = spread()
    for number in range(2):
        versions.made(announced(number), SITES)
        for name in SITES:
            versions.start(name, ())
            slow = 100.0 if name == "service-near" else 1.0
            versions.ready(name, report(number, bytes=2_000_000, transfer_s=slow))
    assert versions.restarted("service-near")
    assert versions.start("service-near", ["service-far"]).source is None  # no delta leads from nothing
    versions.ready("service-near", report(1))
    versions.made(announced(2), SITES)
    assert versions.start("service-near", ["service-far"]).source == "far"


def test_a_site_that_is_not_used_is_waited_for_no_more() -> None:
    versions = spread()
    versions.made(announced(0), SITES)
    versions.start("service-far", ())
    versions.drop("service-far")
    versions.drop("service-near")
    assert (versions.in_flight, list(versions.queued)) == ({}, ["service-home"])


def test_without_a_version_a_restarted_site_gets_none() -> None:
    assert not spread().restarted("service-far")
