"""Evaluation: what a client measures, and whom the server asks at which moment of a round."""
