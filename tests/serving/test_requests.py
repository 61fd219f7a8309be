"""What is asked for: every field, and the sentence for what cannot be done."""

import inspect
import json
from http.client import HTTPResponse
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest
from kit import scripted, with_template
from mlx_lm.tokenizer_utils import load as load_tokenizer
from serving_kit import MESSAGES, WEATHER, ask, running
from transformers import PreTrainedTokenizerBase

from dflash_mlx.chat_template import NO_VARIABLES
from dflash_mlx.sampling import SamplingSettings
from dflash_mlx.serving.engine import LoadedPair, Options
from dflash_mlx.serving.fields import table
from dflash_mlx.serving.requests import fold_seed, read_request


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"model": "another/model"}, 404, "the model 'another/model' is not served here; this server has 'served'"),
        ({"model": 3}, 404, "the model 3 is not served here"),
        ({"draft_model": "other"}, 400, "draft_model is \"other\"; this server has 'drafter'"),
        ({"n": 17}, 400, "n is 17; it must be a whole number from 1 to 16"),
        ({"n": True}, 400, "n is true; it must be a whole number"),
        ({"response_format": {"type": "json"}}, 400, 'response_format is {"type": "json"}; its type must be text, json_object'),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, 400, "or json_schema with a schema"),
        ({"guided_json": {"uniqueItems": True}}, 400, "guided_json: the JSON schema cannot be enforced: Unimplemented keys"),
        ({"guided_json": {}, "guided_regex": "a"}, 400, "guided_json and guided_regex are both given"),
        ({"guided_regex": "("}, 400, "guided_regex: the regular expression cannot be enforced"),
        ({"guided_choice": "left"}, 400, "guided_choice: the choices are ()"),
        ({"grammar": "root ::= ("}, 400, "grammar: it cannot be read"),
        ({"structured_outputs": {"structural_tag": "x"}}, 400, "structured_outputs asks for structural_tag"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, 400, "it must have one of json, regex"),
        ({"adapters": "x"}, 400, 'adapters is "x"; this server cannot do that. Leave it out.'),
        ({"parallel_tool_calls": "no"}, 400, 'parallel_tool_calls is "no"; it must be true or false'),
        ({"tool_choice": "required"}, 400, "tool_choice asks for a call, and tools offers no function. Offer one"),
        ({"tool_choice": {"type": "function", "function": {"name": "rm"}}, "tools": WEATHER}, 400, "offers no such function"),
        ({"tool_choice": {"type": "custom"}}, 400, "or name a function"),
        ({"tools": "all"}, 400, 'tools is "all"; it must be a list'),
        ({"stop": [1]}, 400, "stop is [1]; it must be text or a list of texts"),
        ({"mirostat": 2}, 400, "mirostat is 2; this server cannot do that. Leave it out, or send 0"),
        ({"lora": [{"id": 0}]}, 400, "lora is"),
        ({"num_ctx": 4096}, 400, "num_ctx is 4096; this server cannot do that. Leave it out."),
        ({"dry_multiplier": 0.8}, 400, "dry_multiplier is 0.8; this server cannot do that"),
        ({"echo": True}, 400, "echo is true; this server cannot do that"),
        ({"reasoning_effort": "huge"}, 400, 'reasoning_effort is "huge"; it must be one of none, minimal'),
        ({"max_completion_tokens": 0}, 400, "max_completion_tokens is 0; it must be"),
        (
            {"presence_penalty": 10**30},
            400,
            "; it must be a number from -1000000 to 1000000",
        ),
        ({"frequency_penalty": -1e7}, 400, "frequency_penalty is -10000000; it must be a number from"),
        ({"temperature": 10**200}, 400, "it must be a number from 0 to 1000000"),
        (
            {"repetition_penalty": 1.1, "repetition_context_size": 1 << 31},
            400,
            "repetition_context_size is 2147483648; it must be",
        ),
        ({"stream_options": {"x": 1}}, 400, "include_usage"),
        ({"stream_options": {"include_usage": "x"}, "stream": True}, 400, "include_usage, true or false"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options came without stream = true"),
        ({"prompt": "x"}, 400, 'prompt is "x"; this server cannot do that'),
        ({"role_mapping": {"user": "U: "}}, 400, "role_mapping is given; served has a chat template"),
        ({"num_draft_tokens": 64}, 400, "num_draft_tokens is 64; it must be a whole number from 0 to 63"),
        ({"num_draft_tokens": -1}, 400, "num_draft_tokens is -1; it must be"),
        ({"num_draft_tokens": 1e4}, 400, "num_draft_tokens is 10000; it must be a whole number"),
        ({"top_logprobs": -1}, 400, "top_logprobs is -1; it must be a whole number from 0 to 20"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, 400, "half of a surrogate pair"),
        ({"max_tokens": 0}, 400, "max_tokens is 0; it must be a whole number of at least 1"),
        ({"max_tokens": True}, 400, "max_tokens is true; it must be a whole number"),
        ({"temperature": -1}, 400, "temperature is -1; it must be a number from 0"),
        ({"temperature": "hot"}, 400, 'temperature is "hot"; it must be a number'),
        ({"top_k": 5000}, 400, "top_k is 5000; it must be below 1536"),
        ({"top_logprobs": 40}, 400, "top_logprobs is 40; it must be a whole number from 0 to 20"),
        ({"xtc_threshold": 0.9}, 400, "xtc_threshold is 0.9; it must be a number from 0 to 0.5"),
        ({"logit_bias": {"99999": 1}}, 400, "token ids are 0 to 1535"),
        ({"logit_bias": {"5": "nan"}}, 400, 'a logit_bias is "nan"; it must be a number of at most 1000000 in size'),
        ({"logit_bias": {"5": None}}, 400, "a logit_bias is null"),
        ({"logit_bias": {"5": True}}, 400, "a logit_bias is true"),
        ({"logit_bias": {"5": 1e9}}, 400, "a logit_bias is 1000000000.0"),
        ({"logit_bias": [5]}, 400, "logit_bias is [5]; it must be an object"),
        ({"logit_bias": {"-1": 1}}, 400, "token ids are 0 to 1535"),
        ({"logit_bias": {"²": 1}}, 400, "token ids are 0 to 1535"),
        ({"logit_bias": {"9" * 5000: 1}}, 400, "token ids are 0 to 1535"),
        ({"seed": 2**64}, 400, "seed is 18446744073709551616; it must be a whole number of at most 64 bits"),
        ({"seed": -(2**63) - 1, "temperature": 1}, 400, "a whole number of at most 64 bits, or -1"),
        ({"chat_template_kwargs": 1}, 400, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "hi"}}, 400, "it may hold variables of the chat template only"),
        *(
            ({"chat_template_kwargs": {name: []}}, 400, f"chat_template_kwargs has {name!r}; it may hold variables")
            for name in ("return_tensors", "messages", "tools", "tokenize", "add_generation_prompt")
        ),
        ({"messages": []}, 400, "at least one message"),
        ({"messages": ["hi"]}, 400, "an object with a role"),
        ({"messages": [{"role": "user", "content": 3}]}, 400, "content is 3; it must be text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
            400,
            "image_url",
        ),
        ({"messages": [{"role": "bad", "content": "x"}]}, 400, "the chat template refused these messages: no such role"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, 400, "it must stay below the target's 4096 positions"),
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
    with pytest.raises(openai.BadRequestError, match="n is 30"):
        ask(served, n=30)


