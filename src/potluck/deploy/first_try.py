"""A site's data and model are tried once before it takes part: what is wrong with them is best heard at once."""

from __future__ import annotations

import inspect
import traceback
from typing import Any

from potluck.core.plain_values import printable
from potluck.deploy.site import Site, modest
from potluck.deploy.site_data import site_data
from potluck.errors import ConfigError, PotluckError, kind_and_message
from potluck.models.build import build


def try_first(site: Site, data: str) -> None:
    """Load a site's data and build its model; raises where `data`, its function, fails.

    The rest is only said: no server has told so far how many classes there are, and what is guessed from the
    labels may be wrong.
    """
    try:
        given = site.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the site's own code may raise anything, and end with SystemExit
        raise ConfigError(f"client {site.client}: --data {data} failed: {_why(error)}; mend it") from error
    try:
        _build(site, given)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        site.notes.announce(f"a run will probably not be joined: {_why(error)}")


def _build(site: Site, given: Any) -> None:
    """Build the model for the data, unless it waits for a width that only a server tells."""
    task = site_data(given, site.client, None)[0].task
    if not _takes_width(site.model):
        with modest():
            build(site.model, task, who=f"client {site.client}", check=False)


def _takes_width(model: Any) -> bool:
    try:
        return callable(model) and "rep_dim" in inspect.signature(model).parameters
    except (TypeError, ValueError):  # it does not say what it takes
        return False


def _why(error: BaseException) -> str:
    """An error in one line; of one that is no sentence of ours the log has all."""
    if isinstance(error, PotluckError):
        return printable(str(error))
    traceback.print_exc()
    return printable(kind_and_message(error))
