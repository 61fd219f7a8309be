"""A made-up Metal GPU: MLX's own operations stand for our texts; its clock, limits and faults are the test's.

Launches go through `mx.fast.metal_kernel`, so grids, threadgroups and templates are those that a Mac would be given. Its clock
is read by trials alone and moves only by what a launch, a compile and stock MLX's calls cost.
"""

import math
import struct

import mlx.core as mx

from dflash_mlx.kernels import (
    accept,
    autotune,
    block_attention,
    block_gather_qmm,
    block_heads,
    block_linear,
    block_qmm,
    gated_delta,
    small_batch,
    trials,
)
from dflash_mlx.kernels.head_argmax import head_argmax_ops

OPS = {
    "accept": (accept, accept.accept_ops),
    "block_qmm": (block_qmm, block_qmm.block_qmm_ops),
    "block_attention": (block_attention, block_attention.block_attention_ops),
    "block_gather_qmm": (block_gather_qmm, block_gather_qmm.block_gather_qmm_ops),
    "block_heads": (block_heads, block_heads.block_heads_ops),
    "block_linear": (block_linear, block_linear.block_linear_ops),
    "gated_delta": (gated_delta, gated_delta.gated_delta_ops),
}


class MetalDevice:
    """The device that a test's process runs on.

    now: its clock, in seconds.
    costs: (name, template) -> seconds of a launch; stock_costs: name -> seconds of MLX's call; compile_s: of each text's first
      launch; most_threads: (name, template) -> what a threadgroup may have; before: called with a name before each launch and
      stock call.
    launches: (name, template, threads) of each; the name of a text in several forms says which.
    """

    def __init__(self, architecture="applegpu_g15s", name="Apple M3 Pro"):
        self.info = {
            "architecture": architecture,
            "device_name": name,
            "memory_size": 18 << 30,
            "max_recommended_working_set_size": 12 << 30,
        }
        self.now, self.compile_s, self.launches, self._compiled = 0.0, 0.0, [], set()
        self.costs = lambda name, template: {"head_argmax": 8e-4}.get(name, 0.0 if name.endswith("_reduce") else 1e-3)
        self.stock_costs = lambda name: 2e-3
        self.most_threads = lambda name, template: 1024
        self.before = lambda name: None

    def install(self, monkeypatch, tmp_path):
        """Put it in the place of this machine's, with an empty cache directory."""
        monkeypatch.setenv("DFLASH_MLX_CACHE", str(tmp_path))
        monkeypatch.delenv("DFLASH_MLX_KERNELS", raising=False)
        monkeypatch.setattr(mx, "device_info", lambda *_: self.info)
        monkeypatch.setattr(mx, "set_wired_limit", lambda limit: 0)
        monkeypatch.setattr(mx.fast, "metal_kernel", self.metal_kernel)
        monkeypatch.setattr(autotune, "has_gpu", lambda: True)
        monkeypatch.setattr(trials, "clock", lambda: self.now)
        # Its clock does not waver.
        monkeypatch.setattr(trials, "SAMPLES", 2)
        monkeypatch.setattr(trials, "LENGTH", 2)
        monkeypatch.setattr(block_qmm, "TRIAL_BYTES", 1)
        monkeypatch.setattr(block_attention, "TRIAL_KEYS", 64)
        for name, (module, ops) in OPS.items():
            monkeypatch.setattr(module, f"{name}_ops", self._timed(name, ops))
        # Another way to say MLX's own call: as quick, if a test does not say otherwise.
        name = "gqa_folded_attention"
        monkeypatch.setattr(small_batch, name, self._timed(name, getattr(small_batch, name)))
        for name in ("_known", "_off", "_plans", "_waiting"):
            monkeypatch.setattr(autotune, name, {})
        monkeypatch.setattr(autotune, "_slow", set())
        return self

    def restart(self):
        """As a new process on the same machine: what this one found out is forgotten, and all is compiled anew."""
        autotune._known.clear(), autotune._off.clear(), autotune._waiting.clear(), autotune._slow.clear(), autotune._forget()
        autotune._system.cache_clear()
        self._compiled.clear()
        self.launches.clear()

    def _timed(self, name, ops):
        def stock(*args, **kwargs):
            self.before(name)
            self.now += self.stock_costs(name)
            return ops(*args, **kwargs)

        return stock

    def metal_kernel(self, name, input_names, **_):
        name = name.removeprefix("dflash_")
        computes = getattr(self, f"_{name.split('_EIGHTS')[0]}")

        def launch(*, inputs, template, threadgroup, grid, output_shapes, output_dtypes):
            self.before(name)
            given, threads = dict(template), math.prod(threadgroup)
            assert not any(n % t for n, t in zip(grid, threadgroup, strict=True))
            if threads > self.most_threads(name, given):
                raise RuntimeError(f"Thread group size ({threads}) is greater than the maximum allowed threads per group")
            text = (name, *template)
            self.now += self.costs(name, given) + (0.0 if text in self._compiled else self.compile_s)
            self._compiled.add(text)
            self.launches.append((name, given, threads))
            outs = computes(dict(zip(input_names, inputs, strict=True)), given, output_shapes)
            return [a.reshape(s).astype(t) for a, s, t in zip(outs, output_shapes, output_dtypes, strict=True)]

        return launch

    # ---- what our texts compute

    @staticmethod
    def _block_qmm(inputs, given, shapes):
        return [OPS["block_qmm"][1](*inputs.values(), given["GROUP"], given["BITS"])]

    _block_qmm_tiles = _block_qmm

    @staticmethod
    def _block_linear(inputs, given, shapes):
        x, w, scales, biases, weight, residual = map(inputs.get, ("x", "w", "scales", "biases", "weight", "residual"))
        weights = block_linear.Weights(w, scales, biases, given["GROUP"], given["BITS"])
        norm = None if weight is None else (weight, struct.unpack("f", struct.pack("i", given["EPS"]))[0])
        # Its form is in its text alone, but for what its output says.
        residual = None if residual is None else residual.reshape(shapes[0])
        return [OPS["block_linear"][1](x, weights, norm, residual, shapes[0][-1] < w.shape[0], heads=x.ndim == 4)]

    @staticmethod
    def _block_heads(inputs, given, shapes):
        eps = struct.unpack("f", struct.pack("i", given["EPS"]))[0]
        heads = block_heads.Heads(*map(given.get, ("HEADS", "KV_HEADS", "D", "DIMS", "TRADITIONAL")), eps)
        return OPS["block_heads"][1](*inputs.values(), heads)

    @staticmethod
    def _gated_delta(inputs, given, shapes):
        *about, rows = inputs.values()
        y, state = OPS["gated_delta"][1](*about, rows.item())
        return [mx.pad(y, [(0, 0), (0, shapes[0][1] - y.shape[1]), (0, 0), (0, 0)]), state]

    @staticmethod
    def _block_gather_qmm(inputs, given, shapes):
        return [OPS["block_gather_qmm"][1](*inputs.values(), given["GROUP"], given["BITS"])]

    @staticmethod
    def _accept(inputs, given, shapes):
        return OPS["accept"][1](*inputs.values())

    @staticmethod
    def _head_argmax(inputs, given, shapes):
        x, w, scales, biases, bias, _ = inputs.values()
        weights = (w,) if given["DENSE"] else (w, scales, biases, given["GROUP"], given["BITS"])
        ids, margin = head_argmax_ops(x, *weights, logit_bias=bias if given["BIASED"] else None)
        # The answer in the first stripe, nothing in the others.
        rest = mx.full((x.shape[0], shapes[0][1] - 1), -math.inf)
        best = [mx.concatenate([a[:, None].astype(mx.float32), rest], axis=1) for a in (margin, mx.zeros_like(margin))]
        return [*best, mx.concatenate([ids[:, None], mx.zeros(rest.shape, dtype=mx.int32)], axis=1)]

    @staticmethod
    def _head_argmax_reduce(inputs, given, shapes):
        best, second, ids = inputs.values()
        return [ids[:, 0], best[:, 0] - second[:, 0]]

    @staticmethod
    def _block_attention(inputs, given, shapes):
        q, k, v, scale, start, _, held = inputs.values()
        if given["CAUSAL"] and not given["WINDOW"]:
            # Of an array that is no number yet where a pass is traced: how many keys there are.
            out = attention_in_chunks(q, k, v, scale, mx.where(held > 0, held, k.shape[2]))
        else:
            out = OPS["block_attention"][1](q, k, v, scale.item(), bool(given["CAUSAL"]), given["WINDOW"], None, start.item())
        chunks = shapes[0][3]
        return [mx.repeat(out[:, :, :, None], chunks, axis=3), mx.zeros(shapes[1]), mx.ones(shapes[2])]

    @staticmethod
    def _block_attention_reduce(inputs, given, shapes):
        return [next(iter(inputs.values()))[:, :, :, 0]]


