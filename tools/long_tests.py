"""Write tests/long_tests.txt: functions of tests that take long, which `make test-quick` leaves out.

    python tools/long_tests.py      # all tests but the slow ones: some minutes, on a machine that does nothing else

New tests count as short until it is run again.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests" / "long_tests.txt"
LEAST_S = 0.3
"""Mean seconds of a function's tests from which it is long: a tenth of all tests, and three quarters of the time."""


def long_functions(report: Path) -> list[str]:
    """Return the functions that are long, as FILE::FUNCTION below tests/, from a report of the family `xunit1`."""
    seconds = defaultdict(list)
    for test in ET.parse(report).iter("testcase"):
        file, name = test.attrib["file"].removeprefix("tests/"), test.attrib["name"].partition("[")[0]
        seconds[f"{file}::{name}"].append(float(test.attrib["time"]))
    return sorted(name for name, times in seconds.items() if statistics.fmean(times) >= LEAST_S)


def main() -> None:
    """Run the tests and write the list; nothing is written if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        written = ("-o", "junit_family=xunit1", "--junitxml", str(report))
        command = [sys.executable, "-m", "pytest", "-n", "3", "-m", "not slow", *written]
        if code := subprocess.run(command, cwd=ROOT, check=False).returncode:
            sys.exit(code)
        LIST.write_text("".join(f"{one}\n" for one in long_functions(report)), encoding="utf-8")


if __name__ == "__main__":
    main()
