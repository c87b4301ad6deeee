"""Federations over Flower: its processes, its two apps and its simulation. The only folder that imports `flwr`."""
