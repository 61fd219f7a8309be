"""One round of the real loop as a list of primitives, on any machine: nothing is evaluated and no weight is allocated.

`mx.export_function` with a callback tells each primitive with its inputs, outputs, shapes, types and arguments. Weights, caches
and the anchor go in as inputs. The CPU build takes `mx.fast` apart and inlines compiled functions; mlx-lm asks
`mx.metal.is_available()` which recurrence to build. For the length of a walk each of these is one stand-in: a `Depends` of the
call's inputs on a tag, which `Primitive.kind` names. Our own kernels are off: a Mac turns them on by trial (`kernels/`).
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import gated_delta
from mlx_lm.models.cache import ArraysCache, KVCache

from dflash_mlx.draft_length.policy import DraftLengthPolicy, FixedDraftLength
from dflash_mlx.kernels import autotune
from dflash_mlx.loop import Kept, Run
from dflash_mlx.models.drafter import Drafter
from dflash_mlx.pair import DFlashPair
from dflash_mlx.prompt_cache import PairCache
from dflash_mlx.rollback import leaves
from dflash_mlx.stats import GenerationStats
from dflash_mlx.target_sampler import RoundResult, TargetSampler

# A primitive's array: its name in the walk, shape and type.
Array = tuple[str, tuple[int, ...], mx.Dtype]


@dataclass
class Primitive:
    """kind: what it is called in the launch table; stage: of the first array that was handed over and needs it."""

    kind: str
    arguments: list[Any]
    inputs: list[Array]
    outputs: list[Array]
    stage: str = ""


@dataclass
class HandOver:
    """Arrays that the host gave to the device in one call. real: False where it only says whose the primitives are."""

    stage: str
    arrays: list[mx.array]
    real: bool = True
    names: list[str] = field(default_factory=list)


@dataclass
class Round:
    """primitives: in the order in which MLX runs them; inputs: names that were there before; handed: in order."""

    primitives: list[Primitive]
    inputs: dict[str, Array]
    handed: list[HandOver]


class _Tags:
    """Stand-ins of one walk. Each is a `Depends` of the call's inputs on a scalar, by whose name it is known again."""

    DTYPES = (mx.bfloat16, mx.float16, mx.float32, mx.int32, mx.uint32, mx.bool_)

    def __init__(self, kinds: list[str]):
        self.keys = [(kind, dtype) for kind in kinds for dtype in self.DTYPES]
        self.arrays: dict[tuple[str, mx.Dtype], mx.array] = {}

    def scalars(self) -> list[mx.array]:
        return [mx.zeros((), dtype) for _, dtype in self.keys]

    def call(self, kind: str, inputs: list[mx.array], like: list[mx.array]) -> list[mx.array]:
        """Arrays of the shapes and types of `like`."""
        made = [mx.broadcast_to(self.arrays[kind, a.dtype], a.shape) for a in like]
        return mx.depends(made, [a for a in inputs if isinstance(a, mx.array)])


ATTENTION = ["attention" + c + m + s for c in ("", " causal") for m in ("", " mask") for s in ("", " sinks")]
OWN = "own text"
FAST = [OWN, "rms_norm", "rope", "rope part", "gated_delta", "dequantize", "contiguous", *ATTENTION]


def compiled_functions() -> dict[str, list[tuple[Any, str, Any]]]:
    """name: (module, attribute, function) of every compiled function that a module of mlx-lm, MLX or ours has by name."""
    kind, found = type(mx.compile(lambda x: x)), {}
    for path, module in list(sys.modules.items()):
        if module is not None and path.split(".")[0] in ("mlx", "mlx_lm", "dflash_mlx"):
            for name, value in list(vars(module).items()):
                if type(value) is kind:
                    found.setdefault(f"compiled {name}", []).append((module, name, value))
    return found


