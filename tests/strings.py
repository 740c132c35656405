"""Strings of any characters, for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

ANY = st.characters(exclude_categories=["Cs"])
"""The characters of `st.text()`, which hypothesis finds by encoding each in UTF-8: two seconds in every new clone."""


def any_text(max_size: int | None = None) -> st.SearchStrategy[str]:
    """Return strings of all characters but lone surrogates, as `st.text()` does."""
    return st.text(ANY, max_size=max_size)
