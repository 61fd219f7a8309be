"""The same pair through this package and through others that run on this machine, each in its own environment and process.

    python bench/peers.py --envs DIR --pair tiny --z-lab CHECKOUT --out bench/results/peers-tiny.json
        [--sides mlx-lm ours mlx-dspark] [--small-draft DIR] [--kinds chat,code] [--max-tokens 64] [--trials 3]
        [--max-seconds 600] [--before CHECKOUT] [--block-size 8] [--dense]

Sides: mlx-lm (plain decoding), ours (default settings), z-lab (the authors' MLX code; give a checkout of z-lab/dflash),
mlx-dspark, dflash-mlx-0.1.8 (both from the package index), mlx-lm-draft (mlx-lm's speculative decoding; its small model is
--small-draft, else the target's own first layers, for want of one with the same tokenizer), before (an older checkout of this
project, given by --before: its answers are compared with ours id by id, and its speed trial by trial). --block-size fixes the
block of these two, and nothing is copied from the text, so that equal rounds are timed. Environments are made in
--envs with venv and pip at the first run and kept. Target and drafter are written out once as float32 (on a CPU; bfloat16 on a
GPU), a quantized drafter dense, so that all load the same numbers. Greedy; every side otherwise with its own defaults.

All processes stay loaded and answer in turn, one at a time; the order is turned round after every trial. Speed of a side in a
trial is over mlx-lm's on the same prompt in the same trial. A side that says something else than mlx-lm is shown with the count.
A record in --out that ran out of time is continued.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from dflash_mlx import load
from dflash_mlx.checkpoint import inspect_checkpoint
from dflash_mlx.pairs.builtin import BUILTIN_PAIRS, builtin_path
from dflash_mlx.tools import bench, bench_record
from dflash_mlx.tools.columns import align

HERE = Path(__file__).resolve().parent
# What pip installs for a side; None: this environment has it.
REQUIREMENTS = {
    "mlx-lm": None,
    "ours": None,
    "before": None,
    "mlx-lm-draft": None,
    "z-lab": None,
    "mlx-dspark": ["mlx-dspark==0.20.3"],
    "dflash-mlx-0.1.8": ["dflash-mlx==0.1.8", "mlx-lm==0.32.2"],
}

# Run by `ours` of peer_worker.py.
OURS = ("ours", "before")


def environment(side: str, folder: Path) -> str:
    """The interpreter of a side, its environment made first if it is not there."""
    wanted = REQUIREMENTS[side]
    if wanted is None:
        return sys.executable
    python = folder / side / "bin" / "python"
    if not (folder / side / "ready").exists():
        print(f"Making an environment for {side} ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder / side)], check=True)
        build = "mlx[cpu]" if sys.platform == "linux" else "mlx"
        command = [str(python), "-m", "pip", "install", "-q", *wanted, f"{build}=={mx.__version__}"]
        subprocess.run(command, check=True)
        (folder / side / "ready").write_text(" ".join(command[5:]) + "\n")
    return str(python)


def machine_dtype() -> str:
    return "float32" if mx.default_device() == mx.cpu else "bfloat16"


def written_target(name: str, source: str, folder: Path, dense: bool = False) -> str:
    """A target as a directory in the number type of this machine, made once; quantized matrices stay as they are unless dense."""
    from dflash_mlx.conversion import convert

    done = folder / f"{name}-target-{'dense-' * dense}{machine_dtype()}"
    if not (done / "config.json").exists():
        is_quantized = "quantization" in inspect_checkpoint(source).config
        convert(source, str(done), dtype=machine_dtype(), dequantize=dense and is_quantized)
    return str(done)


def written_drafter(name: str, source: str, folder: Path) -> str:
    """A drafter as a directory in the number type of this machine, made once; no peer reads a quantized one, so it is dense."""
    from dflash_mlx.conversion import load_dense_drafter

    # An earlier drafter of that name is another one.
    done = folder / f"{name}-drafter-{inspect_checkpoint(source).digest()}-{machine_dtype()}"
    if not (done / "config.json").exists():
        config, dense = load_dense_drafter(source)
        done.mkdir(parents=True, exist_ok=True)
        dtype = getattr(mx, machine_dtype())
        mx.save_safetensors(
            str(done / "model.safetensors"), {k: v.astype(dtype) for k, v in dense.items()}, metadata={"format": "mlx"}
        )
        (done / "config.json").write_text(json.dumps({**config, "dtype": machine_dtype()}, indent=1))
    return str(done)


def first_layers(target: str, layers: int, folder: Path) -> str:
    """A directory with the target's first layers as a small model of its own."""
    done = folder / f"{Path(target).name}-first-{layers}"
    if not (done / "config.json").exists():
        done.mkdir(parents=True, exist_ok=True)
        for file in Path(target).iterdir():
            if file.suffix == ".json" and not file.name.endswith(".index.json"):
                shutil.copy(file, done)
        weights = {}
        for file in Path(target).glob("*.safetensors"):
            for name, array in mx.load(str(file)).items():
                place = name.split(".layers.")[-1].split(".")[0] if ".layers." in name else ""
                if not place or int(place) < layers:
                    weights[name] = array
        mx.save_safetensors(str(done / "model.safetensors"), weights, metadata={"format": "mlx"})
        config = json.loads((done / "config.json").read_text())
        config["num_hidden_layers"] = layers
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:layers]
        (done / "config.json").write_text(json.dumps(config, indent=1))
    return str(done)