def test_a_prompt_that_is_none_is_refused(served):
    for prompt in ([1, "a"], [1536], [[-1]], [], [[]], None, {}, [None]):
        status, body = served.post("/v1/completions", {"prompt": prompt})
        assert status == 400 and json.loads(body)["error"]["message"].startswith(f"prompt is {json.dumps(prompt)}; it must be")
    assert "the prompt is empty" in served.post("/v1/completions", {"prompt": ""})[1]
    assert "at most 64" in served.post("/v1/completions", {"prompt": ["x"] * 65})[1]


def test_a_prompt_may_be_ids_or_a_list_and_each_has_its_answer(served, chatty):
    create, ids = served.client.completions.create, chatty[1].encode("for i in ")
    text = create(model="served", prompt="for i in ", max_tokens=5).choices[0].text
    assert create(model="served", prompt=ids, max_tokens=5).choices[0].text == text
    asked = {"model": "served", "prompt": [ids, chatty[1].encode("x = ")], "max_tokens": 5}
    both = create(**asked)
    assert [choice.index for choice in both.choices] == [0, 1] and both.choices[0].text == text != both.choices[1].text
    assert both.usage.completion_tokens == 10
    told = {0: "", 1: ""}
    for chunk in create(**asked, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            told[choice.index] += choice.text
    assert told == {0: text, 1: both.choices[1].text} and chunk.usage.completion_tokens == 10


def test_a_seed_of_64_bits_is_folded_and_minus_one_draws_one_that_is_told(served):
    def asked(seed):
        body = {"messages": MESSAGES, "max_tokens": 6, "temperature": 1.5, "seed": seed}
        with served.send("/v1/chat/completions", body) as link:
            answer = HTTPResponse(link)
            answer.begin()
            return int(answer.headers["x-seed"]), json.loads(answer.read())["choices"][0]["message"]["content"]

    assert asked(7)[0] == 7 and asked(2**32 - 1)[0] == 2**32 - 1
    folded, text = asked(2**63)
    # Fixed: a text of a long seed stays what it is.
    assert folded == fold_seed(2**63) == 3317865200
    assert asked(folded) == (folded, text) == asked(2**63)
    drawn, text = asked(-1)
    assert asked(drawn) == (drawn, text) and asked(-1)[0] != drawn


@pytest.mark.parametrize("stop", ["", [], ["", "never there"], None, "x" * 5000, [f"y{i}" for i in range(100)]])
def test_a_stop_of_any_form_that_never_comes_changes_nothing(served, stop):
    said = [
        json.loads(served.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 6, **more})[1])["choices"][0]
        for more in ({}, {"stop": stop})
    ]
    assert said[0] == said[1]


