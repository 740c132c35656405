"""Errors that a user can do something about are lines without a traceback, also in studies."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from streamrl.cli.main import error_lines
from streamrl.errors import RunFailed, UserError

STUDIES = Path(__file__).parents[2] / "experiments"


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (UserError("no model\x1b here;\nfetch it"), 2, "error: no model? here;\n       fetch it\n"),
        (RunFailed(""), 1, "error: RunFailed\n"),
        (PermissionError(13, "Permission denied", "/secret"), 2, "error: /secret: Permission denied\n"),
    ],
)
def test_an_error_for_the_user_is_printed_in_place_of_its_traceback(
    error: Exception, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, error_lines():
        raise error
    assert ended.value.code == code and capsys.readouterr().err == says


@pytest.mark.parametrize("error", [ValueError("a mistake of this program"), PermissionError("of no file")])
def test_other_errors_keep_their_traceback(error: Exception) -> None:
    with pytest.raises(type(error)), error_lines():
        raise error


def studies_with_a_model() -> list[Path]:
    """Scripts that look for a model themselves or have a study's module do it."""
    trees = {path: path.read_text(encoding="utf-8") for path in sorted(STUDIES.glob("*.py"))}
    need = {path for path, text in trees.items() if "resolve_model(" in text}
    need |= {path for path, text in trees.items() for one in need if f"from {one.stem} import" in text}
    return [path for path in trees if path in need and "__main__" in trees[path]]


@pytest.mark.parametrize("path", studies_with_a_model(), ids=lambda path: path.stem)
def test_a_study_without_its_model_says_so_in_a_line(path: Path) -> None:
    *_, last = ast.parse(path.read_text(encoding="utf-8")).body
    assert ast.unparse(last) == "if __name__ == '__main__':\n    with error_lines():\n        main()"


def test_studies_with_a_model_are_found() -> None:
    assert {"agent_tokens", "delta_codec", "peer_trl"} <= {path.stem for path in studies_with_a_model()}
