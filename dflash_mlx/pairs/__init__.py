"""Pairs known by name: those that come with the package, and published drafters of well-known targets."""
