"""The server as clients meet it: the openai package and raw sockets, in one process with the thread that generates."""

import copy
import importlib
import inspect
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import fields

import mlx.core as mx
import mlx_lm.server
import openai
import pytest
from families import BASE, FAMILIES, varied
from kit import Letters, scripted, with_template
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import SPMStreamingDetokenizer, TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer

from dflash_mlx import load, load_drafter, make_prompt_cache, stream_generate
from dflash_mlx.serving.app import Generator, Handler, Options, Provider, Server, _by_text
from dflash_mlx.serving.prefix_cache import PrefixCache
from dflash_mlx.text import StopText, token_bytes

TOOLS = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% for tool_call in [] %}{{ tool_call.name }}{% endfor %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "[{{ m.role }}]<|endoftext|>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]<|endoftext|>{% endif %}"
)
WEATHER = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


class Running:
    """A server at a free port, with its client."""

    def __init__(self, server):
        self.server, self.port = server, server.server_address[1]
        self.generator, self.provider = server.generator, server.generator.model_provider
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=60)

    def send(self, path, body, *headers):
        """A socket that has sent a request; `body` is an object or bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(data)}", *headers]
        link = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        link.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + data)
        return link

    def raw(self, data):
        """Status and body of the answer to bytes as they are."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as link:
            link.sendall(data)
            return read(link)

    def post(self, path, body, *headers):
        with self.send(path, body, *headers) as link:
            return read(link)

    def get(self, path, *headers):
        return self.raw("\r\n".join([f"GET {path} HTTP/1.1", "Host: x", *headers]).encode() + b"\r\n\r\n")

    def wait_idle(self):
        began = time.monotonic()
        while self.generator.running or self.generator.waiting:
            assert time.monotonic() - began < 30
            time.sleep(0.01)


def read(link):
    data = b""
    while piece := link.recv(1 << 16):
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()


@contextmanager
def running(model, tokenizer, drafter=None, **options):
    provider = Provider(Options(**options), lambda: ("served", "drafter" if drafter else None, model, tokenizer, drafter))
    generator = Generator(provider, PrefixCache(options.get("prompt_cache_size", 10)))
    provider.ready.wait()
    try:
        assert provider.fault is None, provider.fault
        with Server(generator_at_free_port(generator)) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                yield Running(server)
            finally:
                server.shutdown()
                thread.join()
    finally:
        generator.stop_and_join()


def generator_at_free_port(generator):
    generator.cli_args.port = 0
    return generator


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    path = with_template(tmp_path_factory.mktemp("served"), TOOLS)
    model, tokenizer = load(path, dtype=mx.float32)
    return model, tokenizer, load_drafter("tiny", model)


@pytest.fixture(scope="module")
def served(chatty):
    # Every round drafts, so that what is counted does not depend on what pays on this machine.
    with running(*chatty, block_size=8) as server:
        yield server


MESSAGES = [{"role": "user", "content": "def add(a, b):"}]


def expected(chatty, messages=MESSAGES, **options):
    """Our own responses to the same messages, plain."""
    model, tokenizer, _ = chatty
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return list(stream_generate(model, tokenizer, ids, **options))


def text_of(responses):
    return "".join(r.text for r in responses)


def ask(served, messages=MESSAGES, **options):
    return served.client.chat.completions.create(model="served", messages=messages, **options)


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


def test_a_seed_gives_the_text_of_the_api_with_any_number_of_drafts(served, chatty):
    sampler = make_sampler(0.9, top_p=0.95, top_k=50)
    plain = text_of(expected(chatty, max_tokens=10, sampler=sampler, seed=7))
    for drafts in (0, 7):
        extra = {"top_k": 50, "num_draft_tokens": drafts}
        answer = ask(served, max_tokens=10, temperature=0.9, top_p=0.95, seed=7, extra_body=extra)
        assert answer.choices[0].message.content == plain


def test_a_hybrid_target_goes_on_from_the_prompt_when_its_answer_comes_back_changed(chatty):
    # As thinking models' answers do, whose thinking is not sent back.
    tokenizer = chatty[1]
    module, args = FAMILIES["qwen3_next"]
    module = importlib.import_module(f"mlx_lm.models.{module}")
    args = {**BASE, **args, "model_type": "qwen3_next", "vocab_size": 1536}
    mx.random.seed(4)
    model = varied(module.Model(module.ModelArgs.from_dict(args)), 3)
    with running(model, tokenizer) as server:
        first = ask(server, max_tokens=6).usage
        longer = [*MESSAGES, {"role": "assistant", "content": "other"}, *MESSAGES]
        again = ask(server, longer, max_tokens=6)
        assert again.usage.prompt_tokens_details.cached_tokens == first.prompt_tokens - 1
        fresh = expected((model, tokenizer, None), longer, max_tokens=6)
    assert again.choices[0].message.content == text_of(fresh)


