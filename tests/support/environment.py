"""What tests and the processes that they start run in: the CPU, a cache folder of their own, and Ctrl-C as a terminal gives it.

DFLASH_MLX_TEST_DEVICE   cpu (unless set) or gpu: MLX's default device in all tests
"""

import os
import signal
from pathlib import Path

DEVICE = "DFLASH_MLX_TEST_DEVICE"
STARTUP = Path(__file__).parent / "startup"


def choose_device(environ):
    """Tell this process's MLX, and by `environ` that of processes started with it, on which device to run."""
    import mlx.core as mx

    environ.setdefault(DEVICE, "cpu")
    mx.set_default_device(mx.Device(getattr(mx, environ[DEVICE])))
    paths = environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(STARTUP) not in paths:
        environ["PYTHONPATH"] = os.pathsep.join([str(STARTUP), *filter(None, paths)])


def own_cache(environ, folder):
    """Keep what tests measure and find out in `folder`. Models that the user's cache holds are used from there."""
    from dflash_mlx.machine import cache_directory

    users = cache_directory()
    for model in users.iterdir() if users.is_dir() else ():
        if (model / "config.json").exists():
            (folder / model.name).symlink_to(model, target_is_directory=True)
    environ["DFLASH_MLX_CACHE"] = str(folder)


def give_children_interrupts():
    """Let signals reach the processes started from here where the shell ignores them for this one (`nohup pytest &`).

    A handler is not inherited, an ignored signal is. This process itself goes on ignoring them.
    """
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
