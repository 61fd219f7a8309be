"""What a stream of tokens adds to its prompt's text, for every kind of tokenizer, and how a rendered prompt is told."""

import random

import pytest
from kit import ids_of, plain, run, text_of, with_template
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, SPMStreamingDetokenizer, TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_mlx import load, make_prompt_cache
from dflash_mlx.text import TextStream, follows_chat_template

BYTES = {f"<0x{i:02X}>": 3 + i for i in range(256)}


def sentencepiece(cleans=False):
    """Llama 2's kind: blanks as U+2581, the first of which is dropped by the decoder, and bytes for what has no piece."""
    pieces = ["\u2581", "\u2581a", "a", "\u2581=", "b", "\u2581\u2581\u2581", ".", "n", "\u2581n", "'t", "\u2581'", "s", ","]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **BYTES, **{piece: 259 + i for i, piece in enumerate(pieces)}}
    core = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(steps)
    fast = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=cleans)
    return TokenizerWrapper(fast, SPMStreamingDetokenizer)


def byte_level():
    """GPT-2's kind: every byte has a letter; pieces of several."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    vocab = {letter: i for i, letter in enumerate(sorted(letters))}
    vocab |= {piece: 256 + i for i, piece in enumerate(["\u0120a", "\u0120=", "\u0120\u0120", "ab"])}
    core = Tokenizer(models.BPE(vocab, []))
    core.decoder = decoders.ByteLevel()
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=core), BPEStreamingDetokenizer)


KINDS = {"sentencepiece": sentencepiece, "cleaned": lambda: sentencepiece(True), "byte-level": byte_level}


def adds(tokenizer, prompt, ids):
    """The rule itself."""
    before, whole = (tokenizer.decode(part) if part else "" for part in (prompt, prompt + ids))
    common = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), min(len(before), len(whole)))
    return whole[common:]


def pieces(tokenizer, prompt, ids):
    text = TextStream(tokenizer, prompt)
    return [*(text.feed(token) for token in ids), text.finish()]


def lines(kind, chance, tokenizer):
    """Prompts and answers: anything, letters cut in the middle, runs of blanks and bytes."""
    n = len(tokenizer)
    text = "a \u00e9\u4e2d\U0001f600 =  b".encode()
    name = "<0x%02X>".__mod__ if kind != "byte-level" else {b: c for c, b in letter_bytes().items()}.get
    bytewise = [tokenizer.convert_tokens_to_ids(name(byte)) for byte in text]
    for _ in range(150):
        line = [chance.randrange(3, n) for _ in range(chance.randrange(2, 60))]
        for _ in range(chance.randrange(4)):
            at = chance.randrange(len(line))
            line[at:at] = bytewise[chance.randrange(len(bytewise)) :]
        if chance.random() < 0.3:
            line = [chance.choice(bytewise) for _ in line]
        cut = chance.randrange(len(line))
        yield line[:cut], line[cut:]


def letter_bytes():
    from dflash_mlx.text import _BYTES

    return _BYTES


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_is_what_the_ids_add_to_the_text_of_the_prompt(kind):
    tokenizer = KINDS[kind]()
    for prompt, ids in lines(kind, random.Random(kind), tokenizer):
        assert "".join(pieces(tokenizer, prompt, ids)) == adds(tokenizer, prompt, ids), (prompt, ids)


@pytest.mark.parametrize("kind", ["sentencepiece", "byte-level"])
def test_text_is_given_out_with_the_token_that_completes_it(kind):
    tokenizer = KINDS[kind]()
    name = tokenizer.convert_tokens_to_ids
    blank = "\u2581" if kind == "sentencepiece" else "\u0120"
    prompt, ids = [name("a"), name(f"{blank}=")], [name(f"{blank}a"), name("b"), name(f"{blank}=")]
    # mlx-lm drops the first blank.
    assert pieces(tokenizer, prompt, ids) == [" a", "b", " =", ""]


def test_of_byte_level_tokens_only_the_new_one_is_decoded(monkeypatch):
    tokenizer = byte_level()
    ids = [tokenizer.convert_tokens_to_ids(name) for name in ("a", "\u0120=", "\u0120a", "b")]
    monkeypatch.setattr(type(tokenizer._tokenizer), "decode", lambda *_: pytest.fail("a window was decoded"))
    assert pieces(tokenizer, ids[:1], ids[1:]) == [" =", " a", "b", ""]


def test_a_prompt_that_ends_inside_a_character_gets_the_whole_character():
    smile = "\U0001f600".encode()
    by_letter = {byte: letter for letter, byte in letter_bytes().items()}
    for tokenizer, name in ((sentencepiece(), "<0x%02X>".__mod__), (byte_level(), by_letter.get)):
        ids = [tokenizer.convert_tokens_to_ids(name(byte)) for byte in smile]
        b = tokenizer.convert_tokens_to_ids("b")
        for cut in (1, 2, 3):
            assert "".join(pieces(tokenizer, [b, *ids[:cut]], [*ids[cut:], b])) == "\U0001f600b"


def test_a_prompt_that_ends_in_half_a_surrogate_leaves_no_replacement_behind():
    tokenizer, letters = byte_level(), {byte: letter for letter, byte in letter_bytes().items()}
    half = [tokenizer.convert_tokens_to_ids(letters[byte]) for byte in b"\xed\xb2"]
    b = tokenizer.convert_tokens_to_ids("b")
    for ids in ([b], [half[1], b], [*half, b]):
        assert "".join(pieces(tokenizer, [b, *half], ids)) == adds(tokenizer, [b, *half], ids)


def test_after_a_chat_template_the_text_is_mlx_lms_without_one_leading_blank(tmp_path):
    tokenizer = load(with_template(tmp_path))[1]
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "Why?"}], add_generation_prompt=True)
    answer = tokenizer.encode("  so it is")
    assert follows_chat_template(tokenizer, rendered) and not follows_chat_template(tokenizer, tokenizer.encode("x ="))
    assert "".join(pieces(tokenizer, rendered, answer)) == " so it is"
    text = TextStream(tokenizer, rendered, after_chat_template=False)
    assert "".join([*map(text.feed, answer), text.finish()]) == "  so it is"


def test_a_template_that_ends_otherwise_behind_a_system_message_is_told_too(tmp_path):
    end = "{% if add_generation_prompt %}[assistant]{% if messages[0].role == 'system' %}!{% endif %}{% endif %}"
    tokenizer = load(with_template(tmp_path, "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}" + end))[1]
    for system in ([], [{"role": "system", "content": "Be brief."}]):
        messages = [*system, {"role": "user", "content": "Why?"}]
        assert follows_chat_template(tokenizer, tokenizer.apply_chat_template(messages, add_generation_prompt=True))


@pytest.mark.parametrize(
    "template", ["{% for m in messages %}{{ m.content }}\n{% endfor %}", "{{ 1 / 0 }}", "{{ messages[0].content }}"]
)
def test_a_template_without_an_end_of_its_own_tells_nothing(tmp_path, template):
    tokenizer = load(with_template(tmp_path, template))[1]
    assert not follows_chat_template(tokenizer, tokenizer.encode("if a:\n"))


def test_a_runs_text_is_what_its_ids_add_with_a_drafter_and_without(pair):
    model, tokenizer, drafter = pair
    letters = {byte: letter for letter, byte in letter_bytes().items()}
    half = [tokenizer.convert_tokens_to_ids(letters[byte]) for byte in "\u00e9".encode()[:1]]
    blanks = 0
    for prompt in (*map(tokenizer.encode, ("x =", "if a:\n   ", "import", "def f(a,")), tokenizer.encode("caf") + half):
        for used in (None, drafter):
            got = run(model, used, prompt, 12, tokenizer)
            assert text_of(got) == adds(tokenizer, prompt, ids_of(got)), (prompt, used)
        # mlx-lm's text of the same ids begins at the answer, and drops its first blank.
        theirs = text_of(plain(model, tokenizer, prompt, max_tokens=12))
        assert text_of(got) in (theirs, " " + theirs) or prompt[-1:] == half
        blanks += text_of(got) == " " + theirs
    assert blanks


def test_a_turn_that_goes_on_in_a_cache_has_the_text_of_the_whole_conversation(pair):
    model, tokenizer, drafter = pair
    prompt, cache = tokenizer.encode("x ="), make_prompt_cache(model, drafter)
    first = run(model, drafter, prompt, 5, tokenizer, prompt_cache=cache)
    second = run(model, drafter, tokenizer.encode(" +"), 5, tokenizer, prompt_cache=cache)
    before = prompt + ids_of(first) + tokenizer.encode(" +")
    assert text_of(second) == adds(tokenizer, before, ids_of(second))


def test_a_text_stream_may_be_given(pair):
    model, tokenizer, drafter = pair
    prompt = tokenizer.encode("x =")
    for used in (None, drafter):
        text = TextStream(tokenizer, prompt, after_chat_template=True)
        got = text_of(run(model, used, prompt, 12, tokenizer, text_stream=text))
        assert got == text_of(plain(model, tokenizer, prompt, max_tokens=12))
