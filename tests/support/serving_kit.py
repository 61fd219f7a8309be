"""A server in one process with its client, for the tests of serving/."""

import json
import socket
import time
from contextlib import contextmanager
from http.client import HTTPResponse

import openai

from dflash_mlx import stream_generate
from dflash_mlx.serving.engine import Engine
from dflash_mlx.serving.server import Options, Server

TOOLS = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% for tool_call in [] %}{{ tool_call.name }}{% endfor %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "[{{ m.role }}]<|endoftext|>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]<|endoftext|>{% endif %}"
)


WEATHER = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


class Running:
    """A server at a free port, with its client."""

    def __init__(self, server, engine):
        self.server, self.port, self.engine = server, server.address[1], engine
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
        while self.engine.running or self.engine.waiting:
            assert time.monotonic() - began < 60
            time.sleep(0.01)


def read(link):
    """Status and body of the next answer."""
    answer = HTTPResponse(link)
    answer.begin()
    return answer.status, answer.read().decode()


@contextmanager
def running(model, tokenizer, drafter=None, **options):
    """A `Running` server of a pair; raises what kept it from starting."""
    server = Server(Options(port=0, **options))
    engine = Engine(server.options, lambda: ("served", "drafter" if drafter else None, model, tokenizer, drafter))
    try:
        engine.start()
        engine.ready.wait()
        if engine.fault is not None:
            raise engine.fault
        server.start(engine)
        yield Running(server, engine)
    finally:
        engine.close()
        server.stop()
        engine.join()


MESSAGES = [{"role": "user", "content": "def add(a, b):"}]


def expected(chatty, messages=MESSAGES, **options):
    """Our own responses to the same messages, plain."""
    model, tokenizer, _ = chatty
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return list(stream_generate(model, tokenizer, ids, **options))


def ask(served, messages=MESSAGES, **options):
    return served.client.chat.completions.create(model="served", messages=messages, **options)


# As Qwen3's: thinking is open, closed at once, or left to the model; earlier thinking is not shown again.
THINKS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]"
    "{% if enable_thinking %}<think>{% else %}<think></think>{% endif %}{% endif %}"
)