def test_of_two_limits_of_an_answer_the_smaller_holds(served):
    for one, two, least in ((3, 5, 3), (5, 2, 2), (-1, 4, 4)):
        assert ask(served, max_tokens=one, max_completion_tokens=two).usage.completion_tokens == least


def test_an_unknown_field_is_ignored_named_and_logged_once(served, caplog):
    body = {"messages": MESSAGES, "max_tokens": 1, "temprature": 1, "straße\r\nx: y": 2, "user": "me"}
    for _ in range(2):
        with served.send("/v1/chat/completions", body) as link:
            answer = HTTPResponse(link)
            answer.begin()
            assert answer.status == 200 and answer.headers["x-ignored-fields"] == "temprature, stra?e??x: y"
            assert answer.headers["x"] is None and answer.read()
    assert sum("'temprature' has no effect" in record.getMessage() for record in caplog.records) <= 1


def test_tools_that_are_no_functions_are_named(served):
    body = {"messages": MESSAGES, "max_tokens": 1, "tools": [*WEATHER, {"type": "web_search"}]}
    with served.send("/v1/chat/completions", body) as link:
        answer = HTTPResponse(link)
        answer.begin()
        assert answer.status == 200 and answer.headers["x-ignored-fields"] == "tools: web_search"


@pytest.mark.parametrize(
    ("template", "effort", "written"),
    [
        ("{{ reasoning_effort }}", "minimal", "low"),
        ("{{ reasoning_effort }}", "xhigh", "high"),
        ("{{ enable_thinking }}", "none", "False"),
        ("{{ enable_thinking }}", "high", "True"),
        ("{{ thinking }}", "low", "True"),
        ("no such thing", "low", "no such thing"),
    ],
)
def test_reasoning_effort_reaches_the_template_or_switches_thinking(tmp_path, template, effort, written):
    tokenizer = load_tokenizer(Path(with_template(tmp_path, template)))
    pair = SimpleNamespace(
        tokenizer=tokenizer, names={"default_model"}, most_drafts=None, vocabulary=1536, draft_name=None, name="x"
    )
    request = read_request({"messages": MESSAGES, "reasoning_effort": effort}, "chat", pair, Options())
    assert tokenizer.decode(request.render(tokenizer)[0].ids) == written
    assert request.ignored == ([] if "{" in template else ["reasoning_effort"])


def test_the_target_has_several_names(chatty):
    names = {"model_name": "mine", "aliases": ["gpt-4o", "b"]}
    with running(*chatty, **names) as server:
        assert [one.id for one in server.client.models.list().data] == ["mine"]
        for name in ("mine", "gpt-4o", "b", "served", "default_model"):
            assert server.client.completions.create(model=name, prompt="x", max_tokens=1).model == "mine"
            assert server.get(f"/v1/models/{name}")[0] == 200
        assert server.post("/v1/completions", {"prompt": "x", "model": "other"})[0] == 404
    with running(*chatty, any_model_name=True) as server:
        assert server.client.completions.create(model="any/thing", prompt="x", max_tokens=1).model == "served"


def test_the_base_name_of_a_path_is_a_name(pair):
    assert LoadedPair("/models/Qwen3-8B", None, *pair[:2], None).names >= {"/models/Qwen3-8B", "Qwen3-8B"}


