"""What a target writes, told apart: answer, reasoning, tool calls. Chat and server both read with it.

Knows marks in text and mlx-lm's tool parsers. Knows no HTTP and no messages.

mlx-lm's tokenizer wrapper names the marks of most families. `_THINKING`, `_CALLS` and `_Harmony` hold those that it lacks. A
grammar belongs to a tokenizer whose vocabulary or chat template has its marks.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.tool_parsers.qwen3_coder import parse_tool_call as parse_xml_call


@dataclass
class Call:
    """A tool call as a client gets it; arguments is the text of a JSON object."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: str(uuid.uuid4()))


@dataclass
class Piece:
    """Text of one kind, "answer" or "reasoning"; or calls, with kind "call" and no text."""

    kind: str
    text: str = ""
    calls: list[Call] = field(default_factory=list)


class Channels:
    """Tells growing text of one answer apart.

    Args:
      before: the end of the prompt, from behind the last message on: it may have opened the reasoning.
      tools: what the client offered. Without tools a written call stays text, marks kept; so does one that cannot be read.
    """

    def __init__(self, tokenizer: Any, before: str = "", tools: Sequence[dict[str, Any]] | None = None):
        self._reader = _Harmony(before, tools) if is_harmony(tokenizer) else _Marked(tokenizer, before, tools)

    def feed(self, text: str, last: bool = False) -> list[Piece]:
        """The pieces that this text completes; letters that may begin a mark wait for the next call, or for `last`."""
        pieces = self._reader.feed(text, last)
        return [piece for piece in pieces if piece.text or piece.calls]


def is_harmony(tokenizer: Any) -> bool:
    """Whether answers come in gpt-oss's channels, by the tokenizer's own marks."""
    vocabulary = _vocabulary(tokenizer)
    return all(mark in vocabulary for mark in ("<|start|>", "<|channel|>", "<|message|>"))


def has_tool_calls(tokenizer: Any) -> bool:
    """Whether tool calls of this tokenizer's target can be read."""
    return is_harmony(tokenizer) or _call_grammar(tokenizer) is not None


def has_reasoning(tokenizer: Any) -> bool:
    """Whether reasoning of this tokenizer's target can be told from its answer."""
    return is_harmony(tokenizer) or bool(_thinking_marks(tokenizer))


def template_source(tokenizer: Any) -> str:
    """The text of the chat templates; "" where the template is none or a program."""
    source = getattr(tokenizer, "chat_template", None)
    if isinstance(source, dict):
        source = "\n".join(str(text) for text in source.values())
    return source if isinstance(source, str) else ""


# Marks that open and close reasoning and that mlx-lm's wrapper does not look for.
_THINKING = (
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<thought>", "</thought>"),
    # mlx-lm's own, where they are not tokens but are spelled by the template.
    ("<think>", "</think>"),
)
# Marks round an answer that says nothing about its text.
_FRAMES = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")


def _json_calls(text: str, tools: Any) -> Any:
    return json.loads(text.strip().removesuffix("<|eom_id|>").removesuffix("<|eot_id|>"))


def _single_key_calls(text: str, tools: Any) -> Any:
    return [{"name": name, "arguments": value} for call in json.loads(text) for name, value in call.items()]


def _deepseek_calls(text: str, tools: Any) -> Any:
    body = (
        r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(.+?)"
        r"(?:\s*```json\s*|<｜tool▁sep｜>)(.*?)(?:\s*```)?\s*<｜tool▁call▁end｜>"
    )
    calls = [{"name": name.strip(), "arguments": arguments} for name, arguments in re.findall(body, text, re.DOTALL)]
    if not calls or re.sub(body, "", text, flags=re.DOTALL).strip():
        raise ValueError("not all of it is calls")
    return calls


_CALL_ID = re.compile(r"\[CALL_ID\]\s*(\w+)\s*(?=\[ARGS\])")


