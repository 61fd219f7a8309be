"""`dflash-mlx doctor`: examines a target, a drafter, or a pair. The result is one plain dict, and its rendering as text.

A step that fails adds its sentence to `faults`, and the next independent step runs. What looks odd but may be intended goes to
`suspicions`. Prints nothing.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, RotatingKVCache
from mlx_lm.models.cache import make_prompt_cache as make_target_cache

from .. import traced
from ..checkpoint import inspect_checkpoint
from ..config import LAST_TAPS
from ..conversion.targets import LoadedTarget
from ..drafter_checks import FEW_ACCEPTED
from ..errors import DFlashError, one_line
from ..exact import row_test
from ..generation import stream_generate
from ..kernels import autotune
from ..loading import check_memory, drafter_bytes, held_bits, load, load_drafter, loaded_dtype, weight_bytes
from ..machine import limit_bytes, limit_text, size_text
from ..memory import RunSize, cache_bytes, entries_after_rows, model_bytes
from ..models.target import Target
from ..pair_checks import mask_row_fault
from ..pairs.builtin import BUILTIN_PAIRS, builtin_path
from ..pairs.published import stated_thinking
from ..progress import tell
from ..rollback import check_rollback, leaves, rollback, rollback_point
from ..stats import gain_text
from ..verify import verify_block
from . import system
from .bench_prompts import chat_ids

CONTEXTS = (4096, 32768, 131072)
# Mean tokens a round of the built-in drafters on their own prompt; other drafters' cards state no number in a fixed place.
_EXPECTED_TAU = {"tiny": 2.3, "smollm2": 2.0}
# A random drafter's: on average it accepts next to nothing.
_RANDOM_TAU = 1 + FEW_ACCEPTED
_TOKENS = 32
_COUNTING = "Counting which drafts are accepted"
# The timed answers: how long, how often each, and the least that can be timed; the smallest gain that is reported.
_TIMED_TOKENS, _TURNS, _LEAST_TOKENS = 48, 3, 8
# Names of the self-tests in the report.
_SELF_TESTS = {"taps": "reading layers", "rollback": "undoing drafts", "rows": "many rows", "exact": "rows alone"}
# Seconds after which no further turn begins.
_ENOUGH_S = 10
_FASTER = 1.05
_PROBE_ROWS = 12
# The first Apple GPU that computes bfloat16 itself (M3); rows on which values must stay finite before float16 is advised.
_OWN_BFLOAT16, _FLOAT16_ROWS = 15, 256


def diagnose(
    model: str | None,
    draft_model: str | None,
    dtype: mx.Dtype | str | None = None,
    revision: str | None = None,
    contexts: Sequence[int] = CONTEXTS,
    draft_bits: int | str | None = None,
    adapter_path: str | None = None,
    last_tap: str | None = None,
    exact: bool = False,
) -> dict[str, Any]:
    """Look at a target (`model`), a drafter (`draft_model`) or both, and run the self-tests that they allow.

    adapter_path: an adapter that mlx-lm trained for the target. draft_bits, last_tap: as in `load_drafter`.
    exact: also compare a row alone and among others, as `exact=True` runs it.
    Returns: plain values only: versions, machine, target, drafter, memory, self_tests, acceptance, speed, kernels, traced,
    advice, faults, suspicions.
    """
    report: dict[str, Any] = {
        "versions": _versions(),
        "machine": system.facts(),
        "faults": [],
        "suspicions": [],
    }
    faults, suspicions = report["faults"], report["suspicions"]
    suspicions += system.faults(report["machine"])
    lm = tokenizer = draft = None
    if draft_model:
        report["drafter"] = _attempt(faults, lambda: _read_drafter(draft_model, dtype, revision, draft_bits))
        if unread := (report["drafter"] or {}).get("unread"):
            suspicions.append(f"the drafter's config has keys that nothing here reads: {', '.join(unread)}")
    if model:
        weights = _attempt(faults, lambda: _read_weights(model, dtype, revision))
        if weights:
            lm, tokenizer = _attempt(faults, lambda: load(model, adapter_path=adapter_path, dtype=dtype, revision=revision)) or (
                None,
                None,
            )
        if lm is not None:
            report["target"] = _attempt(faults, lambda: {**weights, **_describe_target(lm)})
    if lm is not None and report.get("drafter"):
        again = lambda tap: load_drafter(draft_model, lm, revision=revision, bits=draft_bits, last_tap=tap)  # noqa: E731
        draft = _attempt(faults, lambda: again(last_tap))
    if lm is not None and report.get("target"):
        layers = draft.config.taps(len(lm.layers)) if draft else (0,)
        tell("Testing the target")
        report["self_tests"] = _attempt(faults, lambda: _self_tests(lm, layers))
        report["memory"] = _attempt(faults, lambda: _memory(report, lm, draft, contexts))
        if exact and report["self_tests"] is not None:
            report["self_tests"]["exact"] = _attempt(faults, lambda: row_test(lm, layers)) or "failed: see below"
        faults += [text for text in (report["self_tests"] or {}).values() if text.startswith("failed")]
    if draft is not None:
        _context(report, suspicions)
        if fault := mask_row_fault(draft):
            suspicions.append(fault)
        report["acceptance"] = _attempt(faults, lambda: _acceptance(lm, tokenizer, draft, model, suspicions))
        if report["acceptance"] and len(lm.layers) - 1 in draft.config.target_layer_ids:
            tau = report["acceptance"]["tau"]
            found = _attempt(faults, lambda: _last_taps(lm, tokenizer, draft, again, model, tau, suspicions))
            report["acceptance"]["last_tap"] = found
        report["speed"] = _attempt(faults, lambda: _speed(lm, tokenizer, draft, model)) if report["acceptance"] else None
    # Last: what ran above may have tried some.
    report["kernels"] = _attempt(faults, _kernels)
    report["traced"] = _attempt(faults, lambda: _traced(draft))
    if dtype is None and report.get("self_tests") and not faults:
        # The very last: it changes the target's number type.
        report["advice"] = _float16_advice(report, lm, draft_model, revision, draft_bits)
    return report


def _float16_advice(
    report: Mapping[str, Any], lm: Any, draft_model: str | None, revision: str | None, draft_bits: int | str | None
) -> str | None:
    """Whether --dtype float16 suits a Mac whose GPU has no bfloat16 of its own: only where this model's values stay finite in it.

    Casts the target in place.
    """
    generation = re.search(r"applegpu_g(\d+)", report["machine"]["architecture"] or "")
    if not generation or int(generation.group(1)) >= _OWN_BFLOAT16 or report["target"]["activations"] != "bfloat16":
        return None
    LoadedTarget(lm, {}, None, "").cast(mx.float16)
    target = Target(lm)
    ids = [(i * 37 + 11) % target.vocabulary for i in range(_FLOAT16_ROWS)]
    hidden = target(mx.array([ids]), make_target_cache(lm)).hidden
    found = "the target's own logits hold NaN or infinity" if not mx.isfinite(target.head(hidden)).all().item() else None
    if found is None and draft_model:
        try:
            load_drafter(draft_model, lm, revision=revision, bits=draft_bits)
        except DFlashError as error:
            found = one_line(error, None)
    if found:
        return f"this GPU computes bfloat16 by way of float32, but float16 is not for this model: {found}"
    return "this GPU computes bfloat16 by way of float32, and this model's values stay finite in float16: try --dtype float16"


def _attempt(faults: list[str], step: Callable[[], Any]) -> Any:
    """A step's result. If it fails: None, and its sentence among the faults."""
    try:
        return step()
    except (DFlashError, OSError, ValueError, RuntimeError) as error:
        # Several steps may meet the same one.
        if (text := one_line(error, None)) not in faults:
            faults.append(text)
        return None


