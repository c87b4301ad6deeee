"""Runs: an experiment played round by round into a folder, alone or in a comparison."""
