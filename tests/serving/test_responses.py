"""What goes back: texts, streams, log-probabilities, usage."""

from types import SimpleNamespace

import mlx.core as mx
import pytest
from kit import Letters, scripted, text_of
from mlx_lm.tokenizer_utils import SPMStreamingDetokenizer, TokenizerWrapper
from serving_kit import MESSAGES, ask, expected, running
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from dflash_mlx import stream_generate
from dflash_mlx.serving import engine
from dflash_mlx.serving.engine import Job, _AnswerText
from dflash_mlx.serving.responses import by_text
from dflash_mlx.text import StopText, token_bytes


def test_an_answer_is_the_targets_own_and_counts_what_was_drafted_and_reused(chatty):
    messages = [{"role": "user", "content": "class Stack:"}]
    plain = expected(chatty, messages, max_tokens=24)
    # A server of its own: prompts of other tests begin alike.
    with running(*chatty, block_size=8) as served:
        answer = ask(served, messages, max_tokens=24)
        # The second turn runs only what is new.
        longer = [*messages, {"role": "assistant", "content": answer.choices[0].message.content}, *MESSAGES]
        again = ask(served, longer, max_tokens=8)
    assert answer.choices[0].message.content == text_of(plain) and answer.choices[0].finish_reason == "length"
    assert answer.model == "served" and answer.choices[0].logprobs is None
    model, tokenizer, drafter = chatty
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    drafted = list(stream_generate(model, tokenizer, ids, max_tokens=24, draft_model=drafter, block_size=8))
    accepted = sum(r.from_draft for r in drafted)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (len(ids), 24, len(ids) + 24)
    assert usage.completion_tokens_details.accepted_prediction_tokens == accepted > 5
    rejected = sum(r["width"] for r in drafted[-1].stats.rounds) - accepted
    assert usage.completion_tokens_details.rejected_prediction_tokens == rejected
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert again.choices[0].message.content == text_of(expected(chatty, longer, max_tokens=8))
    assert len(ids) + 24 >= again.usage.prompt_tokens_details.cached_tokens >= len(ids) + 20