def test_penalties_see_the_whole_prompt_whatever_was_held(served):
    messages = [{"role": "user", "content": "x = 1\ny = x + x\nz = "}]
    options = {"max_tokens": 16, "presence_penalty": 1.5, "extra_body": {"presence_context_size": 60}}
    first = ask(served, messages, **options)
    again = ask(served, messages, **options)
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    assert again.choices[0].message.content == first.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_is_told_from_text(chatty, stream):
    tokenizer = chatty[1]
    said = 'Let me see. <tool_call>{"name": "weather", "arguments": {"city": "Łódź"}}</tool_call>'
    line = [*tokenizer.encode(said), tokenizer.eos_token_id]
    with running(scripted(line, vocab=1536), tokenizer) as server:
        answer = ask(server, tools=WEATHER, tool_choice="auto", max_tokens=100, stream=stream)
        if stream:
            chunks = list(answer)
            text = "".join(c.choices[0].delta.content or "" for c in chunks)
            calls = [call for c in chunks for call in c.choices[0].delta.tool_calls or []]
            reason = chunks[-1].choices[0].finish_reason
        else:
            text, calls = answer.choices[0].message.content, answer.choices[0].message.tool_calls
            reason = answer.choices[0].finish_reason
    assert text == "Let me see. " and reason == "tool_calls"
    assert [(c.function.name, json.loads(c.function.arguments)) for c in calls] == [("weather", {"city": "Łódź"})]


def test_a_tool_call_that_cannot_be_read_is_text(chatty):
    tokenizer = chatty[1]
    with running(scripted(tokenizer.encode("<tool_call>{broken"), vocab=1536), tokenizer) as server:
        answer = ask(server, tools=WEATHER, max_tokens=len(tokenizer.encode("<tool_call>{broken")))
    assert answer.choices[0].message.content == "{broken" and answer.choices[0].message.tool_calls is None


