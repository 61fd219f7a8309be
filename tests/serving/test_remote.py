"""`chat --url`: answers of our own server over its socket, and of others that speak OpenAI's API in other words."""

import json
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO

import pytest
from cli_kit import run
from kit import scripted
from serving_kit import MESSAGES, running

from dflash_mlx.errors import DFlashError
from dflash_mlx.serving.chat import Chat
from dflash_mlx.serving.prefix_cache import CacheOptions
from dflash_mlx.serving.remote import Remote, RemoteConversation
from dflash_mlx.serving.sessions import read_session, write_session


def talking(url, key=None, name=None, system=None, **given):
    remote = Remote(url, key)
    return RemoteConversation(remote, remote.pair(name), given, system)


def answered(talk, text="def add(a, b):", should_stop=lambda: False, progress=lambda done, total: None):
    """Pieces of the next answer."""
    talk.messages.append({"role": "user", "content": text})
    return [(kind, piece) for kind, piece, _ in talk.answer(should_stop, progress)]


def chunk(reason=None, **delta):
    return "data: " + json.dumps({"choices": [{"delta": delta, "finish_reason": reason}]})


@contextmanager
def other(lines, status=200, kind="text/event-stream", models=("m",), then=lambda: None):
    """A server of somebody else's; gives its address and the bodies and headers that came."""
    came = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(404) if models is None else self.send({"data": [{"id": name} for name in models]})

        def do_POST(self):
            came.append((json.loads(self.rfile.read(int(self.headers["Content-Length"]))), dict(self.headers)))
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()
            for line in lines:
                self.wfile.write(line.encode() + b"\n\n")
                self.wfile.flush()
                then()

        def send(self, body):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *about):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}", came
    finally:
        server.shutdown()


def test_our_server_answers_a_conversation_and_reuses_its_prompt(served):
    talk = talking(f"http://127.0.0.1:{served.port}", max_tokens=8)
    pieces = answered(talk)
    said = served.client.chat.completions.create(model="served", messages=MESSAGES, max_tokens=8)
    assert len(pieces) > 1 and "".join(text for _, text in pieces) == said.choices[0].message.content
    last = talk.last
    assert (last.generation_tokens, last.finish_reason, talk.used) == (8, "length", said.usage.total_tokens)
    assert last.generation_tps > 0 and talk.pair.name == "served" and talk.limit == talk.pair.limit == 4096
    answered(talk, "and more")
    assert talk.held > 0 and [one["role"] for one in talk.messages] == ["user", "assistant"] * 2
    assert talk.totals.answers == 2 and talk.totals.tokens == 16


