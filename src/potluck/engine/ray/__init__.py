"""Clients on the machines of a Ray cluster; the only room that imports ray."""
