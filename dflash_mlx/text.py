"""Text as it grows: what each token adds to it, and where it stops. Knows tokenizers, no models."""

from __future__ import annotations

import codecs
import re
import weakref
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, SPMStreamingDetokenizer, StreamingDetokenizer, TokenizerWrapper

from .errors import GenerationError


def encode(tokenizer: TokenizerWrapper, prompt: str | mx.array | Sequence[int]) -> list[int]:
    """Token ids of a prompt; special tokens are added to text that does not begin with BOS, as in mlx-lm."""
    if isinstance(prompt, str):
        if half := next((f"U+{ord(letter):04X}" for letter in prompt if "\ud800" <= letter <= "\udfff"), None):
            raise GenerationError(f"the prompt has {half}, half of a surrogate pair", "Give text of whole characters")
        bos = tokenizer.bos_token
        return list(tokenizer.encode(prompt, add_special_tokens=bos is None or not prompt.startswith(bos)))
    ids = prompt.tolist() if isinstance(prompt, mx.array) else prompt
    if not isinstance(ids, (list, tuple)) or not all(type(i) is int for i in ids):
        what = f"of type {type(prompt).__name__}"
        if isinstance(prompt, mx.array):
            what = f"an array of {str(prompt.dtype).removeprefix('mlx.core.')} and shape {list(prompt.shape)}"
        elif isinstance(ids, (list, tuple)):
            odd = next(i for i in ids if type(i) is not int)
            what = f"a list that holds {str(odd)[:40]!r} of type {type(odd).__name__}"
        raise GenerationError(
            f"the prompt is {what}; it must be text, a list of token ids or an array [T] of them",
            "Pass one prompt at a time",
        )
    return list(ids)


class TextStream:
    """The text that an answer adds to its prompt, token by token.

        text = TextStream(tokenizer, prompt_ids)                  one for each answer; prompt_ids: all of them, cached ones too
        print(text.feed(token))                                   for each token, EOS left out
        print(text.finish())                                      what was held back, once after the last token

    A prompt that is continued: the pieces together are what `tokenizer.decode(prompt + ids)` adds behind the longest common
    start with `tokenizer.decode(prompt)`. So a leading blank stays, and a character that the prompt began comes whole. Text that
    a later token may still change is held back: half a character, a run of byte tokens, a blank that the tokenizer cleans up.

    A prompt that a chat template has rendered: mlx-lm's own text, which drops one leading blank.

    after_chat_template: which of the two; None: told by how the prompt ends (see `follows_chat_template`).
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], after_chat_template: bool | None = None):
        # Of a prompt cache that mlx-lm filled not all ids are known.
        prompt = [token for token in prompt if token >= 0]
        # A new one at each access.
        mlx_lms = getattr(tokenizer, "detokenizer", None)
        cleans = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        if follows_chat_template(tokenizer, prompt) if after_chat_template is None else after_chat_template:
            self._way: _ByMlxLm | _ByBytes | _ByWindow = _ByMlxLm(mlx_lms)
        elif isinstance(mlx_lms, BPEStreamingDetokenizer) and not cleans:
            self._way = _ByBytes(tokenizer, prompt)
        else:
            self._way = _ByWindow(tokenizer, prompt, cleans)

    def feed(self, token: int) -> str:
        """The text that is certain now and was not before."""
        return self._way.feed(token)

    def finish(self) -> str:
        """The rest of the text."""
        return self._way.finish()

    @property
    def holds(self) -> bool:
        """Whether text is held back now; of mlx-lm's text nobody knows, and it is True."""
        return self._way.holds


# Tokens at the end of a prompt, or of a window, that settle how the next ones are read.
_SHIELD = 8


class _ByMlxLm:
    """mlx-lm's own text."""

    holds = True

    def __init__(self, detokenizer: StreamingDetokenizer):
        self._detokenizer = detokenizer

    def feed(self, token: int) -> str:
        self._detokenizer.add_token(token)
        return self._detokenizer.last_segment

    def finish(self) -> str:
        self._detokenizer.finalize()
        return self._detokenizer.last_segment


