"""Rebuilt tokenizers against independent ones: sentencepiece, transformers' own classes, hand-made vocabularies."""

import io
import json
from pathlib import Path

import pytest
import sentencepiece
from dflash_mlx.conversion.gguf.tokenizer import TokenType, build_tokenizer, special_ids, tokenizer_faults, write_tokenizer
from gguf_files import CONTROL, byte_level
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, Qwen2Tokenizer

from dflash_mlx.errors import ConversionError

TEXTS = [row["text"] for row in json.loads((Path(__file__).parents[2] / "data/smollm2_tokens.json").read_text(encoding="utf-8"))]


def trained_merges(size: int = 900) -> list[str]:
    """Merges of a byte-level BPE trained on the texts."""
    tokenizer = HFTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def pieces(pre: str, text: str) -> list[str]:
    tokenizer = build_tokenizer(byte_level(pre))
    if tokenizer.normalizer:
        text = tokenizer.normalizer.normalize_str(text)
    decoder = decoders.ByteLevel()
    return [decoder.decode([piece]) for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


# Cut by hand from the regexes. They differ in digits (one by one, in threes, whole), contractions in capitals and newlines.
@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["I", "'", "LL", " pay", " 12345", ".", "\n", "\n", "Go"]),
        ("smollm", ["I", "'", "LL", " pay", " ", "1", "2", "3", "4", "5", ".", "\n", "\n", "Go"]),
        ("starcoder", ["I", "'", "LL", " pay", " ", "1", "2", "3", "4", "5", ".", "\n", "\n", "Go"]),
        ("llama-bpe", ["I", "'LL", " pay", " ", "123", "45", ".\n\n", "Go"]),
        ("qwen2", ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", ".\n\n", "Go"]),
        ("qwen35", ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", ".\n\n", "Go"]),
        ("tekken", ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", ".\n\n", "Go"]),
        ("deepseek-v3", ["I", "'LL", " pay", " ", "123", "45", ".\n\n", "Go"]),
        ("deepseek-coder", ["I", "'", "LL", " pay", " ", "1", "2", "3", "4", "5", ".", "\n", "\n", "Go"]),
        ("default", ["I", "'", "LL", " pay", " ", "123", "45", ".", "\n", "\n", "Go"]),
    ],
)
def test_pre_tokenizer_cuts_as_its_name_says(pre, expected):
    assert pieces(pre, "I'LL pay 12345.\n\nGo") == expected


def test_tekken_cuts_at_a_capital_after_small_letters():
    assert pieces("tekken", "fooBar/\n") == ["foo", "Bar", "/\n"]
    assert pieces("qwen2", "fooBar/\n") == ["fooBar", "/\n"]


def test_qwen35_keeps_combining_marks_with_their_letters():
    text = "กำ" + "ก็"
    assert pieces("qwen35", text) == [text]
    assert len(pieces("qwen2", text)) > 1


def test_qwen2_equals_transformers_own_class():
    metadata = byte_level("qwen2", trained_merges())
    vocabulary = {text: number for number, text in enumerate(metadata["ggml.tokens"])}
    merges = [tuple(merge.split()) for merge in metadata["ggml.merges"]]
    theirs = Qwen2Tokenizer(vocab=vocabulary, merges=merges, unk_token=None, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    theirs.add_special_tokens({"additional_special_tokens": CONTROL})
    ours = build_tokenizer(metadata)
    texts = [*TEXTS, "cafe\u0301 \u212b"]
    assert [ours.encode(text).ids for text in texts] == [theirs.encode(text) for text in texts]


def test_special_tokens_are_one_id_and_unused_ones_plain_text():
    metadata = byte_level("smollm")
    tokenizer = build_tokenizer(metadata)
    assert tokenizer.encode("<|im_start|><tool><|im_end|>").ids == [1, 3, 2]
    assert tokenizer.decode([1, 3, 2]) == "<tool>"
    assert len(tokenizer.encode("[PAD0]").ids) == len("[PAD0]")


def test_ignore_merges_takes_a_whole_word_that_is_a_token():
    # "abc" is a token, but the merges lead past it: a+b, then ab+c was never learnt
    metadata = byte_level("llama-bpe", ["a b", "b c"])
    metadata["ggml.tokens"][-1], metadata["ggml.token_type"][-1] = "abc", TokenType.NORMAL
    assert build_tokenizer(metadata).encode("abc", add_special_tokens=False).tokens == ["abc"]
    assert build_tokenizer(metadata | {"ggml.pre": "qwen2"}).encode("abc").tokens == ["ab", "c"]


@pytest.mark.parametrize(
    ("pre", "keys", "expected"),
    [
        ("smollm", {}, []),
        ("smollm", {"ggml.add_bos_token": True}, [1]),
        ("llama-bpe", {}, [1]),
        ("llama-bpe", {"ggml.add_bos_token": False}, []),
    ],
)
def test_bos_is_added_as_the_file_says_or_as_its_kind_does(tmp_path, pre, keys, expected):
    metadata = byte_level(pre, **keys)
    assert build_tokenizer(metadata).encode("").ids == expected
    write_tokenizer(metadata, tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).encode("") == expected


def test_eos_is_added_if_the_file_says_so(tmp_path):
    write_tokenizer(byte_level("smollm", **{"ggml.add_eos_token": True}), tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).encode("") == [2]


def test_reloaded_by_transformers_the_ids_are_the_same(tmp_path):
    metadata = byte_level("smollm", trained_merges())
    write_tokenizer(metadata, tmp_path)
    reloaded, built = AutoTokenizer.from_pretrained(tmp_path), build_tokenizer(metadata)
    assert [reloaded.encode(text) for text in TEXTS] == [built.encode(text).ids for text in TEXTS]
    assert [reloaded.decode(built.encode(text).ids) for text in TEXTS] == TEXTS


def test_one_eos_needs_no_generation_config(tmp_path):
    metadata = byte_level("smollm", chat_template="{{ '<|im_end|>' }}")
    assert special_ids(metadata) == {"bos_token_id": 1, "eos_token_id": 2}
    write_tokenizer(metadata, tmp_path)
    assert not (tmp_path / "generation_config.json").exists()


@pytest.mark.parametrize(
    "keys",
    [{"ggml.eot_token_id": 2}, {"chat_template": "{{ message }}<|im_end|>"}],
    ids=["a key of the file", "the end of turn in the template"],
)
def test_several_eos_go_to_generation_config(tmp_path, keys):
    metadata = byte_level("smollm", **{"ggml.eos_token_id": 0}, **keys)
    assert special_ids(metadata)["eos_token_id"] == [0, 2]
    write_tokenizer(metadata, tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == [0, 2]


def test_chat_template_and_named_ones_come_through(tmp_path):
    template = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    metadata = byte_level("smollm", **{"chat_template": template, "chat_template.tool_use": "tools: {{ messages }}"})
    write_tokenizer(metadata, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "Zoë 🙂"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, chat_template="default") == "<|im_start|>Zoë 🙂<|im_end|>"
    assert tokenizer.apply_chat_template(messages, tokenize=False, chat_template="tool_use").startswith("tools: [")
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")


def sentencepiece_metadata(prefix: bool, user_defined: list[str]) -> tuple[sentencepiece.SentencePieceProcessor, dict]:
    """A small SentencePiece BPE trained on the texts, and what llama.cpp's converter would write of it."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in TEXTS for line in text.split("\n") if line.strip()]),
        model_writer=model,
        model_type="bpe",
        vocab_size=1200,
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        add_dummy_prefix=prefix,
        user_defined_symbols=user_defined,
        split_digits=True,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    numbers = range(processor.vocab_size())

    def kind(number: int) -> TokenType:
        if processor.id_to_piece(number) in user_defined:
            return TokenType.USER_DEFINED
        tests = {TokenType.UNKNOWN: "is_unknown", TokenType.CONTROL: "is_control", TokenType.BYTE: "is_byte"}
        return next((kind for kind, test in tests.items() if getattr(processor, test)(number)), TokenType.NORMAL)

    return processor, {
        "ggml.model": "llama",
        "ggml.tokens": [processor.id_to_piece(number) for number in numbers],
        "ggml.scores": [processor.get_score(number) for number in numbers],
        "ggml.token_type": [kind(number) for number in numbers],
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
        "ggml.add_space_prefix": prefix,
    }


@pytest.mark.parametrize(
    ("prefix", "user_defined"),
    [(True, []), (False, []), (False, ["▁▁", "▁▁▁▁", "<tool>", "\n\n"])],
    ids=["llama", "no prefix", "gemma"],
)
def test_sentencepiece_vocabulary_gives_sentencepiece_ids(prefix, user_defined):
    processor, metadata = sentencepiece_metadata(prefix, user_defined)
    tokenizer = build_tokenizer(metadata)
    extra = ["  a  b", "a    b\n\n\nc", "x<tool>y", "\n", " ", "", "日本語 🤖 ünï", "\t\ttab", "x" * 500]
    # sentencepiece reads "</s>" in a text as four characters; llama.cpp and Hugging Face read the token
    texts = [text for text in TEXTS + extra if "<s>" not in text and "</s>" not in text]
    assert len(texts) > 350
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    assert ids == processor.encode(texts)
    assert [tokenizer.decode(row) for row in ids] == texts


def test_sentencepiece_adds_bos_unless_told_not_to():
    _, metadata = sentencepiece_metadata(True, [])
    assert build_tokenizer(metadata).encode("a").ids[0] == 1
    assert build_tokenizer(metadata | {"ggml.add_bos_token": False}).encode("a").ids[0] != 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ggml.pre": "kimi-k9"}, "pre-tokenizer 'kimi-k9', which is not one of gpt-2, "),
        ({"ggml.pre": None}, "pre-tokenizer None"),
        ({"ggml.model": "bert"}, "tokenizer model 'bert', which is not gpt2 or llama"),
        ({"ggml.model": None}, "no tokenizer"),
        ({"ggml.model": "llama"}, "no tokenizer.ggml.scores"),
        ({"ggml.token_type": [1, 2]}, "2 entries in tokenizer.ggml.token_type for 261 tokens"),
        ({"ggml.eos_token_id": 4000}, "tokenizer.ggml.eos_token_id = 4000 of 261 tokens"),
        ({"ggml.tokens": ["a"] * 261}, "260 tokens that occur twice"),
    ],
)
def test_what_cannot_be_rebuilt_is_said(tmp_path, change, message):
    metadata = byte_level("smollm") | change
    assert any(message in fault for fault in tokenizer_faults(metadata))
    with pytest.raises(ConversionError, match="tokenizer cannot be rebuilt:"):
        write_tokenizer(metadata, tmp_path)
    assert not list(tmp_path.iterdir())


def test_all_faults_are_listed_at_once():
    metadata = byte_level("nonsense", **{"ggml.eos_token_id": 4000, "ggml.token_type": [1]})
    assert len(tokenizer_faults(metadata)) == 3


def test_bos_without_an_id_is_a_fault():
    metadata = byte_level("llama-bpe")
    del metadata["ggml.bos_token_id"]
    assert tokenizer_faults(metadata) == ["a tokenizer that adds BOS and has no tokenizer.ggml.bos_token_id"]


def test_a_file_without_token_types_has_only_normal_tokens(tmp_path):
    metadata = byte_level("smollm", ["a b"])
    del metadata["ggml.token_type"]
    write_tokenizer(metadata, tmp_path)
    assert len(build_tokenizer(metadata).encode("<tool>").ids) == len("<tool>")
    # transformers makes special what tokenizer_config.json names
    assert AutoTokenizer.from_pretrained(tmp_path).encode("ab<|im_end|>") == [metadata["ggml.tokens"].index("ab"), 2]


def test_merges_of_unknown_pieces_are_refused():
    with pytest.raises(ConversionError, match="merges do not fit its tokens"):
        build_tokenizer(byte_level("smollm") | {"ggml.merges": ["a b"]})
