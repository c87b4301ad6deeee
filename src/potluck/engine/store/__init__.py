"""States at rest: in device memory, in host memory, on disk."""
