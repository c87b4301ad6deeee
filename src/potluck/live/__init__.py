"""What is known of a run while it goes on: one `Snapshot`, read from its folder.

`potluck status`, `potluck watch` (in the terminal and as a page) and the endpoint for Prometheus all show it. The
run writes its logs, and every few seconds a small `status.json`; whoever watches only reads these files. Neither
torch nor Flower is imported here, so that watching is quick to start and small.
"""