def _mistral_calls(read: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    """mlx-lm's parser of `name[ARGS]{...}`, for `name[CALL_ID]id[ARGS]{...}` too: it takes the id for the name."""

    def read_with_ids(text: str, tools: Any) -> Any:
        ids, parsed = _CALL_ID.findall(text), read(_CALL_ID.sub("", text), tools)
        calls = parsed if isinstance(parsed, list) else [parsed]
        return [{**call, "id": id} for call, id in zip(calls, ids, strict=True)] if len(ids) == len(calls) else parsed

    return read_with_ids


# (start, end, reader) of tool calls that mlx-lm's wrapper does not know; "" ends with the answer.
_CALLS: tuple[tuple[str, str, Callable[[str, Any], Any]], ...] = (
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _deepseek_calls),
    ("<seed:tool_call>", "</seed:tool_call>", parse_xml_call),
    ("<|START_ACTION|>", "<|END_ACTION|>", _json_calls),
    ("<|tools_prefix|>", "<|tools_suffix|>", _single_key_calls),
    ("<|tool_call|>", "<|/tool_call|>", _json_calls),
    ("<TOOLCALL>", "</TOOLCALL>", _json_calls),
    ("<tool_call>", "</tool_call>", _json_calls),
    ("<|tool_call|>", "", _json_calls),
    ("<|python_tag|>", "", _json_calls),
)


def _vocabulary(tokenizer: Any) -> Any:
    return tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}


def _spelled(tokenizer: Any) -> Callable[[str], bool]:
    """Whether a mark is a token, or stands in the chat template."""
    vocabulary, source = _vocabulary(tokenizer), template_source(tokenizer)
    return lambda mark: mark in vocabulary or mark in source


def _thinking_marks(tokenizer: Any) -> tuple[str, str] | None:
    if tokenizer.has_thinking:
        return tokenizer.think_start, tokenizer.think_end
    spelled = _spelled(tokenizer)
    return next(((start, end) for start, end in _THINKING if spelled(start) and spelled(end)), None)


def _call_grammar(tokenizer: Any) -> tuple[str, str, Callable[[str, Any], Any]] | None:
    if tokenizer.has_tool_calling:
        start, read = tokenizer.tool_call_start, tokenizer.tool_parser
        return start, tokenizer.tool_call_end or "", _mistral_calls(read) if start == "[TOOL_CALLS]" else read
    spelled = _spelled(tokenizer)
    return next(((start, end, read) for start, end, read in _CALLS if spelled(start) and (not end or spelled(end))), None)


def read_calls(parsed: Any) -> list[Call]:
    """Calls from what a parser gives: an object or a list of them.

    Arguments may be an object or its text, absent or null: then there are none.

    Raises:
      ValueError: one of them has no name, or its arguments are no JSON object. Then none of them is a call.
    """
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not calls:
        raise ValueError("there is no call in it")
    return [_read_call(call) for call in calls]