def _versions() -> dict[str, str]:
    from ..conversion.report import versions

    return versions()


def _kernels() -> dict[str, Any]:
    """Which kernels may run, and what this machine has found about each at each shape."""
    asked = autotune.setting()
    wanted = asked if isinstance(asked, str) else ",".join(sorted(asked))
    return {"asked": wanted, "gpu": autotune.has_gpu(), "verdicts": [asdict(result) for result in autotune.results()]}


def _traced(draft: Any) -> dict[str, Any]:
    """Whether passes may be traced, and which were with this pair in this process."""
    accelerator = draft.pair.accelerator if getattr(draft, "pair", None) else None
    return {"asked": traced.setting(), "here": traced.may_accelerate(), "found": accelerator.findings() if accelerator else []}


def _read_weights(model: str, dtype: mx.Dtype | str | None, revision: str | None) -> dict[str, Any]:
    path = builtin_path(model, "target") or model
    found = inspect_checkpoint(path, revision=revision)
    type_ = loaded_dtype(found, dtype)
    check_memory(found, type_)
    return {"name": model, "path": str(found.path), "files": found.kind, "weights_gb": weight_bytes(found, type_) / 1e9}


def _read_drafter(
    draft_model: str, dtype: mx.Dtype | str | None, revision: str | None, draft_bits: int | str | None
) -> dict[str, Any]:
    from ..conversion.drafters import read_drafter

    checkpoint = inspect_checkpoint(builtin_path(draft_model, "drafter") or draft_model, revision=revision)
    read = read_drafter(checkpoint)
    raw, weights, config = read.raw, read.weights, read.config
    stated = stated_thinking(draft_model, checkpoint.path, raw)
    held = held_bits(weights, checkpoint.source, draft_bits)
    own = {"embedding": "embed_tokens.weight", "head": "lm_head.weight", "map of a reduced vocabulary": "d2t"}
    own |= {"Markov head": "markov_head.markov_w1.weight", "confidence head": "confidence_head.proj.weight"}
    return {
        "name": draft_model,
        "architecture": config.architecture or "DFlashDraftModel (unnamed)",
        "read_from": {field: {"key": key, "value": _plain(_at(raw, key))} for field, key in config.read_from.items()},
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "layers": [
            {"causal": causal, "window": window, "rope": rope.kind, "theta": rope.theta}
            for causal, window, rope in zip(config.causal, config.windows, config.ropes, strict=True)
        ],
        "own": [what for what, name in own.items() if name in weights],
        "quantization": _plain(config.quantization),
        "held_bits": held,
        "unsupported": list(config.unsupported),
        "unread": list(config.unread),
        "trained_with_thinking": None if stated is None else {"setting": stated[0], "stated_by": stated[1]},
        "weights_gb": drafter_bytes(weights, loaded_dtype(checkpoint, dtype), held) / 1e9,
        "positions": config.max_position_embeddings,
    }


