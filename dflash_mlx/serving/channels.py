"""Divides what a target writes into answer, reasoning and tool calls. Chat and server both use it.

Knows marks in text; how a call is read is `tool_calls`'. Knows no HTTP and no messages.

mlx-lm's tokenizer wrapper names the marks of most families. `_THINKING`, `CALLS` and `_Harmony` hold those that it lacks. A
grammar belongs to a tokenizer whose vocabulary or chat template has its marks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.chat_templates import muse_spark

from .live_calls import HeadedCalls, LiveCalls, Part, live_calls
from .scanning import Frame, JsonText, Scanner
from .tool_calls import (
    BARE,
    CALLS,
    TAKEN_FOR_OTHERS,
    Call,
    Reader,
    begins_bare,
    begins_python,
    end_of_calls,
    is_json,
    mended,
    names_of,
    offered,
    open_value,
    parse_xml_call,
    read_whole,
    shows_its_end,
    spell,
    tried,
)


@dataclass
class Piece:
    """Text of one kind, "answer" or "reasoning"; or calls, with kind "call" and no text.

    For calls that are streamed: "begun" has the call without its arguments, "arguments" a piece of their text.
    """

    kind: str
    text: str = ""
    calls: list[Call] = field(default_factory=list)


class Channels:
    """Splits the text of one answer by kind while it is written.

    Args:
      before: the end of the prompt, after the last message: it may have opened the reasoning.
      tools: what the client offered. Without tools a call stays text, with its marks; so does a call that cannot be read.
      live: report calls while they are written, where `live_calls` knows the grammar.
      marked: calls come with their marks, as an answer under a grammar writes them.
    """

    def __init__(
        self,
        tokenizer: Any,
        before: str = "",
        tools: Sequence[dict[str, Any]] | None = None,
        live: bool = False,
        marked: bool = False,
    ):
        live = live and bool(tools)
        reader = _Harmony(before, tools, live) if is_harmony(tokenizer) else _Marked(tokenizer, before, tools, live, marked)
        self._reader = reader

    def feed(self, text: str, last: bool = False) -> list[Piece]:
        """The pieces that this text completes. Letters that may begin a mark are held until more text comes, or until `last`."""
        pieces = self._reader.feed(text, last)
        return [piece for piece in pieces if piece.text or piece.calls]


def is_harmony(tokenizer: Any) -> bool:
    """Whether answers come in gpt-oss's channels, by the tokenizer's own marks."""
    vocabulary = _vocabulary(tokenizer)
    return all(mark in vocabulary for mark in ("<|start|>", "<|channel|>", "<|message|>"))


def has_tool_calls(tokenizer: Any) -> bool:
    """Whether tool calls of this tokenizer's target can be read."""
    return is_harmony(tokenizer) or call_grammar(tokenizer) is not None


def has_reasoning(tokenizer: Any) -> bool:
    """Whether the reasoning of this tokenizer's target can be separated from its answer."""
    return is_harmony(tokenizer) or bool(thinking_marks(tokenizer))


def end_of_thinking(tokenizer: Any) -> tuple[int, int] | None:
    """The ids of the tokens that open and close reasoning; None if there are no marks, or a mark is not a single token."""
    marks = None if is_harmony(tokenizer) else thinking_marks(tokenizer)
    ids = [tokenizer.encode(mark, add_special_tokens=False) for mark in marks or ()]
    return (ids[0][0], ids[1][0]) if [len(one) for one in ids] == [1, 1] else None


def opens_reasoning(tokenizer: Any, before: str) -> bool:
    """Whether the end of a prompt has opened reasoning."""
    marks = thinking_marks(tokenizer)
    return marks is not None and before.rfind(marks[0]) > before.rfind(marks[1])


