"""Variables with which no client asks a proxy for this machine."""

from __future__ import annotations

import urllib.request

import pytest

from streamrl.runtime.no_proxy import without_proxy

NEAR = "127.0.0.1,localhost"


@pytest.mark.parametrize(
    ("given", "upper", "lower"),
    [
        ({}, None, None),
        ({"NO_PROXY": "a"}, "a", None),
        ({"HTTP_PROXY": ""}, None, None),
        ({"HTTP_PROXY": "http://p"}, NEAR, NEAR),
        ({"all_proxy": "http://p", "no_proxy": " a, localhost ,"}, "a,localhost,127.0.0.1", "a,localhost,127.0.0.1"),
        ({"http_proxy": "http://p", "NO_PROXY": "*"}, "*", None),
        ({"https_proxy": "http://p", "NO_PROXY": "a", "no_proxy": "b"}, f"a,{NEAR}", f"b,{NEAR}"),
    ],
)
def test_this_machine_is_added_to_what_needs_no_proxy_where_there_is_a_proxy(
    given: dict[str, str], upper: str | None, lower: str | None
) -> None:
    made = without_proxy({"PATH": "/bin", **given})
    assert (made.pop("NO_PROXY", None), made.pop("no_proxy", None)) == (upper, lower)
    kept = {name: value for name, value in given.items() if name.lower() != "no_proxy"}
    assert made == {"PATH": "/bin", **kept}


def test_python_asks_no_proxy_then(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in without_proxy({"http_proxy": "http://p"}).items():
        monkeypatch.setenv(name, value)
    assert urllib.request.proxy_bypass_environment("127.0.0.1:8000")
    assert not urllib.request.proxy_bypass_environment("example.org")
