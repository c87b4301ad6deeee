"""What Ray tells its workers of a driver: nothing of the folders that it works in.

Ray puts the driver's current folder first where workers look for modules. Whoever stands in a folder that somebody
sent would run a folder `potluck` in it instead of potluck. Code that workers need travels with the run.
"""

from __future__ import annotations

import ray.job_config


class Job(ray.job_config.JobConfig):  # type: ignore[misc]
    """A driver whose current folder is none of its workers' business."""

    @property
    def _py_driver_sys_path(self) -> list[str]:
        """Folders that workers search first: none, whatever Ray adds to the list that it is given."""
        return []

    @_py_driver_sys_path.setter
    def _py_driver_sys_path(self, folders: list[str]) -> None:
        """Take no folder."""


def use_for_every_driver() -> None:
    """Make every driver of this process such a one, also where a library such as Flower calls `ray.init`."""
    ray.job_config.JobConfig = Job
