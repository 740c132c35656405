"""The dashboard in a real headless browser: `make test-browser`, which says what it needs.

`make test-browser PICTURES_OF=runs/demo` also renews the pictures in docs/pictures/, from a run that has ended.
Skipped where there is no Chromium or no Playwright: neither is a requirement of the project.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from streamrl.dashboard import web_server
from streamrl.dashboard.access import AccessGuard
from streamrl.dashboard.watched_run import WatchedRuns
from streamrl.dashboard.web_app import make_app
from streamrl.run_dir.jsonl import RowWriter
from streamrl.run_dir.metrics import MetricsRow
from streamrl.run_dir.status import write_status
from tests.dashboard.samples import a_sample, write_samples
from tests.report.synthetic import make_row, make_status, write_run
from tests.waiting import scaled

playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: make test-browser")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None:
    pytest.skip("needs Chromium: apt-get install chromium", allow_module_level=True)

PICTURES_OF = os.environ.get("PICTURES_OF", "")
"""Folder of the run of which the documentation's pictures are taken; '': of a synthetic one, and they are not kept."""
MARKUP = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'><b>bold</b>"
ROOT = Path(__file__).parents[2]
SAMPLES = 100_000
PER_STEP = 20_000


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: `demo` and `other` of a few steps, and `big` with 100,000 samples."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("demo", "other", "big"):
        write_run(folder / name, 3, rollouts=name == "other")
    with RowWriter(folder / "other" / "metrics.jsonl", MetricsRow) as metrics:
        metrics.append(make_row(4, usd=0.75, usd_by_process={"here": {"trainer": 0.5}, "far": {"link": 0.25}}))
    row = a_sample("a.0", task=MARKUP, completion=MARKUP, reward_error=MARKUP, finish_reason=MARKUP)
    told = {
        "messages": [{"role": "user", "content": MARKUP}, {"role": MARKUP, "content": "2"}],
        "steps": [{"kind": "tool", "name": MARKUP, "started": 1.0, "finished": 2.0, "detail": MARKUP, "tokens": 0}],
    }
    episode = a_sample("a.2", conversation=json.dumps(told), mask=[True, False, True, True])
    void = a_sample("a.1", reward=None, void_cause="timeout", reward_error=MARKUP, t_trained=None)
    write_samples(folder / "demo" / "rollouts", 1, [row, void, episode])
    for step in range(1, SAMPLES // PER_STEP + 1):
        many = [a_sample(f"s{step}g{n // 8:05}.{n % 8}", step=step, output_length=n) for n in range(PER_STEP)]
        if step % 2 == 0:
            many[1000]["completion"] = "a Needle 7 in a haystack"
        write_samples(folder / "big" / "rollouts", step, many)
    return folder


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serves a dashboard of a folder; gives its address."""
    with web_server.bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        app = AccessGuard(make_app(WatchedRuns([folder]), web_server.chart_library()), None, port)
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield f"http://127.0.0.1:{port}/"
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    with serving(runs) as found:
        yield found


@pytest.fixture(scope="module")
def pictured(runs: Path) -> Iterator[str]:
    """Address of the state page of the run of which pictures are taken."""
    folder = Path(PICTURES_OF or runs / "other").resolve()
    with serving(folder) as found:
        yield f"{found}#/run/{folder.name}"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has no sandbox for root
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=sandbox)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page on which anything in the console, or any uncaught error, fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    found = context.new_page()
    found.set_default_timeout(1000 * scaled(20.0))
    said: list[str] = []
    # Chromium writes an answer of 410 to the console; it is the one that a test provokes
    found.on("console", lambda one: said.append(f"{one.type}: {one.text}") if "410 (Gone)" not in one.text else None)
    found.on("pageerror", lambda error: said.append(f"error: {error}"))
    yield found
    context.close()
    assert said == []


PAGES = {
    "#/?compare=demo&compare=other": ".js-plotly-plot .legend",
    "#/run/demo": "text=Who waits for whom",
    "#/run/other": "text=Costs of the finished steps",
    "#/run/demo/curves": ".js-plotly-plot",
    "#/run/demo/timeline": ".js-plotly-plot .bars",
    "#/run/demo/samples": ".row >> text=a.0",
    "#/run/demo/sample?id=a.0": ".tokens span",
    "#/run/demo/sample?id=a.2": ".message",
    "#/run/demo/group?id=a": "article >> nth=1",
    "#/run/other/group?id=s1-0&id=s2-0": "section >> nth=1",
}


@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_opens_runs_no_markup_of_a_model_and_is_accessible(
    browser: Any, page: Any, address: str, path: str, scheme: str
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page.emulate_media(color_scheme=scheme)
    page.goto(address + path)
    page.locator(PAGES[path]).first.wait_for()
    assert page.evaluate("window.hacked") is None
    assert page.locator("main b, main img, main script").count() == 0
    # the drawings of charts are left out: axe takes a minute for them and finds nothing
    found = Axe().run(page, {"exclude": [[".plot"]]}, options={"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]})
    assert [(one["id"], one["nodes"][0]["html"][:200]) for one in found.response["violations"]] == []


def test_markup_of_a_model_is_shown_as_text(page: Any, address: str) -> None:
    page.goto(f"{address}#/run/demo/sample?id=a.0")
    page.locator(".tokens").wait_for()
    assert page.locator(".text").nth(1).inner_text() == MARKUP
    page.goto(f"{address}#/run/demo/sample?id=a.1")
    page.get_by_text(f"void (timeout): {MARKUP}").wait_for()


def test_a_page_follows_a_run_that_goes_on_and_says_when_it_is_gone(page: Any, address: str, runs: Path) -> None:
    live = runs / "live"
    write_run(live, 1)
    page.goto(f"{address}#/run/live")
    page.get_by_text("1 of 20", exact=True).wait_for()
    with RowWriter(live / "metrics.jsonl", MetricsRow) as metrics:
        metrics.append(make_row(2, reward_mean=0.8125))
    write_status(live, make_status(2, 20, time.time()))
    page.get_by_text("2 of 20", exact=True).wait_for()
    page.get_by_text("0.813").wait_for()
    page.get_by_text("samples finished: 40 of 64").wait_for()
    shutil.rmtree(live)
    page.get_by_text("the run's folder or a file of it is gone").wait_for()


def test_100000_samples_are_scrolled_with_few_elements_by_keys_and_by_hand(page: Any, address: str) -> None:
    page.goto(f"{address}#/run/big/samples?sort=output_length&descending=false")
    page.get_by_text("100,000 of 100,000 samples").wait_for()
    page.locator(".list").focus()
    page.keyboard.press("End")
    page.locator(".row[aria-selected=true] >> text=19,999").wait_for()
    assert page.locator(".row").count() < 60
    page.keyboard.press("Home")
    page.locator(".row[aria-selected=true][aria-posinset='1']").wait_for()
    page.locator(".list").evaluate("list => { list.scrollTop = list.scrollHeight / 2; }")
    page.locator(".row >> text=/^(9,999|10,000)$/").first.wait_for()
    page.keyboard.press("PageDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.locator(".tokens span").first.wait_for()
    page.keyboard.press("Escape")
    page.locator(".list").wait_for()


def test_samples_that_could_not_be_read_at_first_come_later(page: Any, address: str) -> None:
    where = "**/api/runs/other/samples?**"
    page.route(where, lambda route: route.fulfill(status=410, json={"error": "not at the moment"}))
    page.goto(f"{address}#/run/other/samples")
    page.get_by_text("not at the moment").wait_for()
    page.unroute(where)
    page.get_by_text("192 of 192 samples").wait_for()


def test_durations_are_rounded_before_they_are_split(page: Any, address: str) -> None:
    page.goto(address)
    seconds = [4.25, 119.4, 119.6, 179.6, 7199.6, 10_799.0, 90_000.0]
    texts = page.evaluate("(all) => import('/static/format.js').then((format) => all.map(format.duration))", seconds)
    assert texts == ["4.3 s", "119 s", "2 min 0 s", "3 min 0 s", "2 h 0 min", "3 h 0 min", "25 h 0 min"]


def test_filters_are_in_the_address_and_keys_choose_pages(page: Any, address: str) -> None:
    page.goto(f"{address}#/run/other/samples")
    page.locator("select[name=task]").select_option("letter_counting")
    page.get_by_text("96 of 192 samples").wait_for()
    page.get_by_label("reward from").fill("0.5")
    page.get_by_label("reward from").press("Tab")
    page.wait_for_function("location.hash.includes('reward_min=0.5') && location.hash.includes('task=letter_counting')")
    page.locator("h1").click()
    for key, text in {
        "1": "Processes",
        "2": "loss",
        "3": "Shares of this window",
        "g": "Choose runs to compare",
    }.items():
        page.keyboard.press(key)
        page.get_by_text(text).first.wait_for()
    page.keyboard.press("?")
    page.get_by_role("dialog").wait_for()


def test_a_text_is_searched_in_all_samples(page: Any, address: str, runs: Path) -> None:
    page.goto(f"{address}#/run/big/samples")
    page.get_by_text("100,000 of 100,000 samples").wait_for()
    page.keyboard.press("/")
    page.keyboard.type("needle 7")
    page.keyboard.press("Enter")
    page.get_by_text("2 of 100,000 samples").wait_for()
    assert page.locator(".row >> text=needle").count() == 0, "ids are listed, not texts"
    assert sorted(page.locator(".row span:first-child").all_inner_texts()) == ["s2g00125.0", "s4g00125.0"]
    page.get_by_role("button", name="all samples").click()
    page.get_by_text("100,000 of 100,000 samples").wait_for()


def test_runs_of_any_name_are_compared_also_after_a_reload(page: Any, address: str, runs: Path) -> None:
    names = ("50%", "a,b", "a+b c")
    for name in names:
        write_run(runs / name, 1)
    page.goto(f"{address}#/")
    for name in names:
        page.get_by_label(f"compare {name}", exact=True).check()
    page.reload()
    for name in names:
        page.get_by_label(f"compare {name}", exact=True).and_(page.locator(":checked")).wait_for()
    for name in names:
        shutil.rmtree(runs / name)


def test_groups_are_compared_and_the_chain_of_waits_is_live(page: Any, address: str, runs: Path) -> None:
    page.goto(f"{address}#/run/other/group?id=s1-0")
    page.get_by_label("compare with").select_option(index=2)
    page.locator("section[aria-label^='group ']").nth(1).wait_for()
    page.get_by_role("button", name="leave out group s1-0").click()
    page.locator("h1", has_text="Group ").wait_for()
    page.locator("article").nth(7).wait_for()
    assert page.locator("article").count() == 8
    stuck = runs / "stuck"
    stuck.mkdir()
    wait = {"owner": "controller", "waiting_for": "trainer: step 2", "limit_s": 120.0}
    write_status(stuck, make_status(1, 20, time.time(), waits=[wait | {"since": time.time() - 3}]))
    page.goto(f"{address}#/run/stuck")
    page.locator(".notice.calm", has_text="healthy: ").wait_for()
    write_status(stuck, make_status(1, 20, time.time(), waits=[wait | {"since": time.time() - 130}]))
    page.locator(".notice.bad", has_text="stuck: controller has waited").wait_for()
    page.locator(".chain", has_text="controller waits").wait_for()
    shutil.rmtree(stuck)


def test_the_timeline_is_zoomed_by_keys_and_asks_for_what_it_shows(page: Any, address: str) -> None:
    page.goto(f"{address}#/run/demo/timeline")
    page.get_by_text("54 s of 54 s").wait_for()
    with page.expect_request(lambda request: "start=13." in request.url):
        page.keyboard.press("+")
    page.get_by_text("27 s of 54 s").wait_for()
    page.keyboard.press("0")
    page.get_by_text("54 s of 54 s").wait_for()


@pytest.mark.parametrize("name", ["state", "curves", "timeline", "sample", "group"])
def test_pictures_for_the_documentation_are_taken(page: Any, pictured: str, tmp_path: Path, name: str) -> None:
    page.set_viewport_size({"width": 1180, "height": 640})
    page.goto(f"{pictured}/{'samples' if name in ('sample', 'group') else name}")
    match name:
        case "state":
            page.locator(".notice", has_text=": ").first.wait_for()
            page.get_by_text("Processes").first.wait_for()
        case "curves":
            page.locator("figure", has_text="predicted against actual").locator(".main-svg").first.wait_for()
        case "timeline":
            page.locator(".js-plotly-plot .bars").first.wait_for()
        case _:
            page.locator(".row .number").first.wait_for()
    if name in ("sample", "group"):
        page.locator(".list").focus()
        page.keyboard.press("Enter")  # the first of the list
        page.locator(".tokens span").first.wait_for()
    if name == "group":
        page.locator(".tiles a").click()
        page.locator("article").nth(1).wait_for()
    path = (ROOT / "docs" / "pictures" if PICTURES_OF else tmp_path) / f"dashboard_{name}.png"
    page.screenshot(path=path, animations="disabled")
    assert path.stat().st_size > 20_000, "a page with nothing on it takes less"
