"""`/v1/messages` as Anthropic's own client meets it."""

import json

import anthropic
import pytest
from kit import scripted
from serving_kit import MESSAGES, WEATHER, ask, running

TOOLS = [{"name": "weather", "description": "w", "input_schema": WEATHER[0]["function"]["parameters"]}]
CALL = 'Let me see. <tool_call>{"name": "weather", "arguments": {"city": "Łódź", "days": [1, 2]}}</tool_call>'


def client(server, key="none"):
    return anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key=key, max_retries=0, timeout=60)


def says(tokenizer, text, vocab=1536):
    return scripted([*tokenizer.encode(text), tokenizer.eos_token_id], vocab=vocab)


def test_a_message_is_the_answer_of_a_chat(served):
    text, create = ask(served, max_tokens=12).choices[0].message.content, client(served).messages.create
    got = create(model="served", messages=MESSAGES, max_tokens=12)
    assert (got.content[0].text, got.stop_reason, got.usage.output_tokens) == (text, "max_tokens", 12)
    parts = [
        {"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"], "cache_control": {"type": "ephemeral"}}]}
    ]
    with client(served).messages.stream(model="served", messages=parts, max_tokens=12) as stream:
        kinds = [event.type for event in stream if event.type not in ("text", "ping")]
        final = stream.get_final_message()
    assert kinds[:2] == ["message_start", "content_block_start"] and kinds.count("content_block_delta") > 4
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert (final.content[0].text, final.stop_reason, final.usage.output_tokens) == (text, "max_tokens", 12)
    usage = final.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == got.usage.input_tokens + got.usage.cache_read_input_tokens


def test_a_stop_sequence_is_named(served):
    text = ask(served, max_tokens=12).choices[0].message.content
    got = client(served).messages.create(model="served", messages=MESSAGES, max_tokens=12, stop_sequences=["never", text[5:8]])
    assert (got.stop_reason, got.stop_sequence, got.content[0].text) == (
        "stop_sequence",
        text[5:8],
        text[: text.index(text[5:8])],
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_a_block_and_its_arguments_stream(chatty, stream):
    with running(says(chatty[1], CALL), chatty[1]) as server:
        asked = {"model": "served", "messages": [{"role": "user", "content": "Weather?"}], "tools": TOOLS, "max_tokens": 200}
        if stream:
            with client(server).messages.stream(**asked) as events:
                deltas = [event.partial_json for event in events if event.type == "input_json"]
                got = events.get_final_message()
            assert len(deltas) > 5
        else:
            got = client(server).messages.create(**asked)
    text, call = got.content
    assert text.text == "Let me see. " and got.stop_reason == "tool_use"
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Łódź", "days": [1, 2]})


def test_thinking_is_a_block_with_a_signature(thinker):
    with running(says(thinker, "Hm. </think>Yes", 1540), thinker) as server:
        thinking = {"type": "enabled", "budget_tokens": 1024}
        with client(server).messages.stream(
            model="served", messages=[{"role": "user", "content": "x"}], max_tokens=2000, thinking=thinking
        ) as events:
            list(events)
            got = events.get_final_message()
    assert [block.type for block in got.content] == ["thinking", "text"]
    assert got.content[0].thinking == "Hm. " and got.content[0].signature and got.content[1].text == "Yes"


@pytest.mark.parametrize("budget", [1, 3, 5])
def test_thinking_ends_at_its_budget(thinker, budget):
    # What it says is always the same letter: only the budget ends the thinking.
    letter = thinker.encode("a", add_special_tokens=False)[0]
    with running(scripted([letter] * 40, vocab=1540), thinker) as server:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 12}
        body["thinking"] = {"type": "enabled", "budget_tokens": budget}
        got = json.loads(server.post("/v1/messages", body)[1])["content"]
    assert [block["type"] for block in got] == ["thinking", "text"]
    assert got[0]["thinking"] == "a" * budget and got[1]["text"] == "a" * (12 - budget - 1)