def test_texts_and_messages_are_tokenized_and_read_back(served, chatty):
    tokenizer = chatty[1]
    ids = tokenizer.encode("def f(x):")
    for body in ({"content": "def f(x):"}, {"prompt": "def f(x):"}):
        assert json.loads(served.post("/tokenize", body)[1])["tokens"] == ids
    said = json.loads(served.post("/tokenize", {"messages": MESSAGES})[1])
    assert said["tokens"] == tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True) and said["count"] == len(
        said["tokens"]
    )
    assert json.loads(served.post("/detokenize", {"tokens": ids})[1])["content"] == "def f(x):"
    assert served.post("/detokenize", {"tokens": [9999]})[0] == 400
    for body in ({"content": 3}, {"text": "def f(x):"}, {}):
        status, said = served.post("/tokenize", body)
        assert status == 400 and "Send content, prompt or messages" in said


def test_the_page_of_fields_is_the_table():
    page = (Path(__file__).parents[2] / "docs/api.md").read_text()
    assert table() in page


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": MESSAGES}, "this server cannot do that"),
        ({"tools": WEATHER}, "tools is [{"),
        ({"chat_template_kwargs": {}}, "chat_template_kwargs is {}; this server cannot do that"),
        ({"logprobs": -1}, "logprobs is -1; it must be a whole number from 0 to 20"),
        ({"logprobs": 21}, "logprobs is 21; it must be a whole number from 0 to 20"),
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
                "chat_template_kwargs is given; served has no chat template",
            ),
            ({"role_mapping": {"user": 1}}, 'role_mapping is {"user": 1}; it must be an object of texts'),
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


def test_nulls_and_what_only_accounts_use_are_as_if_left_out(served):
    body = {
        "messages": MESSAGES,
        "max_tokens": 2,
        "temperature": None,
        "stop": None,
        "lora": None,
        "user": "me",
        "store": False,
        "n": 1,
    }
    status, answer = served.post("/v1/chat/completions", body)
    assert status == 200 and json.loads(answer)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("data", "status", "message"),
    [
        (b"{not json", 400, "the body is not JSON in UTF-8"),
        (b"\xff\xfe{}", 400, "the body is not JSON in UTF-8"),
        (b'{"messages": [], "temperature": NaN}', 400, "NaN is not JSON"),
        (b'{"messages": [], "temperature": 1e999}', 400, '"1e999" is too large a number'),
        (b'{"messages": [], "presence_penalty": -1' + b"0" * 400 + b"}", 400, "is too large a number"),
        (b"[" * 100_000, 400, "the body is not JSON in UTF-8"),
        (b"[1]", 400, "the body is of type list; it must be a JSON object"),
    ],
)
def test_a_broken_body_is_refused(served, data, status, message):
    answer = served.post("/v1/chat/completions", data)
    assert answer[0] == status and message in json.loads(answer[1])["error"]["message"]


@pytest.mark.parametrize(
    ("name", "value", "same_as"),
    [
        ("top_p", 0, {"temperature": 0}),
        ("top_k", 0, {}),
        ("min_p", 0, {}),
        ("presence_penalty", 0, {}),
        ("frequency_penalty", 0, {}),
        ("repetition_penalty", 1, {}),
        ("xtc_probability", 0, {}),
    ],
)
def test_a_zero_means_in_a_request_what_it_means_everywhere(served, name, value, same_as):
    asked = {"messages": MESSAGES, "max_tokens": 12, "temperature": 1.5, "seed": 3}
    bodies = [served.post("/v1/chat/completions", {**asked, **more})[1] for more in ({name: value}, same_as)]
    texts = [json.loads(body)["choices"][0]["message"]["content"] for body in bodies]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "change",
    [
        *({"repetition_penalty": 0}, {"max_tokens": 0}, {"max_tokens": -2}, {"max_tokens": 1.5}, {"max_completion_tokens": 2.5}),
        *(
            {"top_p": -0.1},
            {"top_p": 1.1},
            {"top_k": -2},
            {"top_k": 1.5},
            {"min_p": 2},
            {"xtc_probability": 1.5},
            {"temperature": "1"},
        ),
        *(
            {"presence_context_size": -1},
            {"frequency_penalty": "0"},
            {"seed": 1.5},
            {"seed": 2**64},
            {"stream": 1},
            {"logprobs": 2},
        ),
    ],
)
def test_what_is_out_of_range_is_refused_by_name_with_the_value(served, change):
    (name, value), *_ = change.items()
    status, body = served.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, **change})
    message = json.loads(body)["error"]["message"]
    assert status == 400 and message.startswith(f"{name} is ") and ("it must be" in message), message


