"""The thread that generates: order, caches, clients that leave, faults inside."""

import importlib
import json
import threading
import time

import mlx.core as mx
import pytest
from families import BASE, FAMILIES, varied
from kit import scripted, text_of
from serving_kit import MESSAGES, ask, expected, read, running

from dflash_mlx import make_prompt_cache, stream_generate
from dflash_mlx.errors import DFlashError
from dflash_mlx.sampling import Distribution, SamplingSettings
from dflash_mlx.serving import engine
from dflash_mlx.serving.engine import Generation, LoadedPair, Options
from dflash_mlx.serving.prefix_cache import CacheOptions


def test_a_seed_gives_the_text_of_the_api_with_any_number_of_drafts(served, chatty):
    sampler = Distribution(0.9, top_p=0.95, top_k=50)
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


def test_options_that_would_make_every_request_fail_end_the_start(pair):
    for options, message in (
        ({"sampling": SamplingSettings(top_k=1536)}, "top_k is 1536; it must be below 1536, the target's vocabulary"),
        ({"block_size": 65}, "block_size is 65; with this drafter it must be at most 64"),
    ):
        with pytest.raises(DFlashError, match=message), running(*pair, **options):
            pass


@pytest.fixture
def slow_until_left(monkeypatch):
    """Passes of a target, and what to call when the client leaves: from then on each waits until the server knows of it. So what
    is counted does not depend on when this machine gives the server's thread its turn."""
    left, noticed, cancel = threading.Event(), threading.Event(), Generation.cancel

    def noticing(self):
        cancel(self)
        noticed.set()

    monkeypatch.setattr(Generation, "cancel", noticing)
    return lambda: noticed.wait(20) if left.is_set() else time.sleep(0.005), left.set


def test_a_server_that_ends_does_not_wait_for_its_answers(chatty):
    model = scripted([7] * 10_000, vocab=1536, wait_s=0.01)
    with running(model, chatty[1]) as server:
        link = server.send("/v1/completions", {"prompt": "x", "max_tokens": 5000, "stream": True})
        while model.passes < 5:
            time.sleep(0.005)
    link.close()
    # 5,000 would take a minute.
    assert model.passes < 2500


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_noticed_within_one_round_and_the_next_is_served(chatty, stream, slow_until_left):
    tokenizer, (passing, leave) = chatty[1], slow_until_left
    model = scripted([7] * 10_000, vocab=1536, wait_s=passing)
    with running(model, tokenizer) as server:
        link = server.send("/v1/completions", {"prompt": "x", "max_tokens": 5000, "stream": stream})
        while model.passes < 10:
            time.sleep(0.005)
        leave()
        link.close()
        seen = model.passes
        server.wait_idle()
        # One pass was under way, mlx-lm has enqueued the next, and one token may pass between the two looks.
        assert model.passes <= seen + 3
        assert server.client.completions.create(model="served", prompt="y", max_tokens=3).usage.completion_tokens == 3


def test_a_client_that_leaves_during_a_long_prompt_is_noticed_after_a_pass(chatty, slow_until_left):
    tokenizer, (passing, leave) = chatty[1], slow_until_left
    model = scripted([7] * 100, vocab=1536, wait_s=passing)
    with running(model, tokenizer, caches=CacheOptions(prefill_step_size=4)) as server:
        link = server.send("/v1/completions", {"prompt": "a b c d " * 200, "max_tokens": 5})
        while model.passes < 5:
            time.sleep(0.005)
        leave()
        link.close()
        seen = model.passes
        server.wait_idle()
        assert model.passes <= seen + 2


def test_a_client_that_leaves_the_queue_costs_nothing(chatty):
    tokenizer = chatty[1]
    model = scripted([7] * 10_000, vocab=1536, wait_s=0.01)
    with running(model, tokenizer) as server:
        first = server.send("/v1/completions", {"prompt": "x", "max_tokens": 200})
        while not server.engine.running:
            time.sleep(0.005)
        second = server.send("/v1/completions", {"prompt": "z", "max_tokens": 5000})
        while server.engine.waiting < 1:
            time.sleep(0.005)
        assert json.loads(server.get("/health")[1]).items() >= {"status": "ok", "queue": 1, "running": True}.items()
        second.close()
        third = server.send("/v1/completions", {"prompt": "y", "max_tokens": 4})
        assert read(first)[0] == 200
        passes = model.passes
        assert read(third)[0] == 200 and model.passes <= passes + 8


@pytest.mark.full
def test_sixteen_requests_at_once_get_their_own_answers_in_order(served, chatty, monkeypatch):
    prompts = [f"def f{i}(" for i in range(16)]
    alone = [text_of(expected(chatty, [{"role": "user", "content": p}], max_tokens=6)) for p in prompts]
    got, begun, threads = [None] * 16, [], []
    text_of_answer = engine._AnswerText
    monkeypatch.setattr(engine, "_AnswerText", lambda tokenizer, job: (begun.append(job), text_of_answer(tokenizer, job))[1])

    def one(i):
        got[i] = ask(served, [{"role": "user", "content": prompts[i]}], max_tokens=6).choices[0].message.content

    for i in range(16):
        threads.append(threading.Thread(target=one, args=(i,)))
        threads[-1].start()
        # Each is in the queue, or begun, before the next one is sent.
        while served.engine.waiting + len(begun) <= i and threads[-1].is_alive():
            time.sleep(0.002)
    for thread in threads:
        thread.join()
    assert got == alone
    ids = [chatty[1].apply_chat_template([{"role": "user", "content": p}], add_generation_prompt=True) for p in prompts]
    assert [job.prompt for job in begun] == ids


