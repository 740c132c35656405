"""Fault injection into a live run, and an account of the consequences."""
