"""What an answer may say: a JSON schema, a regular expression or a grammar, as masks over the next token.

Knows tokens and grammars, by llguidance, an optional extra. Knows no models, no draft sources and no HTTP.

    grammar = json_schema({"type": "object", ...})          text, bound to no tokenizer; one serves many runs
    stream_generate(..., constraint=grammar)                each run begins a constraint of its own

A constraint is an object with `mask`, `advance` and `rollback`; a class of your own may be given in place of a grammar.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from .errors import GenerationError

# Keywords of older JSON Schema versions, which llguidance would ignore. Keywords that it knows and cannot do, it refuses itself.
_DROPPED = ("disallow", "divisibleBy", "extends")
# The keys of `x-guidance`, llguidance's own settings, that a schema may have: its layout. Others would loosen the schema.
_LAYOUT = {"item_separator", "key_separator", "whitespace_flexible", "whitespace_pattern"}
# The layout of Python's json.dumps, which targets write most often. Blanks that are fixed are forced, and need no drafter pass.
_AS_PYTHON = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
_HELD_GRAMMARS = 64
# Patterns for formats. llguidance's own would accept the year 0, February 29 in any year, and second 60 in any minute.
_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_DAY = "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_BY_4 = "(?:0[48]|[2468][048]|[13579][26])"
_DATE = f"(?:{_YEAR}-{_DAY}|(?:[0-9]{{2}}{_BY_4}|{_BY_4}00)-02-29)"
_HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR})"
_FORMATS = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}"}


class ConstraintError(GenerationError):
    """A grammar or a schema that cannot be enforced."""


class UnsupportedError(ConstraintError):
    """No constraint works here, whatever it asks for: a package is missing, or the target's way of writing is not supported."""


class Constraint(Protocol):
    """Which tokens may come next. A run has one of its own and moves it on with what is committed."""

    def mask(self) -> np.ndarray | None:
        """Bits [ceil(V / 32)] uint32, bit i % 32 of word i // 32 for token i; None: any token may come."""

    def advance(self, token: int) -> bool:
        """Move on by a token. Returns: False, with nothing changed, if that token may not come."""

    def rollback(self, n: int) -> None:
        """Undo the last n calls of `advance`."""

    def forced(self) -> list[int]:
        """The tokens that must come next, as the target's tokenizer would write their text; [] if none is certain."""


@dataclass(frozen=True, eq=False)
class Grammar:
    """A grammar as text, and the constraints that begin with it.

    lark: in llguidance's dialect of Lark. what: names it in errors, such as "the JSON schema".
    """

    lark: str
    what: str = "the grammar"

    def __post_init__(self) -> None:
        object.__setattr__(self, "_compiled", weakref.WeakKeyDictionary())
        object.__setattr__(self, "_lock", threading.Lock())

    def begin(self, tokenizer: Any) -> GrammarConstraint:
        """A constraint at its start, for one run with this tokenizer (mlx-lm's wrapper). A tokenizer's first takes up to 1 s.

        Raises:
          ConstraintError: the grammar cannot be enforced; ImportError: llguidance is not installed.
        """
        words = _words(tokenizer)
        with self._lock:
            if (found := self._compiled.get(tokenizer)) is None or found[0] is not words:
                found = self._compiled[tokenizer] = words, self._compile(words)
            eos = sorted(words.eos_tokens, key=lambda token: token != tokenizer.eos_token_id)
            return GrammarConstraint(found[1].deep_copy(), words.vocab_size, eos)

    def validate(self) -> None:
        """Check it without a tokenizer. Raises: ConstraintError if it would fail with any."""
        failed, messages = _llguidance().LLMatcher.validate_grammar_with_warnings(self.lark)
        if failed:
            raise self._error(messages[0])

    def _error(self, told: str) -> ConstraintError:
        remedy = "Remove what is named here from it" if "schema" in self.what else "Correct it"
        return ConstraintError(f"{self.what} cannot be enforced: {_sentence(told)}", remedy)

    def _compile(self, words: Any) -> Any:
        matcher = _llguidance().LLMatcher(words, self.lark, log_level=0)
        if matcher.is_error():
            raise self._error(matcher.get_error())
        return matcher