def test_a_stream_carries_the_same_text_and_its_usage_when_asked(served, chatty):
    chunks = list(ask(served, max_tokens=20, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == text_of(expected(chatty, max_tokens=20))
    assert chunks[-2].choices[0].finish_reason == "length" and chunks[-1].usage.completion_tokens == 20
    assert {c.object for c in chunks} == {"chat.completion.chunk"} and len(chunks) > 10
    assert all(c.usage is None for c in list(ask(served, max_tokens=3, stream=True)))


def test_text_completions_stream_or_not(served, chatty):
    model, tokenizer, _ = chatty
    plain = text_of(stream_generate(model, tokenizer, "for i in ", max_tokens=12))
    create = served.client.completions.create
    assert create(model="served", prompt="for i in ", max_tokens=12).choices[0].text == plain
    assert "".join(c.choices[0].text for c in create(model="served", prompt=["for i in "], max_tokens=12, stream=True)) == plain


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_cuts_the_text_wherever_its_letters_fall_in_tokens(served, chatty, stream):
    responses = expected(chatty, max_tokens=30)
    whole, edge = text_of(responses), len(responses[0].text) + len(responses[1].text)
    for start, length in ((edge - 1, 3), (edge, 1), (edge + 3, 6), (1, len(whole) - 2)):
        word = whole[start : start + length]
        answer = ask(served, max_tokens=30, stop=["never there", word], stream=stream)
        if stream:
            chunks = list(answer)
            text, reason = "".join(c.choices[0].delta.content or "" for c in chunks), chunks[-1].choices[0].finish_reason
        else:
            text, reason = answer.choices[0].message.content or "", answer.choices[0].finish_reason
            assert answer.usage.completion_tokens <= 30
        assert (text, reason) == (whole[: whole.index(word)], "stop")


def test_text_that_may_begin_a_stop_string_is_held_until_it_is_known():
    stop = StopText(["</end>", "xx"])
    assert [stop.feed(piece) for piece in ("a<", "/en", "c", "x")] == [("a", False), ("", False), ("</enc", False), ("", False)]
    assert stop.feed("y</end", last=True) == ("xy</end", False)
    assert StopText(["ab", "b"]).feed("xab") == ("x", True)
    assert StopText([]).feed("x") == ("x", False)


def test_logprobs_come_when_asked_for_and_are_plain_decodings(served, chatty):
    plain = expected(chatty, max_tokens=9)
    values = [r.logprobs[r.token].item() for r in plain]
    answer = ask(served, max_tokens=9, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    # float32, the same rows: 1e-4 leaves room for another order of sums.
    assert [c.logprob for c in content] == pytest.approx(values, abs=1e-4)
    assert [c.token for c in content] == [chatty[1].decode([r.token]) for r in plain]
    assert all(len(c.top_logprobs) == 3 and c.top_logprobs[0].logprob == pytest.approx(c.logprob) for c in content)
    assert bytes(content[0].bytes).decode() == content[0].token
    chunks = list(ask(served, max_tokens=9, logprobs=True, stream=True))
    streamed = [entry for c in chunks if c.choices[0].logprobs for entry in c.choices[0].logprobs.content]
    assert [c.logprob for c in streamed] == pytest.approx(values, abs=1e-4)
    old = served.client.completions.create(model="served", prompt="x = ", max_tokens=4, logprobs=2).choices[0]
    assert len(old.logprobs.tokens) == 4 and "".join(old.logprobs.tokens) == old.text
    assert all(len(top) == 2 for top in old.logprobs.top_logprobs)


def test_tokens_that_are_part_of_a_character_have_their_bytes(chatty):
    tokenizer = chatty[1]
    # Four tokens of one byte, then one of two, of which the last has a space before its letter.
    line = tokenizer.encode("🚀 x", add_special_tokens=False)
    with running(scripted(line, vocab=1536), tokenizer) as server:
        content = ask(server, max_tokens=len(line), logprobs=True, top_logprobs=1).choices[0].logprobs.content
    with running(scripted(line, vocab=1536), tokenizer) as server:
        old = server.client.completions.create(model="served", prompt="y", max_tokens=1, logprobs=1).choices[0].logprobs
    assert [bytes(entry.bytes) for entry in content] == [b"\xf0", b"\x9f", b"\x9a", b"\x80", b" x"]
    assert [entry.token for entry in content][2:] == ["bytes:\\x9a", "bytes:\\x80", " x"] and content[4].id == line[4]
    assert all(entry.top_logprobs[0].bytes == entry.bytes for entry in content)
    assert old.tokens == ["bytes:\\xf0"] and list(old.top_logprobs[0]) == old.tokens


def test_every_kind_of_vocabulary_tells_a_tokens_bytes(pair):
    class Pieces(Letters):
        names = ["\u2581Hi", "<0xE2>", "<0x82>", "half"]

        def __len__(self):
            return len(self.names)

        def convert_ids_to_tokens(self, ids):
            return [self.names[i] for i in ids] if isinstance(ids, list) else self.names[ids]

        def decode(self, ids):
            return "\ufffd" if ids[0] else "Hi"

    sentencepiece = TokenizerWrapper(Pieces(), SPMStreamingDetokenizer)
    assert [token_bytes(sentencepiece, i) for i in range(3)] == [b" Hi", b"\xe2", b"\x82"]
    other = TokenizerWrapper(Pieces())
    assert [token_bytes(other, i) for i in range(4)] == [b"Hi", b"\xe2", b"\x82", None]
    # Byte-level: wherever a token is whole characters, they are what it decodes to.
    tokenizer = pair[1]
    texts = [tokenizer.decode([i]) for i in range(1536)]
    assert all(token_bytes(tokenizer, i) == text.encode() for i, text in enumerate(texts) if "\ufffd" not in text)
    assert sum("\ufffd" in text for text in texts) > 100


def test_two_tokens_with_one_text_are_both_among_the_alternatives():
    class Same:
        detokenizer = None

        def convert_ids_to_tokens(self, token):
            return None

        def decode(self, ids):
            return "same" if ids[0] < 2 else "other"

    assert by_text(Same(), [(1, -0.5), (2, -1.0), (0, -2.0)]) == {"same": -0.5, "other": -1.0, "same (token 0)": -2.0}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_empty_says_so(chatty, stream):
    tokenizer = chatty[1]
    with running(scripted([tokenizer.eos_token_id], vocab=1536), tokenizer) as server:
        got = ask(server, max_tokens=9, stream=stream, **({"stream_options": {"include_usage": True}} if stream else {}))
        chunks = list(got) if stream else [got]
    assert [c.choices[0].finish_reason for c in chunks if c.choices] == ["stop"]
    assert chunks[-1].usage.completion_tokens == 1
    assert not stream and got.choices[0].message.content is None or stream and not chunks[0].choices[0].delta.content


@pytest.mark.parametrize("logprobs", [False, True])
def test_the_role_stands_in_the_first_delta_alone(served, logprobs):
    chunks = list(ask(served, max_tokens=9, stream=True, logprobs=logprobs))
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1) and len(chunks) > 4
    with served.client.chat.completions.stream(model="served", messages=MESSAGES, max_tokens=9, stop=["zzz"]) as stream:
        list(stream)
        message = stream.current_completion_snapshot.choices[0].message
    assert message.role == "assistant"
    # Sent back it is a known role.
    assert ask(served, [*MESSAGES, {"role": message.role, "content": message.content}, *MESSAGES], max_tokens=1).choices


def test_text_offset_tells_where_a_tokens_text_stands_while_text_is_held_back(served, chatty):
    create, asked = served.client.completions.create, {"model": "served", "max_tokens": 14, "logprobs": 1}
    for prompt in ("Hello, my name is", "if a:\n   ", "x ="):
        free = create(prompt=prompt, **asked).choices[0]
        tokens, offsets = free.logprobs.tokens, free.logprobs.text_offset
        assert free.text == "".join(tokens) and offsets == [len("".join(tokens[:i])) for i in range(len(tokens))]
        for word in (tokens[3] + "ZZZ", tokens[5] + tokens[6] + "\0", free.text[2:] + "\0"):
            assert create(prompt=prompt, stop=[word], **asked).choices[0].logprobs.text_offset == offsets
            chunks = list(create(prompt=prompt, stop=[word], stream=True, **asked))
            assert [at for chunk in chunks for at in chunk.choices[0].logprobs.text_offset] == offsets
            assert "".join(chunk.choices[0].text for chunk in chunks) == free.text


def test_bytes_of_tokens_are_looked_up_only_where_log_probabilities_are_asked_for(served, monkeypatch):
    looked = []
    monkeypatch.setattr(engine, "token_bytes", lambda *about: looked.append(about[1]) or token_bytes(*about))
    asked = {"model": "served", "prompt": "def f(", "max_tokens": 6, "temperature": 0}
    assert served.client.completions.create(**asked).choices[0].text and not looked
    assert served.client.completions.create(**asked, logprobs=1).choices[0].text and len(looked) == 6


def test_text_offset_counts_characters_of_several_tokens_once(chatty):
    tokenizer = chatty[1]
    # Four tokens of one byte each, then a letter.
    line = tokenizer.encode("🚀 x", add_special_tokens=False)
    with running(scripted(line, vocab=1536), tokenizer) as server:
        choice = server.client.completions.create(model="served", prompt="y", max_tokens=len(line), logprobs=0).choices[0]
    assert choice.text == "🚀 x" and choice.logprobs.text_offset == [0, 0, 0, 0, 1]


def test_text_offset_is_right_where_a_token_by_itself_has_another_text():
    vocab = {"a": 0, "##b": 1, "s": 2, ".": 3}
    core = Tokenizer(models.WordPiece(vocab, unk_token="a"))
    core.decoder = decoders.WordPiece(cleanup=True)
    text = _AnswerText(TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=core)), Job([0], top=0))
    plain = {"finish_reason": None, "from_draft": False, "stats": None, "generation_tps": 0.0}
    told = [text.token(SimpleNamespace(token=i, logprobs=mx.zeros(4), **plain)) for i in (1, 1, 0, 1, 3, 2)]
    assert ([token.text for token in told], [token.offset for token in told]) == (
        ["b", "b", " a", "b", ".", " s"],
        [0, 1, 2, 4, 5, 6],
    )


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_text_offset_counts_a_character_that_the_prompt_began(cut):
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256, "\u2581a": 257}
    core = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=core), SPMStreamingDetokenizer)
    rocket, known = list("🚀".encode()), {"finish_reason": None, "from_draft": False, "stats": None, "generation_tps": 0.0}
    text = _AnswerText(tokenizer, Job([256, *rocket[:cut]], top=0))
    told = [text.token(SimpleNamespace(token=i, logprobs=mx.zeros(258), **known)) for i in [*rocket[cut:], 257, 256]]
    # The character is the answer's, whose text has it whole.
    begun = cut < 4
    assert "".join(token.text for token in told) == "🚀" * begun + " aa"
    assert [token.offset for token in told] == [0] * (4 - cut) + [begun, begun + 2]


