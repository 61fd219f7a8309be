"""Route the calls of a model's modules through handlers, for one pass and in one thread. Nothing is left on the model.

Knows modules and their classes; knows no model, no target and no handler.

mlx-lm models offer no hook, and many build `model.layers` afresh at each access. What works for all of them: the module
OBJECT gets a made class, a subclass of its own class whose calls look for a handler, and its own class back afterwards.
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
    """Per thread: (id(module), method) -> its handler. They are not kept on a module, where an array would become a parameter."""

    handlers: dict[tuple[int, str], Handler] = {}


# class -> its made class. There is one, because a new type in each pass would defeat caches keyed by type.
_made: dict[type, type] = {}
_local = _Local()
# Each pass under way, of any thread -> ids of the modules that have made classes for it.
_held: dict[object, Collection[int]] = {}
_lock = threading.Lock()


def _swapped(cls: type) -> type:
    """The made class of a class: its calls go to this thread's handler for the module, if there is one.

    `as_linear` of an embedding, which is the head of a tied model, is such a call too.
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
        # Not by `super`: another thread may have given the module its own class back since this method was looked up.
        inner = getattr(made.__base__, method).__get__(self)
        return inner(*args, **kwargs) if handler is None else handler(inner, args, kwargs)

    return call


def _is_swapped(cls: type) -> bool:
    """Whether a class is a made one. A subclass that a model itself has of a class with a made one is not."""
    return _made.get(cls.__base__) is cls


def own_class(module: nn.Module) -> type:
    """A module's own class, also while it has a made one for a pass of some thread."""
    cls = type(module)
    return cls.__base__ if _is_swapped(cls) else cls


def _chain(outer: Handler, within: Handler) -> Handler:
    return lambda inner, args, kwargs: outer(lambda *a, **k: within(inner, a, k), args, kwargs)


# nn.Module's own `__setattr__` checks whether the value is a parameter, which takes as long as the rest of an interception.
_set = object.__setattr__


@contextmanager
def intercept(handlers: Sequence[tuple[nn.Module, Handler] | tuple[nn.Module, Handler, str]]) -> Iterator[None]:
    """Route the calls of some modules through handlers, in this thread, until the block ends.

    handlers: (module, handler), or (module, handler, name of a method other than `__call__`). Of several for one module the last
      one is called first.
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
                # Hundreds of modules have few classes, so most have a made one already.
                if made := _made.get(cls):
                    _set(module, "__class__", made)
                elif not _is_swapped(cls):
                    _set(module, "__class__", _swapped(cls))
        _local.handlers = routed
        yield
    finally:
        _local.handlers = before
        with _lock:
            # This is right also if an interruption left a part of the above undone.
            _held.pop(me, None)
            others = set().union(*_held.values())
            for key, module in modules.items():
                cls = type(module)
                own = cls.__base__
                if _made.get(own) is cls and key not in others:
                    _set(module, "__class__", own)