def _sentence(error: str) -> str:
    """The line of an llguidance error that gives the reason."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if line.startswith("error:")), None)
    told = (last or lines[0] if lines else "no reason is given").removeprefix("error:").strip()
    # Without the position: it is one in the text made from a schema, which the user has not seen.
    return re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", told)[:300]


class GrammarConstraint:
    """A grammar within a run."""

    def __init__(self, matcher: Any, vocabulary: int, eos: Sequence[int]):
        self._matcher, self._words, self._eos = matcher, (vocabulary + 31) // 32, list(eos)
        # How many tokens came from the answer's end on: drafts may run past it.
        self._over = 0

    def mask(self) -> np.ndarray | None:
        """As `Constraint.mask`. At the grammar's end it allows only tokens that end an answer, and after these any token.

        Raises:
          ConstraintError: the grammar has become too complex, or nothing may follow.
        """
        if self._over:
            return None
        bits = np.zeros(self._words, dtype=np.uint32)
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self._matcher.is_error():
            raise ConstraintError(f"the grammar came to an end: {_sentence(self._matcher.get_error())}", "Give a simpler one")
        return bits

    def advance(self, token: int) -> bool:
        if self._over or token in self._eos and self._matcher.is_accepting():
            self._over += 1
            return True
        return self._matcher.try_consume_tokens([token]) == 1

    def rollback(self, n: int) -> None:
        over = min(n, self._over)
        self._over, n = self._over - over, n - over
        if n and not self._matcher.rollback(n):
            raise ConstraintError(f"the grammar cannot go back {n} tokens: {_sentence(self._matcher.get_error())}")

    def forced(self) -> list[int]:
        tokens = [] if self._over else self._matcher.compute_ff_tokens()
        if tokens:
            # If the answer ends after them, EOS is forced too.
            taken = self._matcher.try_consume_tokens(tokens)
            tokens = tokens + self._eos[:1] if taken == len(tokens) and self._matcher.is_stopped() else tokens
            self.rollback(taken)
        return tokens


class Guide:
    """A constraint in a run: it follows the committed tokens, and looks ahead along drafts.

    seen: how many tokens it has passed, the prompt's included; None: the tokens of the first call are the prompt.
    """

    def __init__(self, constraint: Constraint, seen: int | None = None):
        self.constraint, self.seen = constraint, seen

    def follow(self, tokens: Sequence[int]) -> None:
        """Move on by committed tokens.

        Raises:
          ConstraintError: one was not allowed, which happens only where no token is.
        """
        for token in tokens:
            if not self.constraint.advance(token):
                raise ConstraintError(f"the constraint does not allow token {token}, and allowed no other", "Mend it")
            self.seen += 1

    def legal(self, drafts: Sequence[int]) -> int:
        """How many of the leading drafts may come."""
        return sum(1 for _ in self._along(drafts)) - 1

    def masks(self, drafts: Sequence[int]) -> mx.array | None:
        """Masks [len(drafts) + 1, words] uint32 of what may follow the committed tokens and each draft; None: anything.

        After the first draft that may not come all bits are set: those rows are not used.
        """
        rows = [self.constraint.mask() for _ in self._along(drafts)]
        if all(row is None for row in rows):
            return None
        free = np.full_like(next(row for row in rows if row is not None), 0xFFFFFFFF)
        rows = [free if row is None else row for row in rows] + [free] * (len(drafts) + 1 - len(rows))
        return mx.array(np.stack(rows))

    def _along(self, drafts: Sequence[int]) -> Iterator[int]:
        """Yield with the constraint before the drafts, then after each allowed one: their number. At the end it is moved back."""
        taken = 0
        try:
            yield taken
            for token in drafts:
                if not self.constraint.advance(token):
                    return
                taken += 1
                yield taken
        finally:
            self.constraint.rollback(taken)


def apply_masks(rows: mx.array, masks: mx.array | None) -> mx.array:
    """Apply masks [N, words] of `Guide.masks` to log-probabilities [N, V]: -inf where a token may not come, normalised again."""
    if masks is None:
        return rows
    bits = (masks[..., None] >> mx.arange(32, dtype=mx.uint32)) & 1
    allowed = bits.reshape(len(masks), -1)[:, : rows.shape[-1]].astype(mx.bool_)
    if (missing := rows.shape[-1] - allowed.shape[1]) > 0:
        # Rows of the head that the tokenizer has no token for.
        allowed = mx.pad(allowed, [(0, 0), (0, missing)])
    rows = mx.where(allowed, rows, mx.array(-mx.inf, dtype=rows.dtype))
    return rows - mx.logsumexp(rows, axis=-1, keepdims=True)


class ConstraintProcessor:
    """A constraint as the last of mlx-lm's logits processors, for runs that sample row by row."""

    def __init__(self, guide: Guide):
        self.guide = guide

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Shapes: tokens [T]; logits [1, V] to log-probabilities [1, V]."""
        if self.guide.seen is None:
            self.guide.seen = len(tokens)
        new = tokens[self.guide.seen :]
        # In this order the host reads the last token while the device runs the pass.
        mx.async_eval(new)
        mx.async_eval(logits)
        self.guide.follow(new.tolist())
        return apply_masks(logits - mx.logsumexp(logits, axis=-1, keepdims=True), self.guide.masks([]))


def begin_constraint(constraint: Grammar | Constraint, tokenizer: Any) -> Constraint:
    """The constraint of one run, from the argument `constraint`.

    Raises:
      ConstraintError: it is neither a grammar nor a constraint, or the grammar cannot be enforced.
    """
    if isinstance(constraint, Grammar):
        return constraint.begin(tokenizer)
    lacks = [name for name in ("mask", "advance", "rollback", "forced") if not callable(getattr(constraint, name, None))]
    if lacks:
        raise ConstraintError(
            f"constraint is a {type(constraint).__name__} without {lacks[0]}; it must be a grammar, or have mask, advance, "
            "rollback and forced",
            "Make one with dflash_mlx.constraint.json_schema(schema)",
        )
    return constraint


# Grammars


@functools.lru_cache(_HELD_GRAMMARS)
def lark(text: str, what: str = "the grammar") -> Grammar:
    """A grammar in llguidance's dialect of Lark, with `start` as its beginning."""
    return Grammar(text, what)


