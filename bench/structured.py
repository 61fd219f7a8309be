"""Answers held to a schema: are they of it, are drafted ids the plain ones, and how fast do they come beside free text?

    python bench/structured.py                          20 schemas x 25 seeds at temperature 1 on the built-in pair `tiny`
    python bench/structured.py --speed --pair smollm2   tokens/s of held and free answers, by turns, median of 5

The first prints one line a schema and exits with 1 where an answer breaks a promise; `tests/data/schemas.json` has sources and
licences. Needs llguidance, the first also jsonschema.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import mlx.core as mx

from dflash_mlx import load, load_drafter, stream_generate
from dflash_mlx.constraint import json_schema
from dflash_mlx.sampling import Distribution
from dflash_mlx.train.start import dense

# What is checked of formats: Python knows no year 0, which dates may have.
FORMATS = ("email", "uuid", "ipv4")
SCHEMAS = json.loads((Path(__file__).parents[1] / "tests" / "data" / "schemas.json").read_text())


def prompt_of(tokenizer, name):
    """What a chat model is asked, or what a model of source code goes on with."""
    if not tokenizer.has_chat_template:
        return f'{name.replace(" ", "_")} = json.loads("""'
    asked = [{"role": "user", "content": f"Write one example of a JSON object: {name}. Only JSON."}]
    return tokenizer.apply_chat_template(asked, add_generation_prompt=True)


def answer(pair, name, most, **options):
    """The responses of one answer."""
    model, tokenizer, drafter = pair
    options = {"draft_model": drafter, **options}
    return list(stream_generate(model, tokenizer, prompt_of(tokenizer, name), most, **options))


def check(pair, name, seed, most):
    """Whether an answer ended by itself. Raises: what it breaks."""
    import jsonschema

    schema, tokenizer = SCHEMAS[name]["schema"], pair[1]
    options = {"constraint": json_schema(schema), "sampler": Distribution(1.0), "seed": seed}
    got = answer(pair, name, most, block_size=8, **options)
    plain = answer(pair, name, most, draft_model=None, **options)
    ids = [response.token for response in got]
    assert ids == [response.token for response in plain], f"{name}, seed {seed}: drafted ids are not the plain ones"
    if got[-1].finish_reason == "stop":
        value = json.loads("".join(response.text for response in got))
        jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker(FORMATS)).validate(value)
        return True
    held = json_schema(schema).begin(tokenizer)
    assert got[-1].finish_reason == "length" and all(map(held.advance, ids)), f"{name}, seed {seed}: no beginning of an answer"
    return False


def speed(pair, names, runs):
    """tokens/s of held and of free answers, each with what drafts it: by turns, after one of each that does not count."""
    tps = {"held": [], "free": []}
    for turn in range(runs + 1):
        for kind in tps:
            tokens = seconds = 0
            for name in names:
                options = {"constraint": json_schema(SCHEMAS[name]["schema"])} if kind == "held" else {}
                got = answer(pair, name, 96, sampler=Distribution(1.0), seed=turn, **options)
                tokens, seconds = tokens + len(got), seconds + len(got) / got[-1].generation_tps
            print(f"turn {turn}, {kind}: {tokens / seconds:.1f} tokens/s", flush=True)
            if turn:
                tps[kind].append(tokens / seconds)
    return tps


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="tiny")
    parser.add_argument("--seeds", type=int, default=25)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--dense", action="store_true", help="dequantize the target and the drafter: bfloat16")
    asked = parser.parse_args()
    model, tokenizer = load(asked.pair)
    if asked.dense:
        model = dense(model, mx.bfloat16)
    drafter = load_drafter(asked.pair, model)
    pair = model, tokenizer, dense(drafter, mx.bfloat16) if asked.dense else drafter
    if asked.speed:
        tps = speed(pair, [name for name in SCHEMAS if "written" in SCHEMAS[name]["source"]], asked.turns)
        for kind, values in tps.items():
            print(f"{kind}: median {statistics.median(values):.1f} tokens/s of {[round(value, 1) for value in values]}")
        return 0
    total = ended = broken = 0
    for name in SCHEMAS:
        of_this = 0
        for seed in range(asked.first_seed, asked.first_seed + asked.seeds):
            total += 1
            try:
                of_this += check(pair, name, seed, asked.max_tokens)
            except Exception as error:  # noqa: BLE001 - whatever it is, the other schemas are tried
                broken += 1
                print(f"{name}, seed {seed}: {str(error)[:200]}", flush=True)
        ended += of_this
        print(f"{name}: {of_this} of {asked.seeds} ended by themselves", flush=True)
    print(f"{ended} of {total} ended by themselves, {broken} broke a promise")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
