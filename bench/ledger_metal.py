"""What a walked round launches on Metal: kernels, bytes, multiply-adds, and where a launch waits for the one before it.

The rules are read from MLX's public source (github.com/ml-explore/mlx at 846d176, 2026-08-22, the newest that was at hand; its
version.h says 0.32.2): `SOURCES` names the file of each. Strides are followed exactly, because a kernel copies an input whose
layout it cannot take. A chip is its GPU's generation and size, as MLX asks them ("applegpu_g15s": 15, "s").
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
from ledger_walk import Array, Primitive, Round

# kind of primitive: (launches at the shapes of a round, file under mlx/backend). Any other kind is refused.
SOURCES: dict[str, tuple[str, str]] = {
    "Reshape": ("0; 1 copy where no strides can say it", "gpu/primitives.cpp, common/utils.cpp"),
    "Flatten": ("as Reshape", "gpu/primitives.cpp"),
    "Unflatten": ("as Reshape", "gpu/primitives.cpp"),
    "ExpandDims": ("0", "gpu/primitives.cpp"),
    "Squeeze": ("0", "gpu/primitives.cpp"),
    "Transpose": ("0", "gpu/primitives.cpp"),
    "Broadcast": ("0", "gpu/primitives.cpp"),
    "Slice": ("0", "gpu/slicing.cpp"),
    "Split": ("0", "gpu/primitives.cpp"),
    "StopGradient": ("0", "gpu/primitives.cpp"),
    "Depends": ("0", "gpu/primitives.cpp"),
    "View": ("0", "gpu/primitives.cpp"),
    "AsType": ("1 copy; 0 to its own type where the input has no other user", "gpu/primitives.cpp, gpu/copy.cpp"),
    "contiguous": ("1 copy, or 0 where the array is dense and its buffer holds no more", "gpu/primitives.cpp"),
    "Concatenate": ("1 copy a part", "metal/slicing.cpp"),
    "Full": ("1", "gpu/primitives.cpp"),
    "Arange": ("1", "metal/primitives.cpp"),
    "Pad": ("2: a fill and a copy", "gpu/slicing.cpp"),
    "SliceUpdate": ("1 copy of the update; 2 where the input has another user and is copied whole", "gpu/primitives.cpp"),
    "Gather": ("1", "metal/indexing.cpp"),
    "GatherAxis": ("1", "metal/indexing.cpp"),
    "elementwise": ("1", "metal/unary.cpp, binary.cpp, ternary.cpp"),
    "compiled": ("1: all of these are chains of elementwise operations", "metal/compiled.cpp, compile.cpp"),
    "Reduce": (
        "1 for rows and columns; 2 over all of a large array; 1 copy more of a layout that neither takes",
        "metal/reduce.cpp",
    ),
    "ArgReduce": ("1", "metal/primitives.cpp"),
    "Softmax": ("1; 1 copy of an input that is not dense", "metal/softmax.cpp"),
    "LogSumExp": ("1; 1 copy of an input that is not dense", "metal/logsumexp.cpp"),
    "Scan": ("1; 1 copy of an input that is not dense", "metal/scan.cpp"),
    "sort": ("1 to 2,048 values a row; beyond, 1 and 2 a merge level and 1 copy", "metal/sort.cpp"),
    "rms_norm": ("1; 1 copy of an input with gaps between its rows", "metal/normalization.cpp"),
    "rope": ("1", "metal/rope.cpp"),
    "rope part": ("2: what is not rotated is copied", "metal/rope.cpp"),
    "dequantize": ("1; 1 copy a part that is not dense", "metal/quantized.cpp"),
    "Convolution": ("1 depthwise; 1 copy of an input that is not dense", "metal/conv.cpp"),
    "QuantizedMatmul": ("1; 2 where K is split; 1 copy of rows with gaps", "metal/quantized.cpp"),
    "GatherQMM": ("1; 1 copy of rows with gaps", "metal/quantized.cpp"),
    "Matmul": ("1; 2 where K is split", "metal/matmul.cpp"),
    "attention": (
        "1; 2 with a second pass over long keys; its operations one by one where rows x shared heads exceed 32 (to 8 rows), or "
        "above 8 rows at head sizes 192 and 256",
        "metal/scaled_dot_product_attention.cpp, fast.cpp",
    ),
    "ScatterAxis": ("1; 1 copy of the whole where the input has another user", "metal/indexing.cpp"),
    "own text": ("1; 1 copy an input that is not dense", "metal/custom_kernel.cpp; dflash_mlx/kernels"),
    "gated_delta": ("1; 1 copy an input that is not dense", "metal/custom_kernel.cpp; mlx-lm models/gated_delta.py"),
}
VIEWS = {"Reshape", "Flatten", "Unflatten", "ExpandDims", "Squeeze", "StopGradient", "Depends", "View"}
UNARY = set("Abs Exp Log Negative Sigmoid Sqrt Square Tanh LogicalNot Erf Cos Sin".split())
NARY = set(
    "Add Subtract Multiply Divide Maximum Minimum Power FloorDivide Remainder Select BitwiseBinary LogicalAnd LogicalOr "
    "Equal NotEqual Greater GreaterEqual Less LessEqual".split()
)
# Read: chains of elementwise operations, short enough to be one kernel.
COMPILED = {f"compiled {name}" for name in ("swiglu", "silu", "precise_swiglu", "swiglu_oai", "compute_g", "weighted_rows")}
SORTS = {"Sort", "ArgSort", "Partition", "ArgPartition"}


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Of an array whose rows lie one behind the other, in elements."""
    out = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        out[i] = out[i + 1] * shape[i + 1]
    return tuple(out)


