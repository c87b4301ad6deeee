"""Finished runs: their scores as frames, tables and pictures, and their clients with the trained models."""