def _at(raw: Mapping[str, Any], key: str) -> Any:
    value: Any = raw
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def _describe_target(lm: Any) -> dict[str, Any]:
    target = Target(lm)
    cache = make_target_cache(lm)
    check_rollback(cache, target.family)
    kinds: dict[str, list[int]] = {}
    for layer, entry in enumerate(cache):
        kinds.setdefault("; ".join(_rolls_back(leaf) for leaf in leaves([entry])), []).append(layer)
    types = {str(value.dtype).removeprefix("mlx.core.") for _, value in tree_flatten(lm.parameters())}
    return {
        "family": target.family,
        "n_layers": len(target.layers),
        "vocabulary_rows": target.vocabulary,
        "activations": str(target.embed(mx.zeros((1, 1), dtype=mx.int32)).dtype).removeprefix("mlx.core."),
        "number_types": sorted(types),
        "positions": target.context_length,
        "caches": kinds,
    }


def _rolls_back(entry: Any) -> str:
    name = type(entry).__name__
    if type(entry) is ArraysCache:
        return f"{name}: put back, then the kept rows are replayed"
    if type(entry) is RotatingKVCache:
        kept = f", first {entry.keep} kept" if entry.keep else ""
        return f"{name}: newest rows cut, window {entry.max_size}{kept}"
    return f"{name}: rows cut"


