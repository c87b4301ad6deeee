"""Engines: they run client steps, wherever the clients are."""
