"""Answers held to a constraint: what is drafted, cut and masked changes no id; and what cannot be enforced is refused by name."""

import json
import sys
from datetime import date, datetime, time

import jsonschema
import mlx.core as mx
import numpy as np
import pytest
from kit import DATA, TINY, failing_pass, ids_of, letters, plant, run, text_of, tiny_drafter, tiny_target
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import AutoTokenizer

from dflash_mlx import constrained, constraint, generate, make_prompt_cache, stream_generate
from dflash_mlx.batch.generator import BatchGenerator
from dflash_mlx.constraint import ConstraintError, json_object, json_schema, lark, one_of, regex
from dflash_mlx.draft_length.policy import FixedDraftLength
from dflash_mlx.pair import DFlashPair
from dflash_mlx.sampling import Distribution

PROMPT = [3, 17, 9, 33, 21, 40]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["alpha", "beta"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}


class Turns:
    """Odd tokens follow even ones; after each third token 7, 8 and 9 are forced."""

    def __init__(self, vocabulary=61, every=3):
        self.vocabulary, self.every, self.tokens = vocabulary, every, []

    def allowed(self):
        if rest := self.forced()[:1]:
            return rest
        odd = not self.tokens or self.tokens[-1] % 2 == 0
        return [i for i in range(self.vocabulary) if i % 2 == odd]

    def mask(self):
        bits = np.zeros((self.vocabulary + 31) // 32 * 32, dtype=np.uint8)
        bits[self.allowed()] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def advance(self, token):
        if token not in self.allowed():
            return False
        self.tokens.append(token)
        return True

    def rollback(self, n):
        self.tokens = self.tokens[: len(self.tokens) - n]

    def forced(self):
        place = len(self.tokens) % (self.every + 3) - self.every
        return [7, 8, 9][place:] if place >= 0 else []


@pytest.fixture(scope="module")
def tiny():
    model = tiny_target()
    return model, tiny_drafter(model)


def held(ids):
    turns = Turns()
    return all(turns.advance(token) for token in ids)


@pytest.mark.parametrize("sampler", [None, Distribution(1.0)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "options",
    [{}, {"block_size": None}, {"block_size": 1}, {"prompt_lookup": True}, {"logits_processors": [lambda ids, row: row]}],
    ids=["block", "policy", "plain", "lookup", "processor"],
)
@pytest.mark.quick(4)
def test_drafted_ids_are_those_of_plain_decoding_under_the_same_constraint(tiny, sampler, options):
    model, drafter = tiny
    common = {"sampler": sampler, "seed": 5, "max_tokens": 40}
    line = ids_of(run(model, None, PROMPT, constraint=Turns(), **common))
    got = run(model, drafter, PROMPT, constraint=Turns(), **common, **options)
    assert ids_of(got) == line and held(line) and line != ids_of(run(model, None, PROMPT, **common))
    if options == {}:
        assert got[-1].stats.sources["grammar"]["accepted"] > 10
        # Of the rows before the bonus: of what may not come, minus infinity.
        assert all(
            np.isneginf(np.array(r.logprobs)).sum() >= 30 and mx.exp(r.logprobs).sum().item() == pytest.approx(1) for r in got
        )


FAULTS = {
    "a guide that is not undone": (constraint.Guide, "_along", "self.constraint.rollback(taken)", "pass"),
    "rows that are not masked": (
        constrained,
        "apply_masks",
        "mx.where(allowed, rows, mx.array(-mx.inf, dtype=rows.dtype))",
        "rows",
    ),
    "one mask for all rows": (constraint.Guide, "masks", "np.stack(rows)", "np.stack([rows[0]] * len(rows))"),
    "masks a row late": (constraint.Guide, "masks", "np.stack(rows)", "np.stack([rows[0], *rows[:-1]])"),
    "a token of the run before it": (
        constrained.ConstrainedSampler,
        "follow",
        "self.history.since(self.guide.seen)",
        "self.history.since(self.guide.seen)[:-1]",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_of_the_masks_is_seen(tiny, monkeypatch, fault):
    model, drafter = tiny
    line = ids_of(run(model, None, PROMPT, constraint=Turns(), max_tokens=40))
    plant(monkeypatch, *FAULTS[fault])
    try:
        assert ids_of(run(model, drafter, PROMPT, constraint=Turns(), max_tokens=40)) != line
    except ConstraintError:
        pass


def test_a_cut_round_verifies_no_draft_that_may_not_come(tiny, monkeypatch):
    class Cutting(FixedDraftLength):
        wants_confidence = cuts_by_confidence = True

        def confidence_cut(self, confidence):
            return self.width

        def prompt_lookup_width(self, width, rates):
            return 0

    model, drafter = tiny
    monkeypatch.setattr(DFlashPair, "draft_length_policy", lambda *_: Cutting(4))
    got = run(model, drafter, PROMPT, 40, block_size=None, constraint=Turns())
    turns, widths = Turns(), []
    turns.advance(got[0].token)
    for one in got[-1].stats.rounds:
        for token in one.drafted[: one.width]:
            assert turns.advance(token)
        turns.rollback(one.width - one.accepted)
        assert turns.advance(one.bonus)
        widths.append(one.width)
    assert 0 in widths and max(widths) > 0 and ids_of(got) == ids_of(run(model, None, PROMPT, 40, constraint=Turns()))


def test_each_row_of_a_batch_has_a_constraint_of_its_own(tiny):
    model, drafter = tiny
    asked = [{"constraint": Turns()}, {}, {"constraint": Turns(every=2), "sampler": Distribution(1.0), "seed": 3}]
    lines = [ids_of(run(model, None, PROMPT, 30, **{**options, "constraint": fresh(options)})) for options in asked]
    batch, got = BatchGenerator(model, letters(), drafter, max_batch=3), {}
    for options in asked:
        got[batch.insert(PROMPT, max_tokens=30, block_size=5, **{**options, "constraint": fresh(options)})] = []
    while len(batch):
        for response in batch.next():
            got[response.uid].append(response.token)
    assert list(got.values()) == lines


def fresh(options):
    """A constraint that no run has moved on."""
    return Turns(every=options["constraint"].every) if "constraint" in options else None


def test_a_plain_stretch_under_a_constraint_waits_once_a_token(tiny, waits):
    model, drafter = tiny
    at = []
    for _ in stream_generate(model, letters(), PROMPT, 40, drafter, block_size=1, constraint=Turns()):
        at.append(waits["wait"])
    assert {b - a for a, b in zip(at[:-2], at[1:-1], strict=True)} == {1}


def test_a_closed_stream_leaves_its_cache_at_its_tokens(tiny):
    model, drafter = tiny
    cache = make_prompt_cache(model, drafter)
    steps = stream_generate(model, letters(), PROMPT, 40, drafter, block_size=5, constraint=Turns(), prompt_cache=cache)
    ids = [next(steps).token for _ in range(8)]
    steps.close()
    fresh = ids_of(run(model, drafter, [*PROMPT, *ids, 11], 12))
    assert ids_of(run(model, drafter, [11], 12, prompt_cache=cache)) == fresh


def test_a_kernel_that_failed_in_a_held_round_costs_no_id(tiny, monkeypatch):
    model, drafter = tiny
    line = ids_of(run(model, drafter, PROMPT, 30, constraint=Turns()))
    for nth in (1, 2, 4):
        with monkeypatch.context() as patch:
            failing_pass(patch, nth)
            assert ids_of(run(model, drafter, PROMPT, 30, constraint=Turns())) == line


def test_tokens_beyond_the_masks_words_may_not_come(tiny):
    model, drafter = tiny
    line = ids_of(run(model, drafter, PROMPT, 20, constraint=Turns(vocabulary=32)))
    assert max(line) < 32 and line == ids_of(run(model, None, PROMPT, 20, constraint=Turns(vocabulary=32)))


# With llguidance, on the built-in pair


@pytest.mark.parametrize("seed", [None, 1])
def test_an_answer_is_json_of_its_schema_and_its_drafts_change_nothing(pair, seed):
    model, tokenizer, drafter = pair
    options = {"max_tokens": 90, "constraint": json_schema(SCHEMA), "seed": seed, "sampler": seed and Distribution(1.0)}
    plain = list(stream_generate(model, tokenizer, "def person():\n    return ", **options))
    got = list(stream_generate(model, tokenizer, "def person():\n    return ", draft_model=drafter, block_size=8, **options))
    assert ids_of(got) == ids_of(plain) and got[-1].finish_reason == "stop"
    value = json.loads(text_of(got))
    jsonschema.validate(value, SCHEMA)
    # Laid out as json.dumps does, for that is what the forced drafts are.
    assert text_of(got) == json.dumps(value, ensure_ascii=False) and got[-1].stats.sources["grammar"]["accepted"] >= 12


# Python knows no year 0, which dates may have.
FORMATS = ("email", "uuid", "ipv4")
SCHEMAS = json.loads((DATA / "schemas.json").read_text())


@pytest.mark.full
@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_of_every_schema_hold_and_are_plain_decodings(pair, name):
    """As `bench/structured.py` does for 25 seeds; here one, and up to 200 tokens."""
    model, tokenizer, drafter = pair
    schema, prompt = SCHEMAS[name]["schema"], f'{name.replace(" ", "_")} = json.loads("""'
    options = {"max_tokens": 200, "constraint": json_schema(schema), "seed": 7, "sampler": Distribution(1.0)}
    got = list(stream_generate(model, tokenizer, prompt, draft_model=drafter, block_size=8, **options))
    assert ids_of(got) == ids_of(stream_generate(model, tokenizer, prompt, **options))
    if got[-1].finish_reason == "stop":
        validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker(FORMATS))
        validator.validate(json.loads(text_of(got)))
    else:
        held = json_schema(schema).begin(tokenizer)
        assert got[-1].finish_reason == "length" and all(held.advance(r.token) for r in got)


def test_other_grammars_hold_too(pair):
    model, tokenizer, drafter = pair

    def said(grammar, tokens=24):
        return generate(model, tokenizer, "x = ", draft_model=drafter, max_tokens=tokens, block_size=8, constraint=grammar)

    assert said(regex(r"[0-9]{3}/[a-f]{2}"))[3] == "/"
    assert said(one_of(["left", "right"])) in ("left", "right")
    assert said(lark('start: "a" b\nb: "b" | "c" b')).startswith("a")
    assert said(json_object()).startswith("{")


def test_a_stream_that_is_cut_says_so_and_its_text_begins_an_answer(pair):
    model, tokenizer, drafter = pair
    got = list(stream_generate(model, tokenizer, "x = ", 5, drafter, block_size=8, constraint=json_schema(SCHEMA)))
    assert got[-1].finish_reason == "length"
    guide = json_schema(SCHEMA).begin(tokenizer)
    assert all(guide.advance(r.token) for r in got)


REFUSED = [
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"properties": {"a": {"not": {"type": "string"}}}}, "not"),
    ({"type": "string", "format": "iri"}, "iri"),
    ({"properties": {"a": {"$ref": "https://example.org/a"}}}, "https://example.org/a"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"oneOf": [{"type": "string"}, {"minLength": 3}]}, "oneOf"),
    ({"type": "number", "divisibleBy": 2}, "divisibleBy"),
    ({"type": "object", "minProperties": 2}, "minProperties"),
    ({"x-guidance": {"lenient": True}, "uniqueItems": True}, "lenient"),
    ("{", "no JSON"),
    ([1], "list"),
]


