"""The `tokenizer.*` keys of a GGUF file -> tokenizer.json and its companions, as Hugging Face's tokenizers read them.

Knows the two vocabularies that llama.cpp calls "gpt2" (byte-level BPE) and "llama" (SentencePiece BPE with byte fallback), and
the pre-tokenizers in `_PRE_TOKENIZERS`. A name that is not in that table is refused: with text cut in another way, the same
merges give other ids, and nothing later would notice. Knows nothing of tensors or models.

Sources: ggml-org/llama.cpp, src/llama-vocab.cpp (what each name stands for; it quotes the regexes of the published tokenizer.json
files) and include/llama.h (token types); huggingface/transformers, tokenization_qwen2.py, tokenization_qwen3_5.py and
tokenization_gemma.py (normalizers).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from dflash_mlx.errors import ConversionError


class TokenType(IntEnum):
    """llama.cpp's `llama_token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class _PreTokenizer:
    """How text is cut before byte-level BPE: `splits` in turn, each match a piece of its own.

    - digits: every digit is a piece
    - gpt2: then GPT-2's own regex, which `tokenizers` has built in
    - ignore_merges: a piece that is a token is that token, whatever the merges say
    - bos: whether BOS is prepended where the file has no `add_bos_token`
    """

    splits: tuple[str, ...] = ()
    digits: bool = False
    gpt2: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    bos: bool = False


_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")
# What llama.cpp uses if its converter did not recognise the tokenizer and wrote "default".
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)

_PRE_TOKENIZERS = {
    "gpt-2": _PreTokenizer(gpt2=True),
    "phi-2": _PreTokenizer(gpt2=True),
    "smollm": _PreTokenizer(digits=True, gpt2=True),
    "starcoder": _PreTokenizer(digits=True, gpt2=True),
    "llama-bpe": _PreTokenizer((_LLAMA3,), ignore_merges=True, bos=True),
    "llama3": _PreTokenizer((_LLAMA3,), ignore_merges=True, bos=True),
    "llama-v3": _PreTokenizer((_LLAMA3,), ignore_merges=True, bos=True),
    "tekken": _PreTokenizer((_TEKKEN,), ignore_merges=True, bos=True),
    "qwen2": _PreTokenizer((_QWEN2,), nfc=True),
    "qwen35": _PreTokenizer((_QWEN35,), nfc=True),
    "deepseek-v3": _PreTokenizer(_DEEPSEEK3),
    "deepseek-coder": _PreTokenizer(_DEEPSEEK_CODER),
    "default": _PreTokenizer(_DEFAULT),
}

# The kinds of vocabulary, and the key that ranks the merges of each.
_RANKS = {"gpt2": "ggml.merges", "llama": "ggml.scores"}

# Texts that llama.cpp takes as ends of turn if no key of the file names one; here they count if the chat template has them.
_END_OF_TURN = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "[EOT]"}
)


def tokenizer_faults(metadata: dict[str, Any]) -> list[str]:
    """Why no tokenizer can be rebuilt from these keys (without their `tokenizer.` prefix), one phrase each; empty if it can."""
    model = metadata.get("ggml.model")
    if model is None:
        return ["no tokenizer (tokenizer.ggml.model)"]
    if model not in _RANKS:
        return [f"tokenizer model {model!r}, which is not {' or '.join(_RANKS)}"]
    faults = []
    if model == "gpt2" and metadata.get("ggml.pre") not in _PRE_TOKENIZERS:
        faults.append(f"pre-tokenizer {metadata.get('ggml.pre')!r}, which is not one of {', '.join(_PRE_TOKENIZERS)}")
    tokens = metadata.get("ggml.tokens", [])
    if len(set(tokens)) != len(tokens):
        faults.append(f"{len(tokens) - len(set(tokens))} tokens that occur twice")
    for key in ("ggml.tokens", _RANKS[model]):
        if key not in metadata:
            faults.append(f"no tokenizer.{key}")
    for key in ("ggml.token_type", "ggml.scores"):
        if len(metadata.get(key, tokens)) != len(tokens):
            faults.append(f"{len(metadata[key])} entries in tokenizer.{key} for {len(tokens)} tokens")
    for key in ("bos", "eos", "unknown", "padding", "eot", "eom"):
        if (number := metadata.get(f"ggml.{key}_token_id", 0)) >= len(tokens):
            faults.append(f"tokenizer.ggml.{key}_token_id = {number} of {len(tokens)} tokens")
    for key in ("bos", "eos"):
        if _adds(metadata, key) and f"ggml.{key}_token_id" not in metadata:
            faults.append(f"a tokenizer that adds {key.upper()} and has no tokenizer.ggml.{key}_token_id")
    return faults


