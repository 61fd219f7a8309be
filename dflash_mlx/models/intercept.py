"""Calls of a model's modules go through handlers for the length of a pass, in one thread, and nothing is left on the model.

Knows modules and their classes; knows no model, no target and what no handler does.

mlx-lm models offer no hook, and many build `model.layers` afresh at each access. What works for all of them: the module
OBJECT gets a subclass of its own class, and its old class back afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.nn as nn

# (the module's own call, its arguments, its keyword arguments) -> what the caller gets
Handler = Callable[[Callable[..., Any], tuple, dict], Any]


class _Local(threading.local):
    """Per thread: (id(module), method) -> what to do with its call. Never on a module, where an array would be a parameter."""

    handlers: dict[tuple[int, str], Handler] = {}


# One made class per class: a new type each pass would defeat caches keyed by type.
_made: dict[type, type] = {}
_local = _Local()
# The modules, by id, that each pass of any thread holds in their made classes.
_held: dict[object, Collection[int]] = {}
_lock = threading.Lock()


def _swapped(cls: type) -> type:
    """The subclass of a module's class whose calls go through this thread's handlers, where it has one.

    An embedding's `as_linear`, the head of a tied model, is such a call too.
    """
    made = _made.get(cls)
    if made is None:
        methods = [method for method in ("__call__", "as_linear") if hasattr(cls, method)]
        made = _made[cls] = type("Tapped" + cls.__name__, (cls,), {})
        for method in methods:
            setattr(made, method, _through_handler(made, method))
    return made


def _through_handler(made: type, method: str) -> Callable[..., Any]:
    def call(self, *args, **kwargs):
        handler = _local.handlers.get((id(self), method))
        # Not by `super`: another thread, which alone held the module, may have let go of it since this call was looked up.
        inner = getattr(made.__base__, method).__get__(self)
        return inner(*args, **kwargs) if handler is None else handler(inner, args, kwargs)

    return call


def _is_swapped(cls: type) -> bool:
    """Whether a module's class is a made one. A class of its own that inherits from one that was tapped is not that."""
    return _made.get(cls.__base__) is cls


def own_class(module: nn.Module) -> type:
    """A module's class, also while a pass of some thread holds it in a made one."""
    cls = type(module)
    return cls.__base__ if _is_swapped(cls) else cls


def _chain(outer: Handler, within: Handler) -> Handler:
    return lambda inner, args, kwargs: outer(lambda *a, **k: within(inner, a, k), args, kwargs)


# nn.Module's own looks whether the value is a parameter, which takes as long as the rest of an interception.
_set = object.__setattr__


@contextmanager
def intercept(handlers: Sequence[tuple[nn.Module, Handler] | tuple[nn.Module, Handler, str]]) -> Iterator[None]:
    """Route the calls of some modules through handlers, in this thread, until the block ends; the newest is outermost.

    A third item names another method than `__call__`.
    """
    before, me = _local.handlers, object()
    routed, modules = dict(before), {}
    for module, handler, *method in handlers:
        key = (id(module), method[0] if method else "__call__")
        routed[key] = _chain(handler, routed[key]) if key in routed else handler
        modules[key[0]] = module
    try:
        with _lock:
            _held[me] = modules.keys()
            for module in modules.values():
                cls = type(module)
                # Of hundreds of modules the classes are few: most are known here.
                if made := _made.get(cls):
                    _set(module, "__class__", made)
                elif not _is_swapped(cls):
                    _set(module, "__class__", _swapped(cls))
        _local.handlers = routed
        yield
    finally:
        _local.handlers = before
        with _lock:
            # Right for any part of the above that an interruption left undone.
            _held.pop(me, None)
            others = set().union(*_held.values())
            for key, module in modules.items():
                cls = type(module)
                own = cls.__base__
                if _made.get(own) is cls and key not in others:
                    _set(module, "__class__", own)