@pytest.mark.parametrize("schema,named", REFUSED, ids=[named for _, named in REFUSED])
def test_a_schema_that_cannot_be_held_to_is_refused_by_name(pair, schema, named):
    model, tokenizer, drafter = pair
    with pytest.raises(ConstraintError, match=named) as caught:
        next(stream_generate(model, tokenizer, "x", 3, drafter, constraint=json_schema(schema)))
    assert caught.value.remedy


def test_a_name_that_is_no_keyword_is_none(pair):
    _, tokenizer, _ = pair
    schema = {"type": "object", "properties": {"not": {"type": "string"}, "extends": {"const": {"divisibleBy": 1}}}}
    json_schema(schema).begin(tokenizer)


def test_what_does_not_go_with_a_constraint_is_refused(tiny, pair, monkeypatch):
    model, drafter = tiny
    with pytest.raises(ConstraintError, match="'rejection'"):
        run(model, drafter, PROMPT, constraint=Turns(), acceptance="rejection", sampler=Distribution(1.0))
    with pytest.raises(ConstraintError, match="mlx-lm draft model"):
        run(model, tiny_target(2), PROMPT, constraint=Turns())
    with pytest.raises(ConstraintError, match="dict without mask"):
        run(model, drafter, PROMPT, constraint={"type": "object"})
    with pytest.raises(ConstraintError, match="no grammar can be enforced with this model.s tokenizer"):
        run(model, drafter, PROMPT, constraint=json_object())
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConstraintError, match="not installed. Install it: pip install llguidance"):
        next(stream_generate(*pair[:2], "x", 3, constraint=lark('start: "never compiled"')))