def template_source(tokenizer: Any) -> str:
    """The text of the chat templates; "" if there is none, or it is a Python function."""
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
    ("<reasoning>", "</reasoning>"),
    ("◁think▷", "◁/think▷"),
    # Solar Open's; Granite 3.2's.
    ("<|think|>", "<|end|>"),
    ("Here is my thought process:", "Here is my response:"),
    ("<mm:think>", "</mm:think>"),
    ("<|thought_start|>", "<|thought_end|>"),
    # Apriel's, whose prompts open it.
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    # mlx-lm's own, where they are not tokens but are spelled by the template.
    ("<think>", "</think>"),
)
SPECIAL_MARK = re.compile(r"(<\|[^|>]+\|>|｜[^｜]+｜|\]<\]\w+\[>\[)")
# Marks round an answer that say nothing about its text: Cohere's, ERNIE's and Granite's, Hunyuan's, Solar Open's, GigaChat's,
# Apriel's, MiniMax-M3's.
_FRAMES = (
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ("<|START_TEXT|>", "<|END_TEXT|>"),
    ("<response>", "</response>"),
    ("<answer>", "</answer>"),
    ("<|content|>", "<|end|>"),
    ("<|begin|>assistant", "<|flush|>"),
    ("assistant<|role_sep|>", "<|message_sep|>"),
    ("[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"),
    # MiniMax-M3's, whose answers begin with it where nothing is thought.
    ("</mm:think>", "[e~["),
)


def _vocabulary(tokenizer: Any) -> Any:
    return tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}


def _is_token(tokenizer: Any, mark: str) -> bool:
    """Whether a mark is a token, or is made of marks that are."""
    vocabulary, parts = _vocabulary(tokenizer), SPECIAL_MARK.findall(mark)
    return mark in vocabulary or bool(parts) and all(part in vocabulary for part in parts)


def _spelled(tokenizer: Any) -> Callable[[str], bool]:
    """Whether a mark is a token, or stands in the chat template."""
    source = template_source(tokenizer)
    return lambda mark: mark in source or _is_token(tokenizer, mark)


def thinking_marks(tokenizer: Any) -> tuple[str, str] | None:
    """The marks that open and close reasoning; None where there are none."""
    if tokenizer.has_thinking:
        return tokenizer.think_start, tokenizer.think_end
    spelled = _spelled(tokenizer)
    return next(((start, end) for start, end in _THINKING if spelled(start) and spelled(end)), None)


def frames(tokenizer: Any) -> list[tuple[str, str]]:
    """The marks that may stand round an answer, as tokens or spelled by the chat template."""
    spelled = _spelled(tokenizer)
    return [(start, end) for start, end in _FRAMES if spelled(start) and spelled(end)]


# A header of Muse's messages, which reaches nobody: `<|start|>assistant to=NAME<|message|>`.
_MUSE_HEADER = re.compile(r"\s*(?:<\|start\|>\s*\w*)?\s*(?:to?|to=[^\s<]*)?(?:<\|message\|>\s*)?(?:<[|\w]*)?")
_LONGEST_HEADER = 400


def _response_format(tokenizer: Any) -> tuple[dict[str, list[tuple[str, str]]], str | None]:
    """The transitions of a format of whole responses, and its first state: mlx-lm's, also for Muse Glimmer, where it has none."""
    if not tokenizer.response_transitions and "to=self<|message|>" in template_source(tokenizer):
        return muse_spark.RESPONSE_FORMAT["transitions"], muse_spark.RESPONSE_FORMAT["initial_state"]
    return tokenizer.response_transitions, tokenizer.response_initial_state


def call_grammar(tokenizer: Any) -> tuple[str, str, Reader] | None:
    """The marks round this tokenizer's tool calls and what reads these; None where they are not known."""
    if other := next((grammar for grammar in TAKEN_FOR_OTHERS if _is_token(tokenizer, grammar[0])), None):
        return other
    if tokenizer.has_tool_calling:
        start, read = tokenizer.tool_call_start, tokenizer.tool_parser
        return start, tokenizer.tool_call_end or "", mended(start, read)
    spelled = _spelled(tokenizer)
    found = [(start, end, read) for start, end, read in CALLS if spelled(start) and (not end or spelled(end))]
    if len({start for start, *_ in found}) > 1:
        # A template may name the marks of another family too (Apriel 1.5). Those round the calls that it writes are its own.
        written = _written_call(tokenizer)
        found = [grammar for grammar in found if grammar[0] in written] or found
    return found[0] if found else None


