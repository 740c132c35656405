"""By what processes of tests are known."""

MARK = "STREAMRL_STARTED_BY"
"""Environment variable: what has started a process (`tests/leaks.py`)."""
WARM = "tests.warm"
"""In the command line of a template (`tests/warm.py`), which a session of pytest keeps."""
