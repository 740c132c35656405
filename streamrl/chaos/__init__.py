"""Fault injection into a live run, and an account of the consequences.

faults.py         which fault comes when (pure)
follow.py         when a fault was noticed, when others served, when the run had recovered (pure)
audit.py          whether every sample was trained exactly once (pure)
table.py          results by kind of fault, as a table and as Markdown (pure)
observation.py    reads a run's folder
inject.py         injects a fault, by process id
own_launcher.py   runs the launcher as a child of this process
study.py          injects one fault after another until the time is over
"""