@contextlib.contextmanager
def as_on_metal(handed: Callable[..., None], kernels: bool = False) -> Iterator[None]:
    """MLX says that the default device is a Metal GPU; what would be handed to it goes to `handed`.

    kernels: whether ours may run; else none does.
    """
    stream = mx.default_stream(mx.cpu)
    with contextlib.ExitStack() as stack:
        for where, name, value in (
            (mx, "async_eval", handed),
            (mx, "default_stream", lambda *_: stream),
            (mx, "default_device", lambda: mx.gpu),
            (mx.metal, "is_available", lambda: True),
            (autotune, "may_run", lambda: kernels),
        ):
            stack.enter_context(mock.patch.object(where, name, value))
        yield


@contextlib.contextmanager
def stand_ins(tags: _Tags, functions: dict[str, list[tuple[Any, str, Any]]]) -> Iterator[None]:
    """The calls that the CPU build would take apart become one primitive each."""

    def rms_norm(x, weight, eps, **_):
        return tags.call("rms_norm", [x, weight], [x])[0]

    def rope(x, dims, *, traditional, base=None, scale=1.0, offset=0, freqs=None, **_):
        return tags.call("rope" if dims == x.shape[-1] else "rope part", [x, offset, freqs], [x])[0]

    def attention(q, k, v, *, scale, mask=None, sinks=None, **_):
        array = isinstance(mask, mx.array)
        kind = "attention" + " causal" * (mask == "causal" if not array else 0) + " mask" * array + " sinks" * (sinks is not None)
        return tags.call(kind, [q, k, v, mask, sinks], [q])[0]

    def recurrence(q, k, v, g, beta, state, mask=None):
        return tuple(tags.call("gated_delta", [q, k, v, g, beta, state, mask], [v.astype(q.dtype), state]))

    def dequantize(w, scales, biases=None, **more):
        return tags.call("dequantize", [w, scales, biases], [real["dequantize"](w, scales, biases, **more)])[0]

    def own_text(**_):
        def launch(*, inputs, output_shapes, output_dtypes, **_):
            like = [SimpleNamespace(shape=shape, dtype=dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]
            return tags.call(OWN, inputs, like)

        return launch

    def contiguous(a, *_, **__):
        return tags.call("contiguous", [a], [a])[0]

    real = {"dequantize": mx.dequantize}
    # Whether a compiled function is being called for its shapes: what it calls is a part of it.
    inside = [False]

    def compiled(name: str, function: Any) -> Callable:
        def call(*args, **kwargs):
            if inside[0]:
                return function(*args, **kwargs)
            inside[0] = True
            try:
                like = function(*args, **kwargs)
            finally:
                inside[0] = False
            given = [a for _, a in tree_flatten([*args, *kwargs.values()])]
            out = tags.call(name, given, list(like) if isinstance(like, (list, tuple)) else [like])
            return type(like)(out) if isinstance(like, (list, tuple)) else out[0]

        call.__name__ = name.removeprefix("compiled ")
        return call

    with contextlib.ExitStack() as stack:
        for name, function in (
            ("rms_norm", rms_norm),
            ("rope", rope),
            ("scaled_dot_product_attention", attention),
            ("metal_kernel", own_text),
        ):
            stack.enter_context(mock.patch.object(mx.fast, name, function))
        for name, function in (("dequantize", dequantize), ("contiguous", contiguous)):
            stack.enter_context(mock.patch.object(mx, name, function))
        stack.enter_context(mock.patch.object(gated_delta, "gated_delta_kernel", recurrence))
        for name, places in functions.items():
            # One for all places, for those who ask which function it is.
            made = {id(function): compiled(name, function) for _, _, function in places}
            for module, attribute, function in places:
                stack.enter_context(mock.patch.object(module, attribute, made[id(function)]))
        yield


class Walk:
    """Rounds of one pair at one context.

    Args:
      context: tokens that both models have read.
      kernels: whether ours serve what they may serve, each by one launch.
    """

    def __init__(self, drafter: Drafter, context: int, kernels: bool = False):
        self.kernels = kernels
        self.pair, self.drafter, self.context = DFlashPair.of(drafter), drafter, context
        self.functions = compiled_functions()
        self.tags = _Tags([*FAST, *self.functions])
        self.block = self.drafter.config.block_size
        with as_on_metal(lambda *_: None), self._stood_in(self.tags.scalars()):
            self._prepare()

    @contextlib.contextmanager
    def _stood_in(self, scalars: list[mx.array]) -> Iterator[None]:
        self.tags.arrays = dict(zip(self.tags.keys, scalars, strict=True))
        with stand_ins(self.tags, self.functions):
            yield

    def _prepare(self) -> None:
        """Find the stateful modules and the head, and what each cache entry's arrays look like."""
        cache = self.pair.open_cache(None)
        output = self.pair.target(mx.zeros((1, 1), mx.int32), cache.target)
        self.pair.target.head(output.hidden)
        self.drafter.inject(output.features, cache.drafter, 0)
        self.features = (1, 1, output.features.shape[-1]), output.features.dtype
        self.entries = [self._filled(entry) for entry in leaves([*cache.target, *cache.drafter])]
        self.cache = cache

    def _filled(self, entry: Any) -> tuple[list[tuple[tuple[int, ...], mx.Dtype]], dict[str, int]]:
        """(shapes and types of an entry's arrays, its marks) once it holds the context."""
        if type(entry) is ArraysCache:
            return [(a.shape, a.dtype) for a in entry.cache], {}
        B, heads, _, D = entry.keys.shape
        if type(entry) is KVCache:
            rows, marks = (self.context // entry.step + 2) * entry.step, {"offset": self.context}
        else:
            rows = min(self.context, entry.max_size)
            marks = {"offset": self.context, "_idx": rows}
        return [((B, heads, rows, D), a.dtype) for a in (entry.keys, entry.values)], marks

    def widen(self, capacity: int) -> None:
        """Let the entries that hold a row a token have buffers of so many rows, as traced passes leave them."""
        for i, (shapes, marks) in enumerate(self.entries):
            if "offset" in marks and "_idx" not in marks:
                self.entries[i] = [((B, heads, capacity, D), dtype) for (B, heads, _, D), dtype in shapes], marks

    def target_cache(self) -> list[Any]:
        """The target's entries, holding the context."""
        cache = self.pair.open_cache(None)
        self._fill(cache, iter(self.inputs(1)))
        return list(cache.target)

    def _fill(self, cache: PairCache, arrays: Iterator[mx.array]) -> None:
        """Give a cache's entries the arrays, and the marks of those that hold the context."""
        for entry, (shapes, marks) in zip(leaves([*cache.target, *cache.drafter]), self.entries, strict=True):
            taken = [next(arrays) for _ in shapes]
            if type(entry) is ArraysCache:
                entry.cache = taken
            else:
                entry.keys, entry.values = taken
                vars(entry).update(marks)

    def _run(self, arrays: Iterator[mx.array], width: int, pending: int) -> Run:
        """A run in the middle of an answer, with caches made of the arrays."""
        cache = self.pair.open_cache(None)
        self._fill(cache, arrays)
        for entry in cache.drafter:
            # Behind by what is pending.
            entry.offset = self.context - pending
            if hasattr(entry, "_idx"):
                entry._idx = min(entry.offset, entry.keys.shape[2])
        cache.rows, cache.ids, cache.features = self.context, [0] * (self.context + 1), next(arrays)
        options = SimpleNamespace(
            draft_model=self.drafter,
            stream=mx.default_stream(mx.cpu),
            quantization=None,
            max_tokens=-1,
            progress=lambda *_: None,
            logits_processors=None,
            constraint=None,
        )
        policy = FixedDraftLength(width)
        # As where the policy chose the width, by what was accepted alone.
        chosen = SimpleNamespace(wants_confidence=False)
        policy.drafts_needed = lambda width: DraftLengthPolicy.drafts_needed(chosen, width)
        run = Run(options, self.pair, cache, TargetSampler(None, (), None), [], policy, GenerationStats(self.block, rule=policy))
        run.emitted, run._begun = 2, 0
        return run

    def inputs(self, pending: int) -> list[mx.array]:
        shapes = [shape for shapes, _ in self.entries for shape in shapes]
        (B, _, F), dtype = self.features
        return [mx.zeros(*shape) for shape in [*shapes, ((B, pending, F), dtype), ((1,), mx.int32)]]

    def _round(
        self, arrays: list[mx.array], rows: int, accepted: int, pending: int, enter: Callable[[str], None]
    ) -> list[mx.array]:
        """Propose, verify, commit what `accepted` says, and roll back; rows: of the target's pass, the anchor included.

        enter: told each stage as it begins. Returns: the drafted ids, [] at 1 row.
        """
        given, drafted = iter(arrays), []
        run = self._run(given, rows - 1, pending)
        anchor = next(given)
        enter("draft")
        draft = run.propose(anchor, rows - 1)
        drafted += [draft.row] if rows > 1 else []
        enter("verify")
        output = run.verify(anchor, draft)
        enter("commit")
        if rows == 1:
            run.commit_row(output)
        else:
            run.commit(Kept(output, RoundResult([0] * (rows - 1), accepted, 0, lambda i: None)))
            enter("rollback")
            run.roll_back()
        enter("end")
        return drafted

    def primitives(self, rows: int, accepted: int, pending: int) -> Round:
        """The round of `rows` rows of which `accepted` drafts are kept, after one that left `pending` rows of features."""
        modules = (self.pair.model, self.drafter)
        names = [[k for k, _ in tree_flatten(m.parameters())] for m in modules]
        weights = [[a for _, a in tree_flatten(m.parameters())] for m in modules]
        caches, handed, stage = self.inputs(pending), [], []

        def note(*arrays: Any) -> None:
            found = [a for _, a in tree_flatten(list(arrays)) if isinstance(a, mx.array)]
            handed.append(HandOver(stage[-1], found))

        def whole(*flat: mx.array) -> list[mx.array]:
            rest = list(flat)
            for module, of in zip(modules, names, strict=True):
                module.update(tree_unflatten(list(zip(of, rest[: len(of)], strict=True))))
                del rest[: len(of)]
            scalars, rest = rest[: len(self.tags.keys)], rest[len(self.tags.keys) :]
            with as_on_metal(note, self.kernels), self._stood_in(scalars):
                drafted = self._round(rest, rows, accepted, pending, stage.append)
            # The draft first, so that what it needs counts as its own, whenever it is handed over.
            handed.insert(0, HandOver("draft", drafted, False))
            return [a for h in handed for a in h.arrays]

        told: list[dict] = []
        try:
            flat = [*weights[0], *weights[1], *self.tags.scalars(), *caches]
            mx.export_function(told.append, whole, *flat)
        finally:
            for module, of, arrays in zip(modules, names, weights, strict=True):
                module.update(tree_unflatten(list(zip(of, arrays, strict=True))))
        return self._read(told, handed, sum(map(len, weights)))

    def _read(self, told: list[dict], handed: list[HandOver], first_tag: int) -> Round:
        inputs = [tuple(a) for t in told if t["type"] == "inputs" for a in t["inputs"]]
        outputs = [a[0] for t in told if t["type"] == "outputs" for a in t["outputs"]]
        tags = {inputs[first_tag + i][0]: kind for i, (kind, _) in enumerate(self.tags.keys)}
        spread = [t for t in told if t.get("name") == "Broadcast" and t["inputs"][0][0] in tags]
        fed = {t["outputs"][0][0]: tags[t["inputs"][0][0]] for t in spread}
        primitives = []
        for t in told:
            if t["type"] != "primitive" or t["outputs"][0][0] in fed:
                continue
            kind, ins = t["name"], [tuple(a) for a in t["inputs"]]
            if kind == "Depends" and ins[0][0] in fed:
                kind, ins = fed[ins[0][0]], [a for a in ins if a[0] not in fed]
            primitives.append(Primitive(kind, list(t["arguments"]), ins, [tuple(a) for a in t["outputs"]]))
        made, rest = {a[0]: p for p in primitives for a in p.outputs}, iter(outputs)
        # The pass is handed over at each tap, and once as a whole.
        verified = -1 - len(self.pair.target.layer_ids)
        for h in handed:
            h.names, h.arrays = [next(rest) for _ in h.arrays], []
            if h.real and h.stage == "verify" and handed[0].names:
                # What the pass is read by comes behind the pass.
                verified += 1
                h.stage = "accept" if verified > 0 else "verify"
            open_names = list(h.names)
            while open_names:
                p = made.get(open_names.pop())
                if p is not None and not p.stage:
                    p.stage = h.stage
                    open_names += [a[0] for a in p.inputs]
        constants = [tuple(a) for t in told if t["type"] == "constants" for a in t["constants"]]
        known = {a[0]: a for a in inputs} | {c[0]: (c[0], tuple(c[1].shape), c[1].dtype) for c in constants}
        return Round(primitives, known, handed)

    def host_seconds(self, rows: int, accepted: int, pending: int, repeats: int = 5) -> dict[str, float]:
        """Thread CPU seconds of building a round, median: whole, and until each stage had first handed something over.

        "verify": until the pass was begun, at its first tap; "passed": until it was handed over whole; "verified": until what is
        read of it was; "committed": until only the rollback is left, which the loop does behind the next
        draft. The graph is not evaluated; the recurrent kernel and each call of `mx.fast` are one node.
        """
        runs = [self.timed(rows, accepted, pending) for _ in range(repeats)]
        return {key: statistics.median(run[key] for run in runs) for key in runs[0]}

    def timed(self, rows: int, accepted: int, pending: int) -> dict[str, float]:
        """One round of `host_seconds`, on a machine that says it is Metal's (`as_on_metal`)."""
        caches, stage, at, ends = self.inputs(pending), [], {}, {"commit": "verified", "rollback": "committed", "end": "whole"}
        began, taps = 0.0, len(self.pair.target.layer_ids)

        def enter(name: str) -> None:
            nonlocal began
            stage.append(name)
            if name == "draft":
                # What was made before is a run's, not a round's.
                began = time.thread_time()
            if name in ends:
                at[ends[name]] = time.thread_time() - began

        def hand_over(*_: Any) -> None:
            nonlocal taps
            at.setdefault(stage[-1], time.thread_time() - began)
            if stage[-1] == "verify":
                taps -= 1
                if taps == -1:
                    at["passed"] = time.thread_time() - began

        with as_on_metal(hand_over), _one_node_each():
            self._round(caches, rows, accepted, pending, enter)
        return at


@contextlib.contextmanager
def _one_node_each() -> Iterator[None]:
    """As Metal's build makes them: a call of `mx.fast` or of the recurrent kernel is one node of the graph."""

    def first(x, *rest, **more):
        return mx.depends([x], [a for a in (*rest, *more.values()) if isinstance(a, mx.array)])[0]

    def recurrence(q, k, v, g, beta, state, mask=None):
        return tuple(mx.depends([v, state], [q, k, g, beta]))

    with contextlib.ExitStack() as stack:
        for name in ("rms_norm", "rope", "scaled_dot_product_attention"):
            stack.enter_context(mock.patch.object(mx.fast, name, first))
        stack.enter_context(mock.patch.object(gated_delta, "gated_delta_kernel", recurrence))
        yield
