"""Texts of models, of other sites and in other people's folders are shown, logged and taken apart, never obeyed."""

from __future__ import annotations

import io
import json
import logging
import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from streamrl.agents.tool_calls import TOOL_FAMILIES, ToolFamily
from streamrl.cli import main
from streamrl.cli.report import command as report_command
from streamrl.cli.status import command as status_command
from streamrl.errors import RunFailed
from streamrl.launcher.entry_point import LAST_WORDS
from streamrl.protocol.message import parse
from streamrl.protocol.weights import Fetch
from streamrl.report import plots
from streamrl.report.live_view import LiveView
from streamrl.report.terminal import TextConsole, plain_table
from streamrl.run_dir.jsonl import RowWriter
from streamrl.run_dir.metrics import MetricsRow
from streamrl.run_dir.start_stages import say
from streamrl.run_dir.status import write_status
from streamrl.runtime import log_lines
from streamrl.transport.refusals import Refusals
from streamrl.transport.wire import MalformedMessage
from tests.report.synthetic import make_row, write_run

ROOT = Path(__file__).parents[2]
OBEYED = "\x1b[2J\x1b]0;title\x07\x9b31m\u202e"
"""What clears a screen, sets its title and colours, and turns a line around."""
EVIL = f"{OBEYED}[/no style][red]:bomb:"
SHOWN = "[/no style][red]:bomb:"


def write_evil_status(folder: Path) -> None:
    about = {"role": "instance", "since": 1.0, "dtype": "bfloat16", "packing": "shared"}
    texts = dict.fromkeys(("state", "detail", "dtype_why", "packing_why"), EVIL)
    values = {
        "run": EVIL,
        "state": "running",
        "step": 3,
        "steps": 9,
        "started_at": 900.0,
        "updated_at": 1e12,
        "roles": {EVIL: about | texts},
        "waits": [{"owner": EVIL, "waiting_for": EVIL, "since": 1.0, "limit_s": 9.0}],
        "sites": {EVIL: {"silent_s": 1.0, "excluded": EVIL}},
        "refused": {"malformed": {EVIL: 3}},
        "error": EVIL,
        "schedule_note": EVIL,
    }
    write_status(folder, values)
    say(folder, "controller", EVIL)


def assert_shown(printed: str, times: int) -> None:
    assert not set(printed) & set("\x07\x9b\u202e")
    assert "\x1b[2J" not in printed and "\x1b]" not in printed
    assert printed.replace("\n", "").count(SHOWN[:11]) >= times


def test_status_shows_the_texts_of_others_and_a_terminal_obeys_none(tmp_path: Path) -> None:
    write_evil_status(tmp_path)
    done = CliRunner().invoke(status_command, [str(tmp_path)])
    assert done.exit_code == 0, done.exception
    assert_shown(done.output, 8)


@pytest.mark.parametrize("plain", [False, True])
def test_the_live_view_shows_the_texts_of_others_and_a_terminal_obeys_none(tmp_path: Path, plain: bool) -> None:
    buffer = io.StringIO()
    console = TextConsole(file=buffer, force_terminal=True, width=500, height=60)
    with LiveView(tmp_path, plain, console) as view:
        say(tmp_path, "controller", EVIL)
        view.refresh()
        write_evil_status(tmp_path)
        view.refresh()
        view.summary()
    assert_shown(buffer.getvalue(), 3)


def test_tables_take_brackets_of_others_for_text() -> None:
    buffer = io.StringIO()
    table = plain_table("process", "doing")
    table.add_row(EVIL, EVIL)
    TextConsole(file=buffer, force_terminal=True, width=200).print(table)
    assert_shown(buffer.getvalue(), 2)


def test_an_error_that_quotes_others_is_shown_and_not_obeyed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise RunFailed(EVIL)

    monkeypatch.setattr(main, "cli", fail)
    with pytest.raises(SystemExit):
        main.main()
    assert_shown(capsys.readouterr().err, 1)


def test_no_command_has_a_console_that_obeys_texts() -> None:
    consoles = [
        path for path in (ROOT / "streamrl").rglob("*.py") if re.search(r"\bConsole\(", path.read_text("utf-8"))
    ]
    assert consoles == []


