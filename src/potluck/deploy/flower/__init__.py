"""Flower beneath a federation; the only folder that imports `flwr`."""