def special_ids(metadata: dict[str, Any]) -> dict[str, int | list[int]]:
    """`bos_token_id`, `pad_token_id` and `eos_token_id` (a list if there are several) as a config.json has them.

    EOS are the file's eos, eot (end of turn) and eom (end of message) ids, and the ends of turn that its chat template writes.
    """
    ids = {f"{name}_token_id": metadata.get(f"ggml.{key}_token_id") for name, key in (("bos", "bos"), ("pad", "padding"))}
    eos = [metadata[key] for key in ("ggml.eos_token_id", "ggml.eot_token_id", "ggml.eom_token_id") if key in metadata]
    template = metadata.get("chat_template", "")
    eos += [
        number
        for number, (token, kind) in enumerate(_typed_tokens(metadata))
        if token in _END_OF_TURN and token in template and kind == TokenType.CONTROL
    ]
    eos = list(dict.fromkeys(eos))
    ids["eos_token_id"] = eos[0] if len(eos) == 1 else eos or None
    return {name: value for name, value in ids.items() if value is not None}


def write_tokenizer(metadata: dict[str, Any], directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and, if there are several EOS ids, generation_config.json into `directory`.

    Raises:
      ConversionError: if `tokenizer_faults` finds any, or the merges do not fit the tokens.
    """
    if faults := tokenizer_faults(metadata):
        raise ConversionError(
            f"the file's tokenizer cannot be rebuilt: {'; '.join(faults)}", "Use the original checkpoint's tokenizer"
        )
    tokenizer = build_tokenizer(metadata)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(_dumps(_tokenizer_config(metadata)), encoding="utf-8")
    ids = special_ids(metadata)
    if isinstance(ids.get("eos_token_id"), list):
        (directory / "generation_config.json").write_text(_dumps(ids), encoding="utf-8")


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer that these keys describe; they must have no `tokenizer_faults`.

    Raises:
      ConversionError: if a merge names a piece that is no token.
    """
    build = _byte_level if metadata["ggml.model"] == "gpt2" else _sentencepiece
    try:
        tokenizer = build(metadata)
    except Exception as error:  # `tokenizers` raises bare Exception
        raise ConversionError(
            f"the file's merges do not fit its tokens: {error}", "Use the original checkpoint's tokenizer"
        ) from error
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False) for text in _texts(metadata, TokenType.CONTROL, TokenType.UNKNOWN)]
    )
    # SentencePiece looks for user-defined tokens in the normalized text, which has U+2581 for spaces. If a prefix is added this
    # does not work: the normalizer would put it before the tokens too
    normalized = metadata["ggml.model"] == "llama" and not _adds_prefix(metadata)
    tokenizer.add_tokens(
        [AddedToken(text, normalized=normalized, special=False) for text in _texts(metadata, TokenType.USER_DEFINED)]
    )
    before, after = _affix(metadata, "bos"), _affix(metadata, "eos")
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *(f"{text}:1" for text in before), "$B:1", *(f"{text}:1" for text in after)],
            special_tokens=[(text, tokenizer.token_to_id(text)) for text in {*before, *after}],
        )
    return tokenizer


