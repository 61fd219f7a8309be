"""A server's requests that are answered together: each as alone, prompts shared, memory counted."""

import queue
import threading
import time

import pytest
from serving_kit import running

from dflash_mlx.errors import DFlashError
from dflash_mlx.serving.together import Together

BODIES = [
    {"prompt": "def add(a, b):", "max_tokens": 24, "temperature": 0},
    {"prompt": "import os\n", "max_tokens": 40, "temperature": 0.8, "seed": 3},
    {"prompt": "x = 1\n" * 12, "max_tokens": 9, "temperature": 0, "frequency_penalty": 1.2},
    {"prompt": "class A:", "max_tokens": 32, "temperature": 0, "stop": ["self"], "logprobs": 2},
]


def completions(server, bodies, meanwhile=lambda: None):
    """Answers to bodies that are sent at once, in their order. None begins before all wait, however slow this machine is."""
    answers, engine, is_asked = [None] * len(bodies), server.engine, threading.Event()
    next_job = engine._next_job

    def once_all_wait():
        is_asked.set()
        if engine._queue.qsize() < len(bodies):
            time.sleep(0.002)
            raise queue.Empty
        engine._next_job = next_job
        return next_job()

    engine._next_job = once_all_wait
    assert is_asked.wait(60)

    def ask(i):
        extra = {name: value for name, value in bodies[i].items() if name in ("num_draft_tokens",)}
        body = {name: value for name, value in bodies[i].items() if name not in extra}
        answers[i] = server.client.completions.create(model="served", extra_body=extra, **body)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        meanwhile()
        time.sleep(0.001)
    assert None not in answers
    return answers


@pytest.fixture
def most(monkeypatch):
    """The most requests that ran together."""
    seen = [0]
    step = Together.step

    def counted(self):
        seen.append(len(self))
        step(self)

    monkeypatch.setattr(Together, "step", counted)
    return lambda: max(seen)


@pytest.mark.rows_equal
def test_requests_at_once_are_answered_as_each_is_alone(pair, most):
    with running(*pair) as server:
        alone = [server.client.completions.create(model="served", **body).choices[0] for body in BODIES]
        # Not from what the first time left behind.
    with running(*pair) as server:
        got = [answer.choices[0] for answer in completions(server, BODIES)]
        server.wait_idle()
    assert most() > 1
    for one, other in zip(got, alone, strict=True):
        assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
    assert got[3].logprobs.tokens == alone[3].logprobs.tokens
    assert got[3].logprobs.token_logprobs == pytest.approx(alone[3].logprobs.token_logprobs, abs=1e-4)


def test_a_beginning_that_requests_share_is_read_once_also_while_they_run(pair):
    prompt = "def add(a, b):\n    return a + b\n\n" * 6
    bodies = [{"prompt": f"{prompt}{tail}", "max_tokens": 40, "temperature": 0} for tail in ("x", "y = 2", "def f(")]
    with running(*pair) as server:
        usages = [answer.usage for answer in completions(server, bodies)]
    held = sorted(usage.prompt_tokens_details.cached_tokens for usage in usages)
    assert held[0] == 0 and all(cached > 40 for cached in held[1:])


def test_a_request_waits_until_what_all_may_take_fits_in_memory(pair, most, monkeypatch):
    init = Together.__init__

    def small(self, *args, **named):
        init(self, *args, **named)
        self._room = self._needs_of(200)

    monkeypatch.setattr(Together, "__init__", small)
    with running(*pair) as server:
        completions(server, [{"prompt": f"x = {i}", "max_tokens": 90, "temperature": 0} for i in range(4)])
    # Two of 90 tokens and their prompts fit into 200, three do not.
    assert most() == 2


def test_clients_that_leave_end_their_own_requests_only(pair):
    with running(*pair) as server:
        links = [server.send("/v1/completions", {"prompt": f"x = {i}", "max_tokens": 400, "temperature": 0}) for i in range(3)]
        while len(server.engine.generations) < 3:
            time.sleep(0.002)
        for link in links[:2]:
            link.close()
        began = time.monotonic()
        while len(server.engine.generations) > 1 and time.monotonic() - began < 60:
            time.sleep(0.002)
        assert len(server.engine.generations) == 1
        links[2].close()
        server.wait_idle()


def test_max_batch_bounds_what_runs_and_needs_a_drafter(pair, most):
    with running(*pair, max_batch=2) as server:
        completions(server, BODIES)
    assert most() == 2
    with pytest.raises(DFlashError, match="max_batch is 2; requests run together with a drafter only"):
        with running(pair[0], pair[1], max_batch=2):
            pass


@pytest.mark.rows_equal
def test_n_gives_answers_of_the_next_seeds_and_counts_the_prompt_once(pair):
    body = {"model": "served", "prompt": "x = [", "max_tokens": 10, "temperature": 1.0}
    with running(*pair) as server:
        alone = [server.client.completions.create(seed=seed, **body).choices[0].text for seed in (4, 5, 6)]
        got = server.client.completions.create(seed=4, n=3, **body)
        streamed = {0: "", 1: "", 2: ""}
        for chunk in server.client.completions.create(seed=4, n=3, stream=True, stream_options={"include_usage": True}, **body):
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
            usage = chunk.usage or None
    assert [(one.index, one.text) for one in got.choices] == [*enumerate(alone)] and streamed == dict(enumerate(alone))
    assert got.usage.completion_tokens == usage.completion_tokens <= 30
    assert got.usage.prompt_tokens == usage.prompt_tokens < 10
