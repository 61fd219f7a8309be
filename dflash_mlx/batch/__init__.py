"""Many requests at once: each is a row of the batch with its own caches, and one target pass verifies the blocks of all rows."""
