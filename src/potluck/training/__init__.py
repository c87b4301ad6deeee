"""The training loop, optimisers, training modes, and passes over whole splits."""
