"""Growing text: what each token adds, and where the text stops. Knows tokenizers; knows no models."""

from __future__ import annotations

import codecs
import re
import weakref
from collections.abc import Sequence
from numbers import Integral
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
    # Of MLX, NumPy or PyTorch.
    is_array = hasattr(prompt, "tolist")
    ids = prompt.tolist() if is_array else prompt
    if not isinstance(ids, (list, tuple)) or not all(map(is_whole, ids)):
        what, remedy = f"of type {type(prompt).__name__}", "Pass one prompt at a time"
        if is_array:
            what = f"an array of {str(prompt.dtype).removeprefix('mlx.core.')} and shape {list(prompt.shape)}"
        elif isinstance(ids, (list, tuple)):
            odd = next(i for i in ids if not is_whole(i))
            what = f"a list that holds {str(odd)[:40]!r} of type {type(odd).__name__}"
            if isinstance(odd, dict):
                remedy = "Write messages with tokenizer.apply_chat_template(messages, add_generation_prompt=True)"
        raise GenerationError(
            f"the prompt is {what}; it must be text, a list of token ids or an array [T] of them",
            remedy,
        )
    return list(map(int, ids))


def is_whole(value: Any) -> bool:
    """Whether it is a whole number, of Python or NumPy."""
    return isinstance(value, Integral) and not isinstance(value, bool)


class TextStream:
    """The text that an answer adds to its prompt, token by token.

        text = TextStream(tokenizer, prompt_ids)                  one per answer; prompt_ids: the whole prompt, cached ids too
        print(text.feed(token))                                   for each token except EOS
        print(text.finish())                                      once after the last token: what was held back

    If a prompt is continued as text, the pieces together are what `tokenizer.decode(prompt + ids)` adds after the longest common
    start with `tokenizer.decode(prompt)`. So a leading space stays, and a character that the prompt began comes whole. Text that
    a later token may still change is held back: half a character, a run of byte tokens, a space that the tokenizer may clean up.

    If a chat template made the prompt, the text is mlx-lm's own, which drops one leading space.

    after_chat_template: which of the two; None: decided by how the prompt ends (see `follows_chat_template`).
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], after_chat_template: bool | None = None):
        # If mlx-lm filled the prompt cache, not all ids are known.
        prompt = [token for token in prompt if token >= 0]
        # mlx-lm makes a new detokenizer at each access.
        mlx_lms = getattr(tokenizer, "detokenizer", None)
        cleans = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        if follows_chat_template(tokenizer, prompt) if after_chat_template is None else after_chat_template:
            self._way: _ByMlxLm | _ByBytes | _ByWindow = _ByMlxLm(mlx_lms)
        elif isinstance(mlx_lms, BPEStreamingDetokenizer) and not cleans:
            self._way = _ByBytes(tokenizer, prompt)
        else:
            self._way = _ByWindow(tokenizer, prompt, cleans)

    def feed(self, token: int) -> str:
        """The text that has become certain with this token."""
        return self._way.feed(token)

    def finish(self) -> str:
        """The rest of the text."""
        return self._way.finish()

    @property
    def holds(self) -> bool:
        """Whether text is held back now. For mlx-lm's own text this is unknown, so it is True."""
        return self._way.holds


