"""Faults on purpose in a run that goes on, and an account of what became of them.

faults.py    which fault comes when (pure)
follow.py    when one was noticed, when others served, when the run had recovered (pure)
audit.py     whether every sample was trained once (pure)
table.py     results by kind of fault, as a table and as Markdown (pure)
observation.py reads a run's folder
inject.py    does it, by process id
own_launcher.py a run that is a child of this process
study.py     one fault after the other until the time is over
"""
