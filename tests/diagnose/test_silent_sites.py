"""Why a site is silent, as far as the trainer's site knows."""

from __future__ import annotations

from streamrl.diagnose.stuck import judge
from tests.diagnose.test_stuck import SAMPLES, facts, remote


def test_what_was_refused_from_a_silent_site_explains_its_silence() -> None:
    refused = {
        "protocol version": {"site b": 3, "site c": 1},
        "hello": {"service-b": 2},
        "unknown key": {"a stranger": 4},
        "malformed": {"site b": 9},
    }
    verdict = judge(facts(SAMPLES, processes=remote(), silent_s={"b": 80.0}, into_step_s=90.0, refused=refused))
    assert verdict.sentence.endswith(
        "its site has been silent for 80 s; turned away since the controller started: 3 messages of it in another "
        "version of the protocol (the same streamrl is needed at both sites), 2 hellos of it (its own last words say "
        "why), 4 handshakes with a key that is not known here, maybe of this site"
    )
    others = {"hello": {"site c": 1}, "malformed": {"site b": 9}}
    verdict = judge(facts(SAMPLES, processes=remote(), silent_s={"b": 80.0}, into_step_s=90.0, refused=others))
    assert verdict.sentence.endswith("silent for 80 s, the link or the site is down")