class _ByBytes:
    """Byte-level BPE: a text is its tokens' bytes, one behind the other. So only those of the new token are decoded."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int]):
        self._name, self._begun = tokenizer.convert_ids_to_tokens, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in prompt[-_SHIELD:]:
            self.feed(token)
        # A prompt that ends inside a character: with how many U+FFFD its own text ends (three bytes of a surrogate have two).
        self._begun = len(self._decoder.getstate()[0].decode(errors="replace"))

    def feed(self, token: int) -> str:
        return self._piece(self._decoder.decode(_letters_bytes(self._name(token) or "")))

    def finish(self) -> str:
        return self._piece(self._decoder.decode(b"", final=True))

    @property
    def holds(self) -> bool:
        return bool(self._decoder.getstate()[0])

    def _piece(self, text: str) -> str:
        if self._begun and text:
            begun, self._begun = self._begun, 0
            return text[min(begun, len(text) - len(text.lstrip("\ufffd"))) :]
        return text


class _ByWindow:
    """Any other tokenizer: the last tokens are decoded together, and what that adds is given out."""

    _LONGEST = 32
    _BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
    # What `clean_up_tokenization_spaces` writes without the blank.
    _CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")

    def __init__(self, tokenizer: Any, prompt: Sequence[int], cleans: bool):
        self._tokenizer, self._cleans, self.holds = tokenizer, cleans, True
        # _ids: the window that is decoded; _before: the text in front of the next piece, as the window has it.
        self._ids = self._tail(prompt)
        self._before = self._decode()

    def feed(self, token: int) -> str:
        self._ids.append(token)
        self.holds = True
        if self._is_byte(token):
            return ""
        text = self._decode()
        certain = text[: len(text) - self._unsure(text)]
        self.holds = certain != text
        return self._piece(text, certain)

    def finish(self) -> str:
        text = self._decode()
        return self._piece(text, text)

    def _piece(self, text: str, certain: str) -> str:
        start = len(self._before) if certain.startswith(self._before) else _common(self._before, certain)
        piece = certain[start:]
        if piece:
            self._before = certain
        if len(self._ids) > self._LONGEST and text == certain:
            self._ids = self._tail(self._ids)
            self._before = self._decode()
        return piece

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids) if self._ids else ""

    def _is_byte(self, token: int) -> bool:
        name = getattr(self._tokenizer, "convert_ids_to_tokens", lambda token: None)(token)
        return isinstance(name, str) and self._BYTE.fullmatch(name) is not None

    def _tail(self, ids: Sequence[int]) -> list[int]:
        """The last ids, none of a run of bytes without those before it: a run decodes as a whole."""
        start = max(len(ids) - _SHIELD, 0)
        while start and self._is_byte(ids[start]):
            start -= 1
        return list(ids[start:])

    def _unsure(self, text: str) -> int:
        """How many letters at the end may still change."""
        # Half a character, or several.
        unsure = len(text) - len(text.rstrip("\ufffd"))
        if self._cleans and not unsure:
            unsure = max((n for word in self._CLEANED for n in range(1, len(word)) if text.endswith(word[:n])), default=0)
        return unsure


def follows_chat_template(tokenizer: Any, prompt: Sequence[int]) -> bool:
    """Whether a prompt of token ids ends as the tokenizer's chat template ends one, so that an answer may begin.

    Told by the ids that two rendered messages have in common at the end; an end without a letter tells nothing. Text that was
    encoded by itself and happens to end like that counts as rendered.
    """
    ids = list(prompt[-_LONGEST_END:])
    return any(ids[-len(end) :] == end for end in _template_ends(tokenizer))


# Ids at the end of a prompt that are compared with the template's.
_LONGEST_END = 64
# Tokenizer -> its chat template, and how that ends a prompt.
_ends: weakref.WeakKeyDictionary[Any, tuple[Any, list[list[int]]]] = weakref.WeakKeyDictionary()


def _template_ends(tokenizer: Any) -> list[list[int]]:
    if not getattr(tokenizer, "has_chat_template", False):
        return []
    template = getattr(tokenizer, "chat_template", None)
    known = _ends.get(tokenizer)
    if known is None or known[0] != template:
        settings = ({}, {"enable_thinking": True}, {"enable_thinking": False})
        # Some templates end otherwise where there is a system message.
        systems = ([], [{"role": "system", "content": "y"}])
        found = [_template_end(tokenizer, system, **setting) for system in systems for setting in settings]
        known = _ends[tokenizer] = (template, [end for end in found if end])
    return known[1]


def _template_end(tokenizer: Any, system: list[dict[str, str]], **settings: Any) -> list[int]:
    """The ids that two rendered messages share at their end; [] where they have no letter."""
    options = {"add_generation_prompt": True, "return_dict": False, **settings}
    try:
        messages = ([*system, {"role": "user", "content": text}] for text in ("x", "7"))
        a, b = (list(tokenizer.apply_chat_template(some, **options)) for some in messages)
        shared = _common(a[::-1], b[::-1])
        end = a[len(a) - shared :][-_LONGEST_END:]
        return end if end and tokenizer.decode(end).strip() else []
    except Exception:  # noqa: BLE001 - a template is a program and may raise anything; this one then tells nothing
        return []


def _common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Length of the longest common start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class StopText:
    """Cuts growing text before the first stop string, wherever its letters fall in tokens."""

    def __init__(self, words: Sequence[str]):
        self.words, self.held = list(words), ""
        # The one that was met first.
        self.found: str | None = None

    def feed(self, text: str, last: bool = False) -> tuple[str, bool]:
        """Returns: the text that is surely before any stop string, and whether one was met.

        Text that may begin one is held until the next call; `last` gives it out.
        """
        text, self.held = self.held + text, ""
        starts = [(at, word) for word in self.words if (at := text.find(word)) >= 0]
        if starts:
            at, self.found = min(starts, key=lambda start: start[0])
            return text[:at], True
        if not last:
            longest = max(map(len, self.words), default=1) - 1
            for length in range(min(longest, len(text)), 0, -1):
                if any(word.startswith(text[-length:]) for word in self.words):
                    text, self.held = text[:-length], text[-length:]
                    break
        return text, False


def prompt_thinking(tokenizer: Any, ids: Sequence[int]) -> bool | None:
    """The template's enable_thinking that a prompt of token ids was rendered with, told by how it ends.

    None: the tokenizer's template has no such setting, or the prompt does not end as the template lets an answer begin.
    """
    if not getattr(tokenizer, "has_chat_template", False):
        return None
    message = [{"role": "user", "content": "x"}]
    try:
        on, off = (
            list(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False, enable_thinking=setting))
            for setting in (True, False)
        )
    except Exception:  # noqa: BLE001 - a template is a program and may raise anything; this one then tells nothing
        return None
    if on == off:
        return None
    shared = _common(on, off)
    # With what comes before them, so that an end without letters of its own is told too; the longer end first.
    ends = sorted(((rendered[max(shared - 3, 0) :], setting) for rendered, setting in ((on, True), (off, False))), key=_length)
    return next((setting for end, setting in reversed(ends) if list(ids[-len(end) :]) == end), None)


def _length(end: tuple[list[int], bool]) -> int:
    return len(end[0])


def token_bytes(tokenizer: Any, token: int) -> bytes | None:
    """What one token adds to the text in UTF-8, also where it is only part of a character; None where that is unknown."""
    name, way = tokenizer.convert_ids_to_tokens(token), tokenizer.detokenizer
    if isinstance(name, str) and isinstance(way, SPMStreamingDetokenizer):
        return bytes([int(name[3:5], 16)]) if name.startswith("<0x") else name.replace("\u2581", " ").encode()
    if isinstance(name, str) and isinstance(way, BPEStreamingDetokenizer):
        return _letters_bytes(name)
    text = tokenizer.decode([token])
    return None if "\ufffd" in text else text.encode()


def _byte_letters() -> dict[str, int]:
    """The letter that byte-level BPE writes for each byte: printable ones as they are, the others in order from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_letters()


def _letters_bytes(name: str) -> bytes:
    """The bytes that the name of a byte-level token stands for; an added token may have letters that stand for none."""
    try:
        return bytes(map(_BYTES.__getitem__, name))
    except KeyError:
        return name.encode()