# As Qwen3's: thinking is open, closed at once, or left to the model; earlier thinking is not shown again.
THINKS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]"
    "{% if enable_thinking %}<think>{% else %}<think></think>{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    """A tokenizer whose vocabulary has two marks as tokens of their own, ids 1536 and 1537."""
    path = tmp_path_factory.mktemp("thinker")
    with_template(path, THINKS)
    config = json.loads((path / "tokenizer.json").read_text())
    for i, mark in enumerate(("<think>", "</think>")):
        config["added_tokens"].append({**config["added_tokens"][0], "id": 1536 + i, "content": mark})
    (path / "tokenizer.json").write_text(json.dumps(config))
    return load_tokenizer(path)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("given", "thought", "content"),
    [
        ({}, "Hmm. ", "Yes <"),
        ({"enable_thinking": True}, "Hmm. ", "Yes <"),
        # Closed by the template: what comes is the answer, and a mark that only closes is text.
        ({"enable_thinking": False}, "", "Hmm. </think>Yes <"),
    ],
)
def test_thinking_is_kept_apart_from_the_answer(thinker, given, thought, content, stream):
    line = [*thinker.encode("Hmm. </think>Yes <"), thinker.eos_token_id]
    with running(scripted(line, vocab=1540), thinker) as server:
        got = ask(server, max_tokens=50, stream=stream, extra_body={"chat_template_kwargs": given})
        parts = [c.choices[0].delta for c in got] if stream else [got.choices[0].message]
    assert "".join(getattr(part, "reasoning", None) or "" for part in parts) == thought
    # A letter that might have begun a mark is not lost at the end.
    assert "".join(part.content or "" for part in parts) == content
    assert stream or got.usage.completion_tokens == len(line)


def test_thinking_that_its_template_drops_costs_the_next_turn_nothing_before_it(thinker):
    line = [*thinker.encode("Hmm. </think>Yes"), thinker.eos_token_id]
    with running(scripted([*line, 0, *line], vocab=1540), thinker) as server:
        first = ask(server, max_tokens=50)
        assert (first.choices[0].message.content, first.choices[0].message.reasoning) == ("Yes", "Hmm. ")
        longer = [*MESSAGES, {"role": "assistant", "content": "Yes"}, {"role": "user", "content": "why"}]
        cached = ask(server, longer, max_tokens=1).usage.prompt_tokens_details.cached_tokens
    # All but the open mark.
    assert cached == first.usage.prompt_tokens - 1


def test_thinking_and_calls_are_told_apart_inside_the_blocks_of_a_pair(chatty):
    # Pieces of what this target says are declared to be the marks, so that its drafter's real blocks run across them.
    model, tokenizer, drafter = chatty
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tools=WEATHER)
    said = text_of(stream_generate(model, tokenizer, ids, max_tokens=60))
    first, second, third = said[9:14], said[30:35], said[50:54]
    assert [said.index(mark) for mark in (first, second, third)] == [9, 30, 50], said
    marked = copy.copy(tokenizer)
    start = tokenizer.encode("<|endoftext|>", add_special_tokens=False)
    # The template ends with that token: thinking is open where the answer begins.
    marked._think_start, marked._think_start_tokens = "<|endoftext|>", tuple(start)
    marked._think_end, marked._think_end_tokens = first, (-1,)
    marked._tool_call_start, marked._tool_call_end = second, third
    marked._tool_parser = lambda text, tools: {"name": tools[0]["function"]["name"], "arguments": {"said": text}}
    rest = {"tools": WEATHER, "max_tokens": 60}
    with running(model, marked, drafter) as server:
        for drafts in (0, 7):
            for stream in (False, True):
                got = ask(server, **rest, stream=stream, extra_body={"num_draft_tokens": drafts})
                parts = [c.choices[0].delta for c in got] if stream else [got.choices[0].message]
                assert "".join(getattr(part, "reasoning", None) or "" for part in parts) == said[:9]
                assert "".join(part.content or "" for part in parts) == said[14:30] + said[54:]
                calls = [call.function for part in parts for call in part.tool_calls or []]
                assert [(c.name, json.loads(c.arguments)) for c in calls] == [("weather", {"said": said[35:50]})]
                if not stream:
                    assert got.usage.completion_tokens == 60
                    assert (got.usage.completion_tokens_details.accepted_prediction_tokens > 0) == (drafts > 0)


def test_what_a_tool_found_reaches_the_template(tmp_path, chatty):
    calls = "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}"
    with_template(tmp_path, TOOLS.replace("{{ m.content }}", calls))
    tokenizer = load_tokenizer(tmp_path)
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    with running(chatty[0], tokenizer) as server:
        usage = ask(server, messages, tools=WEATHER, max_tokens=1).usage
    messages[1] = {**messages[1], "content": "", "tool_calls": [{"function": {"arguments": {"city": "Oslo"}}}]}
    ids = tokenizer.apply_chat_template(messages, tools=WEATHER, add_generation_prompt=True)
    assert usage.prompt_tokens == len(ids) and "Oslo" in tokenizer.decode(ids) and "rain" in tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"model": "another/model"}, 404, "expected the model 'served'; found 'another/model'"),
        ({"model": 3}, 404, "found 3"),
        ({"draft_model": "other"}, 400, "expected draft_model 'drafter' or none"),
        ({"n": 2}, 400, "cannot do n = 2"),
        ({"n": True}, 400, "cannot do n = true"),
        ({"response_format": {"type": "json_object"}}, 400, "cannot do response_format"),
        ({"adapters": "x"}, 400, "expected it left out"),
        ({"parallel_tool_calls": False}, 400, "parallel_tool_calls"),
        ({"tool_choice": "required"}, 400, "cannot force"),
        ({"tools": "all"}, 400, "expected tools to be a list"),
        ({"temprature": 1}, 400, "expected known fields only; found 'temprature'"),
        ({"stop": ""}, 400, "none of them empty"),
        ({"stop": [1]}, 400, "expected stop"),
        ({"stop": ["x"] * 65}, 400, "expected at most 64 stop texts of at most 1000 letters; found 65, the longest of 1"),
        ({"stop": "x" * 1001}, 400, "found 1, the longest of 1001"),
        ({"presence_penalty": 10**30}, 400, "expected presence_penalty of at most 1e+06 in size"),
        ({"frequency_penalty": -1e7}, 400, "expected frequency_penalty of at most 1e+06 in size"),
        ({"temperature": 10**200}, 400, "expected temperature of at most 1e+06 in size"),
        ({"repetition_penalty": 1.1, "repetition_context_size": 1 << 31}, 400, "expected repetition_context_size of at most"),
        ({"stream_options": {"x": 1}}, 400, "include_usage"),
        ({"stream_options": {"include_usage": "x"}, "stream": True}, 400, "include_usage, true or false"),
        ({"stream_options": {"include_usage": True}}, 400, "expected stream = true with stream_options"),
        ({"prompt": "x"}, 400, 'expected no prompt at /v1/chat/completions; found "x"'),
        ({"role_mapping": {"user": "U: "}}, 400, "expected no role_mapping; served has a chat template"),
        ({"num_draft_tokens": 64}, 400, "expected num_draft_tokens of at most 63; found 64"),
        ({"num_draft_tokens": -1}, 400, "num_draft_tokens must be at least 0"),
        ({"num_draft_tokens": 1e4}, 400, "num_draft_tokens must be of type int"),
        ({"top_logprobs": -1}, 400, "expected top_logprobs from 0 to 11; found -1"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, 400, "half of a surrogate pair"),
        ({"max_tokens": 0}, 400, "max_tokens must be at least 1"),
        ({"max_tokens": True}, 400, "max_tokens must be a number"),
        ({"temperature": -1}, 400, "temperature must be at least 0"),
        ({"temperature": "hot"}, 400, "temperature must be of type"),
        ({"top_k": 5000}, 400, "expected top_k below 1536"),
        ({"top_logprobs": 40}, 400, "top_logprobs must be at most 11"),
        ({"xtc_threshold": 0.9}, 400, "xtc_threshold of at most 0.5"),
        ({"logit_bias": {"99999": 1}}, 400, "token ids 0 to 1535"),
        ({"logit_bias": {"5": "nan"}}, 400, 'expected numbers of at most 1e+06 in size as logit_bias; found "nan"'),
        ({"logit_bias": {"5": None}}, 400, "found null"),
        ({"logit_bias": {"5": True}}, 400, "found true"),
        ({"logit_bias": {"5": 1e9}}, 400, "found 1000000000.0"),
        ({"logit_bias": [5]}, 400, "logit_bias must be of type dict"),
        ({"logit_bias": {"-1": 1}}, 400, "token ids 0 to 1535"),
        ({"logit_bias": {"²": 1}}, 400, "token ids 0 to 1535"),
        ({"logit_bias": {"9" * 5000: 1}}, 400, "token ids 0 to 1535"),
        ({"seed": -1}, 400, "whole number from 0 to"),
        ({"seed": 2**40, "temperature": 1}, 400, "whole number from 0 to"),
        ({"chat_template_kwargs": 1}, 400, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "hi"}}, 400, "expected variables of the chat template"),
        ({"chat_template_kwargs": {"return_tensors": "np"}}, 400, "found 'return_tensors'"),
        ({"messages": []}, 400, "at least one message"),
        ({"messages": ["hi"]}, 400, "an object with a role"),
        ({"messages": [{"role": "user", "content": 3}]}, 400, "expected content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
            400,
            "image_url",
        ),
        ({"messages": [{"role": "bad", "content": "x"}]}, 400, "the chat template refused these messages: no such role"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, 400, "below the target's 4096 positions"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_sentence_and_harms_nobody(served, change, status, message):
    answer = served.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2, **change})
    assert answer[0] == status, answer
    assert message in json.loads(answer[1])["error"]["message"]
    assert ask(served, max_tokens=1).usage.completion_tokens == 1


def test_the_openai_client_sees_its_own_error_classes(served):
    with pytest.raises(openai.NotFoundError, match="another"):
        served.client.chat.completions.create(model="another", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="n = 3"):
        ask(served, n=3)


def test_a_text_completion_of_many_prompts_or_none_is_refused(served):
    for prompt in (["a", "b"], [1, 2], None, ""):
        status, body = served.post("/v1/completions", {"prompt": prompt})
        assert status == 400 and "expected" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": MESSAGES}, "expected no messages at /v1/completions"),
        ({"tools": WEATHER}, "expected no tools at /v1/completions"),
        ({"chat_template_kwargs": {}}, "expected no chat_template_kwargs at /v1/completions"),
        ({"logprobs": -1}, "expected logprobs from 0 to 11; found -1"),
        ({"logprobs": 12}, "expected logprobs from 0 to 11; found 12"),
    ],
)
def test_what_a_text_completion_has_no_use_for_is_refused(served, change, message):
    status, body = served.post("/v1/completions", {"prompt": "x", "max_tokens": 1, **change})
    assert status == 400 and message in json.loads(body)["error"]["message"]


def test_without_a_chat_template_roles_are_written_out_and_its_arguments_are_refused(pair):
    with running(*pair) as server:
        body = {"messages": MESSAGES, "max_tokens": 1}
        for change, message in (
            (
                {"chat_template_kwargs": {"enable_thinking": True}},
                "expected no chat_template_kwargs; served has no chat template",
            ),
            ({"role_mapping": {"user": 1}}, "expected role_mapping to be an object of texts"),
        ):
            status, answer = server.post("/v1/chat/completions", {**body, **change})
            assert status == 400 and message in json.loads(answer)["error"]["message"]
        status, answer = server.post("/v1/chat/completions", {**body, "role_mapping": {"user": "U: ", "assistant": "A: "}})
        assert json.loads(answer)["usage"]["prompt_tokens"] == len(pair[1].encode("U: " + MESSAGES[0]["content"] + "A:"))


def test_whole_numbers_do_for_what_mlx_lm_wants_with_a_point(served):
    status, answer = served.post(
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 1, "temperature": 1, "xtc_probability": 1, "xtc_threshold": 0},
    )
    assert status == 200, answer


def test_options_that_would_make_every_request_fail_end_the_start(pair):
    for options, message in (
        ({"top_k": 1536}, "expected top_k below 1536, the target's vocabulary; found 1536"),
        ({"block_size": 65}, "expected block_size of at most 64 with this drafter; found 65"),
    ):
        with pytest.raises(AssertionError, match=message), running(*pair, **options):
            pass


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

    assert _by_text(Same(), [(1, -0.5), (2, -1.0), (0, -2.0)]) == {"same": -0.5, "other": -1.0, "same (token 0)": -2.0}


def test_nulls_and_what_only_accounts_use_are_as_if_left_out(served):
    body = {"messages": MESSAGES, "max_tokens": 2, "temperature": None, "stop": None, "user": "me", "store": False, "n": 1}
    status, answer = served.post("/v1/chat/completions", body)
    assert status == 200 and json.loads(answer)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("data", "status", "message"),
    [
        (b"{not json", 400, "expected JSON"),
        (b"\xff\xfe{}", 400, "expected JSON in UTF-8"),
        (b'{"messages": [], "temperature": NaN}', 400, "NaN is not JSON"),
        (b'{"messages": [], "temperature": 1e999}', 400, '"1e999" is too large a number'),
        (b'{"messages": [], "presence_penalty": -1' + b"0" * 400 + b"}", 400, "is too large a number"),
        (b"[" * 100_000, 400, "expected JSON"),
        (b"[1]", 400, "expected a JSON object; found list"),
    ],
)
def test_a_broken_body_is_refused(served, data, status, message):
    answer = served.post("/v1/chat/completions", data)
    assert answer[0] == status and message in json.loads(answer[1])["error"]["message"]


def test_a_body_above_the_limit_is_refused_before_it_is_read(served):
    status, body = served.post("/v1/chat/completions", json.dumps({"messages": "x" * 10_000_000}).encode())
    assert status == 413 and "--max-body-mb" in json.loads(body)["error"]["message"]
    assert ask(served, max_tokens=1).usage.completion_tokens == 1


def test_odd_requests_are_answered(served):
    line = b"POST /v1/chat/completions HTTP/1.1\r\n"
    assert served.raw(line + b"\r\n")[0] == 411
    assert served.raw(line + b"Content-Length: -5\r\n\r\n")[0] == 400
    assert served.raw(line + b"Content-Length: many\r\n\r\n")[0] == 400
    assert served.post("/v1/embeddings", {})[0] == 404
    assert served.get("/nothing")[0] == 404
    assert served.raw(b"BREW /pot HTTP/1.1\r\n\r\n")[0] == 501


def test_arguments_reach_the_chat_template(tmp_path):
    path = with_template(tmp_path, "{{ enable_thinking }}{{ style }}{% for m in messages %}{{ m.content }}{% endfor %}")
    model, tokenizer = load(path, dtype=mx.float32)
    with running(model, tokenizer, chat_template_args={"style": "plain"}) as server:
        for given, text in (({}, "Falseplain"), ({"enable_thinking": True, "style": "odd"}, "Trueodd")):
            body = {"messages": [{"role": "user", "content": "x = "}], "max_tokens": 1, "chat_template_kwargs": given}
            usage = json.loads(server.post("/v1/chat/completions", body)[1])["usage"]
            assert usage["prompt_tokens"] == len(tokenizer.encode(text + "x = "))


def test_a_client_that_never_finishes_its_request_is_let_go(served, monkeypatch):
    monkeypatch.setattr(Handler, "timeout", 0.3)
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as link:
        link.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{")
        assert link.recv(1) == b""


def test_a_server_that_ends_does_not_wait_for_its_answers(chatty):
    model = scripted([7] * 10_000, vocab=1536, wait_s=0.01)
    with running(model, chatty[1]) as server:
        link = server.send("/v1/completions", {"prompt": "x", "max_tokens": 5000, "stream": True})
        while model.passes < 5:
            time.sleep(0.005)
        began = time.monotonic()
    link.close()
    # 5,000 passes would take a minute.
    assert time.monotonic() - began < 10


def test_head_asks_for_no_body_and_a_question_mark_ends_an_address(served):
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as link:
        link.sendall(b"HEAD /health HTTP/1.1\r\nHost: x\r\n\r\n")
        data = b"".join(iter(lambda: link.recv(1 << 16), b""))
    head, _, body = data.partition(b"\r\n\r\n")
    length = len(served.get("/health?verbose=1&x=2")[1])
    assert head.startswith(b"HTTP/1.0 200") and f"Content-Length: {length}".encode() in head and body == b""
    assert served.post("/v1/completions?api-version=1", {"prompt": "x", "max_tokens": 1})[0] == 200
    assert json.loads(served.get("/v1/models/serve%64")[1])["id"] == "served"


def test_a_web_page_that_is_allowed_may_send_its_key(chatty):
    with running(*chatty, allowed_origins=["http://good.example"]) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as link:
            link.sendall(b"OPTIONS /v1/chat/completions HTTP/1.1\r\nOrigin: http://good.example\r\n\r\n")
            head = b"".join(iter(lambda: link.recv(1 << 16), b"")).decode()
    assert " 204 " in head.splitlines()[0] and "Access-Control-Allow-Origin: http://good.example" in head
    # The star stands for every header but this one.
    assert "Access-Control-Allow-Headers: *" in head and "Access-Control-Allow-Headers: Authorization" in head


def test_models_and_health_say_what_is_running(served):
    assert served.client.models.list().data[0].id == "served"
    model = served.client.models.retrieve("served")
    assert (model.draft_model, model.block_size) == ("drafter", 8)
    assert served.get("/v1/models/other")[0] == 404
    assert json.loads(served.get("/health")[1]) == {"status": "ok", "queue": 0, "running": False}


def test_a_key_and_foreign_web_pages(chatty):
    with running(*chatty, api_key="sesame") as server:
        body = {"messages": MESSAGES, "max_tokens": 1}
        assert server.post("/v1/chat/completions", body)[0] == 401
        assert server.post("/v1/chat/completions", body, "Authorization: Bearer wrong")[0] == 401
        assert server.post("/v1/chat/completions", body, "Authorization: Bearer sesame")[0] == 200
        # The scheme's letters may be of either case; another scheme with the right key is no bearer token.
        assert server.post("/v1/chat/completions", body, "Authorization: bearer  sesame")[0] == 200
        assert server.post("/v1/chat/completions", body, "Authorization: Basic sesame")[0] == 401
        assert server.post("/v1/chat/completions", body, "Authorization: sesame")[0] == 401
        assert server.get("/v1/models")[0] == 401 and server.get("/health?full=1")[0] == 200
        key = "Authorization: Bearer sesame"
        assert server.post("/v1/chat/completions", body, key, "Origin: http://evil.example")[0] == 403
    with running(*chatty, allowed_origins=["http://good.example"]) as server:
        assert server.post("/v1/chat/completions", body, "Origin: http://good.example")[0] == 200
        assert server.post("/v1/chat/completions", body, "Origin: http://evil.example")[0] == 403


def test_the_default_address_is_this_machine_alone(served):
    assert Options().host == "127.0.0.1" and served.server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_noticed_within_one_round_and_the_next_is_served(chatty, stream):
    tokenizer = chatty[1]
    model = scripted([7] * 10_000, vocab=1536, wait_s=0.02)
    with running(model, tokenizer) as server:
        link = server.send("/v1/completions", {"prompt": "x", "max_tokens": 5000, "stream": stream})
        while model.passes < 10:
            time.sleep(0.005)
        link.close()
        seen = model.passes
        server.wait_idle()
        # One pass was under way, mlx-lm has enqueued the next, and one token may pass between the two looks.
        assert model.passes <= seen + 3
        assert server.client.completions.create(model="served", prompt="y", max_tokens=3).usage.completion_tokens == 3


def test_a_client_that_leaves_during_a_long_prompt_is_noticed_after_a_pass(chatty):
    tokenizer = chatty[1]
    model = scripted([7] * 100, vocab=1536, wait_s=0.02)
    with running(model, tokenizer, prefill_step_size=4) as server:
        link = server.send("/v1/completions", {"prompt": "a b c d " * 200, "max_tokens": 5})
        while model.passes < 5:
            time.sleep(0.005)
        link.close()
        seen = model.passes
        server.wait_idle()
        assert model.passes <= seen + 2


def test_a_client_that_leaves_the_queue_costs_nothing(chatty):
    tokenizer = chatty[1]
    model = scripted([7] * 10_000, vocab=1536, wait_s=0.01)
    with running(model, tokenizer) as server:
        first = server.send("/v1/completions", {"prompt": "x", "max_tokens": 40})
        while not server.generator.running:
            time.sleep(0.005)
        second = server.send("/v1/completions", {"prompt": "z", "max_tokens": 5000})
        while server.generator.waiting < 1:
            time.sleep(0.005)
        assert json.loads(server.get("/health")[1]) == {"status": "ok", "queue": 1, "running": True}
        second.close()
        third = server.send("/v1/completions", {"prompt": "y", "max_tokens": 4})
        assert read(first)[0] == 200
        passes = model.passes
        assert read(third)[0] == 200 and model.passes <= passes + 8


def test_sixteen_requests_at_once_get_their_own_answers_in_order(served, chatty):
    prompts = [f"def f{i}(" for i in range(16)]
    alone = [text_of(expected(chatty, [{"role": "user", "content": p}], max_tokens=6)) for p in prompts]
    got, order, threads = [None] * 16, [], []

    def one(i):
        got[i] = ask(served, [{"role": "user", "content": prompts[i]}], max_tokens=6).choices[0].message.content
        order.append(i)

    for i in range(16):
        threads.append(threading.Thread(target=one, args=(i,)))
        threads[-1].start()
        began = time.monotonic()
        # Each is in the queue, or done, before the next one is sent.
        while served.generator.waiting + served.generator.running + len(order) <= i and time.monotonic() - began < 5:
            time.sleep(0.002)
    for thread in threads:
        thread.join()
    assert got == alone
    # Two neighbours' threads may note their ends in either order.
    assert all(abs(place - i) <= 2 for place, i in enumerate(order))


def test_a_request_that_fails_inside_does_not_harm_the_next_one(chatty, monkeypatch):
    model, tokenizer, drafter = chatty
    with running(model, tokenizer, drafter) as server:
        before = ask(server, max_tokens=12).choices[0].message.content

        def fail(*args, **kwargs):
            raise RuntimeError("planted")

        for stream in (False, True):
            with monkeypatch.context() as patch:
                patch.setattr("dflash_mlx.generation.verify_block", fail)
                patch.setattr("dflash_mlx.models.drafter.Drafter.draft", fail)
                status, body = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 12, "stream": stream})
                assert "planted" in body and status == (200 if stream else 500)
                assert "[DONE]" not in body
                # In a stream the error is its last event.
                said = json.loads(body.rpartition("data: ")[2] if stream else body)
                assert said["error"]["message"] == "RuntimeError: planted"
        assert ask(server, max_tokens=12).choices[0].message.content == before
        assert json.loads(server.get("/health")[1])["status"] == "ok"


def test_the_target_is_plain_again_after_serving(served, chatty):
    ask(served, max_tokens=4)
    model = chatty[0]
    assert {type(layer).__name__ for layer in model.layers} == {"TransformerBlock"}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_empty_says_so(chatty, stream):
    tokenizer = chatty[1]
    with running(scripted([tokenizer.eos_token_id], vocab=1536), tokenizer) as server:
        got = ask(server, max_tokens=9, stream=stream, **({"stream_options": {"include_usage": True}} if stream else {}))
        chunks = list(got) if stream else [got]
    assert [c.choices[0].finish_reason for c in chunks if c.choices] == ["stop"]
    assert chunks[-1].usage.completion_tokens == 1
    assert not stream and got.choices[0].message.content is None or stream and not chunks[0].choices[0].delta.content


def test_requests_that_alternate_between_two_conversations_draft_as_fresh_runs(chatty):
    model, tokenizer, drafter = chatty
    with running(model, tokenizer, drafter, block_size=8) as server:
        talks = {name: [{"role": "user", "content": text}] for name, text in (("a", "import os"), ("b", "class Tree:"))}
        held = dict.fromkeys(talks, 0)
        for turn in range(3):
            for name, messages in talks.items():
                answer = ask(server, messages, max_tokens=10)
                ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
                fresh = list(
                    stream_generate(
                        model,
                        tokenizer,
                        ids,
                        max_tokens=10,
                        draft_model=drafter,
                        block_size=8,
                        prompt_cache=make_prompt_cache(model, drafter),
                    )
                )
                assert answer.choices[0].message.content == text_of(fresh)
                accepted = answer.usage.completion_tokens_details.accepted_prediction_tokens
                assert accepted == sum(r.from_draft for r in fresh)
                assert answer.usage.prompt_tokens_details.cached_tokens >= held[name]
                with server.send("/v1/chat/completions", {"messages": messages, "max_tokens": 900, "stream": True}) as left:
                    left.recv(100)
                # Tokens at the border of an answer and what follows it may be cut otherwise.
                held[name] = len(ids) + 10 - 2
                messages += [
                    {"role": "assistant", "content": answer.choices[0].message.content},
                    {"role": "user", "content": f"turn {turn}"},
                ]


@pytest.mark.full
def test_200_requests_leave_no_memory_behind(chatty):
    with running(*chatty, prompt_cache_size=2) as server:
        held, threads = [], []
        for i in range(200):
            body = {"prompt": f"def f{i % 7}(", "max_tokens": 3, "stream": i % 2 == 0}
            if i % 5 == 4:
                # Some leave early.
                server.send("/v1/completions", {**body, "max_tokens": 50}).close()
            else:
                assert server.post("/v1/completions", body)[0] == 200
            if i in (60, 199):
                server.wait_idle()
                mx.clear_cache()
                held.append(mx.get_active_memory())
                threads.append(threading.active_count())
        # Two caches of other lengths may be kept: one step of 256 rows each.
        assert held[1] - held[0] < 2e6 and threads[1] <= threads[0] + 2, (held, threads)


# What serve.py stands on. A new mlx-lm that fails here says which part of it to read again.


def test_every_option_that_mlx_lms_classes_read_is_there():
    source = inspect.getsource(mlx_lm.server)
    named = set(re.findall(r"cli_args\.(\w+)", source.split("def _run_http_server")[0]))
    assert named <= {f.name for f in fields(Options)}, named - {f.name for f in fields(Options)}


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (mlx_lm.server.ModelProvider, {"load", "load_default", "reset"}),
        (mlx_lm.server.ResponseGenerator, {"_run_generate", "_serve_single", "_is_batchable", "_tokenize", "generate"}),
        (mlx_lm.server.ResponseGenerator, {"_make_state_machine", "_log_cache_stats", "stop_and_join", "is_healthy"}),
        (mlx_lm.server.APIHandler, {"do_POST", "do_GET", "handle_completion", "handle_health_check", "handle_models_request"}),
        (mlx_lm.server.APIHandler, {"handle_chat_completions", "handle_text_completions", "validate_model_parameters"}),
        (mlx_lm.server.APIHandler, {"_validate", "generate_response", "_set_completion_headers", "_set_stream_headers"}),
    ],
)
def test_mlx_lms_server_still_has_the_methods_that_are_overridden_or_called(owner, names):
    assert names <= vars(owner).keys(), names - vars(owner).keys()


def test_mlx_lms_server_still_passes_what_is_expected():
    def of(f):
        return list(inspect.signature(f).parameters)

    server = mlx_lm.server
    assert of(server.ResponseGenerator._serve_single) == ["self", "request", "stream"]
    assert of(server.ResponseGenerator._tokenize) == ["self", "tokenizer", "request", "args"]
    assert of(server.ResponseGenerator._make_state_machine) == ["self", "model_key", "tokenizer", "stop_words"]
    assert of(server.ResponseGenerator.generate) == ["self", "request", "generation_args", "progress_callback"]
    assert of(server.APIHandler.handle_completion) == ["self", "request", "stop_words"]
    assert [f.name for f in fields(server.CompletionRequest)] == ["request_type", "prompt", "messages", "tools", "role_mapping"]
    assert [f.name for f in fields(server.LogitsProcessorArguments)][:2] == ["logit_bias", "repetition_penalty"]
    assert [f.name for f in fields(server.SamplingArguments)] == [
        *("temperature", "top_p", "top_k", "min_p", "xtc_probability", "xtc_threshold")
    ]
    # Every field that mlx-lm's handler reads is known here, so none is dropped without a word.
    from dflash_mlx.serving.app import _IGNORED, _KNOWN, _ONLY

    read_fields = set(re.findall(r"body\.get\(\s*\"(\w+)\"", inspect.getsource(server.APIHandler)))
    assert read_fields <= _KNOWN | _ONLY.keys() | _IGNORED, read_fields - (_KNOWN | _ONLY.keys())


def test_mlx_lms_modules_are_left_as_they_are():
    assert mlx_lm.server.APIHandler.handle_completion is not Handler.handle_completion
    assert {c.__module__ for c in (mlx_lm.server.APIHandler, mlx_lm.server.ResponseGenerator)} == {"mlx_lm.server"}


COMMAND = [sys.executable, "-m", "dflash_mlx.cli.app", "serve"]
PAIR = ("--model", "tiny", "--draft-model", "tiny")


def test_the_command_serves_until_it_is_told_to_end():
    process = subprocess.Popen([*COMMAND, *PAIR, "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stderr.readline()
        assert line.startswith("Serving tiny (drafter tiny) at http://127.0.0.1:"), line
        port = int(re.search(r":(\d+)/v1", line).group(1))
        taken = subprocess.run([*COMMAND, *PAIR, "--port", str(port)], capture_output=True, text=True, timeout=60)
        curl = ["curl", "-sS", "-H", "Content-Type: application/json", f"http://127.0.0.1:{port}/v1/completions"]
        done = subprocess.run(
            [*curl, "-d", '{"prompt": "def test_", "max_tokens": 8}'], capture_output=True, text=True, timeout=60
        )
        assert json.loads(done.stdout)["usage"]["completion_tokens"] == 8
    finally:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and out == "" and err.strip() == "Stopped.", err
    assert taken.returncode == 1 and re.fullmatch(r"Error: .*in use.*\n", taken.stderr), taken.stderr


def test_curl_drives_the_server(served, chatty, tmp_path):
    address = f"http://127.0.0.1:{served.port}/v1"

    def curl(path, body, *options):
        """Status and text of an answer; the body goes through a file, as a long one must."""
        file = tmp_path / "body"
        file.write_text(body if isinstance(body, str) else json.dumps(body))
        command = ["curl", "-sS", "-w", "\n%{http_code}", "-d", f"@{file}", *options, address + path]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        text, _, status = done.stdout.rpartition("\n")
        return int(status), text

    ask = {"messages": MESSAGES, "max_tokens": 20}
    said = text_of(expected(chatty, max_tokens=20))
    status, text = curl("/chat/completions", ask)
    assert (status, json.loads(text)["choices"][0]["message"]["content"]) == (200, said)
    ids = chatty[1].apply_chat_template(MESSAGES, add_generation_prompt=True, tools=WEATHER)
    said = text_of(stream_generate(*chatty[:2], ids, max_tokens=20))
    stop = said[10:13]
    body = {**ask, "stream": True, "stop": stop, "logprobs": True, "tools": WEATHER}
    status, text = curl("/chat/completions", body, "-N")
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert status == 200 and events[-1] == "[DONE]"
    chunks = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert "".join(c["delta"].get("content", "") for c in chunks) == said[: said.index(stop)]
    assert chunks[-1]["finish_reason"] == "stop"
    assert 0 < sum(len(c["logprobs"]["content"]) for c in chunks) <= 20
    for body, status, message in (
        ({**ask, "model": "gpt-9"}, 404, "found 'gpt-9'"),
        ('{"messages": [', 400, "expected JSON"),
        ({"messages": [{"role": "user", "content": "x" * 10_000_000}]}, 413, "at most 8000000 bytes"),
    ):
        got = curl("/chat/completions", body)
        assert got[0] == status and message in json.loads(got[1])["error"]["message"]
    # One that is ended midway.
    process = subprocess.Popen(
        ["curl", "-sSN", "-d", json.dumps({**ask, "max_tokens": 3000, "stream": True}), address + "/chat/completions"],
        stdout=subprocess.PIPE,
    )
    # Comments tell how far the prompt is.
    assert any(line.startswith(b"data: ") for line in process.stdout)
    process.kill()
    process.communicate()
    served.wait_idle()
    assert curl("/completions", {"prompt": "x", "max_tokens": 2})[0] == 200


def test_a_drafter_that_cannot_be_loaded_ends_the_command_with_one_line():
    done = subprocess.run(
        [*COMMAND, "--model", "tiny", "--draft-model", "no/such/folder", "--port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and done.stderr.count("Error: ") == 1 and "no/such/folder" in done.stderr
    assert "Traceback" not in done.stderr