def _self_tests(lm: Any, layers: Sequence[int]) -> dict[str, str]:
    """Sentences that begin with "passed" or "failed": logits are finite, taps do not change them, and after a rollback a block
    leaves no trace."""
    target = Target(lm, layers)
    ids = [(i * 37 + 11) % target.vocabulary for i in range(2 * _PROBE_ROWS)]
    cache = make_target_cache(lm)
    hidden = target(mx.array([ids]), cache).hidden
    if not mx.isfinite(target.head(hidden)).all().item():
        found = str(hidden.dtype).removeprefix("mlx.core.")
        return {
            "numbers": f"failed: the target's own logits hold NaN or infinity in {found}: its weights are damaged, or overflow"
        }
    same = mx.array_equal(target.head(hidden), lm(mx.array([ids]), cache=make_target_cache(lm)), equal_nan=True).item()
    tests = {"taps": f"{'passed' if same else 'failed'}: reading the outputs of layers {list(layers)} does not change the logits"}

    # Half the rows one at a time; then the same after a block of wrong rows was taken back, and as one block.
    known, tail = ids[:_PROBE_ROWS], ids[_PROBE_ROWS:]
    single, blocks = make_target_cache(lm), make_target_cache(lm)
    lm(mx.array([known]), cache=single)
    alone = mx.concatenate([lm(mx.array([[token]]), cache=single) for token in tail], axis=1).astype(mx.float32)
    target(mx.array([known]), blocks)
    for block, keep in ((tail[:1] + known[:4], 1), (tail[1:], len(tail) - 1)):
        point = rollback_point(blocks, _PROBE_ROWS + (keep > 1))
        hidden = verify_block(target, mx.array(block[:1]), mx.array([block[1:]]), blocks, point).hidden
        rollback(blocks, point, point.length + keep)
    together = target.head(hidden).astype(mx.float32)
    difference = mx.abs(together - alone[:, 1:]).max().item() / max(mx.abs(alone).max().item(), 1e-9)
    # Rounding of the type with room; a wrong row is of the order of 1.
    passed = math.isfinite(difference) and difference < (1e-3 if hidden.dtype == mx.float32 else 0.1)
    tests["rollback"] = (
        f"{'passed' if passed else 'failed'}: after drafts were undone the logits differ from one token at a time by "
        f"{difference:.1e} of the largest"
    )
    agree = mx.mean(mx.argmax(together, -1) == mx.argmax(alone[:, 1:], -1)).item()
    tests["rows"] = (
        "passed: a pass over many tokens gives the same logits, bit for bit, as one token at a time"
        if difference == 0
        else "passed: a pass over many tokens rounds differently from one token at a time; the likeliest token agrees in "
        f"{100 * agree:.0f} %"
    )
    return tests


def _memory(report: dict[str, Any], lm: Any, draft: Any, contexts: Sequence[int]) -> dict[str, Any]:
    """GB at given context lengths, from what each entry takes after a few rows."""
    entries = entries_after_rows(lm, draft)
    weights = (model_bytes(lm) + (model_bytes(draft) if draft is not None else 0)) / 1e9
    table = {context: weights + cache_bytes(entries, RunSize(context)) / 1e9 for context in contexts}
    report["suspicions"] += [
        f"{needed:.1f} GB at {context} tokens is more than fits: {limit_text()}"
        for context, needed in table.items()
        if needed * 1e9 > limit_bytes() and context <= (report["target"]["positions"] or context)
    ]
    return {"weights_gb": weights, "total_gb": {str(context): needed for context, needed in table.items()}}


def _context(report: dict[str, Any], suspicions: list[str]) -> None:
    ours, theirs = report["drafter"]["positions"], (report.get("target") or {}).get("positions")
    if ours and theirs and ours < theirs:
        suspicions.append(f"the drafter was made for {ours} positions, the target for {theirs}: beyond the first it drafts badly")