def json_schema(schema: Mapping[str, Any] | bool | str) -> Grammar:
    """JSON that a schema (draft 2020-12, as an object or its text) allows, laid out as Python's `json.dumps` does.

    Its own `x-guidance` may say another layout: `item_separator`, `key_separator`, `whitespace_flexible`, `whitespace_pattern`.

    Raises:
      ConstraintError: it is no schema, or has a keyword that cannot be enforced; names it.
    """
    return lark(f"start: {json_rule(schema)}\n", "the JSON schema")


def json_rule(schema: Mapping[str, Any] | bool | str, **more: Any) -> str:
    """A schema as the right side of a Lark rule. more: further settings of llguidance. Raises: as `json_schema`."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise ConstraintError(f"the JSON schema is no JSON: {error}", "Give an object") from None
    if not isinstance(schema, (Mapping, bool)):
        raise ConstraintError(f"the JSON schema is of type {type(schema).__name__}; it must be an object", "Give an object")
    schema = {} if schema is True else {"not": {}} if schema is False else dict(schema)
    layout = schema.pop("x-guidance", {})
    if not isinstance(layout, Mapping) or layout.keys() - _LAYOUT:
        raise ConstraintError(
            f"x-guidance of the JSON schema is {layout!r}; it may have {', '.join(sorted(_LAYOUT))}", "Leave it out"
        )
    schema = _readied(schema)
    try:
        return f"%json {json.dumps({**schema, 'x-guidance': {**_AS_PYTHON, **more, **layout}})}"
    except (TypeError, ValueError) as error:
        raise ConstraintError(f"the JSON schema cannot be written as JSON: {error}", "Give an object of JSON") from None


def _readied(schema: Any) -> Any:
    """A schema with `_FORMATS` as patterns.

    Raises:
      ConstraintError: it has a keyword that llguidance would ignore, wholly or in part.
    """
    if isinstance(schema, list):
        return [_readied(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {}
    for name, value in schema.items():
        if name in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, Mapping):
            value = {key: _readied(part) for key, part in value.items()}
        elif name in _DROPPED:
            raise ConstraintError(f"the JSON schema has {name!r}, which cannot be enforced", "Leave it out")
        elif name == "minProperties" and isinstance(value, int) and value > max(1, len(schema.get("required", []))):
            problem = f"minProperties of the JSON schema is {value}; a name that stands twice would count twice"
            raise ConstraintError(problem, "Leave it out, or name those that are required")
        elif name not in ("const", "enum", "default", "example", "examples"):
            value = _readied(value)
        made[name] = value
    pattern, others = _FORMATS.get(str(made.get("format"))), made.get("allOf", [])
    if pattern is not None and isinstance(others, list):
        del made["format"]
        made["allOf"] = [*others, {"pattern": f"^{pattern}$"}]
    return made


def json_object() -> Grammar:
    """Any JSON object."""
    return json_schema({"type": "object"})


def regex(pattern: str) -> Grammar:
    """Text that a regular expression matches as a whole, in the syntax of Rust's `regex`."""
    escaped = pattern.replace("/", "\\/") if "\\/" not in pattern else pattern
    return lark(f"start: REGEX\nREGEX: /{escaped}/\n", "the regular expression")


def one_of(texts: Sequence[str]) -> Grammar:
    """One of these texts."""
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ConstraintError(f"the choices are {texts!r}; they must be texts, at least one", "Give a list")
    return lark(f"start: {' | '.join(map(json.dumps, texts))}\n", "the choice")


# llguidance


def _llguidance() -> Any:
    try:
        import llguidance
        import llguidance.hf  # noqa: F401 - used by name
    except ImportError:
        raise UnsupportedError(
            "schemas and grammars are enforced by llguidance, which is not installed",
            "Install it: pip install llguidance",
        ) from None
    return llguidance


_WORDS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def _words(tokenizer: Any) -> Any:
    """llguidance's view of a tokenizer, made once: 0.6 s of one processor at 49,152 tokens."""
    eos = sorted(tokenizer.eos_token_ids)
    with _LOCK:
        found = _WORDS.get(tokenizer)
        if found is None or sorted(found.eos_tokens) != eos:
            inner, library = getattr(tokenizer, "_tokenizer", tokenizer), _llguidance()
            try:
                found = library.hf.from_tokenizer(inner, eos_token=eos)
            except ValueError as error:
                problem = f"no grammar can be enforced with this model's tokenizer: {error}"
                raise ConstraintError(problem, "Leave the schema or grammar out") from None
            _WORDS[tokenizer] = found
        return found


def is_special(tokenizer: Any, token: int) -> bool:
    """Whether a token is a special one: text does not match it, so a grammar has to name it by its number."""
    return _words(tokenizer).is_special_token(token)