@dataclass
class Layout:
    """An array as it lies in memory. buffer: whose memory it is; held: elements of that memory."""

    shape: tuple[int, ...]
    dtype: mx.Dtype
    strides: tuple[int, ...]
    buffer: int
    held: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Of the elements that there are: what a broadcast repeats lies there once."""
        return math.prod(n for n, s in zip(self.shape, self.strides, strict=True) if s) * self.dtype.size

    @property
    def row_contiguous(self) -> bool:
        return all(n == 1 or s == w for n, s, w in zip(self.shape, self.strides, strides_of(self.shape), strict=True))

    @property
    def dense(self) -> bool:
        """Without gaps, in whatever order of axes."""
        at = 1
        for s, n in sorted((s, n) for n, s in zip(self.shape, self.strides, strict=True) if n > 1 and s):
            if s != at:
                return False
            at *= n
        return True


def reshaped(layout: Layout, shape: Sequence[int]) -> tuple[int, ...] | None:
    """The strides that say `shape` without a copy, or None."""
    axes = [(n, s) for n, s in zip(layout.shape, layout.strides, strict=True) if n != 1]
    merged: list[list[int]] = []
    for n, s in axes:
        if merged and merged[-1][1] == n * s:
            merged[-1] = [merged[-1][0] * n, s]
        else:
            merged.append([n, s])
    out, i, left, stride = [], 0, 1, 1
    for n in reversed(shape):
        if n == 1:
            out.append(stride * left if left > 1 else 1)
            continue
        if left == 1:
            if i == len(merged):
                return None
            left, stride = merged[-1 - i]
            i, done = i + 1, 1
        if left % n:
            return None
        out.append(stride * done)
        left, done = left // n, done * n
    return tuple(reversed(out))


@dataclass
class Launch:
    """nbytes: read and written; macs: multiply-adds; weight_bytes: of these bytes, those of a weight that all rows share.

    rows: of such a product; tiles: how often its kernel goes through the weight; waits: for a launch before it.
    """

    kernel: str
    stage: str
    nbytes: float
    macs: float = 0.0
    weight_bytes: float = 0.0
    rows: int = 1
    tiles: int = 1
    waits: bool = True


@dataclass
class Gpu:
    """generation and size as MLX asks them; nax: whether it has matrix units that MLX's kernels for them use."""

    generation: int
    size: str
    nax: bool = False

    def vector_rows(self, K: int, N: int) -> int:
        """From how many rows on a quantized product goes to the matrix kernel (get_qmv_batch_limit)."""
        small, middle = K <= 2048 and N <= 2048, K <= 4096 and N <= 4096
        if self.generation >= 17 and self.size != "d":
            return 33 if small else 25 if middle else 13
        if self.generation >= 15 and self.size != "d":
            return 13 if small else 15 if middle else 13
        if self.size == "d":
            return 32 if small else 18 if middle else 12
        if self.generation >= 13:
            return 14 if small else 10 if middle else 6
        return 18 if small else 12 if middle else 10


