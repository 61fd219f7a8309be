"""Activations of a built mlx-lm model, set to the one that the checkpoint's config names.

Knows which activation each mlx-lm family has in its code (it reads no key for it), and the two forms of a feed-forward block.
Knows no files. A wrong activation changes logits by 1e-3 to 1: too little to see in the text, too much for reference outputs.
"""

import functools
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.errors import ConfigError

from .configs import TargetConfig
from .families import special

ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "silu": nn.silu,
    "gelu": nn.gelu,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "relu": nn.relu,
    "relu2": nn.relu2,
}
_SAME = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh", "gelu_python_tanh": "gelu_pytorch_tanh", "relu_squared": "relu2"}

_GATED = ("gate_proj", "up_proj", "down_proj")
_PLAIN = (("c_fc", "c_proj"), ("fc1", "fc2"), ("up_proj", "down_proj"), ("dense_h_to_4h", "dense_4h_to_h"))


def correct_activation(model: nn.Module, target: TargetConfig) -> list[str]:
    """Replace the feed-forward activation if the config names another one than the family's code uses.

    Returns: a sentence for the user if anything was replaced.
    Raises:
      ConfigError: an activation without a formula here, or no feed-forward block of a known shape to put it in.
    """
    if target.activation is None:
        return []
    wanted = _SAME.get(target.activation, target.activation)
    present = special(target.family).activation or _SAME.get(target.usual_activation, target.usual_activation)
    if wanted == present:
        return []
    blocks = [module for layer in model.layers for _, module in layer.named_modules() if _shape(module)]
    if wanted not in ACTIVATIONS or not blocks:
        raise ConfigError(
            f'config.json says "{target.activation}"; mlx-lm\'s {target.family} computes "{present}"',
            "This checkpoint needs another implementation",
        )
    for block in blocks:
        block.__class__ = _with_activation(type(block), _shape(block), wanted)
    return [f"activation set to {wanted}; mlx-lm's {target.family} computes {present}"]


def _shape(module: nn.Module) -> tuple[str, ...] | None:
    children = module.children()
    if all(isinstance(children.get(name), nn.Linear | nn.QuantizedLinear) for name in _GATED):
        return _GATED
    pairs = (pair for pair in _PLAIN if all(isinstance(children.get(n), nn.Linear | nn.QuantizedLinear) for n in pair))
    return next(pairs, None)


@functools.cache
def _with_activation(cls: type, names: tuple[str, ...], activation: str) -> type:
    act = ACTIVATIONS[activation]

    def gated(self, x: mx.array) -> mx.array:
        return self.down_proj(act(self.gate_proj(x)) * self.up_proj(x))

    def plain(self, x: mx.array) -> mx.array:
        return self[names[1]](act(self[names[0]](x)))

    return type(cls.__name__, (cls,), {"__call__": gated if len(names) == 3 else plain})
