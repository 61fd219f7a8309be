"""The page at `/`, and what it draws from: `drafts` of a choice."""

import tomllib
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace

import pytest
from browser import browser, chromium
from kit import text_of
from serving_kit import MESSAGES, ask, expected, running

from dflash_mlx import serving, stream_generate
from dflash_mlx.serving.draft_kinds import DraftKinds, LetterKinds
from dflash_mlx.serving.page_files import FILES, POLICY

FOLDER = Path(serving.__file__).parent / "page"


def reply(server, method, path, **headers):
    link = HTTPConnection("127.0.0.1", server.port, timeout=30)
    body = b'{"prompt": "x", "max_tokens": 1}' if method == "POST" else None
    link.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = link.getresponse()
    answer.text = answer.read().decode()
    link.close()
    return answer


def test_the_page_and_its_files_come_with_a_policy_that_admits_no_other_host(served):
    for path, name in [("/", "index.html"), *((f"/page/{name}", name) for name in FILES)]:
        for method in ("GET", "HEAD"):
            answer = reply(served, method, path)
            assert answer.status == 200 and answer.headers["Content-Security-Policy"] == POLICY
            assert answer.headers["Content-Type"].startswith(FILES[name])
            assert answer.text == ((FOLDER / name).read_text() if method == "GET" else "")
    assert "default-src 'none'" in POLICY and "unsafe" not in POLICY and "http" not in POLICY and "*" not in POLICY
    for path in ("/page/nothing.js", "/page/..%2fapp.py", "/page", "/v1"):
        assert reply(served, "GET", path).status == 404
    assert reply(served, "POST", "/").status == 405


def test_no_file_of_the_page_is_missing_in_a_wheel():
    build = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    root = FOLDER.parents[1]
    held = {path for glob in build["tool"]["setuptools"]["package-data"]["dflash_mlx"] for path in root.glob(glob)}
    assert {FOLDER / name for name in FILES} == set(FOLDER.iterdir()) <= held
    assert "marked" in (Path(__file__).parents[2] / "NOTICE").read_text()


def test_the_page_may_ask_and_a_foreign_one_may_not(served):
    own = f"http://127.0.0.1:{served.port}"
    assert reply(served, "POST", "/v1/completions", Origin=own).status == 200
    for origin in ("http://127.0.0.1:1", "http://foreign.example", f"{own}.foreign.example", "null"):
        assert reply(served, "POST", "/v1/completions", Origin=origin).status == 403
    foreign = {"Host": f"foreign.example:{served.port}", "Origin": f"http://foreign.example:{served.port}"}
    assert reply(served, "POST", "/v1/completions", **foreign).status == reply(served, "GET", "/", **foreign).status == 403


def test_a_key_guards_what_the_page_asks_for_and_not_the_page(chatty):
    with running(*chatty[:2], api_key="secret") as server:
        assert reply(server, "GET", "/").status == reply(server, "GET", "/page/page.js").status == 200
        assert reply(server, "GET", "/v1/models").status == reply(server, "POST", "/v1/completions").status == 401
        assert reply(server, "GET", "/v1/models", Authorization="Bearer secret").status == 200


# Drafts


def kinds_of(rounds, count):
    """Kinds of `count` tokens by the rounds of their run; its first token comes without a round."""
    kinds = ["plain"]
    for one in rounds:
        drafted = "accepted" if one.source == "drafter" else "looked_up"
        kinds += [drafted] * one.accepted + ["bonus" if one.width else "plain"]
    return kinds[:count]


def test_a_stream_tells_which_tokens_were_drafted_as_the_rounds_have_it(served, chatty):
    model, tokenizer, drafter = chatty
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)
    run = list(stream_generate(model, tokenizer, ids, max_tokens=12, draft_model=drafter, block_size=8))
    rounds = run[-1].stats.rounds
    wanted = [(kind, r.text) for kind, r in zip(kinds_of(rounds, len(run)), run, strict=True) if r.text]
    chunks = list(ask(served, max_tokens=12, stream=True, extra_body={"show_drafts": True}))
    told = [(one["kind"], one["text"]) for c in chunks for one in c.choices[0].drafts.get("content", [])]
    assert told == wanted and {"accepted", "bonus", "plain"} <= {kind for kind, _ in told}
    for choice in (chunk.choices[0] for chunk in chunks):
        assert "".join(one["text"] for one in choice.drafts.get("content", [])) == (choice.delta.content or "")
    last = chunks[-1].choices[0].drafts
    assert last["tokens_per_round"] == pytest.approx(11 / len(rounds)) and last["tokens_per_second"] > 0


def test_drafts_are_told_when_asked_for_alone(served):
    assert all("drafts" not in c.choices[0].model_extra for c in ask(served, max_tokens=3, stream=True))
    whole = ask(served, max_tokens=9, extra_body={"show_drafts": True}).choices[0]
    assert "".join(one["text"] for one in whole.drafts["content"]) == whole.message.content
    assert served.post("/v1/chat/completions", {"messages": MESSAGES, "show_drafts": 1})[0] == 400


