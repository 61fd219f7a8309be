"""A made-up CUDA GPU: the CPU, on which `small_batch`'s forms are faster than MLX's own operations, as are our texts, for which
MLX's operations stand in."""

import mlx.core as mx
from metal_device import MetalDevice

from dflash_mlx.kernels import autotune, small_batch, trials

FORMS = {"matmul_as_gemv", "gqa_folded_attention"}


def install(monkeypatch, tmp_path):
    """Put it in the place of this machine's, with an empty cache directory: what ran, in its order, forms by their names, texts
    as `MetalDevice.launches`."""
    texts = MetalDevice()
    ran = texts.launches
    monkeypatch.setattr(mx.fast, "cuda_kernel", texts.metal_kernel)

    def noted(name):
        form = getattr(small_batch, name)
        return lambda *args, **kwargs: ran.append(name) or form(*args, **kwargs)

    for name in FORMS:
        monkeypatch.setattr(small_batch, name, noted(name))
    monkeypatch.setenv("DFLASH_MLX_CACHE", str(tmp_path))
    monkeypatch.delenv("DFLASH_MLX_KERNELS", raising=False)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(autotune, "has_gpu", lambda: True)
    monkeypatch.setenv(small_batch.CUDNN, "0")
    for name in ("_known", "_off", "_plans", "_waiting"):
        monkeypatch.setattr(autotune, name, {})
    monkeypatch.setattr(small_batch, "TRIAL_KEYS", 40)
    monkeypatch.setattr(small_batch, "TRIAL_BYTES", 1)
    times = iter(range(1, 10**6))
    # Stock is timed after ours: it takes longer.
    monkeypatch.setattr(trials, "medians_s", lambda *calls, **_: [next(times) for _ in calls])
    return ran
