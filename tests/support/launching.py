"""`mlx.launch` with ranks on this machine, over the loopback."""

import os
import random
import socket
import stat
import struct
import subprocess
import sys
from pathlib import Path

SUPPORT = Path(__file__).parent
# mlx.launch 0.32 asks for what it can write to its ranks too, which is always so, and takes a whole core for that.
LAUNCH = """
from importlib.metadata import entry_points
from mlx._distributed_utils import launch
select = launch.select
launch.select = lambda reads, writes, others, s: select([fd for fd in reads if fd], [], others, min(max(s, 0.01), 0.1))
next(iter(entry_points(name="mlx.launch"))).load()()
"""


def free_port(count=1):
    """A port with free ones behind it, outside of those that the system hands out."""
    while True:
        port = random.randrange(20000, 30000)
        try:
            for i in range(count):
                with socket.socket() as one:
                    one.bind(("127.0.0.1", port + i))
            return port
        except OSError:
            continue


def sleep_while_waiting():
    """Let this rank's ring sleep until a message comes, at most 2 ms at a time, as if its process were alone on a core.

    MLX's ring asks its sockets again and again: with more ranks than cores that was two thirds of their CPU time, taken from
    the rank that they waited for. A socket that blocks for a moment says the same: nothing yet.
    """
    import mlx.core as mx

    init, moment = mx.distributed.init, struct.pack("ll", 0, 2000)

    def patient(*args, **kwargs):
        mx.distributed.init = init
        group = init(*args, **kwargs)
        for fd in map(int, os.listdir("/dev/fd")):
            try:
                if not stat.S_ISSOCK(os.fstat(fd).st_mode) or os.get_blocking(fd):
                    continue
            except OSError:
                continue
            with socket.socket(fileno=os.dup(fd)) as one:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, moment)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, moment)
            os.set_blocking(fd, True)
        return group

    mx.distributed.init = patient


def launched(ranks, *arguments, env=(), **options):
    """A `subprocess.Popen` of a Python program with these arguments on so many ranks; its output is text."""
    command = [sys.executable, *map(str, arguments)]
    launch = [sys.executable, "-c", LAUNCH, "-n", str(ranks), "--backend", "ring", "--starting-port", str(free_port(ranks))]
    path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **dict(env)}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*launch, "--", *command] if ranks > 1 else command, env=env, **{**pipes, **options})


def output_of(ranks, *arguments, env=(), timeout=300):
    """What such a program prints. The launcher's own exit status is 0 whatever happens."""
    process = launched(ranks, *arguments, env=env)
    try:
        return process.communicate(timeout=timeout)[0]
    finally:
        process.kill()
