"""One side of bench/peers.py: answers prompts with one implementation, in that implementation's own environment.

    python bench/peer_worker.py SIDE '{"target": DIR, "drafter": DIR, ...}'

Reads a JSON object {"ids": [...], "max_tokens": n} a line from stdin and writes {"ids", "ttft_s", "decode_s"} a line to stdout,
decode_s from the first token to the end; ours also "drafted", the drafted ids of each round. Imports nothing of this checkout
unless SIDE is ours: a peer has a package of the same name; side `before` is an older state of ours, found by PYTHONPATH. Every
side is greedy, with its own defaults for all else.
"""

import inspect
import json
import sys
import time
from importlib import metadata


def streamed(responses, token_of):
    """Drain a stream of tokens: ids, seconds to the first, seconds after it. `token_of` gives a list of ids per response."""
    ids, first, began = [], None, time.perf_counter()
    for response in responses:
        new = token_of(response)
        if new and first is None:
            first = time.perf_counter()
        ids += new
    ended = time.perf_counter()
    return ids, first - began, ended - first


def mlx_lm_plain(paths):
    import mlx_lm

    model, tokenizer = mlx_lm.load(paths["target"])
    return tokenizer, lambda ids, n: streamed(mlx_lm.stream_generate(model, tokenizer, ids, max_tokens=n), lambda r: [r.token])


def mlx_lm_draft(paths):
    """mlx-lm's own speculative decoding with an ordinary small model."""
    import mlx_lm

    model, tokenizer = mlx_lm.load(paths["target"])
    draft, _ = mlx_lm.load(paths["small"])

    def answer(ids, n):
        return streamed(mlx_lm.stream_generate(model, tokenizer, ids, max_tokens=n, draft_model=draft), lambda r: [r.token])

    return tokenizer, answer


def ours(paths):
    """With "block_size": that block in each round, nothing copied from the text."""
    from dflash_mlx import load, load_drafter, stream_generate

    model, tokenizer = load(paths["target"])
    drafter = load_drafter(paths["drafter"], model)
    # An older state has another name for it.
    lookup = next(name for name in ("prompt_lookup", "copy") if name in inspect.signature(stream_generate).parameters)
    fixed = {"block_size": paths["block_size"], lookup: False} if paths.get("block_size") else {}

    def answer(ids, n):
        stats = []

        def token_of(response):
            stats[:] = [response.stats]
            return [response.token]

        found = streamed(stream_generate(model, tokenizer, ids, max_tokens=n, draft_model=drafter, **fixed), token_of)
        return *found, [list(r.drafted) for r in stats[0].rounds]

    return tokenizer, answer


def z_lab(paths):
    """The authors' MLX code, from a checkout of z-lab/dflash."""
    sys.path.insert(0, paths["z_lab"])
    from dflash import model_mlx

    # Local directories: it would ask the hub for them.
    model_mlx.snapshot_download = lambda path, **options: path
    model, tokenizer = model_mlx.load(paths["target"])
    drafter = model_mlx.load_draft(paths["drafter"])

    def answer(ids, n):
        return streamed(
            model_mlx.stream_generate(model, drafter, tokenizer, ids, max_tokens=n), lambda r: [int(t) for t in r.tokens]
        )

    return tokenizer, answer


def mlx_dspark(paths):
    from mlx_dspark.generate import dflash_generate
    from mlx_dspark.load import load_dflash, load_target

    target, tokenizer = load_target(paths["target"], require_tap=True)
    drafter, _ = load_dflash(paths["drafter"], quantize=False)

    def answer(ids, n):
        began = time.perf_counter()
        done = dflash_generate(target, tokenizer, drafter, prompt_ids=ids, max_new_tokens=n)
        return list(done.token_ids), done.prefill_seconds, time.perf_counter() - began - done.prefill_seconds

    return tokenizer, answer


def dflash_mlx_0_1_8(paths):
    from dflash_mlx.engine.events import TokenEvent
    from dflash_mlx.runtime import get_stop_token_ids, stream_dflash_generate
    from dflash_mlx.runtime.bundle import load_runtime_bundle
    from dflash_mlx.runtime.context import build_offline_runtime_context

    context = build_offline_runtime_context()
    pair = load_runtime_bundle(model_ref=paths["target"], draft_ref=paths["drafter"], verify_config=context.verify)

    def answer(ids, n):
        events = stream_dflash_generate(
            target_model=pair.target_model,
            target_ops=pair.target_ops,
            tokenizer=pair.tokenizer,
            draft_model=pair.draft_model,
            draft_backend=pair.draft_backend,
            prompt_tokens_override=ids,
            max_new_tokens=n,
            stop_token_ids=get_stop_token_ids(pair.tokenizer),
            runtime_context=context,
        )
        return streamed(events, lambda e: [int(e.token_id)] if isinstance(e, TokenEvent) else [])

    return pair.tokenizer, answer


SIDES = {
    "mlx-lm": mlx_lm_plain,
    "ours": ours,
    "before": ours,
    "mlx-lm-draft": mlx_lm_draft,
    "z-lab": z_lab,
    "mlx-dspark": mlx_dspark,
    "dflash-mlx-0.1.8": dflash_mlx_0_1_8,
}


def main():
    # What libraries print goes to stderr: stdout carries answers alone.
    out, sys.stdout = sys.stdout, sys.stderr
    tokenizer, answer = SIDES[sys.argv[1]](json.loads(sys.argv[2]))
    versions = {}
    for package in ("mlx", "mlx-lm", "mlx-dspark", "dflash-mlx", "transformers"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    eos = sorted(getattr(tokenizer, "eos_token_ids", None) or [tokenizer.eos_token_id])
    print(json.dumps({"versions": versions, "eos": eos}), file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answered = answer(asked["ids"], asked["max_tokens"])
            reply = dict(zip(("ids", "ttft_s", "decode_s", "drafted"), answered, strict=False))
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=out, flush=True)


if __name__ == "__main__":
    main()
