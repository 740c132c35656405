"""The synthetic run folder of the report's tests."""

from __future__ import annotations

from tests.report.conftest import make_run as make_run
