"""A real federation: the same methods, with every client in a process of its own, at its own site.

The server's script runs in the process of `potluck serve`. A client is a `worker` process that answers orders with
its own data, model and secret. Orders and replies are bytes; only `flower` knows how they travel.
"""
