"""Pictures of runs from their folders: what each kind needs, where it comes from, and who draws it."""
