"""Checkpoints of any published spelling -> MLX models and MLX directories.

`convert` writes a directory; `load_target`, `load_tokenizer` and `load_drafter_weights` read the same sources directly.
"""

from .converter import Conversion, convert
from .drafters import load_dense_drafter, load_drafter_weights
from .targets import load_target, quantize_to_match
from .tokenizers import load_tokenizer

__all__ = [
    "Conversion",
    "convert",
    "load_dense_drafter",
    "load_drafter_weights",
    "load_target",
    "load_tokenizer",
    "quantize_to_match",
]
