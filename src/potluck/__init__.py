"""Potluck: federated learning where everyone brings their own model."""
