"""What goes back: texts, streams, log-probabilities, usage."""

import pytest
from kit import Letters, scripted, text_of
from mlx_lm.tokenizer_utils import SPMStreamingDetokenizer, TokenizerWrapper
from serving_kit import MESSAGES, ask, expected, running

from dflash_mlx import stream_generate
from dflash_mlx.serving.responses import by_text
from dflash_mlx.text import StopText, token_bytes


def test_an_answer_is_the_targets_own_and_counts_what_was_drafted_and_reused(served, chatty):
    messages = [{"role": "user", "content": "class Stack:"}]
    plain = expected(chatty, messages, max_tokens=24)
    answer = ask(served, messages, max_tokens=24)
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
    # The second turn runs only what is new.
    longer = [*messages, {"role": "assistant", "content": answer.choices[0].message.content}, *MESSAGES]
    again = ask(served, longer, max_tokens=8)
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
        names = ["\u2581Hi", "<0xE2>", "<0x82>"]

        def __len__(self):
            return len(self.names)

        def convert_ids_to_tokens(self, ids):
            return [self.names[i] for i in ids] if isinstance(ids, list) else self.names[ids]

        def decode(self, ids):
            return "\ufffd" if ids == [1] else "Hi"

    sentencepiece = TokenizerWrapper(Pieces(), SPMStreamingDetokenizer)
    assert [token_bytes(sentencepiece, i) for i in range(3)] == [b" Hi", b"\xe2", b"\x82"]
    other = TokenizerWrapper(Pieces())
    assert [token_bytes(other, i) for i in range(2)] == [b"Hi", None]
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
