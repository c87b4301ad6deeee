"""Comparisons: methods, variants and sweeps run side by side, each paired with Local under the same settings."""
