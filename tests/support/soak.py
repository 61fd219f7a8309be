"""A soak: 16 clients that come, leave and stop in the middle, for as long as one likes, of a server in a process of its own.

    python tests/support/soak.py --minutes 60 --seed 24 --out bench/results/soak-tiny-CPU.json

Each client draws what it does next from a generator of its own: it reads a whole answer or a stream to its end, closes a stream
in the middle, leaves before a word comes, breaks off within its body, asks for what is refused, or looks at the counts. The same
request must say the same whenever it is made and whatever goes on beside it, a sampled one with its seed too. The first quarter
of the time fills what the server keeps; from there memory may not grow.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path

CLIENTS = 16
# Of the process, from the second quarter of the time to the last.
GROWTH_MB = 30
DOES = {"whole": 5, "stream": 5, "stop": 4, "leave": 2, "half": 1, "refused": 1, "look": 1}
PATHS = {"chat": "/v1/chat/completions", "text": "/v1/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
LAST = {"chat": "data: [DONE]", "text": "data: [DONE]", "responses": "event: response.", "messages": "event: message_stop"}
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]<|endoftext|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]<|endoftext|>{% endif %}"
)
PAGES = "def add(a, b):\n    return a + b\n\n" * 20


def request(chance: random.Random) -> tuple[str, dict]:
    """An API and a body of one of a few hundred kinds, short and long."""
    api = chance.choice([*PATHS])
    text = (PAGES[: 40 * chance.randrange(12)] if chance.random() < 0.3 else "") + f"def f{chance.randrange(8)}("
    talk = [{"role": "user", "content": text}]
    if chance.random() < 0.3:
        talk += [{"role": "assistant", "content": "x):\n"}, {"role": "user", "content": "and more"}]
    limit = {"responses": "max_output_tokens"}.get(api, "max_tokens")
    body = {{"text": "prompt", "responses": "input"}.get(api, "messages"): text if api == "text" else talk}
    body[limit] = chance.choice([1, 4, 16, 40])
    if chance.random() < 0.4:
        body |= {"temperature": 0.8, "seed": chance.randrange(3)}
    if api == "responses" and chance.random() < 0.5:
        body["store"] = False
    return api, body


def said(api: str, data: str) -> str:
    """The text of an answer in one piece or of a stream, with why it ended."""
    texts, why = [], None
    for line in [f"data: {data}"] if data.startswith("{") else data.split("\n"):
        if not line.startswith("data: {"):
            continue
        body = json.loads(line[6:])
        if "error" in body and body["error"]:
            raise ValueError(f"an error for an answer: {body['error']}")
        if api in ("chat", "text"):
            for choice in body["choices"]:
                part = choice.get("delta", choice.get("message", choice))
                texts.append(part.get("content", part.get("text")) or "")
                why = choice["finish_reason"] or why
        elif api == "responses":
            if (whole := body.get("response", body)).get("status") in ("completed", "incomplete"):
                texts = [part["text"] for item in whole["output"] for part in item["content"]]
                why = whole["status"]
        else:
            texts += [part.get("text", "") for part in body.get("content", [body.get("delta", {})])]
            why = body.get("delta", body).get("stop_reason") or why
    if why is None:
        raise ValueError(f"no end of an answer: {data[-200:]!r}")
    return f"{''.join(texts)}|{why}"


class Clients:
    """What they all know: what was said to what, and what went wrong."""

    def __init__(self, port: int, seed: int, until: float):
        self.port, self.seed, self.until = port, seed, until
        self.known: dict[str, str] = {}
        self.did: Counter[str] = Counter()
        self.faults: list[str] = []
        self.longest_s = 0.0

    def run(self) -> None:
        threads = [threading.Thread(target=self._client, args=(number,)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _client(self, number: int) -> None:
        chance, link = random.Random(self.seed * 1000 + number), self._link()
        while time.monotonic() < self.until:
            does = chance.choices([*DOES], [*DOES.values()])[0]
            api, body = request(chance)
            # In any case, so that a run with the same seed asks the same.
            part, pause = chance.random(), chance.expovariate(5)
            try:
                getattr(self, f"_{does}")(link, api, body, part)
                self.did[does] += 1
            except (OSError, HTTPException, ValueError, KeyError) as error:
                self.faults.append(f"client {number}, {does} {api} {json.dumps(body)[:300]}: {type(error).__name__}: {error}")
            if does in ("stop", "leave", "half") or part < 0.2:
                link.close()
                link = self._link()
            time.sleep(pause)
        link.close()

    def _link(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.port, timeout=120)

    def _post(self, link: HTTPConnection, api: str, body: dict, wanted: int = 200):
        began = time.monotonic()
        link.request("POST", PATHS[api], json.dumps(body), {"Content-Type": "application/json"})
        answer = link.getresponse()
        if answer.status != wanted:
            raise ValueError(f"status {answer.status} for {wanted}: {answer.read()[:300]}")
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        return answer

    def _check(self, api: str, body: dict, data: str) -> None:
        # A stored answer and one that is not are the same.
        asked = json.dumps([api, {**body, "store": None, "stream": None}], sort_keys=True)
        if self.known.setdefault(asked, text := said(api, data)) != text:
            raise ValueError(f"{text!r} for {self.known[asked]!r}")

    def _whole(self, link: HTTPConnection, api: str, body: dict, part: float) -> None:
        self._check(api, body, self._post(link, api, body).read().decode())

    def _stream(self, link: HTTPConnection, api: str, body: dict, part: float) -> None:
        data = self._post(link, api, {**body, "stream": True}).read().decode()
        if not data.strip().split("\n\n")[-1].startswith(LAST[api]):
            raise ValueError(f"the stream ends with {data[-200:]!r}")
        self._check(api, body, data)

    def _stop(self, link: HTTPConnection, api: str, body: dict, part: float) -> None:
        answer = self._post(link, api, {**body, "stream": True})
        for _ in range(1 + int(part * 12)):
            if not answer.readline():
                break

    def _leave(self, link: HTTPConnection, api: str, body: dict, part: float) -> None:
        link.request("POST", PATHS[api], json.dumps({**body, "stream": part < 0.5}))
        time.sleep(part / 20)

    def _half(self, link: HTTPConnection, api: str, body: dict, part: float) -> None:
        data = json.dumps(body).encode()
        head = f"POST {PATHS[api]} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as one:
            one.sendall((head + data)[: int(part * (len(head) + len(data)))])

    def _refused(self, link: HTTPConnection, api: str, body: dict, part: float) -> None:
        self._post(link, api, {**body, "temperature": "warm"}, 400).read()

    def _look(self, link: HTTPConnection, api: str, body: dict, part: float) -> None:
        link.request("GET", ("/health", "/metrics", "/v1/models")[int(part * 3)])
        answer = link.getresponse()
        if answer.status != 200 or not answer.read():
            raise ValueError(f"status {answer.status}")


def get(port: int, path: str) -> str:
    link = HTTPConnection("127.0.0.1", port, timeout=60)
    link.request("GET", path)
    text = link.getresponse().read().decode()
    link.close()
    return text


def counts(port: int) -> dict[str, float]:
    """What `/metrics` says, by name and labels."""
    return {name: float(value) for name, value in re.findall(r"^(dflash_\S+) (\S+)$", get(port, "/metrics"), re.M)}


@contextmanager
def server(folder: Path):
    """The process and the port of `dflash-mlx serve` of the built-in tiny pair with a chat template, its log in the folder."""
    from dflash_mlx.pairs.builtin import builtin_path

    target = shutil.copytree(builtin_path("tiny", "target"), folder / "target")
    config = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    command = [
        sys.executable,
        "-m",
        "dflash_mlx.cli.app",
        "serve",
        "--model",
        str(target),
        "--draft-model",
        "tiny",
        "--port",
        "0",
    ]
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen([*command, "--port", "0", "--log-level", "info", "--log-json"], stderr=log)
        try:
            began, found = time.monotonic(), None
            while not found:
                assert process.poll() is None and time.monotonic() - began < 120, (folder / "log").read_text()
                found = re.search(r"http://127.0.0.1:(\d+)/v1", (folder / "log").read_text())
                time.sleep(0.1)
            yield process, int(found[1])
        finally:
            process.terminate()
            process.wait(60)


def resident_mb(process: subprocess.Popen) -> float:
    done = subprocess.run(["ps", "-o", "rss=", "-p", str(process.pid)], capture_output=True, text=True, check=True)
    return int(done.stdout) * 1024 / 1e6


def soak(seconds: float, seed: int) -> dict:
    """Run it; what there was, and `faults`: all that should not have been."""
    with tempfile.TemporaryDirectory() as name, server(Path(name)) as (process, port):
        began = time.monotonic()
        clients, samples = Clients(port, seed, began + seconds), []
        crowd = threading.Thread(target=clients.run)
        crowd.start()
        while crowd.is_alive():
            crowd.join(max(seconds / 240, 0.5))
            samples.append((time.monotonic() - began, resident_mb(process)))
        faults, last = clients.faults, began + seconds + 60
        while (health := json.loads(get(port, "/health")))["queue"] or health["running"]:
            if time.monotonic() > last:
                faults.append(f"a request that nobody waits for goes on: {health}")
                break
            time.sleep(0.05)
        found = counts(port)
        log = [json.loads(line) for line in (Path(name) / "log").read_text().splitlines() if line.startswith("{")]
    ends = Counter()
    for key, value in found.items():
        if label := re.match(r'dflash_requests_total\{api="\w+",end="(\w+)"\}', key):
            ends[label[1]] += int(value)
    whole = clients.did["whole"] + clients.did["stream"]
    if ends["error"] or ends["stop"] + ends["length"] < whole:
        faults.append(f"{whole} whole answers came; the server counts {dict(ends)}")
    if len([line for line in log if "end" in line]) != sum(ends.values()):
        faults.append(f"{len(log)} lines of the log, {sum(ends.values())} requests")
    faults += [f"the log: {line}" for line in log if line["level"] not in ("info", "debug") or "traceback" in line]
    # By quarters of the time; the first one fills what the server keeps.
    quarters = [statistics.median(mb for at, mb in samples if at // (seconds / 4) == i) for i in range(4)]
    if quarters[3] - quarters[1] > GROWTH_MB:
        faults.append(f"memory grew from {quarters[1]:.1f} to {quarters[3]:.1f} MB")
    return {
        "seed": seed,
        "seconds": round(seconds),
        "clients": CLIENTS,
        "did": dict(clients.did),
        "whole_answers": whole,
        "different_requests": len(clients.known),
        "server_counts": dict(ends),
        "longest_wait_s": round(clients.longest_s, 2),
        "memory_mb": {"by_quarter": [round(mb, 1) for mb in quarters], "last": round(samples[-1][1], 1)},
        "mlx_active_mb": round(found["dflash_active_memory_bytes"] / 1e6, 1),
        "faults": faults,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=24)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    report = {"what": "tests/support/soak.py", "machine": platform.machine(), "python": platform.python_version()}
    report |= soak(given.minutes * 60, given.seed)
    text = json.dumps(report, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")
    raise SystemExit(bool(report["faults"]))


if __name__ == "__main__":
    main()
