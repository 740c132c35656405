"""What the audit of dependencies makes of pip-audit's answer."""

from __future__ import annotations

import pytest

from tests.loaded_tool import loaded_tool

ANSWER = {
    "dependencies": [
        {"name": "good", "version": "1", "vulns": []},
        {"name": "bad", "version": "1", "vulns": [{"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["2"]}]},
        {"name": "stuck", "version": "1", "vulns": [{"id": "PYSEC-2", "aliases": [], "fix_versions": []}]},
        {"name": "local", "skip_reason": "not found"},
    ]
}


def test_only_what_can_be_mended_fails() -> None:
    audit = loaded_tool("audit")
    assert audit.audited(ANSWER) == 3
    assert audit.findings(ANSWER) == (
        ["bad 1: PYSEC-1, fixed in 2"],
        ["stuck 1: PYSEC-2 (no version fixes it)"],
    )


def test_an_accepted_advisory_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    audit = loaded_tool("audit")
    monkeypatch.setattr(audit, "ACCEPTED", {"CVE-1": "not used here"})
    assert audit.findings(ANSWER)[0] == []
    assert "bad 1: PYSEC-1 (accepted: not used here)" in audit.findings(ANSWER)[1]