@dataclass
class Ledger:
    """The launches of one round on one GPU."""

    round: Round
    gpu: Gpu
    launches: list[Launch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._layouts: dict[str, Layout] = {}
        self._buffers = 0
        for name, shape, dtype in self.round.inputs.values():
            self._fresh((name, tuple(shape), dtype))
        self._users = Counter(a[0] for p in self.round.primitives for a in p.inputs)
        # Written and read since the last barrier.
        self._written: set[int] = set()
        self._read: set[int] = set()
        for p in self.round.primitives:
            self._stage = p.stage
            self._rule(p)(p, [self._layouts[a[0]] for a in p.inputs])

    def _rule(self, p: Primitive) -> Callable[[Primitive, list[Layout]], None]:
        kind = p.kind
        if kind in VIEWS:
            return self._view
        if kind in UNARY | NARY or kind in COMPILED:
            return self._elementwise
        if kind in SORTS:
            return self._sort
        if kind.startswith("attention"):
            return self._attention
        rule = getattr(self, f"_{kind.lower().replace(' ', '_')}", None)
        if rule is None:
            raise KeyError(f"no rule says what {kind} launches on Metal: read MLX's source and add it to SOURCES")
        return rule

    def _fresh(self, array: Array, strides: tuple[int, ...] | None = None) -> Layout:
        name, shape, dtype = array[0], tuple(array[1]), array[2]
        self._buffers += 1
        self._layouts[name] = Layout(shape, dtype, strides or strides_of(shape), self._buffers, math.prod(shape))
        return self._layouts[name]

    def _over(self, array: Array, base: Layout, strides: Sequence[int]) -> None:
        self._layouts[array[0]] = Layout(tuple(array[1]), array[2], tuple(strides), base.buffer, base.held)

    def _launch(self, kernel: str, reads: Sequence[Layout], writes: Layout, nbytes: float | None = None, **more: float) -> None:
        """A launch waits where it reads what was written, or writes what was read or written, since the last barrier."""
        inputs = {a.buffer for a in reads}
        waits = bool(inputs & self._written) or writes.buffer in self._read | self._written
        if waits:
            self._written, self._read = set(), set()
        self._written.add(writes.buffer)
        self._read |= inputs
        nbytes = sum(a.nbytes for a in [*reads, writes]) if nbytes is None else nbytes
        self.launches.append(Launch(kernel, self._stage, nbytes, waits=waits, **more))

    def _copy(self, a: Layout, kernel: str = "copy") -> Layout:
        self._buffers += 1
        out = Layout(a.shape, a.dtype, strides_of(a.shape), self._buffers, a.size)
        self._launch(kernel, [a], out, a.nbytes + out.nbytes)
        return out

    def _row(self, a: Layout) -> Layout:
        return a if a.row_contiguous else self._copy(a)

    def _matrix(self, a: Layout) -> Layout:
        """Copied unless its last two axes are rows one behind the other."""
        ok = a.strides[-1] == 1 and (len(a.shape) < 2 or a.strides[-2] == a.shape[-1])
        return a if ok else self._copy(a)

    # --- views

    def _view(self, p: Primitive, ins: list[Layout]) -> None:
        out, a = p.outputs[0], ins[0]
        strides = a.strides if tuple(out[1]) == a.shape else reshaped(a, out[1])
        if strides is None:
            a = self._copy(a, "copy for reshape")
            strides = strides_of(out[1])
        self._over(out, a, strides)

    def _transpose(self, p: Primitive, ins: list[Layout]) -> None:
        self._over(p.outputs[0], ins[0], [ins[0].strides[i] for i in p.arguments[0]])

    def _broadcast(self, p: Primitive, ins: list[Layout]) -> None:
        a, shape = ins[0], p.outputs[0][1]
        lead = len(shape) - len(a.shape)
        own = [0 if n == 1 and n != m else s for n, s, m in zip(a.shape, a.strides, shape[lead:], strict=True)]
        self._over(p.outputs[0], a, [0] * lead + own)

    def _slice(self, p: Primitive, ins: list[Layout]) -> None:
        steps = p.arguments[2]
        self._over(p.outputs[0], ins[0], [s * t for s, t in zip(ins[0].strides, steps, strict=True)])

    def _split(self, p: Primitive, ins: list[Layout]) -> None:
        for out in p.outputs:
            self._over(out, ins[0], ins[0].strides)

    # --- copies and small kernels

    def _astype(self, p: Primitive, ins: list[Layout]) -> None:
        a, same = ins[0], p.outputs[0][2] == ins[0].dtype
        if same and a.dense and self._users[p.inputs[0][0]] == 1:
            self._over(p.outputs[0], a, a.strides)
        else:
            self._launch("copy", [a], self._fresh(p.outputs[0], a.strides if a.dense else None))

    def _contiguous(self, p: Primitive, ins: list[Layout]) -> None:
        a = ins[0]
        if a.row_contiguous and a.held * a.dtype.size <= a.nbytes + 16384:
            self._over(p.outputs[0], a, a.strides)
        else:
            self._launch("copy", [a], self._fresh(p.outputs[0]))

    def _concatenate(self, p: Primitive, ins: list[Layout]) -> None:
        out = self._fresh(p.outputs[0])
        for i, a in enumerate(a for a in ins if a.size):
            self._launch("copy for concatenate", [a], out, 2 * a.size * a.dtype.size)
            # The parts of one array are copied beside each other.
            self.launches[-1].waits &= i == 0

    def _full(self, p: Primitive, ins: list[Layout]) -> None:
        self._launch("fill", ins, self._fresh(p.outputs[0]))

    def _arange(self, p: Primitive, ins: list[Layout]) -> None:
        self._launch("arange", [], self._fresh(p.outputs[0]))

    def _pad(self, p: Primitive, ins: list[Layout]) -> None:
        out = self._fresh(p.outputs[0])
        self._launch("fill", [], out, out.nbytes)
        self._launch("copy", [ins[0]], out, 2 * ins[0].nbytes)

    def _written_into(self, p: Primitive, a: Layout, lies_right: bool) -> Layout:
        """The output of what writes into its first input: that memory, or a copy where others read it or it lies otherwise."""
        if self._users[p.inputs[0][0]] > 1 or not lies_right:
            out = self._fresh(p.outputs[0])
            self._launch("copy of a whole cache", [a], out)
            return out
        self._over(p.outputs[0], a, a.strides)
        return self._layouts[p.outputs[0][0]]

    def _sliceupdate(self, p: Primitive, ins: list[Layout]) -> None:
        a, update = ins
        out = self._written_into(p, a, a.dense)
        self._launch("copy into a slice", [update], out, 2 * update.size * update.dtype.size)

    def _gather(self, p: Primitive, ins: list[Layout]) -> None:
        out = self._fresh(p.outputs[0])
        self._launch("gather", ins, out, 2 * out.nbytes + sum(a.nbytes for a in ins[1:]))

    _gatheraxis = _gather

    def _scatteraxis(self, p: Primitive, ins: list[Layout]) -> None:
        a, indices, update = ins
        out = self._written_into(p, a, a.row_contiguous)
        self._launch("scatter into a cache", [update, indices], out, 2 * update.size * update.dtype.size)

    def _own_text(self, p: Primitive, ins: list[Layout]) -> None:
        ins = [self._row(a) for a in ins]
        out, *others = (self._fresh(out) for out in p.outputs)
        self._launch("own text", ins, out, sum(a.nbytes for a in [*ins, out, *others]))
        self._written |= {other.buffer for other in others}

    def _elementwise(self, p: Primitive, ins: list[Layout]) -> None:
        full = [a for a in ins if a.shape == tuple(p.outputs[0][1])]
        same = full and all(a.dense and a.strides == full[0].strides for a in full) and len(full) == sum(a.size > 1 for a in ins)
        outs = [self._fresh(out, full[0].strides if same else None) for out in p.outputs]
        kind = p.kind if p.kind.startswith("compiled ") else "elementwise"
        self._launch(kind, ins, outs[0], sum(a.nbytes for a in [*ins, *outs]))

    def _reduce(self, p: Primitive, ins: list[Layout]) -> None:
        a, out = ins[0], self._fresh(p.outputs[0])
        self._launch("reduce", [a], out)
        if out.size == 1 and a.size > 16 * 1024:
            self._launch("reduce", [out], out)

    def _argreduce(self, p: Primitive, ins: list[Layout]) -> None:
        self._launch("argreduce", ins, self._fresh(p.outputs[0]))

    def _softmax(self, p: Primitive, ins: list[Layout]) -> None:
        a = ins[0] if ins[0].dense and ins[0].strides[-1] == 1 else self._copy(ins[0])
        self._launch("softmax", [a], self._fresh(p.outputs[0], a.strides))

    def _logsumexp(self, p: Primitive, ins: list[Layout]) -> None:
        a = ins[0] if ins[0].dense and ins[0].strides[-1] == 1 else self._copy(ins[0])
        self._launch("logsumexp", [a], self._fresh(p.outputs[0]))

    def _scan(self, p: Primitive, ins: list[Layout]) -> None:
        a = self._row(ins[0])
        self._launch("scan", [a], self._fresh(p.outputs[0]))

    def _sort(self, p: Primitive, ins: list[Layout]) -> None:
        a, out = ins[0], self._fresh(p.outputs[0])
        n = a.shape[p.arguments[-1]]
        block = 4 * next(b for b, most in ((32, 32), (64, 64), (128, 128), (256, 256), (512, 1 << 60)) if (n + 3) // 4 <= most)
        blocks = -(-n // block)
        self._launch("sort", [a], out)
        if blocks > 1:
            for _ in range(2 * math.ceil(math.log2(blocks)) + 1):
                self._launch("sort", [out], out, 2 * a.size * (a.dtype.size + 4))

    def _rms_norm(self, p: Primitive, ins: list[Layout]) -> None:
        x = ins[0]
        rows = len(x.shape) < 2 or x.shape[-2] == 1 or x.strides[-2] in (0, x.shape[-1])
        if not (x.dense and x.strides[-1] == 1 and rows):
            x = self._copy(x)
        self._launch("rms_norm", [x, *ins[1:]], self._fresh(p.outputs[0], x.strides))

    def _rope(self, p: Primitive, ins: list[Layout]) -> None:
        x = ins[0]
        axes = len(x.shape)
        while axes > 3 and x.shape[-axes] == 1:
            axes -= 1
        whole = p.kind == "rope"
        if not whole or not x.row_contiguous and axes > 3:
            x = self._copy(x)
        self._launch("rope", [x, *ins[1:]], self._fresh(p.outputs[0]))

    _rope_part = _rope

    def _dequantize(self, p: Primitive, ins: list[Layout]) -> None:
        self._launch("dequantize", [self._row(a) for a in ins], self._fresh(p.outputs[0]))

    def _convolution(self, p: Primitive, ins: list[Layout]) -> None:
        a, w = (self._row(x) for x in ins)
        out = self._fresh(p.outputs[0])
        self._launch("depthwise convolution", [a, w], out, macs=out.size * w.shape[1])

    # --- products

    def _quantizedmatmul(self, p: Primitive, ins: list[Layout]) -> None:
        x, *w = (self._matrix(a) for a in ins)
        K, out = x.shape[-1], self._fresh(p.outputs[0])
        M = x.size // K if len(w[0].shape) == 2 and x.row_contiguous else x.shape[-2]
        N, weights = out.shape[-1], sum(a.nbytes for a in w)
        rest = x.nbytes + out.nbytes
        if M < self.gpu.vector_rows(K, N):
            wide = M >= 2 and self.gpu.generation >= 15
            # The wide kernel multiplies up to 5 rows with each weight that it reads; the other reads weights once a row.
            tiles = -(-M // 5) if wide else M
            kernel = "qmv wide" if wide else "qmv"
            self._launch(kernel, [x, *w], out, rest + weights, macs=M * N * K, weight_bytes=weights, rows=M, tiles=tiles)
            return
        split = min(max(1, 512 // (-(-N // 32) * -(-M // 32))), K // 64)
        while split > 1 and K % (split * 64):
            split -= 1
        nbytes = x.nbytes + out.nbytes * split + weights
        self._launch("qmm", [x, *w], out, nbytes, macs=M * N * K, weight_bytes=weights, rows=M, tiles=-(-M // 32))
        if split > 1:
            self._launch("qmm sum of parts", [out], out, out.nbytes * (split + 1))

    def _gatherqmm(self, p: Primitive, ins: list[Layout]) -> None:
        """Of x [..., 1, K] and the weights [E, N, K] of E experts; each row's expert by index."""
        x, *w = (self._matrix(a) for a in ins[:-2])
        indices, K, out = ins[-1], x.shape[-1], self._fresh(p.outputs[0])
        E, N = w[0].shape[0], out.shape[-1]
        B = out.size // N // x.shape[-2]
        # Distinct experts to be expected, were they drawn without regard to each other.
        used = E * (1 - (1 - 1 / E) ** B)
        weights = sum(a.nbytes for a in w) * used / E
        self._launch("gather qmv", [x, *w, indices], out, x.nbytes + out.nbytes + weights, macs=B * N * K)

    def _matmul(self, p: Primitive, ins: list[Layout]) -> None:
        a, b = ins
        M, K, N, out = a.shape[-2], a.shape[-1], b.shape[-1], self._fresh(p.outputs[0])
        batch = out.size // (M * N)
        self._launch("matmul", [a, b], out, macs=out.size * K)
        tiles = -(-M // 16) * -(-N // 16)
        if (
            batch == 1
            and min(M, N) > 1
            and tiles <= (2048 if self.gpu.size in "sd" else 1024)
            and K // 16 >= 8
            and K >= max(M, N)
        ):
            self._launch("matmul sum of parts", [out], out)

    def _attention(self, p: Primitive, ins: list[Layout]) -> None:
        q, k, v = ins[:3]
        (_, heads, L, D), (_, kv_heads, S, _) = q.shape, k.shape
        shared, causal, sinks = heads // kv_heads, "causal" in p.kind, "sinks" in p.kind
        out, macs = self._fresh(p.outputs[0]), 2 * heads * L * S * D
        if L <= 8 and L * shared <= 32 and D in (64, 96, 128, 256):
            head = q.strides[1] == D and q.strides[2] == heads * D and q.strides[3] == 1
            if not q.row_contiguous and not head:
                q = self._copy(q)
            two = self.gpu.size in "sd" and S >= 1024 or kv_heads < heads and S >= 4096
            self._launch("attention vector", [q, k, v, *ins[3:]], out, macs=macs)
            if two:
                self._launch("attention second pass", [out], out)
        elif L > 8 and D in (64, 72, 80, 96, 128):
            self._launch("attention full", [q, k, v, *ins[3:]], out, macs=macs * -(-L // 32) * 32 / L)
            # Its rows lie token by token.
            self._fresh(p.outputs[0], (out.size, D, heads * D, 1))
        else:
            self._attention_by_parts(q, k, v, ins[3:], out, causal, sinks)

    def _attention_by_parts(
        self, q: Layout, k: Layout, v: Layout, more: list[Layout], out: Layout, causal: bool, sinks: bool
    ) -> None:
        """Scale, product, mask, softmax and product, with all scores in memory; each shared head reads the keys again."""
        (_, heads, L, D), S = q.shape, k.shape[2]
        shared = heads // k.shape[1]
        q = self._copy(q, "elementwise")
        self._buffers += 1
        scores = Layout((1, heads, L, S), q.dtype, strides_of((1, heads, L, S)), self._buffers, heads * L * S)
        self._launch("matmul", [q, k], scores, q.nbytes + shared * k.nbytes + scores.nbytes, macs=heads * L * S * D)
        if causal:
            for n in (L, S):
                self._launch("arange", [], scores, 4 * n)
            self._launch("elementwise", [], scores, L * S)
        if causal or len(more) > sinks:
            self._launch("elementwise", [scores], scores, 2 * scores.nbytes)
        if sinks:
            for _ in range(2):
                self._launch("copy for concatenate", [scores], scores, 2 * scores.nbytes)
        self._launch("softmax", [scores], scores, 2 * scores.nbytes)
        self._launch("matmul", [scores, v], out, scores.nbytes + shared * v.nbytes + out.nbytes, macs=heads * L * S * D)

    def _gated_delta(self, p: Primitive, ins: list[Layout]) -> None:
        """Every value row's state is read once, moved through the tokens in registers, and written."""
        ins = [self._row(a) for a in ins]
        y, state = (self._fresh(out) for out in p.outputs)
        tokens = y.shape[1]
        self._launch("gated delta", ins, y, sum(a.nbytes for a in [*ins, y, state]), macs=4 * tokens * state.size)
        self._written.add(state.buffer)

    # --- sums

    def by_stage(self) -> dict[str, dict[str, float]]:
        """stage: launches, those that wait for another, bytes (weights as often as they are read) and multiply-adds."""
        out: dict[str, dict[str, float]] = {}
        for launch in self.launches:
            of = out.setdefault(launch.stage, {"launches": 0, "waits": 0, "bytes": 0.0, "macs": 0.0})
            of["launches"] += 1
            of["waits"] += launch.waits
            of["bytes"] += launch.nbytes
            of["macs"] += launch.macs
        return out

    def kernels(self) -> Counter[str]:
        return Counter(launch.kernel for launch in self.launches)
