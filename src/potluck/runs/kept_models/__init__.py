"""The trained models that a run folder keeps: written as they were measured, made live again without data."""
