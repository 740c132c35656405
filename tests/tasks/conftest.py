"""The sides of a sandbox in this process."""

from tests.tasks.same_process import same_process

__all__ = ["same_process"]
