"""Lines about the chat: its first line, a continued session, figures under an answer, the list of stored sessions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from ..errors import DFlashError
from ..machine import array_bytes, chip, size_text, state_directory
from ..stats import gain_over_plain, gain_text, tokens_a_round
from ..tools.columns import age_text, count
from .conversation import Conversation, Pair, Settings
from .sessions import read_session


def short(text: str, most: int = 60) -> str:
    """A text's beginning in one line."""
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 3] + "..."


def first_line(talk: Conversation) -> str:
    """The model, its size, the device, and whether drafting is on; or the server that answers."""
    pair = talk.pair
    if talk.url is not None:
        return f"{pair.name}, answered by {talk.url}. What is not set here is set there."
    return f"{pair.name}, {_size(pair.model)}, on {_device()}. {drafting(pair, talk.settings)}"


def drafting(pair: Pair, settings: Settings) -> str:
    if pair.drafter is None:
        return "Drafting is off: there is no drafter."
    if settings.block_size == 1:
        return "Drafting is off: block_size is 1."
    most, by = settings.block_size or pair.drafter.config.block_size, "" if settings.block_size else ", where that is faster"
    return f"Drafting is on: up to {most} tokens a round by {pair.draft_name}{by}."


def _size(model: Any) -> str:
    from mlx.utils import tree_flatten
    from mlx_lm.utils import get_total_parameters

    n = get_total_parameters(model)
    count = f"{n / 1e9:.1f} billion" if n >= 1e9 else f"{n / 1e6:.1f} million"
    return f"{count} parameters, {size_text(array_bytes(array for _, array in tree_flatten(model.parameters())))}"


def _device() -> str:
    import mlx.core as mx

    if mx.default_device() == mx.cpu:
        return f"the CPU ({chip()})"
    name = mx.device_info().get("device_name") or chip()
    return f"the GPU ({name})"


def setting_text(value: Any) -> str:
    """A setting's value as a user types it. 1 is a number, although it equals True."""
    return str(value) if type(value) in (int, float) else {None: "default", True: "on", False: "off"}[value]


def recap(talk: Conversation, state: Mapping[str, Any]) -> list[str]:
    """A recap of a continued session: messages, another model, settings, system message, the last exchange."""
    lines = [f"Continuing a session of {count(len(talk.messages), 'message')}."]
    if state["model"] != talk.pair.name:
        lines.append(f"That session was with {state['model']}; it goes on with {talk.pair.name}.")
    changed = {one.name: asdict(talk.settings)[one.name] for one in fields(Settings)}
    changed = {name: value for name, value in changed.items() if value != getattr(Settings(), name)}
    if changed:
        lines.append("Settings: " + ", ".join(f"{name} {setting_text(value)}" for name, value in changed.items()) + ".")
    if talk.system is not None:
        lines.append(f"System message: {short(talk.system, 200)}")
    last = max((i for i, message in enumerate(talk.messages) if message["role"] == "user"), default=None)
    if last is not None:
        lines.append(f"You: {short(talk.messages[last]['content'], 200)}")
        answer = "".join(message["content"] for message in talk.messages[last + 1 :])
        lines.append(f"Answer: {short(answer, 300) or 'nothing'}")
    return lines


def figures(talk: Conversation) -> str:
    """The line under an answer."""
    last = talk.last
    parts = [count(last.generation_tokens, "token"), f"{last.generation_tps:.1f} tokens/s"]
    stats, is_off = last.stats, bool(last.stats and last.stats.is_off)
    if (rate := tokens_a_round(last)) is not None:
        gain = None if is_off else gain_over_plain(last.generation_tokens, last.generation_tps, stats.plain_tps)
        parts += [gain_text(gain)] if gain else []
        parts.append(f"{rate:.1f} tokens a round")
    if is_off:
        parts.append("drafting off, as it would be slower here")
    if stats and stats.has_measured:
        parts.append("slowed once by timing the model")
    limit = f" of {talk.limit}" if talk.limit else ""
    if talk.used:
        parts.append(f"context {talk.used}{limit} ({talk.held} reused)")
    if talk.stopped:
        parts.append("stopped")
    elif last.finish_reason == "length":
        parts.append(f"cut at {last.generation_tokens} tokens (/set max_tokens allows more)")
    return ", ".join(parts)


def nothing_shown(message: Mapping[str, Any], stopped: bool) -> str | None:
    """A sentence that says why an answer shows no text; None if it shows some."""
    if message["content"].strip():
        return None
    if message.get("reasoning_content", "").strip():
        return "The model thought and gave no answer" + (": it was stopped." if stopped else ". /thoughts shows what it thought.")
    return "The answer is empty: " + ("it was stopped." if stopped else "the model ended it at once.")


def kept_sessions() -> list[tuple[str, str, str, str, str]]:
    """Name, age, messages, model and beginning of each kept session, the newest first."""
    files = sorted((state_directory() / "sessions").glob("*.json"), key=lambda file: -file.stat().st_mtime)
    rows = []
    for file in files:
        age = age_text(file.stat().st_mtime)
        try:
            state = read_session(file.stem)
        except (DFlashError, OSError) as error:
            rows.append((file.stem, age, "", "", short(str(error))))
            continue
        began = next((message["content"] for message in state["messages"] if message["role"] == "user"), "")
        rows.append((file.stem, age, str(len(state["messages"])), state["model"], short(began, 40)))
    return rows