def test_a_whole_number_may_be_written_as_a_float(served):
    """Clients whose only numbers are floats (Gson, R, Lua) send 256.0."""
    whole = {"max_tokens": 4, "top_k": 20, "seed": 7, "n": 2, "temperature": 1, "top_logprobs": 2, "num_draft_tokens": 3}
    asked = {"messages": MESSAGES, "logprobs": True}
    bodies = [{**asked, **whole}, {**asked, **{name: float(value) for name, value in whole.items()}}]
    # What asks for nothing, too.
    bodies[1] |= {"typical_p": 1.0, "dry_multiplier": 0.0, "min_tokens": 0.0, "best_of": 1.0}
    one, two = (served.post("/v1/chat/completions", body) for body in bodies)
    assert one[0] == two[0] == 200 and json.loads(one[1])["choices"] == json.loads(two[1])["choices"]
    for api, body in (
        ("responses", {"input": "x", "max_output_tokens": 2.0}),
        ("completions", {"prompt": "x", "max_tokens": 2.0}),
    ):
        assert served.post(f"/v1/{api}", body)[0] == 200
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024.0}}
    assert served.post("/v1/messages", {"messages": MESSAGES, "max_tokens": 2.0, **thinking})[0] == 200


def test_a_body_may_begin_with_a_byte_order_mark(served):
    """PowerShell and editors of Windows write one."""
    body = json.dumps({"messages": MESSAGES, "max_tokens": 2}).encode()
    assert served.post("/v1/chat/completions", b"\xef\xbb\xbf" + body)[0] == 200


@pytest.mark.parametrize("value,shown", [(True, "true"), ("0", '"0"'), ([1], "[1]"), ({}, "{}")])
def test_a_refused_setting_is_shown_as_it_was_sent(served, value, shown):
    for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
        status, body = served.post("/v1/chat/completions", {"messages": MESSAGES, name: value})
        assert status == 400 and json.loads(body)["error"]["message"].startswith(f"{name} is {shown}; it must be ")


def test_max_tokens_of_minus_one_is_no_limit(chatty):
    tokenizer = chatty[1]
    line = [*tokenizer.encode("a" * 1200), tokenizer.eos_token_id]
    with running(scripted(line, vocab=1536), tokenizer) as server:
        got = ask(server, max_tokens=-1)
    # Beyond the default of 512.
    assert got.usage.completion_tokens == len(line) > 512 and got.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty", "xtc_probability"])
def test_every_sampling_option_changes_the_text_and_may_be_the_servers_default(chatty, served, name):
    asked = {"messages": MESSAGES, "max_tokens": 24, "temperature": 0.8, "seed": 3}
    value = {"repetition_penalty": 3.0, "xtc_probability": 1.0}.get(name, 2.0)
    plain, changed = (
        json.loads(served.post("/v1/chat/completions", {**asked, **more})[1])["choices"][0]["message"]["content"]
        for more in ({}, {name: value})
    )
    assert plain != changed
    with running(*chatty, sampling=SamplingSettings(**{name: value})) as other:
        assert json.loads(other.post("/v1/chat/completions", asked)[1])["choices"][0]["message"]["content"] == changed


def test_twenty_likeliest_tokens_may_be_asked_for(served):
    content = ask(served, max_tokens=2, logprobs=True, top_logprobs=20).choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in content] == [20, 20]


def test_an_unknown_role_is_refused_with_the_roles_that_are_known(served):
    status, body = served.post("/v1/chat/completions", {"messages": [{"role": "assistantassistant", "content": "x"}]})
    message = json.loads(body)["error"]["message"]
    assert status == 400 and message.startswith('a message has the role "assistantassistant"; this server knows system, user')


@pytest.mark.parametrize("api", ["chat/completions", "responses", "messages"])
@pytest.mark.parametrize("function", [{}, {"name": ""}, {"name": " "}, {"name": 5}, {"name": None}])
def test_a_tool_without_a_name_is_refused(served, api, function):
    tool = {"chat/completions": {"type": "function", "function": function}, "responses": {"type": "function", **function}}
    body = {"responses": {"input": "x"}}.get(api, {"messages": MESSAGES, "max_tokens": 4})
    status, said = served.post(f"/v1/{api}", {**body, "tools": [tool.get(api, {**function, "input_schema": {}})]})
    assert status == 400 and "name" in json.loads(said)["error"]["message"], said


@pytest.mark.parametrize("parameters", ["x", [], 5, True])
def test_parameters_of_a_tool_that_are_no_schema_are_refused(served, parameters):
    tools = [{"type": "function", "function": {"name": "ls", "parameters": parameters}}]
    status, said = served.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, "tools": tools})
    assert status == 400 and 'parameters of the tool "ls" are' in json.loads(said)["error"]["message"], said


def test_what_transformers_takes_for_itself_is_no_variable_of_a_template():
    taken = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    assert taken - {"documents", "kwargs"} <= NO_VARIABLES