@pytest.mark.parametrize("k", [0, 1, 3])
def test_a_chosen_token_outside_the_k_likeliest_is_named_beside_them(served, k):
    asked = {"model": "served", "prompt": "x = ", "max_tokens": 30, "temperature": 3.0, "seed": 5, "logprobs": k}
    logprobs = served.client.completions.create(**asked).choices[0].logprobs
    sizes = set()
    for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        sizes.add(len(top))
        if k:
            assert any(name.startswith(token) and near == pytest.approx(value) for name, near in top.items())
    assert sizes == ({k, k + 1} if k else {0})


@pytest.mark.parametrize("prompt", ["x =", "if a:\n   ", "import", "def f(x):\n", "🚀"])
def test_a_text_completion_keeps_its_leading_blank(served, chatty, prompt):
    model, tokenizer, _ = chatty
    ids = tokenizer.encode(prompt)
    tokens = [r.token for r in stream_generate(model, tokenizer, ids, max_tokens=6)]
    got = served.client.completions.create(model="served", prompt=prompt, max_tokens=6, logprobs=0).choices[0]
    again = served.client.completions.create(model="served", prompt=prompt, max_tokens=6, stream=True)
    # The second run finds the prompt in its cache: the text is still what follows all of it.
    assert got.text == "".join(chunk.choices[0].text for chunk in again) == tokenizer.decode([*ids, *tokens])[len(prompt) :]


def test_an_answer_behind_a_chat_template_drops_one_leading_blank_as_mlx_lm_does(chatty):
    tokenizer = chatty[1]
    line = [*tokenizer.encode("  Yes"), tokenizer.eos_token_id]
    with running(scripted(line, vocab=1536), tokenizer) as server:
        assert ask(server, max_tokens=9).choices[0].message.content == " Yes"
