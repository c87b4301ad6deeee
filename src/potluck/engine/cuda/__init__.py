"""A whole cohort at once on one GPU."""