def test_a_date_or_a_time_that_ends_is_one():
    dates = [
        f"{year:04}-{day}"
        for year in (0, 1, 4, 100, 400, 1900, 2000, 2023, 2024, 2100, 9999)
        for day in ("01-31", "02-28", "02-29", "02-30", "04-30", "04-31", "06-00", "12-31", "13-01", "00-01")
    ]
    times = ["00:00:00Z", "23:59:59.5Z", "23:59:60Z", "25:00:00Z", "12:60:00Z", "12:00:00-23:59", "12:00:00+24:00"]
    tokenizer = TokenizerWrapper(AutoTokenizer.from_pretrained(TINY / "target"), eos_token_ids=[0])

    def taken(schema, value):
        held, text = json_schema(schema).begin(tokenizer), json.dumps(value)
        return all(held.advance(token) for token in tokenizer.encode(text)) and bool(held.mask()[0] & 1)

    def is_one(parse, text):
        try:
            return bool(parse(text)) or True
        except ValueError:
            return False

    for format, parse, texts in (
        ("date", date.fromisoformat, dates),
        ("time", time.fromisoformat, times),
        (
            "date-time",
            datetime.fromisoformat,
            [f"{day}T12:00:00Z" for day in dates[::3]] + [f"2024-02-29T{one}" for one in times],
        ),
    ):
        schema = {"type": ["string", "null"], "format": format}
        right = {text: is_one(parse, text) for text in texts}
        assert {text: taken(schema, text) for text in texts} == right and any(right.values()) and not all(right.values())
        # Beside what else the schema says.
        more = {**schema, "pattern": "^20", "allOf": [{"minLength": 3}]}
        assert {text for text in texts if taken(more, text)} == {text for text in texts if right[text] and text.startswith("20")}
        assert taken(schema, None)
    assert "pattern" not in constraint.json_rule({"properties": {"format": {"type": "string"}}, "const": {"format": "date"}})