def test_a_message_of_another_site_is_neither_a_line_of_the_log_nor_obeyed_by_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The launcher believes the last words that a process leaves in its log, and restarts none that has left them."""
    buffer, root = io.StringIO(), logging.RootLogger(logging.WARNING)
    monkeypatch.setattr(logging, "root", root)
    monkeypatch.setattr(log_lines.sys, "stderr", buffer)
    log_lines.log_to_stderr("INFO")
    log = logging.Logger("streamrl.transport.refusals")
    log.parent = root
    monkeypatch.setattr("streamrl.transport.refusals.log", log)
    ends = ("\n", "\r", "\x0b", "\x85", "\u2028")
    for end in ends:
        with pytest.raises(MalformedMessage) as refused:
            parse(Fetch, {"request": 1, "number": 0, f"{end}{LAST_WORDS}{EVIL}": 1})
        Refusals().count("malformed", "service-far", refused.value)
    try:
        raise ValueError(f"{ends[0]}{LAST_WORDS}{EVIL}")
    except ValueError:
        log.exception("failed")
    written = buffer.getvalue()
    assert written.count(LAST_WORDS) == len(ends) + 1
    assert not [line for line in written.splitlines() if line.startswith(LAST_WORDS)]
    assert_shown(written, len(ends) + 1)


def test_every_process_of_a_run_writes_its_log_in_that_form() -> None:
    """The proxy of an emulated network reads no texts, and comes before the module in the order of imports."""
    setting_up = {
        path.relative_to(ROOT / "streamrl").as_posix(): path.read_text("utf-8").count("log_to_stderr(")
        for path in (ROOT / "streamrl").rglob("*.py")
        if re.search(r"log_to_stderr\(|basicConfig\(", path.read_text("utf-8"))
    }
    assert setting_up == {
        "runtime/log_lines.py": 1,
        "launcher/entry_point.py": 1,
        "trackers/tracker_process.py": 1,
        "emulation/proxy.py": 0,
    }


def tagged(*parts: str) -> str:
    return f"<tool_call>{''.join(parts)}</tool_call>"


ENDLESS = {
    "calls that do not end": "<tool_call>" * 50_000,
    "parameters that do not end": tagged("<function=f>", "<parameter=a>" * 50_000, "</function>"),
    "line breaks": tagged("<function=f><parameter=a>", "\n" * 200_000, "</function>"),
    "keys that do not end": tagged("f", "<arg_key>" * 50_000),
    "keys without values": tagged("f", "<arg_key>a</arg_key>" * 50_000),
    "values that do not end": tagged("f", "<arg_key>a</arg_key><arg_value>" * 50_000),
}


@pytest.mark.parametrize("family", TOOL_FAMILIES, ids=lambda one: one.name)
@pytest.mark.parametrize("text", ENDLESS.values(), ids=ENDLESS.keys())
def test_an_answer_of_a_model_is_read_once_so_that_it_holds_up_nobody(family: ToolFamily, text: str) -> None:
    """Time that grows with the square of these lengths would be hours, in the one process of all episodes."""
    assert not family.parse(text).calls


@pytest.mark.parametrize("levels", [200, 5_000, 200_000])
@pytest.mark.parametrize("family", TOOL_FAMILIES, ids=lambda one: one.name)
def test_a_call_that_is_nested_too_deeply_is_malformed_and_fails_no_turn(family: ToolFamily, levels: int) -> None:
    deep = "[" * levels + "]" * levels
    within = f'{{"a": {deep}}}'
    whole = f'{{"name": "f", "arguments": {within}}}'
    for text in (
        tagged(whole),
        tagged(json.dumps({"name": "f", "arguments": within})),
        whole.replace("arguments", "parameters"),
        tagged(f"<function=f><parameter=a>{deep}</parameter></function>"),
        tagged(f"f<arg_key>a</arg_key><arg_value>{deep}</arg_value>"),
    ):
        for call in family.parse(text).calls:
            assert isinstance(json.loads(call.arguments)["a"], str)  # a text that nobody takes apart


def test_a_report_is_of_a_folder_of_any_name_and_its_command_prints_text_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "to_svg", lambda figure, name: "<svg></svg>")
    write_run(tmp_path / "cafe", 1)
    run_dir = (tmp_path / "cafe").rename(tmp_path / os.fsdecode(b"caf\xe9"))
    (run_dir / "status.json").unlink()
    with RowWriter(run_dir / "metrics.jsonl", MetricsRow) as metrics:
        metrics.append(make_row(2, length_bias_warning=f"shorter {EVIL}"))
    result = CliRunner().invoke(report_command, [str(run_dir)], catch_exceptions=False)
    assert "<h1>caf\ufffd</h1>" in (run_dir / "report.html").read_text()
    assert SHOWN in result.output and "caf?/report.html" in result.output
    assert all(one.isprintable() or one == "\n" for one in result.output)