def test_a_request_that_fails_inside_does_not_harm_the_next_one(chatty, monkeypatch):
    model, tokenizer, drafter = chatty
    with running(model, tokenizer, drafter) as server:
        before = ask(server, max_tokens=12).choices[0].message.content

        def fail(*args, **kwargs):
            raise RuntimeError("planted")

        for stream in (False, True):
            with monkeypatch.context() as patch:
                patch.setattr("dflash_mlx.loop.verify_block", fail)
                patch.setattr("dflash_mlx.models.drafter.Drafter.draft", fail)
                status, body = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 12, "stream": stream})
                assert "planted" in body and status == (200 if stream else 500)
                assert "[DONE]" not in body
                # In a stream the error is its last event.
                said = json.loads(body.rpartition("data: ")[2] if stream else body)
                assert said["error"]["message"] == "RuntimeError: planted."
        assert ask(server, max_tokens=12).choices[0].message.content == before
        assert json.loads(server.get("/health")[1])["status"] == "ok"


def test_the_target_is_plain_again_after_serving(served, chatty):
    ask(served, max_tokens=4)
    model = chatty[0]
    assert {type(layer).__name__ for layer in model.layers} == {"TransformerBlock"}


@pytest.mark.full
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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", [ValueError, KeyError, TypeError])
def test_a_fault_inside_is_status_500_and_logged(chatty, monkeypatch, caplog, fault, stream):
    def fail(*args, **kwargs):
        raise fault("planted")

    with running(*chatty) as server:
        with monkeypatch.context() as patch:
            patch.setattr("dflash_mlx.batch.generator.BatchGenerator.insert", fail)
            body = {"messages": MESSAGES, "max_tokens": 2, "stream": stream}
            status, answer = server.post("/v1/chat/completions", body)
        said = json.loads(answer.rpartition("data: ")[2])["error"]
        assert status == (200 if stream else 500) and said["type"] == "server_error" and "planted" in said["message"]
        assert ask(server, max_tokens=1).usage.completion_tokens == 1
    assert any(record.exc_info and record.levelname == "ERROR" for record in caplog.records)


def test_no_bytes_for_prompt_caches_keep_none(chatty):
    with running(*chatty, prompt_cache_bytes=0) as server:
        for _ in range(2):
            assert ask(server, max_tokens=4).usage.prompt_tokens_details.cached_tokens == 0


def test_what_waits_when_the_server_ends_is_told_so(chatty):
    model = scripted([7] * 10_000, vocab=1536, wait_s=0.02)
    with running(model, chatty[1]) as server:
        first = server.send("/v1/completions", {"prompt": "x", "max_tokens": 5000})
        while not server.engine.running:
            time.sleep(0.005)
        second = server.send("/v1/completions", {"prompt": "y", "max_tokens": 5000})
        while server.engine.waiting < 1:
            time.sleep(0.005)
        server.engine.close()
        status, body = read(second)
        first.close(), second.close()
    assert status == 503 and json.loads(body)["error"]["message"] == "the server is stopping. Ask again later."


def test_models_that_nobody_asks_for_are_given_up_and_loaded_again(chatty):
    with running(*chatty, unload_after_s=0.3) as server:
        first = ask(server, max_tokens=6)
        began = time.monotonic()
        while server.engine.is_loaded:
            assert time.monotonic() - began < 60
            time.sleep(0.02)
        assert server.engine.pair.model is server.engine.pair.drafter is None
        # What is said of the models needs none.
        assert server.client.models.list().data[0].block_size == chatty[2].config.block_size
        assert json.loads(server.get("/health")[1])["loaded"] is False
        again = ask(server, max_tokens=6, extra_body={"num_draft_tokens": 2})
    assert again.choices[0].message.content == first.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.full
def test_an_exact_server_answers_one_by_one_as_without_a_drafter(chatty):
    model, tokenizer, drafter = chatty
    said = []
    for draft in (None, drafter):
        with running(model, tokenizer, draft, caches=CacheOptions(exact=True)) as server:
            said.append([ask(server, max_tokens=9).choices[0].message.content for _ in range(2)])
            assert server.engine._together is None
    assert said[0] == said[1] and said[0][0] == said[0][1]


def test_what_an_exact_server_cannot_honour_is_refused_when_it_starts(chatty):
    pair = LoadedPair("served", "draft", *chatty)
    with pytest.raises(DFlashError, match="max_batch is 4 with exact"):
        pair.check(Options(caches=CacheOptions(exact=True), max_batch=4))
    with pytest.raises(DFlashError, match="block_size is 20 with exact; a pass of exact has at most 16 rows"):
        pair.check(Options(caches=CacheOptions(exact=True), block_size=20))
    with pytest.raises(DFlashError, match="max_kv_size was given with exact"):
        pair.check(Options(caches=CacheOptions(exact=True, max_kv_size=64)))
