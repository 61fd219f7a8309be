"""Many requests at once: rows of one batch, each a run with caches of its own, whose blocks one target pass verifies."""
