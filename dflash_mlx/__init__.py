"""DFlash block-diffusion speculative decoding on MLX."""

from __future__ import annotations

from .version import __version__

# Nothing else is imported here: a Ctrl-C before `__main__.main` runs ends the process by the signal.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# name: module that holds it. Imported at first use, so that `import dflash_mlx` loads neither mlx_lm nor a model.
_PUBLIC = {
    "convert": "conversion",
    "load": "loading",
    "load_drafter": "loading",
    "generate": "generation",
    "stream_generate": "generation",
    "make_prompt_cache": "generation",
    "batch_generate": "batch.generator",
    "BatchGenerator": "batch.generator",
    "can_trim_prompt_cache": "prompt_cache",
    "trim_prompt_cache": "prompt_cache",
    "DrafterConfig": "config",
    "DFlashError": "errors",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        module = importlib.import_module(f".{_PUBLIC[name]}", __name__)
    except ImportError as error:
        from .requirements import explain

        if (said := explain(error)) is None:
            raise
        raise ImportError(f"{said}.", name=error.name) from None
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