def _prompt(tokenizer: Any, draft: Any, model: str) -> tuple[str, list[int]]:
    """The prompt of the tests, as text and as ids."""
    builtin = BUILTIN_PAIRS.get(model)
    text = builtin.prompt if builtin else "Write a Python function that returns the n-th Fibonacci number."
    prompt = [1, 2, 3, 4]
    try:
        prompt = chat_ids(tokenizer, text, draft)
    except (AttributeError, NotImplementedError, DFlashError):
        text = "token ids 1 2 3 4: this target has no tokenizer"
    return text, prompt


def _acceptance(lm: Any, tokenizer: Any, draft: Any, model: str, suspicions: list[str]) -> dict[str, Any]:
    """32 tokens with the drafter and 32 without: tau, and whether the ids are the same."""
    text, prompt = _prompt(tokenizer, draft, model)
    # A suspicion below says what a warning would.
    draft.pair.judged["said"] = 1
    # Every round drafts: acceptance is to be seen, whether it pays here or not.
    got = list(_counted(stream_generate(lm, tokenizer, prompt, _TOKENS, draft, block_size=draft.config.block_size), 0))
    plain = [r.token for r in _counted(stream_generate(lm, tokenizer, prompt, _TOKENS), _TOKENS)]
    stats, expected = got[-1].stats, _EXPECTED_TAU.get(model)
    same = [r.token for r in got] == plain
    if not same:
        suspicions.append(
            "the ids with the drafter are not plain decoding's: on a GPU a near tie may turn, on a CPU it is a fault"
        )
    if stats.tau is not None and stats.tau < (0.9 * expected if expected else _RANDOM_TAU):
        suspicions.append(
            f"{stats.tau:.2f} tokens a round is what a drafter for another target gives"
            + (f"; {expected:.1f} is expected" if expected else "")
            + ": check the layers that it reads, mask token, RoPE and the number type above"
        )
    return {
        "prompt": text,
        "tokens": len(got),
        "tau": stats.tau,
        "expected_tau": expected,
        "acceptance_lengths": stats.acceptance_lengths,
        "ids_equal_plain_decoding": same,
    }


def _counted(responses: Iterable[Any], before: int) -> Iterator[Any]:
    """The responses of one of the two answers, each told as progress. before: tokens of the other answer that are done."""
    tell(_COUNTING, before, 2 * _TOKENS, "tokens")
    for done, response in enumerate(responses, before + 1):
        tell(_COUNTING, done, 2 * _TOKENS, "tokens")
        yield response


def _last_taps(
    lm: Any, tokenizer: Any, draft: Any, again: Callable[[str], Any], model: str, tau: float | None, suspicions: list[str]
) -> dict[str, float | None]:
    """Tokens a round with the last layer's tap before and after the final norm; a suspicion where the other way gives more.

    again: loads the drafter with the tap taken the other way.
    """
    mine = draft.config.tapped_last
    other = next(way for way in LAST_TAPS if way != mine)
    tell("Reading the last layer the other way")
    second, (_, prompt) = again(other), _prompt(tokenizer, draft, model)
    last = list(stream_generate(lm, tokenizer, prompt, _TOKENS, second, block_size=draft.config.block_size))[-1]
    theirs = last.stats.tau
    if theirs is not None and tau is not None and theirs > tau:
        suspicions.append(
            f"the drafter reads the target's last layer {mine} its final norm and {tau:.2f} tokens a round are accepted; {other} "
            f"it, {theirs:.2f}: --last-tap {other}, or the key last_tap in its config.json"
        )
    return {mine: tau, other: theirs}