def test_only_what_was_given_is_sent_under_openais_names():
    with other([chunk("stop", content="x")]) as (address, came):
        talk = talking(address, "secret", system="be brief", temp=0.0, top_k=3)
        answered(talk)
        talk.set("temp", "0.5")
        talk.set("top_k", "default")
        talk.set("thinking", "off")
        answered(talk, "y")
    (first, headers), (second, _) = came
    always = {"model", "messages", "stream", "stream_options"}
    assert first.keys() == always | {"temperature", "top_k"} and (first["temperature"], first["top_k"]) == (0.0, 3)
    assert first["messages"][0] == {"role": "system", "content": "be brief"} and headers["Authorization"] == "Bearer secret"
    assert second.keys() == always | {"temperature", "chat_template_kwargs"} and second["temperature"] == 0.5
    assert second["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_thinking_and_progress_come_in_the_words_of_other_servers(name):
    seen, stream = [], [": keepalive 5/9", chunk(role="assistant", content=""), chunk(**{name: "hm"}), chunk(content="yes")]
    counts = {"completion_tokens": 5, "prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
    stream += [chunk("stop"), "data: " + json.dumps({"choices": [], "usage": counts}), "data: [DONE]"]
    with other(stream) as (address, _):
        talk = talking(address)
        assert answered(talk, progress=lambda *at: seen.append(at)) == [("thinking", "hm"), ("answer", "yes")]
    assert seen == [(5, 9)] and talk.messages[-1] == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    assert (talk.last.generation_tokens, talk.used, talk.held) == (5, 14, 4)
    assert talk.body()["messages"][-1] == {"role": "assistant", "content": "yes"}


def test_a_server_that_does_not_stream_is_understood():
    whole = {"choices": [{"message": {"role": "assistant", "content": "all of it"}, "finish_reason": "stop"}]}
    with other([json.dumps(whole)], kind="application/json") as (address, _):
        assert answered(talking(address)) == [("answer", "all of it")]


@pytest.mark.parametrize(
    ("lines", "status", "message"),
    [
        (['{"error": {"message": "no such model"}}'], 404, "status 404: no such model"),
        (['{"error": "bad key"}'], 401, "status 401: bad key. Give its key with --api-key"),
        (["<html>bad gateway</html>"], 502, "status 502: <html>bad gateway"),
        ([chunk(content="x"), 'data: {"error": {"message": "out of memory"}}'], 200, "the server says: out of memory"),
        ([chunk(content="x")], 200, "ended the answer in the middle"),
        (["data: what"], 200, "other than a chat completion"),
    ],
)
def test_a_server_that_fails_is_told_in_its_own_words_and_what_came_stays(lines, status, message):
    with other(lines, status) as (address, _):
        talk = talking(address)
        with pytest.raises(DFlashError, match=message):
            answered(talk)
    assert len(talk.messages) == (2 if "data: {" in lines[0] and status == 200 else 1)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n",
            "ended the answer in the middle",
        ),
        (b"", "closed the connection before it answered"),
    ],
)
def test_a_server_that_is_lost_is_told_in_words_not_in_those_of_the_transport(head, message):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def lose_one():
            with listener.accept()[0] as client:
                client.recv(1 << 16)
                client.sendall(head)

        threading.Thread(target=lose_one, daemon=True).start()
        remote = Remote(f"127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(DFlashError, match=rf"^{remote.url} {message}\. /retry asks again\.$"):
            list(remote.events({}, lambda: False))


def test_no_server_no_address_and_several_models_are_one_sentence():
    with pytest.raises(
        DFlashError, match=r"no server answers at http://127.0.0.1:9/v1: [A-Z][a-z ]+\. Start it, or give another --url"
    ):
        talking("127.0.0.1:9")
    with pytest.raises(DFlashError, match="not the address"):
        Remote("ftp://x")
    with other([], models=("a", "b")) as (address, _):
        with pytest.raises(DFlashError, match="lists 2 models: a, b. Name one with --model"):
            talking(address)
        assert talking(address, name="b").pair.name == "b"
    with other([], models=None) as (address, _):
        with pytest.raises(DFlashError, match=r"has no list of models \(HTTP 404\). Check the address"):
            talking(address)
        assert talking(address, name="b").pair.name == "b"
    for pasted in ("x:1/v1/chat/completions", " x:1/v1/models/ ", "x:1/chat/completions"):
        assert Remote(pasted).url == "http://x:1/v1"
    assert Remote("https://x.org/api/v1/").url == "https://x.org/api/v1" and Remote("x:1").url == "http://x:1/v1"


@pytest.mark.parametrize("pieces", [0, 2])
def test_a_stop_ends_the_server_too_also_before_the_first_word(chatty, pieces):
    model = scripted([7] * 10_000, vocab=1536, wait_s=0.02)
    with running(model, chatty[1], max_tokens=2000, caches=CacheOptions(prefill_step_size=8)) as served:
        talk, seen = talking(f"http://127.0.0.1:{served.port}"), []
        talk.messages.append({"role": "user", "content": "x " * (1 if pieces else 1500)})
        stop = lambda: len(seen) >= pieces and served.engine.running  # noqa: E731
        seen.extend(seen.append(text) for _, text, _ in talk.answer(stop, lambda done, total: None))
        served.wait_idle()
        # Of 2,000 tokens, or of 188 passes over the prompt.
        assert model.passes < 100
    assert talk.stopped and (talk.last is None) == (pieces == 0)
    assert len(talk.messages) == (2 if pieces else 1)


def test_a_session_remembers_its_server_but_no_key(served, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    talk = talking(f"127.0.0.1:{served.port}", "secret", temp=0.7, max_tokens=2)
    answered(talk)
    path = write_session("far", talk.state())
    state = read_session("far")
    assert state["url"] == talk.url and "secret" not in path.read_text()
    again = talking(f"127.0.0.1:{served.port}")
    again.restore(state)
    assert again.messages == talk.messages and again.given == {"temp": 0.7, "max_tokens": 2}


def test_commands_that_need_models_here_say_so_in_a_sentence(served):
    out, notes = StringIO(), StringIO()
    talk = talking(f"127.0.0.1:{served.port}", max_tokens=4)
    lines = ["/drafts", "/set block_size 4", "/model other draft", "/model", "x", "/retry", "/stats", "/set temp 0", "/retry"]
    Chat(
        talk, lambda name, drafter: talk.remote.pair(name), stdin=StringIO("\n".join(lines) + "\n"), stdout=out, stderr=notes
    ).run()
    said = notes.getvalue()
    assert said.startswith(f"served, answered by {talk.url}. What is not set here is set there.")
    assert said.count("needs models that run here") == 3 and "Model served of" in said
    assert said.count("Temperature 0 gives the same answer") == 1 and "context" in said and out.getvalue().strip()


@pytest.mark.full
def test_the_command_talks_to_a_server(served, tmp_path):
    done = run("chat", "--url", f"127.0.0.1:{served.port}", "-m", "6", stdin="def f\n", env={"XDG_STATE_HOME": str(tmp_path)})
    assert done.returncode == 0 and done.stdout.strip() and "6 tokens" in done.stderr, done.stderr
