"""Servers of this machine are reached beside a proxy, and nothing else is."""

from __future__ import annotations

import pytest

from streamrl.runtime.proxies import beside_proxies

PROXY = {"HTTP_PROXY": "http://proxy:3128"}


@pytest.mark.parametrize("name", ["http_proxy", "HTTPS_PROXY", "all_proxy"])
def test_the_loopback_needs_no_proxy_where_there_is_one(name: str) -> None:
    given = {name: "http://proxy:3128", "HOME": "/home"}
    assert beside_proxies(given) == given | dict.fromkeys(["no_proxy", "NO_PROXY"], "127.0.0.1,localhost")


def test_without_a_proxy_nothing_changes() -> None:
    for given in ({"HOME": "/home"}, {"NO_PROXY": "here"}, {"HTTP_PROXY": ""}):
        assert beside_proxies(given) == given


def test_hosts_that_need_no_proxy_stay_and_hold_for_the_other_spelling_if_it_has_none() -> None:
    both = beside_proxies(PROXY | {"NO_PROXY": "here, .there,localhost", "no_proxy": "10.0.0.0/8"})
    assert both == PROXY | {"NO_PROXY": "here,.there,localhost,127.0.0.1", "no_proxy": "10.0.0.0/8,127.0.0.1,localhost"}
    one = beside_proxies(PROXY | {"NO_PROXY": "here"})
    assert one["no_proxy"] == one["NO_PROXY"] == "here,127.0.0.1,localhost"
    assert beside_proxies(PROXY | {"no_proxy": "*"})["no_proxy"] == "*"
