"""Output of the command line: sentences on stderr, text as it comes, and the figures under an answer."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from ..stats import gain_over_plain, gain_text, is_off
from ..tools.columns import count, wrap


def say(text: str) -> None:
    """Print a sentence or more on stderr. On a terminal lines break between words."""
    print(wrapped(text, sys.stderr), file=sys.stderr, flush=True)


def columns_of(stream: Any) -> int | None:
    """The width of the terminal that a stream goes to; None: it goes elsewhere."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (AttributeError, OSError, ValueError):
        return None


def wrapped(text: str, stream: Any, indent: int = 0) -> str:
    """As `columns.wrap`, for the terminal that a text goes to."""
    return wrap(text, columns_of(stream), indent)


@contextlib.contextmanager
def only_ours_on_stdout() -> Iterator[Any]:
    """Yield the real stdout, and send everything that libraries print meanwhile to stderr."""
    stdout = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        yield stdout


def figures(result: dict[str, Any], details: bool = False, seed: int | None = None) -> str:
    """The text under an answer: one line, how to continue if it was cut, and with `details` all counts."""
    if result["prompt_tokens"] is None:
        return "Stopped before the first token."
    lines = [headline(result) + (f", seed {seed}" if seed is not None else "")]
    if is_off(result):
        lines.append(f"Drafting is off: on this {device()} it would be slower.")
    if result["has_measured"]:
        lines.append("Meanwhile the model and its drafter were timed, once; that slowed this answer.")
    if result["finish_reason"] == "length":
        n = result["generation_tokens"]
        lines.append(f"Stopped at the limit of {count(n, 'token')}: --max-tokens {2 * n} allows more, -1 any number.")
    elif result["finish_reason"] == "interrupted":
        lines.append("Stopped by Ctrl-C.")
    return "\n".join(lines + (_details(result) if details else []))


def headline(result: dict[str, Any]) -> str:
    """ "256 tokens, 11.2 tokens/s, 2.1 times as fast as without drafts, 3.0 tokens a round".

    The gain is over plain passes of this model on this machine: this run's, or stored ones (`plain_tps`). It is left out if there
    are none, if the answer is too short to time, and if drafting is off.
    """
    n, rounds = result["generation_tokens"], sum(result["widths"].values())
    parts = [count(n, "token"), f"{result['generation_tps']:.1f} tokens/s"]
    if rounds and result["tau"] is not None and not is_off(result):
        if gain := gain_over_plain(n, result["generation_tps"], result["plain_tps"]):
            parts.append(gain_text(gain))
        parts.append(f"{(n - 1) / rounds:.1f} tokens a round")
    return ", ".join(parts)


def device() -> str:
    """The device that MLX computes on, in words."""
    import mlx.core as mx

    return "CPU" if mx.default_device() == mx.cpu else "Mac's GPU" if mx.metal.is_available() else "GPU"


def _details(result: dict[str, Any]) -> list[str]:
    """The lines of --stats."""
    lines = [
        f"Prompt: {count(result['prompt_tokens'], 'token')}, {result['prompt_tps']:.1f} tokens/s",
        f"Peak memory: {result['peak_memory_gb']:.2f} GB",
    ]
    if result["plain_tps"]:
        lines.append(f"Plain decoding here: {result['plain_tps']:.1f} tokens/s")
    if result["tau"] is not None:
        passes, after = count(sum(result["widths"].values()), "round"), count(result["generation_tokens"] - 1, "token")
        lines.append(f"Rounds: {passes} for the {after} after the first; plain decoding takes one per token.")
        lengths = result["acceptance_lengths"]
        counts = ", ".join(f"{n - 1} in {lengths.count(n)}" for n in sorted(set(lengths)))
        drafted = count(len(lengths), "round")
        lines.append(f"Acceptance: tau {result['tau']:.2f} (mean of accepted + 1 over {drafted}; drafts accepted: {counts})")
        if (copied := result["sources"]["prompt_lookup"])["rounds"]:
            lines.append(f"Copied from the text: {count(copied['accepted'], 'token')} in {copied['rounds']} of these rounds.")
    elif result["widths"]:
        lines.append("Acceptance: no drafts were checked, so there is no tau; each token took one pass.")
    if result["width_reason"]:
        lines.append(f"Draft lengths: {result['width_reason']}.")
    spent = {name: took for name, took in result["seconds"].items() if took}
    if spent:
        lines.append("Seconds: " + ", ".join(f"{name} {took:.2f}" for name, took in spent.items()))
    return lines


def nothing(response: Any) -> None:
    pass