def _written_call(tokenizer: Any) -> str:
    """What the chat template writes for a call of an earlier answer; "" if it writes none, or fails."""
    asked = {"role": "user", "content": "x"}

    def write(arguments: Any) -> str:
        call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": arguments}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        before, whole = (str(tokenizer.apply_chat_template(some, tokenize=False)) for some in ([asked], [asked, answer]))
        return whole.removeprefix(before)

    for arguments in ({}, "{}"):
        try:
            return write(arguments)
        except Exception:  # noqa: BLE001, S112 - a template is a program and may raise anything
            continue
    return ""


def call_spelling(tokenizer: Any) -> Callable[[Sequence[tuple[str, str]]], str]:
    """How this tokenizer's target writes calls, given as names and arguments, where its template writes none."""
    start, end, read = call_grammar(tokenizer) or ("", "", None)
    return lambda calls: spell(calls, start, end, read, template_source(tokenizer))


def _streamed(parts: Sequence[Part]) -> list[Piece]:
    return [Piece("begun", calls=[part.call]) if part.call else Piece("arguments", part.arguments) for part in parts]


# An end mark inside a value does not end a call. At most so many letters are held after such a mark: a value that is longer is
# taken for one that was never closed.
_MOST_HELD = 32_768


class _Marked:
    """Reads grammars whose marks stand in one stream of text: states, and in each the marks that lead to another one."""

    def __init__(self, tokenizer: Any, before: str, tools: Any, live: bool, marked: bool):
        self.tokenizer, self.tools, self.scanner, self.lives = tokenizer, tools, Scanner(), live
        self.calls = call_grammar(tokenizer) if tools else None
        # How calls of the offered functions begin where Qwen3-Coder and its like leave their mark out.
        xml = self.calls is not None and self.calls[2] is parse_xml_call and not marked
        self.heads = [f"<function={name}>" for name in names_of(tools)] if xml else []
        thinking = thinking_marks(tokenizer)
        self.edges = self._transitions(tokenizer, thinking)
        self.state = "reasoning" if opens_reasoning(tokenizer, before) else "normal"
        self.state = _response_format(tokenizer)[1] or self.state
        # Reasoning that the prompt opened may begin with its mark once more.
        self.again = thinking[0] if self.state == "reasoning" and thinking else ""
        spelled = [frame for frame in frames(tokenizer) if not all(_is_token(tokenizer, mark) for mark in frame)]
        self.frame = Frame(*spelled[0], before) if spelled else None
        # Whether the answer may begin with a call without its mark.
        self.bare = bool(self.calls) and self.calls[0] in BARE
        # Of the call that is being read: the state before it, its opening mark, its text, and whether that can still be JSON;
        # head: the mark, if it is a part of the call.
        self.before, self.mark, self.call, self.json, self.head = self.state, "", "", JsonText(), ""
        self.live, self.held_header = LiveCalls(()), ""

    def _transitions(self, tokenizer: Any, thinking: tuple[str, str] | None) -> dict[str, list[tuple[str, str]]]:
        """state -> [(mark, next state)], as mlx-lm's `make_text_state_machine`; without tools no mark opens a call."""
        edges: dict[str, list[tuple[str, str]]] = {"normal": [], "reasoning": [], "tool": []}
        formats = _response_format(tokenizer)[0]
        if thinking:
            edges["normal"].append((thinking[0], "reasoning"))
            edges["reasoning"].append((thinking[1], "normal"))
        if self.calls:
            start, end, _ = self.calls
            # A response format that goes to "tool" decides where calls start.
            if not any(to == "tool" for way in formats.values() for _, to in way):
                edges["normal"] += [(mark, "tool") for mark in (start, *self.heads)]
            edges["reasoning"].append((start, "tool"))
            edges["tool"] += [(end, "normal")] if end else []
        framing = [mark for frame in frames(tokenizer) for mark in frame if _is_token(tokenizer, mark)]
        edges["normal"] += [(mark, "normal") for mark in (*tokenizer.structural_markers, *framing)]
        for state, way in formats.items():
            edges.setdefault(state, []).extend((mark, to) for mark, to in way if to != "tool" or self.calls)
        return edges

    def feed(self, text: str, last: bool) -> list[Piece]:
        self.scanner.held += text
        pieces = []
        while True:
            if self.again and (begun := self.scanner.held.lstrip()):
                if not last and begun != self.again and self.again.startswith(begun):
                    return pieces
                if begun.startswith(self.again):
                    self.scanner.held = self.scanner.held.replace(self.again, "", 1)
                self.again = ""
            if self.bare and self.state == "normal" and (begun := self.scanner.held.strip()):
                self.bare = False
                if begins_bare(begun):
                    self._open("tool", "")
            ways = dict(reversed(self.edges.get(self.state, [])))
            part, mark = self.scanner.next(list(ways), last)
            if self.state == "tool":
                self.call += part
                pieces += _streamed(self.live.feed(part))
                if self._given_up(part):
                    self._reread(mark or "", pieces)
                    continue
                if (mark or last) and not self._closed(mark or "", pieces):
                    continue
            else:
                pieces.append(self._text(part, last or mark is not None))
            if mark is None:
                if last and self.scanner.held:
                    continue
                return pieces
            if self.frame and (self.state, mark) == ("reasoning", self.frame.start):
                self.frame.open()
            self._open(ways[mark], mark)

    def _open(self, state: str, mark: str) -> None:
        """Enter the state that a mark opens. In "tool" a call begins; with mark "" the whole answer is the call."""
        if state == "tool":
            self.before, self.mark, self.call, self.json = self.state, mark, "", JsonText()
            self.head = mark if mark in self.heads else ""
            lives = self.lives and mark and not self.head
            self.live = live_calls(self.calls[2], mark, self.tools) if lives else LiveCalls(())
        self.state = state

    def _text(self, text: str, ends: bool) -> Piece:
        """A piece of text in the present state. ends: text of another kind follows, or none."""
        if self.state == "reasoning":
            return Piece("reasoning", text)
        if self.state == "header":
            return self._header(text, ends)
        return Piece("answer", self.frame.feed(text, ends) if self.frame else text)

    def _header(self, text: str, ends: bool) -> Piece:
        """Of text before a message what is no header. It is held until it ends, unless it can be none any more."""
        held = self.held_header = self.held_header + text
        known = _MUSE_HEADER.fullmatch(held) and (not ends or not held.strip() or "<" in held or "=" in held)
        if known and len(held) < _LONGEST_HEADER:
            self.held_header = "" if ends else held
            return Piece("answer")
        self.state, self.held_header = "normal", ""
        return Piece("answer", held)

    def _closed(self, end: str, pieces: list[Piece]) -> bool:
        """Read the call at an end mark (end; "": the answer ends). Returns: whether there is a call.

        If the mark lies inside a value, the call goes on. Otherwise it was none: its opening mark is text, and what came after
        that is read again.
        """
        text, (_, mark, read) = self.head + self.call, self.calls
        behind = ""
        if not mark and self.mark and (at := end_of_calls(read, text)):
            # No mark ends these calls. So what stands behind them is text, or the next ones, if it was not let go as one.
            text, behind = text[:at], text[at:] if text[at:].strip() else ""
            behind = min(self.live.rest(), behind, key=len) if self.live.begun else behind
        value = open_value(text, mark)
        # Lenient parsers leave an open value out, or run over into the next call. A quote alone may be an apostrophe.
        whole = (end or shows_its_end(self.mark, read)) and (not value or value[0] != "<" and not (mark and mark in text))
        calls = tried(lambda: read_whole(read, text, self.tools), text, self.tools) if whole else []
        if calls and (self.mark or offered(calls, self.tools)):
            self._end_reasoning()
            pieces.append(Piece("call", calls=calls[self.live.begun :]))
            if behind:
                self.state, self.scanner.held = self.before, behind + self.scanner.held
            return True
        if end and value:
            self.json.feed(end)
            self.call += end
            pieces += _streamed(self.live.feed(end))
        else:
            self._reread(end, pieces)
        return False

    def _end_reasoning(self) -> None:
        """A call ends the reasoning that it stands in, and the mark of its end may still come."""
        if self.before == "reasoning" and (marks := thinking_marks(self.tokenizer)):
            self.edges["normal"].append((marks[1], "normal"))

    def _given_up(self, part: str) -> bool:
        """Whether the held text cannot become a call any more. part: its newest letters."""
        _, end, read = self.calls
        # Of the grammars that are JSON, Llama's alone may also be calls in Python.
        python = self.calls[0] in BARE and begins_python(self.call)
        if (is_json(read) or not self.mark) and not python and not self.json.feed(part):
            return True
        if not self.mark and not begins_bare(self.call):
            return True
        # An end mark that is still held lies inside a value.
        at = self.call.find(end) if end and len(self.call) > _MOST_HELD else -1
        return 0 <= at < len(self.call) - _MOST_HELD

    def _reread(self, end: str, pieces: list[Piece]) -> None:
        """The held text is no call: its mark is text, and what came after it is read again."""
        if self.live.begun:
            # Except what was already streamed as a call, which stays one.
            self._end_reasoning()
            pieces += _streamed(self.live.finish())
            rest = self.live.rest()
            self.state, self.scanner.held = "normal", (rest and rest + end) + self.scanner.held
            return
        self.state, self.scanner.held = self.before, self.call + end + self.scanner.held
        pieces.append(self._text(self.mark, False))