def _speed(lm: Any, tokenizer: Any, draft: Any, model: str) -> dict[str, Any]:
    """The same answer without a drafter and with one, taking turns: rates after the first token, and the gain.

    gain: the second rate over the first; None where the answer is too short to time. off: plain decoding was chosen throughout.
    """
    _, prompt = _prompt(tokenizer, draft, model)
    rates: dict[str, list[float]] = {"plain_tps": [], "tps": []}
    # Its first run measures what passes cost here.
    tell("Measuring what passes cost here")
    for _ in stream_generate(lm, tokenizer, prompt, _TOKENS, draft):
        pass
    draft.pair.finish_measuring()
    start = time.perf_counter()
    for turn in range(_TURNS):
        if turn and time.perf_counter() - start > _ENOUGH_S:
            break
        for name, drafter in (("plain_tps", None), ("tps", draft)):
            tell("Timing with the drafter and without", turn, _TURNS, "turns")
            times = []
            for response in stream_generate(lm, tokenizer, prompt, _TIMED_TOKENS, drafter):
                times.append(time.perf_counter())
                stats = response.stats
            if len(times) >= _LEAST_TOKENS:
                rates[name].append((len(times) - 1) / (times[-1] - times[0]))
    best = {name: max(found, default=None) for name, found in rates.items()}
    gain = best["tps"] / best["plain_tps"] if all(best.values()) else None
    return {**best, "gain": gain, "off": stats.is_off, "tokens": len(times), "reason": stats.width_reason}


def verdict(report: Mapping[str, Any]) -> list[str]:
    """The verdict: whether anything is wrong, and whether drafting is faster here, and by how much."""
    n, odd = len(report["faults"]), len(report["suspicions"])
    found = f"{n} fault{'s' if n > 1 else ''} found: see the end." if n else "No fault found."
    if odd:
        found += f" {odd} thing{'s look' if odd > 1 else ' looks'} odd: see the end."
    if n:
        return [found]
    speed = report.get("speed")
    if speed is None:
        which = "a drafter" if report.get("target") else "--model"
        return [found, f"Whether it is faster here needs {which}: it was not timed."]
    if speed["gain"] is None:
        return [found, f"Whether it is faster here is not known: the answer ended after {speed['tokens']} tokens."]
    rates = f"{speed['tps']:.3g} tokens/s, {speed['plain_tps']:.3g} without the drafter"
    if speed["off"]:
        return [found, f"Not faster here: drafting turns itself off, as it would be slower. {rates}."]
    if speed["gain"] >= _FASTER:
        return [found, f"Faster here: about {gain_text(speed['gain'])}, on one prompt. {rates}."]
    return [found, f"About as fast here as without drafts, on one prompt. {rates}."]


