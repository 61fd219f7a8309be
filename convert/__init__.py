"""Checkpoints of any published spelling -> MLX models and MLX directories. See `convert` and `load_target`."""

from .targets import load_target

__all__ = ["load_target"]
