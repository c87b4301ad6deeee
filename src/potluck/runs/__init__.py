"""A run: rounds played into a folder, alone or side by side."""