def render(report: Mapping[str, Any], details: bool = False) -> str:
    """The report as lines for a terminal, the verdict first.

    details: also how each layer of the drafter and each key of its config was read; shown anyway where something is wrong.
    """
    details = details or bool(report["faults"] or report.get("suspicions"))
    first, *more = verdict(report)
    lines = [
        f"result      {first}",
        *(f"            {line}" for line in more),
        "versions    " + ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
        *system.lines(report["machine"]),
    ]
    if target := report.get("target"):
        lines += [
            f"target      {target['name']}: {target['family']}, {target['n_layers']} layers, "
            f"{size_text(1e9 * target['weights_gb'])}",
            f"            activations {target['activations']}, weights {', '.join(target['number_types'])}, "
            f"{target['vocabulary_rows']} embedding rows, {target['positions'] or 'no stated number of'} positions",
        ]
        lines += [f"  caches    {kind}: entries {_ranges(layers)}" for kind, layers in target["caches"].items()]
    if drafter := report.get("drafter"):
        lines += [
            f"drafter     {drafter['name']}: {drafter['architecture']}, {size_text(1e9 * drafter['weights_gb'])}"
            f"{' in ' + str(drafter['held_bits']) + ' bits' if drafter['held_bits'] else ''}, "
            f"block {drafter['block_size']}, mask token {drafter['mask_token_id']}, "
            f"reads target layers {drafter['target_layer_ids']}",
            f"            own: {', '.join(drafter['own']) or 'nothing (embedding and head are the target' + chr(39) + 's)'}",
        ]
        if stated := drafter["trained_with_thinking"]:
            lines.append(f"            trained {'with' if stated['setting'] else 'without'} thinking, says {stated['stated_by']}")
        lines += [
            f"  layer {i}   {'causal' if layer['causal'] else 'bidirectional'} in the block, window {layer['window'] or 'none'}, "
            f"RoPE {layer['rope']} base {layer['theta']:g}"
            for i, layer in enumerate(drafter["layers"] if details else ())
        ]
        read_from = drafter["read_from"].items() if details else ()
        lines += [f"  key       {field} = {read['value']!r} from {read['key']}" for field, read in read_from]
    if memory := report.get("memory"):
        sizes = ", ".join(f"{size_text(1e9 * needed)} at {context}" for context, needed in memory["total_gb"].items())
        lines.append(f"memory      weights {size_text(1e9 * memory['weights_gb'])}; in all {sizes} tokens")
    lines += [f"self-test   {_SELF_TESTS.get(name, name)}: {result}" for name, result in (report.get("self_tests") or {}).items()]
    if acceptance := report.get("acceptance"):
        expected = acceptance["expected_tau"]
        tau = "unknown" if acceptance["tau"] is None else f"{acceptance['tau']:.2f}"
        lines.append(
            f"drafts      {tau} tokens a round over {acceptance['tokens']} tokens "
            f"({f'{expected:.1f} expected' if expected else 'no expected number is known'}); "
            f"ids {'equal' if acceptance['ids_equal_plain_decoding'] else 'DIFFER FROM'} plain decoding's"
        )
        if taps := acceptance.get("last_tap"):
            said = (f"{way} its final norm {'unknown' if tau is None else f'{tau:.2f}'}" for way, tau in taps.items())
            lines.append(f"            with the target's last layer tapped {', '.join(said)}")
    if kernels := report.get("kernels"):
        lines += _kernel_lines(kernels)
    if found := report.get("traced"):
        lines += _traced_lines(found)
    if report.get("advice"):
        lines.append(f"advice      {report['advice']}")
    lines += [f"suspicion   {text}" for text in report["suspicions"]]
    lines += [f"fault       {text}" for text in report["faults"]]
    return "\n".join(lines)


def _kernel_lines(kernels: Mapping[str, Any]) -> list[str]:
    """One line a result; how to decide otherwise, which matters only where there is a GPU."""
    if not kernels["gpu"]:
        return ["kernels     none: MLX sees no GPU"]
    lines = [
        f"  {'used' if v['use'] else 'not used'}".ljust(12) + f"{_plan_name(v)}, {v['shape']}, {v['rows']} rows: {v['reason']}"
        for v in sorted(kernels["verdicts"], key=lambda v: (v["kernel"], v["shape"], v["rows"], v["plan"]))
    ]
    return [f"kernels     {autotune.VARIABLE} {kernels['asked']}; {len(lines)} tried on this machine", *lines]


def _plan_name(verdict: Mapping[str, Any]) -> str:
    return f"{verdict['kernel']} {verdict['plan']}".rstrip()


def _traced_lines(report: Mapping[str, Any]) -> list[str]:
    """One line for each of the two models."""
    if not report["here"]:
        why = f"{traced.VARIABLE} is off" if report["asked"] == "off" else "used on a GPU only, unless DFLASH_MLX_COMPILE=on"
        return [f"compiled    none: {why}"]
    lines = [f"compiled    {traced.VARIABLE} {report['asked']}"]
    for found in report["found"]:
        widths = ", ".join(f"{rows} rows {'faster' if faster else 'not faster'}" for rows, faster in found["faster"].items())
        held = f"{found['held_mb']} MB of copied weights" if found.get("held_mb") else ""
        counted = "; ".join(part for part in (f"{found['passes']} passes", widths, held) if part)
        text = f"none: {found['refused']}" if found["refused"] else counted
        lines.append(f"  {found['name']}: {text}")
    return lines


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
