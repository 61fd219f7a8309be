"""The server as clients meet it: addresses, headers, keys, the command."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection, HTTPResponse

import pytest
from kit import scripted, text_of
from serving_kit import MESSAGES, WEATHER, ask, expected, read, running

from dflash_mlx import stream_generate
from dflash_mlx.errors import DFlashError
from dflash_mlx.serving.app import Answer, is_own_name
from dflash_mlx.serving.log_lines import JsonLines
from dflash_mlx.serving.server import Options, TimedProtocol, serve


def test_a_body_above_the_limit_is_refused_before_it_is_read(served):
    status, body = served.post("/v1/chat/completions", json.dumps({"messages": "x" * 10_000_000}).encode())
    assert status == 413 and "--max-body-mb" in json.loads(body)["error"]["message"]
    assert ask(served, max_tokens=1).usage.completion_tokens == 1


def test_odd_requests_are_answered(served):
    line = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
    assert served.raw(line + b"\r\n")[0] == 400
    assert served.raw(line + b"Content-Length: -5\r\n\r\n")[0] == 400
    assert served.raw(line + b"Content-Length: many\r\n\r\n")[0] == 400
    assert served.raw(line + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n")[0] == 400
    status, body = served.raw(b"no request\r\n\r\n")
    assert status == 400 and json.loads(body)["error"]["type"] == "invalid_request_error"
    assert served.post("/v1/embeddings", {})[0] == 404
    assert served.get("/nothing")[0] == 404


def test_a_method_that_an_address_does_not_take_is_405_in_json(served):
    for line, allowed in ((b"BREW /v1/models", "GET"), (b"GET /v1/completions", "POST"), (b"POST /health", "GET")):
        with socket.create_connection(("127.0.0.1", served.port), timeout=30) as link:
            link.sendall(line + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
            answer = HTTPResponse(link)
            answer.begin()
            assert answer.status == 405 and allowed in answer.headers["Allow"]
            assert allowed in json.loads(answer.read())["error"]["message"]


def test_one_connection_carries_request_after_request_in_pieces_or_not(served):
    link = HTTPConnection("127.0.0.1", served.port, timeout=30)
    data = json.dumps({"prompt": "x", "max_tokens": 1, "stream": True}).encode()
    for body in (data, iter([data[:9], data[9:]]), data):
        link.request("POST", "/v1/completions", body)
        answer = link.getresponse()
        assert answer.version == 11 and answer.status == 200 and answer.read().endswith(b"data: [DONE]\n\n")
        opened = link.sock
    link.request("GET", "/health")
    assert link.getresponse().read() and link.sock is opened
    link.close()


def test_events_of_one_moment_are_written_in_one_piece(served):
    """Written apart, they would all go to a client that has left before the loop can notice it."""
    body = json.dumps({"input": "x", "max_output_tokens": 4, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as link:
        link.sendall(b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        answer, pieces = HTTPResponse(link), []
        answer.begin()
        while size := int(answer.fp.readline(), 16):
            pieces.append(re.findall(r"^event: (\S+)$", answer.fp.read(size + 2).decode(), re.M))
    assert pieces[0] == ["response.created", "response.in_progress"]
    assert pieces[-1][0].endswith(".done") and pieces[-1][-1] in ("response.completed", "response.incomplete"), pieces


def test_small_pieces_of_an_answer_do_not_wait_for_the_clients_acknowledgement(served, monkeypatch):
    made, waits = TimedProtocol.connection_made, []

    def connection_made(self, transport):
        waits.append(not transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        made(self, transport)

    monkeypatch.setattr(TimedProtocol, "connection_made", connection_made)
    assert served.get("/health")[0] == 200 and waits == [False]


@pytest.mark.parametrize("sent", [b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"])
def test_a_client_that_sends_a_byte_now_and_then_is_let_go(served, monkeypatch, sent):
    usual_s = min(TimedProtocol.headers_s, TimedProtocol.body_s)
    monkeypatch.setattr(TimedProtocol, "headers_s", 0.3)
    monkeypatch.setattr(TimedProtocol, "body_s", 0.3)
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as link:
        link.sendall(sent)
        began = time.monotonic()
        link.settimeout(0.05)
        while time.monotonic() - began < usual_s:
            try:
                link.sendall(b"x")
                if link.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
    assert 0.2 < time.monotonic() - began < usual_s


def test_a_client_that_does_not_read_its_answer_is_let_go(chatty, monkeypatch):
    monkeypatch.setattr(TimedProtocol, "unread_s", 0.2)
    monkeypatch.setattr("dflash_mlx.serving.app.Completion.add", lambda self, token: ["x" * 1_000_000])
    model = scripted([7] * 10_000, vocab=1536, wait_s=0.001)
    with running(model, chatty[1]) as server:
        link = server.send("/v1/completions", {"prompt": "x", "max_tokens": 4000, "stream": True})
        while model.passes < 5:
            time.sleep(0.005)
        server.wait_idle()
        link.close()
    assert model.passes < 4000


def test_a_full_queue_is_refused_with_the_time_to_come_again(chatty):
    model = scripted([7] * 10_000, vocab=1536, wait_s=0.01)
    with running(model, chatty[1], max_queue=1) as server:
        body = {"prompt": "x", "max_tokens": 5000}
        first = server.send("/v1/completions", body)
        while not server.engine.running:
            time.sleep(0.005)
        second = server.send("/v1/completions", {**body, "max_tokens": 1})
        while server.engine.waiting < 1:
            time.sleep(0.005)
        with server.send("/v1/completions", body) as third:
            answer = HTTPResponse(third)
            answer.begin()
            assert answer.status == 503 and int(answer.headers["Retry-After"]) > 0
            assert json.loads(answer.read())["error"]["code"] == "overloaded"
        # A client that leaves the queue frees its place.
        second.close()
        while server.engine.waiting:
            time.sleep(0.005)
        second = server.send("/v1/completions", {**body, "max_tokens": 1})
        time.sleep(0.05)
        first.close()
        assert read(second)[0] == 200


def test_head_asks_for_no_body_and_a_question_mark_ends_an_address(served):
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as link:
        link.sendall(b"HEAD /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        data = b"".join(iter(lambda: link.recv(1 << 16), b""))
    head, _, body = data.partition(b"\r\n\r\n")
    length = len(served.get("/health?verbose=1&x=2")[1])
    assert head.startswith(b"HTTP/1.1 200") and f"content-length: {length}".encode() in head.lower() and body == b""
    assert served.post("/v1/completions?api-version=1", {"prompt": "x", "max_tokens": 1})[0] == 200
    assert json.loads(served.get("/v1/models/serve%64")[1])["id"] == "served"


def test_a_web_page_that_is_allowed_may_send_its_key(chatty):
    with running(*chatty, allowed_origins=["http://good.example"]) as server:
        link = HTTPConnection("127.0.0.1", server.port, timeout=30)
        origin = {"Origin": "http://good.example"}
        asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-api-key"}
        link.request("OPTIONS", "/v1/chat/completions", headers={**origin, **asks})
        answer = link.getresponse()
        assert answer.status == 200 and answer.read() is not None
        assert answer.headers.get_all("Access-Control-Allow-Origin") == ["http://good.example"]
        assert answer.headers["Access-Control-Allow-Headers"] == "authorization,x-api-key"
        # Once, and on refusals too.
        for method, path in (("GET", "/v1/models"), ("GET", "/nothing"), ("POST", "/v1/completions")):
            link.request(method, path, headers=origin)
            answer = link.getresponse()
            assert answer.read() and answer.headers.get_all("Access-Control-Allow-Origin") == ["http://good.example"]
        link.close()


def test_models_and_health_say_what_is_running(served):
    assert served.client.models.list().data[0].id == "served"
    model = served.client.models.retrieve("served")
    assert (model.draft_model, model.block_size) == ("drafter", 8)
    assert served.get("/v1/models/other")[0] == 404
    assert json.loads(served.get("/health")[1]) == {
        "status": "ok",
        "queue": 0,
        "running": False,
        "loaded": True,
    }


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
    assert Options().host == "127.0.0.1" and served.server.address[0] == "127.0.0.1"


COMMAND = [sys.executable, "-m", "dflash_mlx.cli.app", "serve"]


PAIR = ("--model", "tiny", "--draft-model", "tiny")


def test_the_command_serves_until_it_is_told_to_end():
    process = subprocess.Popen([*COMMAND, *PAIR, "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while (line := process.stderr.readline()).startswith(("Starting", "Loading")):
            pass  # a slow machine's lines
        assert line.startswith("Serving tiny (drafter tiny) at http://127.0.0.1:"), line
        port = int(re.search(r":(\d+)/v1", line).group(1))
        assert process.stderr.readline() == f"Chat in a browser at http://127.0.0.1:{port}/\n"
        taken = subprocess.run([*COMMAND, *PAIR, "--port", str(port)], capture_output=True, text=True, timeout=60)
        curl = ["curl", "-sS", "-H", "Content-Type: application/json", f"http://127.0.0.1:{port}/v1/completions"]
        done = subprocess.run(
            [*curl, "-d", '{"prompt": "def test_", "max_tokens": 8}'], capture_output=True, text=True, timeout=60
        )
        assert json.loads(done.stdout)["usage"]["completion_tokens"] == 8
    finally:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and out == "" and err == "Stopped.\n", err
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
        ({**ask, "model": "gpt-9"}, 404, "the model 'gpt-9' is not served here"),
        ('{"messages": [', 400, "the body is not JSON"),
        ({"messages": [{"role": "user", "content": "x" * 10_000_000}]}, 413, "at most 8000000 are read"),
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


@pytest.mark.full
def test_a_drafter_that_cannot_be_loaded_ends_the_command_with_one_line():
    done = subprocess.run(
        [*COMMAND, "--model", "tiny", "--draft-model", "no/such/folder", "--port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and done.stderr.count("Error: ") == 1 and "no/such/folder" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("host", "own"),
    [
        *(
            (name, True)
            for name in ("127.0.0.1", "127.0.0.1:8080", "[::1]:80", "192.168.1.5", "localhost:8080", "LOCALHOST", "box")
        ),
        *(
            (name, True)
            for name in ("mac.local:8080", "host.docker.internal", "llm.example", "llm.example:443", "", "app.admitted")
        ),
        *((name, False) for name in ("evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example")),
        *(
            (name, False)
            for name in ("x@evil.example", "evil.example/localhost", "mylocal.example", "127.0.0.1.nip.io", "évil.example")
        ),
        # No address, but half of one.
        *((name, False) for name in ("[::1", "::1]", "[evil.example]")),
    ],
)
def test_a_name_that_a_stranger_can_register_is_no_name_of_this_server(host, own):
    assert is_own_name(host, "llm.example", ["http://app.admitted"]) is own


def test_a_foreign_host_is_refused_everywhere(served, chatty):
    for method in ("GET", "HEAD", "POST", "OPTIONS"):
        for path in ("/v1/models", "/models/served", "/health", "/v1/chat/completions", "/nothing"):
            with socket.create_connection(("127.0.0.1", served.port), timeout=30) as link:
                link.sendall(f"{method} {path} HTTP/1.1\r\nHost: evil.example:80\r\nContent-Length: 0\r\n\r\n".encode())
                answer = HTTPResponse(link, method=method)
                answer.begin()
                status, body = answer.status, answer.read().decode()
            assert status == 403 and "served" not in body and str(served.port) not in body
    for hosts in (b"Host: 127.0.0.1\r\nHost: evil.example", b"Host: evil.example\r\nHost: 127.0.0.1"):
        assert served.raw(b"GET /v1/models HTTP/1.1\r\n" + hosts + b"\r\n\r\n")[0] == 400
    for odd in (
        "Host: [::1",
        "Host: localhost\r\nOrigin: http://[::1",
        "Host: localhost\r\nOrigin: [",
        "Host: localhost\r\nOrigin: //",
    ):
        assert served.raw(f"GET /v1/models HTTP/1.1\r\n{odd}\r\n\r\n".encode())[0] == 403, odd
    with running(*chatty, allowed_origins=["*"]) as server:
        assert server.raw(b"GET /v1/models HTTP/1.1\r\nHost: any.example\r\n\r\n")[0] == 200


@pytest.mark.parametrize("prefix", ["", "/v1", "/v1/v1", "//v1", "/", "/v1/"])
def test_every_address_is_there_with_and_without_v1(served, prefix):
    assert json.loads(served.get(f"{prefix}/models")[1])["data"][0]["id"] == "served"
    assert json.loads(served.get(f"{prefix}/models/served")[1])["id"] == "served"
    assert served.post(f"{prefix}/completions", {"prompt": "x", "max_tokens": 1})[0] == 200
    for path in (f"{prefix}/chat/completions", f"{prefix}/chat/completions/"):
        assert served.post(path, {"messages": MESSAGES, "max_tokens": 1})[0] == 200
    assert served.post(f"{prefix}/models", {})[0] == 405 and served.get(f"{prefix}/completions")[0] == 405


def test_a_queued_stream_gets_its_headers_at_once_and_comments_only_when_it_waits(chatty, monkeypatch):
    assert 1 <= Answer.first_comment_s < Answer.next_comment_s <= 5
    monkeypatch.setattr(Answer, "first_comment_s", 0.8)
    monkeypatch.setattr(Answer, "next_comment_s", 0.6)
    tokenizer = chatty[1]
    model = scripted([7] * 10_000, vocab=1536, wait_s=0.02)
    with running(model, tokenizer) as server:
        first = server.send("/v1/completions", {"prompt": "x", "max_tokens": 100, "stream": True})
        while not server.engine.running:
            time.sleep(0.005)
        began = time.monotonic()
        second = server.send("/v1/completions", {"prompt": "z y", "max_tokens": 3, "stream": True}, "Connection: close")
        head = second.recv(1 << 16)
        assert head.startswith(b"HTTP/1.1 200") and b": prompt" not in head and server.engine.waiting == 1
        # Tokens come all the time: nothing to comment on.
        assert "\n:" not in read(first)[1]
        waited, body = time.monotonic() - began, (head + b"".join(iter(lambda: second.recv(1 << 16), b""))).decode()
        first.close(), second.close()
    comments = re.findall(r"(?m)^: prompt 0/\d+$", body)
    assert 1 <= len(comments) <= 1 + waited / 0.6 and "data: [DONE]\n\n" in body
    assert body.index(": prompt") < body.index("data: ")


def test_a_refused_stream_is_told_so_by_its_status(served):
    body = {"messages": [{"role": "user", "content": "word " * 5000}], "stream": True}
    status, answer = served.post("/v1/chat/completions", body)
    assert status == 400 and json.loads(answer)["error"]["code"] == "context_length_exceeded"


def test_an_address_that_cannot_be_bound_is_told_before_anything_is_loaded(served):
    loaded = []
    for options, problem in (
        (Options(port=served.port), rf"cannot listen at 127.0.0.1, port {served.port}: .*in use\. Choose another with --port"),
        (Options(host="no.such.host.invalid", port=0), "the host 'no.such.host.invalid' is unknown: .*Give an address"),
        (Options(host="203.0.113.7", port=0), "cannot listen at 203.0.113.7, port 0: "),
    ):
        with pytest.raises(DFlashError, match=problem):
            serve(options, lambda: loaded.append(1), print)
    assert not loaded


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.full)])
def test_a_signal_in_prefill_is_answered_at_once_and_the_pass_ends_cleanly(chatty, number):
    inside, said, links = threading.Event(), [], []
    model = scripted([7] * 100, vocab=1536, wait_s=lambda: (inside.set(), time.sleep(1.5)))

    def say(line):
        said.append((model.passes, line))
        if line.startswith("Serving"):
            threading.Thread(target=interrupt, args=(int(line.rsplit(":", 1)[1].split("/")[0]),)).start()

    def interrupt(port):
        links.append(socket.create_connection(("127.0.0.1", port)))
        data = json.dumps({"prompt": "a b c d " * 20, "max_tokens": 5}).encode()
        links[0].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        assert inside.wait(60)
        said.append((model.passes, "signal"))
        os.kill(os.getpid(), number)

    due = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {each: signal.signal(each, handler) for each, handler in due.items()}
    try:
        serve(Options(port=0), lambda: ("served", None, model, chatty[1], None), say)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        links[0].close()
    lines = [line for _, line in said]
    stopping = "Stopping: what is being computed or written ends first. Ctrl-C again leaves at once."
    assert lines[2:] == ["signal", stopping, "Stopped."], lines
    # Within the pass in which the signal came.
    assert said[3][0] == said[2][0]


def test_a_second_ctrl_c_leaves_at_once_also_while_models_load():
    program = (
        "import time; from dflash_mlx.serving.server import Options, serve; "
        "serve(Options(port=0), lambda: (print('loading', flush=True), time.sleep(600)), lambda line: print(line, flush=True))"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline().startswith("Stopping: ")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 130
    finally:
        process.kill()


def test_operators_see_counts_and_one_line_a_request_without_its_text(served, caplog):
    def counts():
        text = served.get("/metrics")[1]
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    before, caplog.handler.level = counts(), 0
    with caplog.at_level("INFO", "dflash_mlx.requests"):
        ask(served, [{"role": "user", "content": "sesame open"}], max_tokens=6)
        assert served.post("/v1/messages", {"messages": [], "max_tokens": 1})[0] == 400
        after = counts()
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert grown['dflash_requests_total{api="chat",end="length"}'] == 1 and grown['dflash_refused_total{status="400"}'] == 1
    assert grown["dflash_generated_tokens_total"] == 6 and grown["dflash_first_token_seconds_count"] == 1
    assert grown["dflash_verified_drafts_total"] > 0 and grown["dflash_width_count"] == 1
    assert after["dflash_queue"] == after["dflash_running"] == 0 and after["dflash_active_memory_bytes"] > 0
    (line,) = [record for record in caplog.records if record.name == "dflash_mlx.requests"]
    said = line.getMessage()
    assert "api=chat end=length" in said and "tokens=6" in said and "tau=" in said and "sesame" not in caplog.text
    assert json.loads(JsonLines().format(line))["tokens"] == 6


def test_prompts_are_logged_as_the_model_reads_them_where_that_was_asked_for(chatty, caplog):
    caplog.handler.level = 0
    with running(*chatty, log_prompts=True) as server, caplog.at_level("INFO", "dflash_mlx.requests"):
        ask(server, [{"role": "user", "content": "sesame\nopen"}], max_tokens=1)
    asked = next(record for record in caplog.records if record.name == "dflash_mlx.requests")
    assert "sesame\\nopen" in asked.getMessage() and "\n" not in asked.getMessage()
    assert json.loads(JsonLines().format(asked))["prompt"].startswith("[user]")