def _typed_tokens(metadata: dict[str, Any]) -> list[tuple[str, TokenType]]:
    """Every token with its type, in the order of the ids. A file without types has only normal tokens (GGUF specification)."""
    tokens = metadata["ggml.tokens"]
    return list(zip(tokens, metadata.get("ggml.token_type", [TokenType.NORMAL] * len(tokens)), strict=True))


def _texts(metadata: dict[str, Any], *kinds: TokenType) -> list[str]:
    """The tokens of these types, in the order of their ids."""
    return [text for text, kind in _typed_tokens(metadata) if kind in kinds]


def _adds(metadata: dict[str, Any], name: str) -> bool:
    """Whether the tokenizer adds BOS (EOS): what the file says, else llama.cpp's default for its kind."""
    if name == "eos":
        return metadata.get("ggml.add_eos_token", False)
    pre = _PRE_TOKENIZERS.get(metadata.get("ggml.pre"), _PreTokenizer())
    return metadata.get("ggml.add_bos_token", metadata["ggml.model"] == "llama" or pre.bos)


def _affix(metadata: dict[str, Any], name: str) -> list[str]:
    return [metadata["ggml.tokens"][metadata[f"ggml.{name}_token_id"]]] if _adds(metadata, name) else []


def _adds_prefix(metadata: dict[str, Any]) -> bool:
    """Whether a SentencePiece vocabulary puts a space before the text."""
    return metadata.get("ggml.add_space_prefix", True)


def _vocabulary(metadata: dict[str, Any]) -> dict[str, int]:
    """Token -> id, without unused ids: those pad the embedding, and their placeholder text must not be encoded to them."""
    return {text: number for number, (text, kind) in enumerate(_typed_tokens(metadata)) if kind != TokenType.UNUSED}


def _byte_level(metadata: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE with the pre-tokenizer that the file names."""
    pre = _PRE_TOKENIZERS[metadata["ggml.pre"]]
    # no byte-level piece contains a space, so the only space separates the two
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(_vocabulary(metadata), merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.splits]
    if pre.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.gpt2))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: dict[str, Any]) -> Tokenizer:
    """SentencePiece's BPE: text is not cut first, spaces are U+2581, unknown characters become bytes."""
    unknown = metadata["ggml.tokens"][metadata.get("ggml.unknown_token_id", 0)]
    vocabulary = _vocabulary(metadata)
    tokenizer = Tokenizer(
        models.BPE(vocabulary, list(_merges_by_score(metadata)), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = _adds_prefix(metadata)
    spaces = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces]) if prefix else spaces
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges_by_score(metadata: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The merges of a SentencePiece vocabulary, first to last.

    SentencePiece joins the neighbours that form the token with the best score, and has no list of merges. So every way to cut a
    token into two tokens is a merge here, ranked by the score of the whole token.
    """
    pieces = zip(_typed_tokens(metadata), metadata["ggml.scores"], strict=True)
    scores = {text: score for (text, kind), score in pieces if kind == TokenType.NORMAL}
    for text in sorted(scores, key=lambda text: -scores[text]):
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in scores and right in scores:
                yield left, right


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json: special tokens, BOS and EOS flags, chat templates."""
    tokens = metadata["ggml.tokens"]
    # a plain class: the model families' own would set up another pre-tokenizer than tokenizer.json's
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {f"add_{name}_token": _adds(metadata, name) for name in ("bos", "eos")}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (number := metadata.get(f"ggml.{key}_token_id")) is not None:
            config[f"{name}_token"] = tokens[number]
    named = {key.removeprefix("chat_template."): value for key, value in metadata.items() if key.startswith("chat_template.")}
    if template := metadata.get("chat_template"):
        config["chat_template"] = template
        if named:
            templates = {"default": template} | named
            config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return config


def _dumps(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
