"""A real federation on Flower: the same methods, the clients in processes of their own, wherever they are.

A client is one resident `worker` beside its SuperNode; the server's script runs in the process of `potluck serve`.
Flower carries bytes between the two through `apps`, which know nothing of either.
"""
