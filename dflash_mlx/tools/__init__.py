"""Commands that measure and examine: bench and doctor."""
