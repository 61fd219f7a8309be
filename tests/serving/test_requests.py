"""What is asked for: every field, and the sentence for what cannot be done."""

import json

import openai
import pytest
from kit import scripted
from serving_kit import MESSAGES, WEATHER, ask, running

from dflash_mlx.sampling import SamplingSettings


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"model": "another/model"}, 404, "the model 'another/model' is not served here; this server has 'served'"),
        ({"model": 3}, 404, "the model 3 is not served here"),
        ({"draft_model": "other"}, 400, "draft_model is \"other\"; this server has 'drafter'"),
        ({"n": 2}, 400, "n is 2; this server cannot do that"),
        ({"n": True}, 400, "n is true; this server cannot"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format is"),
        ({"adapters": "x"}, 400, 'adapters is "x"; this server cannot do that. Leave it out.'),
        ({"parallel_tool_calls": False}, 400, "parallel_tool_calls"),
        ({"tool_choice": "required"}, 400, "this server cannot force calls"),
        ({"tools": "all"}, 400, 'tools is "all"; it must be a list'),
        ({"temprature": 1}, 400, "the field 'temprature' is unknown to this server. Leave it out."),
        ({"stop": ""}, 400, 'stop is ""; it must be a text or a list of texts, none of them empty'),
        ({"stop": [1]}, 400, "stop is [1]; it must be a text"),
        ({"stop": ["x"] * 65}, 400, "stop has 65 texts, the longest of 1 letters; at most 64 texts"),
        ({"stop": "x" * 1001}, 400, "stop has 1 texts, the longest of 1001 letters"),
        (
            {"presence_penalty": 10**30},
            400,
            "; it must be a number from -1000000 to 1000000",
        ),
        ({"frequency_penalty": -1e7}, 400, "frequency_penalty is -10000000.0; it must be a number from"),
        ({"temperature": 10**200}, 400, "it must be a number from 0 to 1000000"),
        (
            {"repetition_penalty": 1.1, "repetition_context_size": 1 << 31},
            400,
            "repetition_context_size is 2147483648; it must be",
        ),
        ({"stream_options": {"x": 1}}, 400, "include_usage"),
        ({"stream_options": {"include_usage": "x"}, "stream": True}, 400, "include_usage, true or false"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options came without stream = true"),
        ({"prompt": "x"}, 400, 'prompt is "x"; chat completions have no such field'),
        ({"role_mapping": {"user": "U: "}}, 400, "role_mapping is given; served has a chat template"),
        ({"num_draft_tokens": 64}, 400, "num_draft_tokens is 64; it must be a whole number from 0 to 63"),
        ({"num_draft_tokens": -1}, 400, "num_draft_tokens is -1; it must be"),
        ({"num_draft_tokens": 1e4}, 400, "num_draft_tokens is 10000.0; it must be a whole number"),
        ({"top_logprobs": -1}, 400, "top_logprobs is -1; it must be a whole number from 0 to 20"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, 400, "half of a surrogate pair"),
        ({"max_tokens": 0}, 400, "max_tokens is 0; it must be a whole number of at least 1"),
        ({"max_tokens": True}, 400, "max_tokens is True; it must be a whole number"),
        ({"temperature": -1}, 400, "temperature is -1; it must be a number from 0"),
        ({"temperature": "hot"}, 400, "temperature is 'hot'; it must be a number"),
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
        ({"seed": -1}, 400, "whole number from 0 to"),
        ({"seed": 2**40, "temperature": 1}, 400, "whole number from 0 to"),
        ({"chat_template_kwargs": 1}, 400, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "hi"}}, 400, "it may hold variables of the chat template only"),
        ({"chat_template_kwargs": {"return_tensors": "np"}}, 400, "chat_template_kwargs has 'return_tensors'"),
        ({"messages": []}, 400, "at least one message"),
        ({"messages": ["hi"]}, 400, "an object with a role"),
        ({"messages": [{"role": "user", "content": 3}]}, 400, "content is 3; it must be a text"),
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
    with pytest.raises(openai.BadRequestError, match="n is 3"):
        ask(served, n=3)


def test_a_text_completion_of_many_prompts_or_none_is_refused(served):
    for prompt in (["a", "b"], [1, 2], [7], None, ""):
        status, body = served.post("/v1/completions", {"prompt": prompt})
        said = f"prompt is {json.dumps(prompt)}; it must" if prompt != "" else "the prompt is empty; it must"
        assert status == 400 and json.loads(body)["error"]["message"].startswith(said)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": MESSAGES}, "text completions have no such field"),
        ({"tools": WEATHER}, "tools is [{"),
        ({"chat_template_kwargs": {}}, "chat_template_kwargs is {}; text completions have no such field"),
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
    body = {"messages": MESSAGES, "max_tokens": 2, "temperature": None, "stop": None, "user": "me", "store": False, "n": 1}
    status, answer = served.post("/v1/chat/completions", body)
    assert status == 200 and json.loads(answer)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("data", "status", "message"),
    [
        (b"{not json", 400, "the body is no JSON in UTF-8"),
        (b"\xff\xfe{}", 400, "the body is no JSON in UTF-8"),
        (b'{"messages": [], "temperature": NaN}', 400, "NaN is not JSON"),
        (b'{"messages": [], "temperature": 1e999}', 400, '"1e999" is too large a number'),
        (b'{"messages": [], "presence_penalty": -1' + b"0" * 400 + b"}", 400, "is too large a number"),
        (b"[" * 100_000, 400, "the body is no JSON in UTF-8"),
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
            {"top_k": -1},
            {"top_k": 1.5},
            {"min_p": 2},
            {"xtc_probability": 1.5},
            {"temperature": "1"},
        ),
        *(
            {"presence_context_size": -1},
            {"frequency_penalty": "0"},
            {"seed": 1.5},
            {"seed": 2**32},
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