class _Harmony:
    """gpt-oss's messages: `<|start|>assistant<|channel|>analysis<|message|>text<|end|>`.

    Final and commentary without a recipient are the answer, commentary to functions.NAME is a call, the rest is reasoning.
    A prompt ends after `<|start|>assistant`, so an answer begins within a header.

    A target may also write about these marks. A mark ends a message only if a header follows, or nothing; any other is text. So
    is a mark inside a string of a call, or of an answer in JSON.
    """

    _ENDS = ("<|end|>", "<|return|>", "<|call|>")
    _STARTS = ("<|start|>", "<|channel|>")
    _ROLES = ("assistant", "functions.", "system", "developer", "user", "tool", "python", "browser")
    # How the text after a mark begins, and the whole text.
    _FOLLOWS = {"<|start|>": _ROLES, "<|channel|>": ("analysis", "commentary", "final")}
    _HEADER = re.compile(
        r"\s*(?:<\|start\|>)?[^<]{0,160}(?:<\|channel\|>[^<]{0,160})?(?:<\|constrain\|>[^<]{0,40})?<\|message\|>"
    )
    # The beginning of a header.
    _CUT = re.compile(
        r"\s*(?:<\|start\|>\s*\w*)?\s*(?:to=\S*)?\s*(?:<\|channel\|>\s*\w*(?:\s+to=\S*)?(?:\s+\w+)?)?"
        r"\s*(?:<\|constrain\|>\s*\w*)?\s*(?:<[|\w]*)?"
    )

    def __init__(self, before: str, tools: Any, live: bool):
        self.tools, self.scanner, self.lives, self.live = tools, Scanner(), live, LiveCalls(())
        self.header, self.body, self.kind, self.first = "", "", "header", True
        # json: whether the body can be JSON; torn: where in a call's body the first mark inside a string is, -1 if there is none;
        # given_up: the body began as a call and is text.
        self.json, self.torn, self.given_up = JsonText(), -1, False
        opened = before.rpartition("<|start|>")[2]
        if "<|channel|>" in opened and not any(end in opened for end in self._ENDS):
            # The prompt chose the channel.
            self.feed(opened[opened.index("<|channel|>") :], False)
            self.scanner.held, self.body = "", ""

    def feed(self, text: str, last: bool) -> list[Piece]:
        self.scanner.held += text
        pieces = []
        while True:
            more = self._header(last, pieces) if self.kind == "header" else self._body(last, pieces)
            if more:
                continue
            if last and self.kind == "header":
                self._end_header(pieces)
            return pieces

    def _end_header(self, pieces: list[Piece]) -> None:
        """A header without a text: what does not look like one is an answer."""
        if not self._CUT.fullmatch(self.header):
            pieces.append(Piece("answer", self.header))

    def _header(self, last: bool, pieces: list[Piece]) -> bool:
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
            self.kind, self.body, self.json, self.torn = self._kind(), "", JsonText(), -1
            if self.kind == "call":
                # Its name is known, and the object follows.
                self.live = HeadedCalls(self.tools) if self.lives else LiveCalls(())
                self.live.feed(f"{self._called()}[ARGS]")
        elif mark in self._ENDS or mark == "<|start|>":
            self._end_header(pieces)
            self.header = "<|start|>" if mark == "<|start|>" else ""
        else:
            self.header += mark
        return True

    def _called(self) -> str:
        """The function that a header's recipient names: any of the namespace `functions`, or one that was offered without it."""
        found = re.search(r"to=(functions\.)?([^\s<]+)", self.header)
        return found[2] if found and (found[1] or found[2] in names_of(self.tools)) else ""

    def _kind(self) -> str:
        channel = self.header.partition("<|channel|>")[2].split("<")[0].split()
        channel = channel[0] if channel else "final"
        if self._called():
            return "call"
        spoken = channel == "final" or channel == "commentary" and "to=" not in self.header
        return "answer" if spoken else "reasoning"

    def _body(self, last: bool, pieces: list[Piece]) -> bool:
        part, mark = self.scanner.next((*self._STARTS, *self._ENDS), last)
        if not self._add(part, pieces):
            return self._give_up(mark or "", pieces)
        if mark is not None and not (ends := self._ends(mark, last)):
            if ends is None:
                # Only the text after it shows that.
                self.scanner.held = mark + self.scanner.held
                return False
            return self._add(mark, pieces) or self._give_up("", pieces)
        end = mark if mark in self._ENDS else ""
        if self.kind == "call" and (mark or last):
            if self.json.within and self.torn >= 0:
                return self._give_up(mark or "", pieces)
            pieces += self._closed(end)
        elif self.given_up:
            pieces.append(Piece("answer", end))
        if mark is None:
            return False
        self.kind, self.header, self.given_up = "header", mark if mark in self._STARTS else "", False
        return True

    def _add(self, text: str, pieces: list[Piece]) -> bool:
        """Add text to a body. An answer's and reasoning's goes out, a call's is held. Returns: False if it can be no call."""
        possible = self.json.feed(text)
        if self.kind != "call":
            pieces.append(Piece(self.kind, text))
            return True
        self.body += text
        pieces += _streamed(self.live.feed(text))
        return bool(self.tools) and possible and not 0 <= self.torn < len(self.body) - _MOST_HELD

    def _give_up(self, mark: str, pieces: list[Piece]) -> bool:
        """The held body is no call: it is text, with its marks. From the first mark inside a string on it is read again: a string
        that was never closed must not swallow the messages after it."""
        at = self.torn if self.torn >= 0 else len(self.body)
        if self.live.begun:
            # What was streamed as a call stays one.
            self.scanner.held = self.live.rest() + mark + self.scanner.held
            self.kind, self.given_up, self.json.possible = "answer", True, False
            return True
        pieces.append(Piece("answer", f"{self.header}<|message|>{self.body[:at]}"))
        self.scanner.held = self.body[at:] + mark + self.scanner.held
        self.kind, self.given_up, self.json.possible = "answer", True, False
        return True

    def _ends(self, mark: str, last: bool) -> bool | None:
        """Whether a mark in a body ends the message; None: more text must come."""
        within = self.json.possible and self.json.within and self.kind != "reasoning"
        if within and self.kind == "call":
            self.torn = len(self.body) if self.torn < 0 else self.torn
            return False
        after = self.scanner.held
        start, follows = after.lstrip(), self._FOLLOWS.get(mark, (*self._STARTS, "assistant<|channel|>"))
        if self._HEADER.match(after) and start.startswith(follows):
            return True
        if last:
            # Cut off within a header.
            cut = not start and mark in self._ENDS or start and any(words.startswith(start) for words in follows)
            return not within and bool(cut or start.startswith(follows))
        waits = start.startswith(follows) or any(words.startswith(start) for words in follows)
        return None if waits and len(after) <= _LONGEST_HEADER else False

    def _closed(self, end: str) -> list[Piece]:
        name, body = self._called(), self.body
        # Without any letter of its object it was cut off.
        whole = self.tools and (end or body.strip())
        calls = tried(lambda: {"name": name, "arguments": body}, name + body, self.tools) if whole else []
        written = f"{self.header}<|message|>{body}{end}"
        if self.live.begun:
            return [Piece("call"), Piece("answer", self.live.rest())]
        return [Piece("call", calls=calls) if calls else Piece("answer", written)]