# How many tokens at the end of a prompt or a window can change how the next ones are decoded.
_SHIELD = 8
# Names of SentencePiece's tokens of one byte.
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


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
    """Byte-level BPE: a text is the bytes of its tokens, one after the other. So only the new token's bytes are decoded."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int]):
        self._name, self._begun = tokenizer.convert_ids_to_tokens, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in prompt[-_SHIELD:]:
            self.feed(token)
        # If the prompt ends inside a character: the number of U+FFFD at its end (three bytes of a surrogate give two).
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
    """Any other tokenizer: the last tokens are decoded together, and the text that this adds is returned."""

    _LONGEST = 32
    # Before these, `clean_up_tokenization_spaces` removes the space.
    _CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")

    def __init__(self, tokenizer: Any, prompt: Sequence[int], cleans: bool):
        self._tokenizer, self._cleans, self.holds = tokenizer, cleans, True
        # _ids: the window that is decoded; _before: the window's text before the next piece.
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
        start = len(self._before) if certain.startswith(self._before) else common_start(self._before, certain)
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
        return isinstance(name, str) and _BYTE.fullmatch(name) is not None

    def _tail(self, ids: Sequence[int]) -> list[int]:
        """The last ids. A run of byte tokens is taken whole, because it can only be decoded as a whole."""
        start = max(len(ids) - _SHIELD, 0)
        while start and self._is_byte(ids[start]):
            start -= 1
        return list(ids[start:])

    def _unsure(self, text: str) -> int:
        """How many characters at the end may still change."""
        # One or several unfinished characters.
        unsure = len(text) - len(text.rstrip("\ufffd"))
        if self._cleans and not unsure:
            unsure = max((n for word in self._CLEANED for n in range(1, len(word)) if text.endswith(word[:n])), default=0)
        return unsure


def follows_chat_template(tokenizer: Any, prompt: Sequence[int]) -> bool:
    """Whether a prompt of token ids ends like one that the tokenizer's chat template has rendered for an answer to follow.

    This compares the ids that two rendered messages have in common at their ends. An end without visible text says nothing. Plain
    text that happens to end like that counts as rendered.
    """
    ids = list(prompt[-_LONGEST_END:])
    return any(ids[-len(end) :] == end for end in _template_ends(tokenizer))


# How many ids at the end of a prompt are compared with the template's.
_LONGEST_END = 64
# Tokenizer -> its chat template, and how the template ends prompts.
_ends: weakref.WeakKeyDictionary[Any, tuple[Any, list[list[int]]]] = weakref.WeakKeyDictionary()


def _template_ends(tokenizer: Any) -> list[list[int]]:
    if not getattr(tokenizer, "has_chat_template", False):
        return []
    template = getattr(tokenizer, "chat_template", None)
    known = _ends.get(tokenizer)
    if known is None or known[0] != template:
        settings = ({}, {"enable_thinking": True}, {"enable_thinking": False})
        # Some templates end in another way if there is a system message.
        systems = ([], [{"role": "system", "content": "y"}])
        found = [_template_end(tokenizer, system, **setting) for system in systems for setting in settings]
        known = _ends[tokenizer] = (template, [end for end in found if end])
    return known[1]


def _template_end(tokenizer: Any, system: list[dict[str, str]], **settings: Any) -> list[int]:
    """The ids that two rendered messages share at their end; [] if these show no text."""
    options = {"add_generation_prompt": True, "return_dict": False, **settings}
    try:
        messages = ([*system, {"role": "user", "content": text}] for text in ("x", "7"))
        a, b = (list(tokenizer.apply_chat_template(some, **options)) for some in messages)
        shared = common_start(a[::-1], b[::-1])
        end = a[len(a) - shared :][-_LONGEST_END:]
        return end if end and tokenizer.decode(end).strip() else []
    except Exception:  # noqa: BLE001 - a template is a program and may raise anything; this one then tells nothing
        return []


def common_start(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Length of the longest common start."""
    n = min(len(a), len(b))
    return n if a[:n] == b[:n] else next((i for i in range(n) if a[i] != b[i]), n)


class StopText:
    """Cuts growing text before the first stop string, however tokens divide that string."""

    def __init__(self, words: Sequence[str]):
        self.words, self.held = list(words), ""
        # The stop string that was found first.
        self.found: str | None = None

    def feed(self, text: str, last: bool = False) -> tuple[str, bool]:
        """Returns: the text that cannot be part of a stop string, and whether a stop string was found.

        Text that may be the beginning of one is held until the next call; with `last` it is returned.
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
    """The `enable_thinking` with which the template rendered a prompt of token ids, found from how the prompt ends.

    None if the template has no such setting, or if the prompt does not end like a rendered one.
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
    shared = common_start(on, off)
    # Compare some ids before the difference too, so that an end that adds no ids is recognised too; the longer end first.
    ends = sorted(((rendered[max(shared - 3, 0) :], setting) for rendered, setting in ((on, True), (off, False))), key=_length)
    return next((setting for end, setting in reversed(ends) if list(ids[-len(end) :]) == end), None)


def _length(end: tuple[list[int], bool]) -> int:
    return len(end[0])


def token_bytes(tokenizer: Any, token: int) -> bytes | None:
    """The UTF-8 bytes that one token adds to the text, even if they are only part of a character; None if unknown."""
    name, way = tokenizer.convert_ids_to_tokens(token), tokenizer.detokenizer
    if isinstance(name, str) and isinstance(way, SPMStreamingDetokenizer):
        return bytes([int(name[3:5], 16)]) if name.startswith("<0x") else name.replace("\u2581", " ").encode()
    if isinstance(name, str) and isinstance(way, BPEStreamingDetokenizer):
        return _letters_bytes(name)
    text = tokenizer.decode([token])
    if "\ufffd" not in text:
        return text.encode()
    return bytes([int(name[3:5], 16)]) if isinstance(name, str) and _BYTE.fullmatch(name) else None


def begun_character(tokenizer: Any, prompt: Sequence[int]) -> bytes:
    """The bytes of a character that a prompt begins and does not finish; empty if it ends with a whole one."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    # At most 3 bytes, each of which may be a token of its own.
    decoder.decode(b"".join(token_bytes(tokenizer, token) or b"" for token in prompt[-3:]))
    return decoder.getstate()[0]


def _byte_letters() -> dict[str, int]:
    """The letter by which byte-level BPE writes each byte: printable ones as they are, the others from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_letters()


def _letters_bytes(name: str) -> bytes:
    """The bytes that a byte-level token's name stands for. An added token may have letters that stand for no byte."""
    try:
        return bytes(map(_BYTES.__getitem__, name))
    except KeyError:
        return name.encode()