def test_a_round_of_tools_is_the_conversation_that_a_chat_has(served):
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "x"}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, {"type": "text", "text": "So"}, use],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    asked = {"model": "served", "messages": messages, "system": [{"type": "text", "text": "Be kind."}], "tools": TOOLS}
    got = client(served).messages.create(**asked, max_tokens=3)
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "x"}'}}
    chat = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "So", "reasoning": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "rain"},
        {"role": "user", "content": "And?"},
    ]
    function = {"name": "weather", "description": "w", "parameters": {"type": "object"}}
    same = ask(served, chat, tools=[{"type": "function", "function": function}], max_tokens=3)
    assert got.usage.input_tokens + got.usage.cache_read_input_tokens == same.usage.prompt_tokens
    assert got.content[0].text == same.choices[0].message.content
    assert client(served).messages.count_tokens(**asked).input_tokens == same.usage.prompt_tokens


def test_a_last_message_of_the_assistant_is_gone_on_with(served):
    count = client(served).messages.count_tokens
    begun = [*MESSAGES, {"role": "assistant", "content": "Well, "}]
    assert count(model="served", messages=begun).input_tokens != count(model="served", messages=MESSAGES).input_tokens
    assert client(served).messages.create(model="served", messages=begun, max_tokens=3).usage.output_tokens == 3


@pytest.mark.parametrize("begun, answer", [("The reason", " is this"), ("The reason ", "is this"), (None, "is this")])
def test_an_answer_that_continues_a_word_keeps_its_leading_blank(chatty, begun, answer):
    tokenizer = chatty[1]
    messages = [*MESSAGES, {"role": "assistant", "content": begun}] if begun else MESSAGES
    with running(says(tokenizer, " is this"), tokenizer) as server:
        assert client(server).messages.create(model="served", messages=messages, max_tokens=9).content[0].text == answer
    with running(says(tokenizer, " is this"), tokenizer) as server:
        with client(server).messages.stream(model="served", messages=messages, max_tokens=9) as stream:
            assert "".join(stream.text_stream) == answer


def test_errors_come_in_the_words_that_clients_act_upon(served, chatty):
    create = client(served).messages.create
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 4096 maximum") as caught:
        create(model="served", messages=[{"role": "user", "content": "word " * 5000}], max_tokens=1)
    assert caught.value.body["error"]["type"] == "invalid_request_error" and caught.value.body["type"] == "error"
    with pytest.raises(anthropic.NotFoundError):
        create(model="claude", messages=MESSAGES, max_tokens=1)
    with pytest.raises(anthropic.BadRequestError, match='tool_choice names "rm", and tools offers no such function'):
        create(model="served", messages=MESSAGES, max_tokens=1, tools=TOOLS, tool_choice={"type": "tool", "name": "rm"})
    with running(*chatty, api_key="sesame", max_queue=0) as server:
        with pytest.raises(anthropic.AuthenticationError):
            client(server, "wrong").messages.create(model="served", messages=MESSAGES, max_tokens=1)
        assert client(server, "sesame").messages.create(model="served", messages=MESSAGES, max_tokens=1).usage.output_tokens == 1
        assert client(server, "sesame").models.list().data[0].id == "served"
        link = server.send("/v1/messages", {"messages": MESSAGES, "max_tokens": 900}, "x-api-key: sesame")
        while not server.engine.running:
            pass
        with pytest.raises(anthropic.APIStatusError) as caught:
            client(server, "sesame").messages.create(model="served", messages=MESSAGES, max_tokens=1)
        assert caught.value.status_code == 529 and caught.value.body["error"]["type"] == "overloaded_error"
        link.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stop_sequences": 3}, "stop_sequences is 3; it must be"),
        ({"thinking": {"type": "deep"}}, "thinking is"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens is 0"),
        ({"messages": []}, "messages is []; it must be a list with at least one message"),
        ({"tool_choice": {"type": "banana"}}, 'its type must be "auto", "none", "any" or "tool"'),
        ({"tool_choice": {"type": ["auto"]}}, 'its type must be "auto", "none", "any" or "tool"'),
        ({"tool_choice": {"name": "weather"}}, 'its type must be "auto", "none", "any" or "tool"'),
        ({"system": 5}, "system is 5; it must be text or a list of text parts"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "this server reads text only"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format is"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is"),
    ],
)
def test_what_a_message_cannot_be_is_refused_by_its_own_names(served, change, message):
    status, body = served.post("/v1/messages", {"messages": MESSAGES, "max_tokens": 1, **change})
    assert status == 400 and message in json.loads(body)["error"]["message"]
