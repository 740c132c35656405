"""The ranker's error type."""


class RankerError(ValueError):
    """Bad input; the message names the file, the column and what was expected."""
