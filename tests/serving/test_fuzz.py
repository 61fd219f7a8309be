"""Odd values in every field of the table, and bytes that are no requests: answers, no tracebacks, and a server that goes on."""

import asyncio
import json
import random
import socket
from pathlib import Path

import pytest
from kit import scripted
from serving_kit import MESSAGES, ask

from dflash_mlx.serving.app import make_app
from dflash_mlx.serving.engine import Engine, Options
from dflash_mlx.serving.fields import ADDRESSES, HONOURED, IGNORED, REFUSED

ODD = [None, True, -1, 1.5, 2**70, "", "\0𝔘", "x" * 3000, [], [None, [[]]], {}, {"type": [], "a": {"b": None}}]
BODIES = {
    "chat": {"messages": MESSAGES},
    "text": {"prompt": "x"},
    "responses": {"input": "x"},
    "messages": {"messages": MESSAGES},
}
# Places within what is honoured, beside the fields themselves.
WITHIN = {
    "chat": [("messages", [{"role": "user", "content": ODD}]), ("messages", [{"role": "assistant", "tool_calls": ODD}])],
    "responses": [("input", [{"type": "function_call", "name": ODD}]), ("input", [{"type": "reasoning", "content": ODD}])],
    "messages": [("messages", [{"role": "user", "content": [{"type": "tool_result", "content": ODD}]}]), ("system", [ODD])],
}


# Addresses that have no column in the table.
BESIDE = {
    "/v1/messages/count_tokens": ({"messages": MESSAGES}, ["messages", "system", "tools", "thinking", "model"]),
    "/v1/tokenize": ({"content": "x"}, ["content", "prompt", "messages", "tools"]),
    "/v1/detokenize": ({"tokens": [1]}, ["tokens"]),
}


def cases():
    """(address, body) of each field with each odd value."""
    for path, (body, names) in BESIDE.items():
        for name in names:
            for value in ODD:
                yield path, {**body, name: value}
    for api, body in BODIES.items():
        for name in {**HONOURED[api], **dict.fromkeys(IGNORED[api]), **REFUSED[api], "nobody_knows_it": ()}:
            for value in ODD:
                yield ADDRESSES[api], {**body, name: value}
        for name, shape in WITHIN.get(api, ()):
            for value in ODD:
                yield ADDRESSES[api], {**body, name: json.loads(json.dumps(shape).replace(json.dumps(ODD), json.dumps(value)))}


async def answer(app, path, data):
    """Status and body of what an application answers."""
    sent, given = [], iter([{"type": "http.request", "body": data, "more_body": False}])

    async def receive():
        return next(given, None) or await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "http_version": "1.1", "method": "POST", "query_string": b"", "scheme": "http", "root_path": ""}
    scope |= {
        "path": path,
        "raw_path": path.encode(),
        "headers": [(b"host", b"x")],
        "server": ("x", 1),
        "asgi": {"version": "3.0"},
    }
    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:]).decode()


@pytest.mark.full
def test_every_field_with_odd_values_is_answered_without_a_fault(chatty, caplog):
    tokenizer = chatty[1]
    options = Options(max_tokens=2, prompt_cache_bytes=0)
    # It ends at once, whatever is asked.
    model = scripted([tokenizer.eos_token_id] * 100_000, vocab=1536)
    engine = Engine(options, lambda: ("served", None, model, tokenizer, None))
    engine.start()
    engine.ready.wait()
    statuses, wrong = [], []

    async def all_of_them():
        app = make_app(engine)
        for number, (path, body) in enumerate(cases()):
            if number % 2 and "stream" not in body and path not in BESIDE:
                body["stream"] = True
            status, said = await answer(app, path, json.dumps(body).encode())
            statuses.append(status)
            told = said.startswith(("data: ", "event: ")) or json.loads(said)
            if status >= 500 or not told or '"server_error"' in said or '"api_error"' in said:
                wrong.append((status, path, body, said[:300]))

    try:
        asyncio.run(all_of_them())
    finally:
        engine.close()
        engine.join()
    assert not wrong, wrong[:5]
    fields = sum(len({*HONOURED[api], *IGNORED[api], *REFUSED[api]}) for api in BODIES)
    assert (
        {*BODIES} == {*ADDRESSES}
        and len(statuses) > fields * len(ODD) >= 2000
        and statuses.count(200) > 500
        and statuses.count(400) > 500
    )
    assert not [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"]


def test_300_times_bytes_that_are_no_requests_leave_the_server_alive(served, caplog):
    chance = random.Random(5)
    data = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    good = [
        head + b"Content-Length: %d\r\n\r\n" % len(data) + data,
        head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(data) + data + b"\r\n0\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 70_000 + b"\r\n\r\n",
        b"HEAD /health HTTP/1.0\r\n\r\nOPTIONS * HTTP/1.1\r\nHost: x\r\nOrigin: null\r\n\r\n",
    ]
    for number in range(300):
        sent = bytearray(good[number % 4] if number % 5 else chance.randbytes(200))
        for _ in range(chance.randrange(1, 6)):
            at = chance.randrange(len(sent))
            change = chance.randrange(3)
            if change == 0:
                sent[at] = chance.randrange(256)
            elif change == 1:
                sent[at:at] = chance.choice([b"\r\n", b"\0", b"\r\n\r\n", b":", b" ", b"Content-Length: 9\r\n"])
            else:
                del sent[at : at + chance.randrange(1, 30)]
            sent = sent or bytearray(b"\n")
        with socket.create_connection(("127.0.0.1", served.port), timeout=60) as link:
            try:
                link.sendall(sent)
                link.shutdown(socket.SHUT_WR)
                while link.recv(1 << 16):
                    pass
            except ConnectionError:
                pass
    served.wait_idle()
    assert ask(served, max_tokens=1).usage.completion_tokens == 1
    assert not [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"]


CLIENTS = sorted((Path(__file__).parents[1] / "data/clients").glob("*.json"))


@pytest.mark.parametrize("file", CLIENTS, ids=lambda file: file.stem)
def test_what_agents_send_behind_a_round_of_tools_is_answered(served, file):
    # Fields and shapes of Codex CLI, Claude Code and opencode (of November 2026), with other texts and ids.
    sent = json.loads(file.read_text())
    limit = {"chat": "max_tokens", "responses": "max_output_tokens", "messages": "max_tokens"}[sent["api"]]
    status, said = served.post(ADDRESSES[sent["api"]], {**sent["body"], limit: 4})
    assert status == 200 and sent["body"]["stream"], said
    last = {"chat": "data: [DONE]", "responses": "event: response.incomplete", "messages": "event: message_stop"}[sent["api"]]
    assert said.strip().split("\n\n")[-1].startswith(last) and '"error": {' not in said