def test_drafts_from_the_text_are_told_from_the_drafters():
    stats, kinds, told = SimpleNamespace(n_rounds=0, n_drafting=0, looked_up={}), DraftKinds(), []

    def token(from_draft):
        told.append(kinds.of(SimpleNamespace(stats=stats, from_draft=from_draft)))

    token(False)
    for width, looked_up, accepted in ((3, {}, 1), (2, {2: 1}, 2), (0, {2: 1}, 0), (2, {2: 2}, 0), (2, {2: 2}, 1)):
        stats.n_rounds, stats.n_drafting, stats.looked_up = stats.n_rounds + 1, stats.n_drafting + (width > 0), looked_up
        for i in range(accepted + 1):
            token(i < accepted)
    plain, bonus, drafted, copied = "plain", "bonus", "accepted", "looked_up"
    assert told == [plain, drafted, bonus, copied, copied, bonus, plain, bonus, drafted, bonus]


def test_letters_keep_the_kind_of_their_token_behind_marks_and_when_they_come_late():
    letters = LetterKinds()
    for text, kind in (("<thi", "plain"), ("nk>a", "accepted"), ("b<", "bonus"), ("c", "looked_up")):
        letters.add(text, kind)
    both = lambda text: [(one["kind"], one["text"]) for one in letters.take(text)]  # noqa: E731
    assert both("ab") == [("accepted", "a"), ("bonus", "b")]
    assert both("<c") == [("bonus", "<"), ("looked_up", "c")]
    assert both("made up") == [("plain", "made up")]


# The page in a browser

HOSTILE = "**b** <img src=x onerror='bad=1'> <script>bad=1</script> [a](javascript:bad=1) ![i](http://other.example/x.png)\n\n```\n<b>x\n```"


@pytest.mark.full
@pytest.mark.skipif(chromium() is None, reason="no Chromium here: the page is not tried in a browser")
def test_the_page_streams_stops_edits_retries_and_runs_nothing_that_a_model_writes(chatty, tmp_path):
    model, tokenizer, drafter = chatty
    with running(model, tokenizer, drafter, block_size=8, api_key="secret") as server, browser(tmp_path) as page:
        address = f"http://127.0.0.1:{server.port}/"
        click = lambda place: page.run(f"document.querySelector({place!r}).click()")  # noqa: E731
        page.open(address)
        page.until("document.getElementById('options').open")
        page.faults.clear()
        page.run("document.querySelector('[name=key]').value = 'secret'; document.querySelector('[name=max_tokens]').value = 30")
        click("#options .main")
        page.until("document.getElementById('model').textContent === 'served'")
        page.run("document.getElementById('text').value = 'def add(a, b):'")
        click("#send")
        page.until("document.getElementById('send').textContent === 'Send' && document.querySelector('.assistant .tools')")
        click("#drafts")
        assert page.run("document.querySelector('.assistant .letters').textContent") == text_of(expected(chatty, max_tokens=30))
        assert page.run("!!document.querySelector('.letters .accepted') && !!document.querySelector('.letters .bonus')")
        assert "tokens a round" in page.run("document.querySelector('.assistant .tools').textContent")
        # Stopped, retried; then the question is changed.
        page.run("document.querySelector('[name=max_tokens]').value = -1; document.getElementById('options').close('save')")
        click(".assistant .tools button:nth-child(2)")
        page.until("document.querySelector('.assistant .letters')?.textContent")
        assert page.run("document.getElementById('send').textContent") == "Stop"
        click("#send")
        server.wait_idle()
        assert 'end="left"' in server.get("/metrics", "Authorization: Bearer secret")[1]
        assert page.run("document.querySelectorAll('article').length") == 2
        click(".user .tools button")
        page.run("document.querySelector('[name=max_tokens]').value = 3; document.getElementById('options').close('save')")
        page.run("document.querySelector('.edit textarea').value = 'x = '")
        click(".edit .tools button:nth-child(2)")
        page.until("document.getElementById('send').textContent === 'Send' && document.querySelector('.assistant .tools')")
        assert page.run("document.querySelector('.said').textContent") == "x = "
        # A chat outlives the page. What a model wrote is text.
        page.run(
            "const key = Object.keys(localStorage).find((name) => name.includes('.chat.')), chat = JSON.parse(localStorage[key]);"
            f"chat.messages[1].content = [['plain', {HOSTILE!r}]]; localStorage[key] = JSON.stringify(chat)"
        )
        page.open("about:blank")
        page.open(address)
        page.until("document.querySelectorAll('#sessions li').length === 1")
        click("#sessions button")
        page.until("document.querySelector('.markdown strong')?.textContent === 'b'")
        assert page.run("document.querySelector('.code code').textContent") == "<b>x"
        assert page.run("typeof bad") == "undefined"
        assert page.run("document.querySelectorAll('main :is(img, script, [href^=javascript])').length") == 0
        assert page.run("try { document.body.innerHTML = '<p>'; 'ran' } catch { 'refused' }") == "refused"
        assert all(request.startswith(address) for request in page.requests if request != "about:blank")
        assert page.faults == [] or all("TrustedHTML" in fault for fault in page.faults)
