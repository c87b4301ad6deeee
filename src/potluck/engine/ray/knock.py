"""Asks the head of a Ray cluster which machines it has: `python knock.py 10.0.0.5:6379`. It imports only Ray.

This runs in a process of its own. Ray reads its token once per process, ends a process whose token is missing, and
waits long where something else than Ray listens; none of that may happen to a driver.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Print the address and the name of every machine that is alive, as JSON."""
    from ray._raylet import GcsClient

    nodes = GcsClient(address=sys.argv[1]).get_all_node_info(timeout=10)
    alive = [node for node in nodes.values() if node.state == 0]
    print(json.dumps([[node.node_manager_address, node.node_manager_hostname] for node in alive]))


if __name__ == "__main__":
    main()
