"""Twenty steps of training, in as many processes as `mlx.launch` starts: `ranks_worker.py OUT` with settings as JSON behind it.

Every process writes OUT/rank-N.json: its losses and the sums of its weights; rank 0 trains into OUT.
"""

import json
import os
import sys
from pathlib import Path

import mlx.core as mx

mx.set_default_device(mx.cpu)

from launching import sleep_while_waiting  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from train_kit import make_docs, make_target  # noqa: E402

from dflash_mlx.train import trainer as loop  # noqa: E402
from dflash_mlx.train.start import as_dflash2, drafter_config  # noqa: E402

out, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
model = make_target()
raw = drafter_config(model, mask_token_id=1, layers=2, block_size=6, target_layer_ids=[1, 2, 4])
if settings.pop("dflash2", False):
    raw = as_dflash2(raw, 4)
losses, take, trainers = [], loop.Trainer.take, []


def noting(self, passes, share):
    got = take(self, passes, share)
    losses.append(got[0].item())
    trainers[:] = [self]
    if str(self.step) == os.environ.get("STOP_AT"):
        raise KeyboardInterrupt
    return got


loop.Trainer.take = noting
sleep_while_waiting()
rank = mx.distributed.init().rank()
loop.train(model, make_docs(model), out, raw, loop.TrainConfig(**settings, log_every=20), report=print)
weights = {name: p.tolist() for name, p in tree_flatten(trainers[0].params)}
(out / f"rank-{rank}.json").write_text(json.dumps({"losses": losses, "weights": weights, "step": trainers[0].step}))
