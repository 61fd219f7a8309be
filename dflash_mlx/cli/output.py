"""What the command line says: sentences on stderr, text as it comes, and the figures under an answer."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


def say(text: str) -> None:
    """One sentence or more for the user, on stderr."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def only_ours_on_stdout() -> Iterator[Any]:
    """Hand out the real stdout and send everything that libraries print to stderr meanwhile."""
    stdout = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        yield stdout


def figures(result: dict[str, Any]) -> str:
    """The lines under an answer."""
    if result["prompt_tokens"] is None:
        return "Interrupted before the first token."
    lines = [
        f"Prompt: {result['prompt_tokens']} tokens, {result['prompt_tps']:.1f} tokens/s",
        f"Generation: {result['generation_tokens']} tokens, {result['generation_tps']:.1f} tokens/s, "
        f"ended by {result['finish_reason']}; peak memory {result['peak_memory_gb']:.2f} GB",
    ]
    if result["tau"] is not None:
        after, passes = result["generation_tokens"] - 1, sum(result["widths"].values())
        lines.append(f"Passes: {passes} of the target for the {after} tokens after the first; plain decoding takes one a token.")
        lengths = result["acceptance_lengths"]
        counts = ", ".join(f"{n - 1}: {lengths.count(n)}" for n in sorted(set(lengths)))
        lines.append(
            f"Acceptance: tau {result['tau']:.2f} (mean of accepted + 1 over {len(lengths)} rounds; accepted: rounds {counts})"
        )
        if (copied := result["sources"]["prompt_lookup"])["rounds"]:
            lines.append(f"Copied from the text: {copied['accepted']} tokens in {copied['rounds']} of these rounds.")
    elif result["widths"]:
        lines.append(
            "Acceptance: no draft was verified, so there is no tau; each token took a pass of its own, as without a drafter."
        )
    if result["width_reason"]:
        lines.append(f"Widths: {result['width_reason']}.")
    if result["seed"] is not None:
        lines.append(f"Seed: {result['seed']}")
    return "\n".join(lines)


def nothing(response: Any) -> None:
    pass


def plain_text(stdout: Any) -> Any:
    def show(response: Any) -> None:
        stdout.write(response.text)
        stdout.flush()

    return show


def draft_marker(tokenizer: Any, stdout: Any) -> Any:
    """Accepted tokens green, rejected ones red and struck through, bonus tokens yellow; without colours, in word-diff marks."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stdout, highlight=False, soft_wrap=True)
    coloured = console.color_system is not None
    styles = {"accepted": ("green", "{}"), "rejected": ("red strike", "[-{}-]"), "bonus": ("bold yellow", "{{+{}+}}")}
    seen = 0

    def put(text: str, kind: str | None) -> None:
        style, marks = styles.get(kind, ("", "{}"))
        if text:
            console.print(Text(text, style) if coloured else Text(marks.format(text)), end="")

    def show(response: Any) -> None:
        nonlocal seen
        if response.from_draft:
            put(response.text, "accepted")
            return
        rounds = response.stats.rounds
        if len(rounds) == seen:
            put(response.text, None)
            return
        seen = len(rounds)
        last = rounds[-1]
        rejected = tokenizer.decode(last["drafted"][last["accepted"] : last["width"]])
        put(rejected.replace("\n", "\u21b5"), "rejected")
        put(response.text, "bonus")

    return show
