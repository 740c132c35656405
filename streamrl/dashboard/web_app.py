"""The routes of the dashboard: its page, and what the page asks for as JSON. All of them only read."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from streamrl.dashboard.sample_detail import group_view, sample_view
from streamrl.dashboard.sample_table import OUTCOMES, SORTS, SampleFilter
from streamrl.dashboard.state_view import state_view
from streamrl.dashboard.step_series import describe_figures
from streamrl.dashboard.stuck_view import stuck_view
from streamrl.dashboard.watched_run import WatchedRun, WatchedRuns
from streamrl.errors import UserError
from streamrl.report.trace_window import spans_window
from streamrl.rollouts.plain_text import plain_text
from streamrl.run_dir.jsonl import finite

STATIC = Path(__file__).parent / "static"
PAGE_ROWS = 100
MOST_PIXELS = 4_000

Query = dict[str, str]


class PlainJson(JSONResponse):
    """An answer in JSON whose texts may be anything: a name of a folder need not be UTF-8."""

    def render(self, content: Any) -> bytes:
        return plain_text(json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))).encode()


def make_app(runs: WatchedRuns, charts: Path) -> Starlette:
    """Return the application.

    Args:
        runs: what it shows.
        charts: the file of the chart library (`web_server.chart_library`).
    """

    def index(_request: Request) -> Response:
        return FileResponse(STATIC / "index.html", headers={"Cache-Control": "no-cache"})

    def library(_request: Request) -> Response:
        return FileResponse(charts, media_type="text/javascript", headers={"Cache-Control": "private, max-age=86400"})

    def listing(_request: Request) -> Response:
        now = time.time()
        rows = []
        for run in runs.look():
            try:
                rows.append(run.summary(now))
            except OSError:
                continue  # deleted since it was listed, or of another user
        return PlainJson({"now": now, "runs": finite(rows), "figures": describe_figures()})

    def about_run(view: Callable[[WatchedRun, Query], Any], request: Request) -> Response:
        run = runs.get(request.path_params["run"])
        if run is None:
            return _problem(404, "there is no such run here (yet)")
        try:
            if view in (_samples, _lengths, _sample, _group):
                run.read_samples()
            # some views read nothing but the folder, and one of them takes half a second
            with nullcontext() if view in (_state, _why_stuck) else run.lock:
                found = view(run, dict(request.query_params))
        except (UserError, ValueError) as error:
            return _problem(400, str(error))
        except (FileNotFoundError, NotADirectoryError):
            return _problem(410, f"the run's folder or a file of it is gone: {run.folder}")
        except (pa.ArrowException, OSError) as error:
            return _problem(500, f"a file of the run cannot be read: {error}")
        if found is None:
            return _problem(404, "the run has no such sample or group")
        return PlainJson(finite(found))

    views = {
        "state": _state,
        "why_stuck": _why_stuck,
        "steps": _steps,
        "timeline": _timeline,
        "samples": _samples,
        "lengths": _lengths,
        "sample": _sample,
        "group": _group,
    }
    return Starlette(
        routes=[
            Route("/", index),
            Route("/plotly.min.js", library),
            Route("/api/runs", listing),
            *(Route(f"/api/runs/{{run}}/{name}", _endpoint(partial(about_run, view))) for name, view in views.items()),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]
    )


def _endpoint(answer: Callable[[Request], Response]) -> Callable[[Request], Response]:
    """Return a plain function: Starlette runs those in threads, so that reading a file holds up no other answer."""

    def endpoint(request: Request) -> Response:
        return answer(request)

    return endpoint


def _problem(code: int, text: str) -> Response:
    return PlainJson({"error": text}, code)


def _state(run: WatchedRun, _query: Query) -> dict[str, Any]:
    return state_view(run.folder, time.time())


def _why_stuck(run: WatchedRun, _query: Query) -> dict[str, Any]:
    return stuck_view(run.folder)


def _steps(run: WatchedRun, query: Query) -> dict[str, Any]:
    _must_exist(run)
    return run.steps.since(query.get("since", ""))


def _timeline(run: WatchedRun, query: Query) -> dict[str, Any]:
    _must_exist(run)
    run.spans.look()
    first, last = run.spans.extent
    start, end = _number(query, "start", first), _number(query, "end", last)
    if end <= start:
        end = start + 1.0
    pixels = min(MOST_PIXELS, max(1, round(_number(query, "pixels", 1000))))
    cursor = f"{run.spans.generation} {run.spans.count + run.spans.forgotten} {start} {end} {pixels}"
    if query.get("since") == cursor:  # the page has it: a run's whole timeline may be megabytes
        return {"cursor": cursor, "unchanged": True}
    return {"cursor": cursor, "unchanged": False} | spans_window(run.spans, start, end, pixels)


def _samples(run: WatchedRun, query: Query) -> dict[str, Any]:
    _must_exist(run)
    run.samples.look()
    offset, limit = round(_number(query, "offset", 0)), round(_number(query, "limit", PAGE_ROWS))
    page = run.samples.page(SampleFilter.parse(query), offset, max(1, limit))
    known = {"sorts": SORTS, "outcomes": OUTCOMES, "choices": run.samples.choices()}
    return page | known | {"notes": run.samples.notes}


def _lengths(run: WatchedRun, _query: Query) -> dict[str, Any]:
    _must_exist(run)
    run.samples.look()
    return run.samples.lengths()


def _sample(run: WatchedRun, query: Query) -> dict[str, Any] | None:
    _must_exist(run)
    run.samples.look()
    decode, why_not = run.decoder()
    found = sample_view(run.samples, query.get("id", ""), decode, query.get("all") == "true", run.algorithm())
    if found is not None and why_not:
        found["notes"].append(why_not)
    return found


def _group(run: WatchedRun, query: Query) -> dict[str, Any] | None:
    _must_exist(run)
    run.samples.look()
    return group_view(run.samples, query.get("id", ""), run.decoder()[0], run.algorithm())


def _must_exist(run: WatchedRun) -> None:
    if not run.folder.is_dir():
        raise FileNotFoundError(run.folder)


def _number(query: Query, name: str, default: float) -> float:
    text = query.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError as error:
        raise UserError(f"{name}: expected a number, got {text!r}") from error
    if value != value or abs(value) > 1e15:
        raise UserError(f"{name}: expected a number, got {text!r}")
    return value