def _read_call(call: Any) -> Call:
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = {**call, **call["function"]}
    name = (call.get("name") or call.get("tool_name")) if isinstance(call, dict) else None
    if not isinstance(name, str) or not name.strip():
        raise ValueError("a call has no name")
    arguments = next((call[key] for key in ("arguments", "parameters") if call.get(key) is not None), {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text = text.strip() or "{}"
    if not isinstance(json.loads(text), dict):
        raise ValueError("its arguments are no object")
    given = call.get("id") or call.get("tool_call_id")
    return Call(name.strip(), text, given) if isinstance(given, str) else Call(name.strip(), text)


def _tried(read: Callable[[], Any], written: str, tools: Sequence[dict[str, Any]]) -> list[Call]:
    """The calls, or none where they cannot be read: parsers raise what they like on what a target may write.

    Others take anything for a call. So a name must be one that was offered or written.
    """
    try:
        calls = read_calls(read())
    except Exception:  # noqa: BLE001 - KeyError, AttributeError, RecursionError and others of mlx-lm's parsers
        return []
    known = [made.get("name") for tool in tools if isinstance(made := tool.get("function", tool), dict)]
    names = [name for call in calls for name in {call.name, *_UNREAD.intersection(json.loads(call.arguments))}]
    stand = all(name in known or name in written or json.dumps(name)[1:-1] in written for name in names)
    return calls if stand and all(_NAME.fullmatch(call.name) for call in calls) else []


# The argument under which mlx-lm's glm47 and laguna give what they could not read.
_UNREAD = {"raw"}
# Of a function: no blanks, and no letters of JSON, of marks or of Python calls; no end tag.
_NAME = re.compile(r"""(?!/)[^\s{}\[\]()<>"'=|,]+""")


# A value in a call: between tags, between marks as Gemma's, or quoted.
_VALUE = re.compile(
    r"""<((?:\w+:)?param(?:eter)?|\w*arg_value)\b[^>]*>.*?(?:</\1>|(?=<\1\b)|\Z)"""
    r"""|(<\|"\|>|<escape>).*?(?:\2|\Z)|(["'])(?:\\.|(?!\3)[^\\])*(?:\3|\Z)""",
    re.DOTALL,
)


def _open_value(text: str, end: str) -> str:
    """The value within which this text of a call ends, from its opening on; "" where none is open.

    A value that runs over the end of a call into the tags of the next one is open too: it was never closed.
    """
    behind = "\0"
    for found in _VALUE.finditer(text + behind):
        torn = found[1] and end and end in found[0] and not found[0].endswith(f"</{found[1]}>")
        if torn or found[0].endswith(behind):
            return found[0]
    return ""


class _Scanner:
    """Cuts growing text at marks, wherever their letters fall."""

    def __init__(self) -> None:
        self.held = ""

    def next(self, marks: Sequence[str], last: bool) -> tuple[str, str | None]:
        """Text before the first of these marks in what is held, and that mark; without one, the text that begins none."""
        found = [(at, -len(mark), mark) for mark in marks if (at := self.held.find(mark)) >= 0]
        if found:
            at, _, mark = min(found)
            text, self.held = self.held[:at], self.held[at + len(mark) :]
            return text, mark
        cut = len(self.held)
        if not last:
            longest = max(map(len, marks), default=1) - 1
            starts = (n for n in range(min(longest, cut), 0, -1) if any(mark.startswith(self.held[-n:]) for mark in marks))
            cut -= next(starts, 0)
        text, self.held = self.held[:cut], self.held[cut:]
        return text, None


class _Marked:
    """Grammars of marks in one stream of text: states, and in each the marks that lead to another."""

    def __init__(self, tokenizer: Any, before: str, tools: Any):
        self.tools, self.scanner = tools, _Scanner()
        self.calls = _call_grammar(tokenizer) if tools else None
        thinking = _thinking_marks(tokenizer)
        self.edges = self._transitions(tokenizer, thinking)
        self.state = "normal"
        if thinking and before.rfind(thinking[0]) > before.rfind(thinking[1]):
            self.state = "reasoning"
        self.state = tokenizer.response_initial_state or self.state
        # Of a call on its way: the state before it, the mark that opened it, and its text.
        self.before, self.mark, self.call = self.state, "", ""

    def _transitions(self, tokenizer: Any, thinking: tuple[str, str] | None) -> dict[str, list[tuple[str, str]]]:
        """state -> [(mark, next state)], as mlx-lm's `make_text_state_machine`; without tools no mark opens a call."""
        edges: dict[str, list[tuple[str, str]]] = {"normal": [], "reasoning": [], "tool": []}
        formats = tokenizer.response_transitions
        if thinking:
            edges["normal"].append((thinking[0], "reasoning"))
            edges["reasoning"].append((thinking[1], "normal"))
        if self.calls:
            start, end, _ = self.calls
            # A response format that goes to "tool" decides where calls start.
            if not any(to == "tool" for way in formats.values() for _, to in way):
                edges["normal"].append((start, "tool"))
            edges["reasoning"].append((start, "tool"))
            edges["tool"] += [(end, "normal")] if end else []
        frames = [mark for mark in _FRAMES if mark in _vocabulary(tokenizer)]
        edges["normal"] += [(mark, "normal") for mark in (*tokenizer.structural_markers, *frames)]
        for state, way in formats.items():
            edges.setdefault(state, []).extend((mark, to) for mark, to in way if to != "tool" or self.calls)
        return edges

    def feed(self, text: str, last: bool) -> list[Piece]:
        self.scanner.held += text
        pieces = []
        while True:
            ways = dict(reversed(self.edges.get(self.state, [])))
            part, mark = self.scanner.next(list(ways), last)
            if self.state == "tool":
                self.call += part
                if (mark or last) and not self._closed(mark or "", pieces):
                    continue
            else:
                pieces.append(self._text(part))
            if mark is None:
                return pieces
            if ways[mark] == "tool":
                self.before, self.mark, self.call = self.state, mark, ""
            self.state = ways[mark]

    def _text(self, text: str) -> Piece:
        return Piece("reasoning" if self.state == "reasoning" else "answer", text)

    def _closed(self, end: str, pieces: list[Piece]) -> bool:
        """Whether the call could be read.

        Else it goes on where its end stands within a value. If not, its mark is text, and what came behind it is read anew.
        """
        text, (_, mark, read) = self.call, self.calls
        value = _open_value(text, mark)
        # Lenient parsers leave an open value out, or run over into the next call. A quote alone may be an apostrophe.
        whole = not value or value[0] != "<" and not (mark and mark in text)
        if whole and (calls := _tried(lambda: read(text, self.tools), text, self.tools)):
            pieces.append(Piece("call", calls=calls))
            return True
        if end and value:
            self.call += end
            return False
        self.state, self.scanner.held = self.before, text + end + self.scanner.held
        pieces.append(self._text(self.mark))
        return False


class _Harmony:
    """gpt-oss's messages: `<|start|>assistant<|channel|>analysis<|message|>text<|end|>`.

    The final channel and commentary to nobody are the answer, commentary to functions.NAME is a call, the rest is reasoning.
    A prompt ends behind `<|start|>assistant`, so an answer begins within a header.
    """

    _ENDS = ("<|end|>", "<|return|>", "<|call|>")
    _STARTS = ("<|start|>", "<|channel|>")

    def __init__(self, before: str, tools: Any):
        self.tools, self.scanner = tools, _Scanner()
        self.header, self.body, self.kind, self.first = "", "", "header", True
        opened = before.rpartition("<|start|>")[2]
        if "<|channel|>" in opened and not any(end in opened for end in self._ENDS):
            # The prompt chose the channel.
            self.feed(opened[opened.index("<|channel|>") :], False)
            self.scanner.held, self.body = "", ""

    def feed(self, text: str, last: bool) -> list[Piece]:
        self.scanner.held += text
        pieces = []
        while True:
            more = self._header(last) if self.kind == "header" else self._body(last, pieces)
            if not more:
                return pieces

    def _header(self, last: bool) -> bool:
        """Read on in a header; False: it waits for more text."""
        if self.first and not self.header:
            start = self.scanner.held.lstrip()
            marks = ("to=", *self._STARTS, *self._ENDS, "<|message|>")
            if not any(map(start.startswith, marks)):
                if not last and any(mark.startswith(start) for mark in marks):
                    return False
                if start:
                    # Text without any header is an answer.
                    self.first, self.kind = False, "answer"
                    return True
        part, mark = self.scanner.next((*self._STARTS, *self._ENDS, "<|message|>"), last)
        self.header += part
        if mark is None:
            return False
        self.first = False
        if mark == "<|message|>":
            self.kind, self.body = self._kind(), ""
        elif mark in self._ENDS or mark == "<|start|>":
            self.header = "<|start|>" if mark == "<|start|>" else ""
        else:
            self.header += mark
        return True

    def _kind(self) -> str:
        channel = self.header.partition("<|channel|>")[2].split("<")[0].split()
        channel = channel[0] if channel else "final"
        if re.search(r"to=functions\.\S", self.header):
            return "call"
        spoken = channel == "final" or channel == "commentary" and "to=" not in self.header
        return "answer" if spoken else "reasoning"

    def _body(self, last: bool, pieces: list[Piece]) -> bool:
        part, mark = self.scanner.next((*self._STARTS, *self._ENDS), last)
        if self.kind == "call":
            self.body += part
            if mark or last:
                pieces.append(self._closed(mark if mark in self._ENDS else ""))
        else:
            pieces.append(Piece(self.kind, part))
        if mark is None:
            return False
        self.kind, self.header = "header", mark if mark in self._STARTS else ""
        return True

    def _closed(self, end: str) -> Piece:
        name = re.search(r"to=functions\.([^\s<]+)", self.header)[1]
        body = self.body
        calls = _tried(lambda: {"name": name, "arguments": body}, name + body, self.tools) if self.tools else []
        written = f"{self.header}<|message|>{body}{end}"
        return Piece("call", calls=calls) if calls else Piece("answer", written)