def laid_out(checkout: Path, folder: Path) -> str:
    """A folder from which an older checkout's package is imported, `convert/` at its installed place; made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(checkout / "dflash_mlx", folder / "dflash_mlx")
    shutil.copytree(checkout / "convert", folder / "dflash_mlx" / "conversion")
    return str(folder)


class Side:
    """A peer's process: `ask` gives its answer to one prompt."""

    def __init__(self, name: str, python: str, paths: dict[str, Any], log: Path):
        self.name, self.log = name, log
        environ = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if name == "before":
            environ["PYTHONPATH"] = os.pathsep.join([paths["before"], *filter(None, [environ.get("PYTHONPATH")])])
        # -P: no file beside the script may be taken for a package.
        self.process = subprocess.Popen(
            [python, "-P", str(HERE / "peer_worker.py"), name, json.dumps(paths)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env=environ,
        )
        hello = self._line()
        self.versions, self.eos = hello["versions"], set(hello["eos"])

    def _line(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            last = self.log.read_text().strip().splitlines()[-1:]
            raise RuntimeError(f"{self.name} ended: {' '.join(last)} (the rest is in {self.log.name} of --envs)")
        return json.loads(line)

    def ask(self, ids: list[int], max_tokens: int) -> dict[str, Any]:
        """Raises: RuntimeError, with the side's own message, where it fails."""
        self.process.stdin.write(json.dumps({"ids": ids, "max_tokens": max_tokens}) + "\n")
        self.process.stdin.flush()
        answer = self._line()
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def said(ids: list[int], eos: set[int], max_tokens: int) -> list[int]:
    """The text of an answer as ids: some sides leave EOS out, some go on beyond max_tokens."""
    ids = ids[:max_tokens]
    end = next((i for i, token in enumerate(ids) if token in eos), len(ids))
    return ids[:end]


def digest(ids: list[Any]) -> str:
    """Stands for ids, or for lists of ids, in a record: equal ones have equal digests."""
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()[:16]


def rounds_of(drafted: list[list[int]] | None) -> dict[str, Any]:
    """What a record keeps of the drafted ids of each round: the number of rounds and of drafts, and a digest."""
    if drafted is None:
        return {}
    return {"rounds": len(drafted), "drafts": sum(map(len, drafted)), "drafted": digest(drafted)}


def summarise(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a side and kind, then one a side over all kinds (medians of its speed over mlx-lm's, by pair)."""
    plain = {(r["kind"], r["trial"]): r for r in runs if r["side"] == "mlx-lm"}
    rows = []
    kinds = list(dict.fromkeys(r["kind"] for r in runs))
    for side in dict.fromkeys(r["side"] for r in runs):
        for kind in [*kinds, "all"]:
            of = [r for r in runs if r["side"] == side and kind in (r["kind"], "all") and (r["kind"], r["trial"]) in plain]
            if of:
                ratios = [r["decode_tps"] / plain[r["kind"], r["trial"]]["decode_tps"] for r in of]
                rows.append(
                    {"side": side, "kind": kind, "pairs": len(of), "decode_tps": statistics.median(r["decode_tps"] for r in of)}
                    | {"ratio": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}
                    | {"ttft_s": statistics.median(r["ttft_s"] for r in of), "equal": sum(r["equal"] for r in of)}
                )
    return rows


def against(runs: list[dict[str, Any]], before: str = "before") -> dict[str, Any] | None:
    """Our speed over an earlier state's, by pairs of one prompt and trial: the mean ratio (geometric) and its 95 % interval.

    The interval is that of the mean of the logarithms, by 4,000 resamplings of the pairs. None: there are no pairs.
    """
    by = {(r["side"], r["kind"], r["trial"]): r for r in runs}
    pairs = [
        (r, by[before, kind, trial]) for (side, kind, trial), r in by.items() if side == "ours" and (before, kind, trial) in by
    ]
    if not pairs:
        return None
    logs = np.log([ours["decode_tps"] / then["decode_tps"] for ours, then in pairs])
    means = np.random.default_rng(0).choice(logs, (4000, len(logs))).mean(axis=1)
    low, high = np.exp(np.quantile(means, (0.025, 0.975)))
    ids, drafts = (sum(ours[of] == then[of] for ours, then in pairs) for of in ("said", "drafted"))
    return {"ratio": float(np.exp(logs.mean())), "low": float(low), "high": float(high), "pairs": len(pairs)} | {
        "same_ids": ids,
        "same_drafts": drafts,
    }


def table(record: dict[str, Any]) -> str:
    """A record for people."""
    m = record["machine"]
    lines = [f"{record['pair']} on {m['chip']} ({m['cores']} cores, load before {m['load'][0]:g}), {record['settings']['dtype']}"]
    lines += [f"{side}: {', '.join(f'{p} {v}' for p, v in of.items())}" for side, of in record["versions"].items()]
    lines += [f"{side} left out: {why}" for side, why in record["failed"].items()]
    rows = [["side", "kind", "tokens/s", "times mlx-lm", "least-largest", "first token, s", "same text"]]
    for r in record["summary"]:
        rows.append(
            [r["side"], r["kind"], f"{r['decode_tps']:.1f}", f"{r['ratio']:.2f}", f"{r['low']:.2f}-{r['high']:.2f}"]
            + [f"{r['ttft_s']:.3f}", f"{r['equal']}/{r['pairs']}"]
        )
    if b := record.get("against_before"):
        lines.append(
            f"ours over before: {b['ratio']:.3f} ({b['low']:.3f} to {b['high']:.3f}, 95 %) in {b['pairs']} pairs; "
            f"the same ids in {b['same_ids']}, the same drafts in all rounds in {b['same_drafts']}"
        )
    return "\n".join([*lines, "", *align(rows), "", f"This run is {record['ended']}."])


def earlier_runs(record: dict[str, Any], out: Path | None) -> list[dict[str, Any]]:
    """The runs in `out`, where it is a record of the same pair, settings and machine that ran out of time."""
    if out is None or not out.exists():
        return []
    found = json.loads(out.read_text())
    same = found["machine"]["chip"] == record["machine"]["chip"]
    same = same and all(found[of] == record[of] for of in ("what", "pair", "drafter_sha256", "settings"))
    return found["runs"] if same and found["ended"] != "complete" else []


def warm_up(sides: list[str], ask: Callable[[str], Any]) -> set[str]:
    """Two answers of each side, the first of which loads it. Returns: the sides that gave both.

    Peers compile for long, so they warm up together; states of ours time their passes meanwhile, so each does alone.
    """
    alone = [side for side in sides if side in OURS]
    together = [side for side in sides if side not in OURS]

    def answers(side: str) -> bool:
        return bool(ask(side) and ask(side))

    with ThreadPoolExecutor(len(REQUIREMENTS)) as pool:
        found = dict(zip(together, pool.map(answers, together), strict=True))
    found |= {side: answers(side) for side in alone}
    return {side for side, both in found.items() if both}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All sides over all kinds and trials, into a record of plain values."""
    began = time.perf_counter()
    args.envs.mkdir(parents=True, exist_ok=True)
    models = args.envs / "models"
    name, drafter = Path(args.pair).name, args.draft_model or str(builtin_path(args.pair, "drafter"))
    target = written_target(name, str(builtin_path(args.pair, "target") or args.pair), models, args.dense)
    paths = {"target": target, "drafter": written_drafter(name, drafter, models)}
    model, tokenizer = load(target)
    layers = len(model.layers)
    wanted = [side for side in args.sides if side != "z-lab" or args.z_lab]
    if "mlx-lm-draft" in wanted:
        paths["small"] = args.small_draft or first_layers(target, max(layers // 4, 1), models)
    wanted = [side for side in wanted if side != "before" or args.before]
    if args.before:
        paths["before"] = laid_out(args.before, args.envs / "before")
    if args.block_size:
        paths["block_size"] = args.block_size
    if args.z_lab:
        paths["z_lab"] = str(args.z_lab.resolve())
    plan = bench.Plan(kinds=tuple(args.kinds.split(",")) if args.kinds else (), temps=(0.0,), contexts=(0,))
    prompts = bench.Bench(model, tokenizer, None, plan)
    record = {
        "what": "bench/peers.py",
        "pair": args.pair + ", dense" * args.dense,
        "drafter_sha256": inspect_checkpoint(drafter).digest(),
        "machine": bench.machine(),
        "versions": {},
        "settings": {"max_tokens": args.max_tokens, "trials": args.trials, "dtype": bench.weights_of(model)["dtype"]}
        | {"bits": bench.weights_of(model)["bits"], "digest": prompts.prompts.digest()}
        | {"small_draft": args.small_draft or f"the target's first {max(layers // 4, 1)} of {layers} layers"}
        | {"block_size": args.block_size, "sides": wanted},
        "failed": {},
        "runs": [],
        "ended": "unfinished",
    }
    record["runs"] = earlier_runs(record, args.out)
    open_sides: dict[str, Side] = {}

    def ask(side: str, ids: list[int], max_tokens: int) -> dict[str, Any] | None:
        """None once a side has failed: the others go on without it."""
        try:
            if side not in open_sides:
                open_sides[side] = Side(side, environment(side, args.envs), paths, args.envs / f"{side}.log")
                record["versions"][side] = open_sides[side].versions
            return open_sides[side].ask(ids, max_tokens)
        except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
            record["failed"][side] = str(error)
            print(f"{side} left out: {error}", flush=True)
            return None

    try:
        ready = warm_up(wanted, lambda side: ask(side, prompts.ids(prompts.cells[0], 0), args.max_tokens))
        sides = [side for side in wanted if side in ready]
        print(f"warm after {time.perf_counter() - began:.0f} s: {', '.join(sides)}", file=sys.stderr, flush=True)
        for trial in range(args.trials):
            for cell in prompts.cells:
                if any((r["kind"], r["trial"]) == (cell[0], trial) for r in record["runs"]):
                    continue
                if args.max_seconds and time.perf_counter() - began > args.max_seconds:
                    record["ended"] = "out of time"
                    return record
                ids, answers = prompts.ids(cell, trial), {}
                for side in sides if trial % 2 == 0 else sides[::-1]:
                    if (answer := ask(side, ids, args.max_tokens)) is not None:
                        answers[side] = answer
                plain = answers.get("mlx-lm")
                for side, a in answers.items():
                    eos = open_sides[side].eos
                    equal = plain is None or said(a["ids"], eos, args.max_tokens) == said(plain["ids"], eos, args.max_tokens)
                    if len(a["ids"]) > 1:
                        record["runs"].append(
                            {"side": side, "kind": cell[0], "trial": trial, "tokens": len(a["ids"]), "ttft_s": a["ttft_s"]}
                            | {"decode_tps": (len(a["ids"]) - 1) / a["decode_s"], "equal": equal}
                            | {"said": digest(said(a["ids"], eos, args.max_tokens))}
                            | rounds_of(a.get("drafted"))
                        )
                if args.out:
                    bench_record.write_record(record, args.out)
        record["ended"] = "complete"
    except KeyboardInterrupt:
        record["ended"] = "interrupted"
    finally:
        record["summary"] = summarise(record["runs"])
        record["against_before"] = against(record["runs"])
        for side in open_sides.values():
            side.close()
    return record


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--envs", type=Path, required=True, help="folder for environments, models and logs")
    p.add_argument("--pair", default="tiny", help=f"a built-in pair ({', '.join(BUILTIN_PAIRS)}), or a target's directory")
    p.add_argument("--draft-model", help="the drafter's directory, if it is not the built-in one")
    p.add_argument("--sides", nargs="+", choices=REQUIREMENTS, default=list(REQUIREMENTS))
    p.add_argument("--z-lab", type=Path, help="checkout of github.com/z-lab/dflash; without it that side is left out")
    p.add_argument("--before", type=Path, help="an older checkout of this project; without it that side is left out")
    p.add_argument("--block-size", type=int, help="of ours and before in each round; default: they choose")
    p.add_argument("--small-draft", help="directory of a small model with the target's tokenizer, for mlx-lm-draft")
    p.add_argument("--dense", action="store_true", help="write quantized matrices out: on CUDA theirs take minutes to compile")
    p.add_argument("--kinds")
    p.add_argument("--max-tokens", type=int, default=64)
    p.add_argument("--trials", type=int, default=3)
    p.add_argument("--max-seconds", type=float)
    p.add_argument("--out", type=Path)
    args = p.parse_args()
    record = measure(args)
    print(table(record))
    if args.out:
        bench_record.write_record(record, args.out)


if __name__ == "__main__":
    main()
