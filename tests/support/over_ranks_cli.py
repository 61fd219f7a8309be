"""The command line on one rank of `mlx.launch`, on the CPU: `over_ranks_cli.py OUT ARGUMENTS`. OUT/pid-N has its process."""

import os
import sys
from pathlib import Path

import mlx.core as mx

mx.set_default_device(mx.cpu)

from launching import sleep_while_waiting  # noqa: E402

from dflash_mlx.cli.app import main  # noqa: E402

sleep_while_waiting()
out = sys.argv.pop(1)
(Path(out) / f"pid-{os.environ.get('MLX_RANK', '0')}").write_text(str(os.getpid()))
sys.argv[0] = "dflash-mlx"
main()
