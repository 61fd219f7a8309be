"""Kernels of the fused verify step: each file holds one text, its reference in MLX ops, its launch and its contract.

Knows arrays and devices; knows nothing of models' families, caches or the loop. `docs/kernels.md` draws each kernel.
"""