def attention_in_chunks(q, k, v, scale, end):
    """Attention of the last rows before `end` [1] to the keys up to their own: a row and 256 keys at a time, as the text does it.
    What stands behind, in a buffer or of another row, has no part in a bit."""
    m, share = q.shape[2], q.shape[1] // k.shape[1]
    spare = -k.shape[2] % block_attention.CHUNK
    k, v = (mx.repeat(mx.pad(a, [(0, 0), (0, 0), (0, spare), (0, 0)]), share, axis=1).astype(mx.float32) for a in (k, v))
    rows = []
    for i in range(m):
        seen = end - m + i
        top, total, out = mx.array(-math.inf), mx.array(0.0), mx.zeros((*q.shape[:2], 1, v.shape[3]))
        for at in range(0, k.shape[2], block_attention.CHUNK):
            some = slice(at, at + block_attention.CHUNK)
            row = mx.contiguous(q[:, :, i : i + 1]).astype(mx.float32)
            scores = mx.sum(row * mx.contiguous(k[:, :, some]), axis=-1)[:, :, None] * scale
            scores = mx.where(mx.arange(at, at + block_attention.CHUNK) <= seen, scores, -math.inf)
            best = mx.maximum(top, mx.max(scores, axis=-1, keepdims=True))
            weights, shrink = mx.exp(scores - best), mx.exp(top - best)
            total = total * shrink + mx.sum(weights, axis=-1, keepdims=True)
            out, top = out * shrink + weights @ mx.contiguous(v[:, :, some]), best
        rows.append(out / total)
    return mx.concatenate(rows, axis=2)
