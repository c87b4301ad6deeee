"""A real federation: the same methods, with every client in a process of its own, at its own site.

The server's script runs in the process of `potluck serve`. A client is a `worker` process that answers orders with its
own data, model and secret. Everything here works in bytes and knows no transport; `flower` is the one there is.
"""
