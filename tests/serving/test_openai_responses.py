"""`/v1/responses` as OpenAI's own client meets it."""

import json

import openai
import pytest
from kit import scripted
from serving_kit import MESSAGES, WEATHER, ask, running

FLAT = [{"type": "function", "strict": False, **WEATHER[0]["function"]}]
CALL = 'Let me see. <tool_call>{"name": "weather", "arguments": {"city": "Łódź", "days": [1, 2]}}</tool_call>'


def says(tokenizer, text, vocab=1536):
    return scripted([*tokenizer.encode(text), tokenizer.eos_token_id], vocab=vocab)


def test_a_response_is_the_answer_of_a_chat(served):
    text = ask(served, max_tokens=12).choices[0].message.content
    got = served.client.responses.create(model="served", input=MESSAGES[0]["content"], max_output_tokens=12)
    assert (got.output_text, got.status, got.incomplete_details.reason) == (text, "incomplete", "max_output_tokens")
    assert got.usage.output_tokens == 12 and got.usage.total_tokens == got.usage.input_tokens + 12
    items = [{"role": "user", "content": [{"type": "input_text", "text": MESSAGES[0]["content"]}]}]
    with served.client.responses.stream(model="served", input=items, max_output_tokens=12) as stream:
        events = list(stream)
    assert "".join(part.text for item in events[-1].response.output for part in item.content) == text
    kinds = [event.type for event in events]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    done = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert kinds[-4:] == [f"response.{kind}" for kind in done] and kinds.count("response.output_text.delta") > 4
    assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_an_item_of_its_own_and_its_arguments_stream(chatty, stream):
    with running(says(chatty[1], CALL), chatty[1]) as server:
        asked = {"model": "served", "input": "Weather?", "tools": FLAT, "max_output_tokens": 200}
        if stream:
            with server.client.responses.stream(**asked) as events:
                deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
                got = events.get_final_response()
            assert len(deltas) > 5 and "".join(deltas) == got.output[1].arguments
        else:
            got = server.client.responses.create(**asked)
    text, call = got.output
    assert text.content[0].text == "Let me see. " and got.status == "completed"
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Łódź", "days": [1, 2]})


def test_reasoning_is_an_item_and_is_sent_back_to_the_template(thinker):
    with running(says(thinker, "Hm. </think>Yes", 1540), thinker) as server:
        with server.client.responses.stream(model="served", input="x", reasoning={"effort": "low"}) as events:
            thought = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
            got = events.get_final_response()
    assert thought == "Hm. " == got.output[0].content[0].text and got.output_text == "Yes"
    assert got.output[0].type == "reasoning" and got.usage.output_tokens_details.reasoning_tokens > 0


def test_items_that_are_sent_back_as_references_are_those_of_the_responses_that_are_kept(served):
    """As the AI SDK sends an answer back where `store` is left out."""
    create, text = served.client.responses.create, MESSAGES[0]["content"]
    first = create(model="served", input=text, max_output_tokens=8)
    whole = [{"role": "user", "content": text}, first.output[0].model_dump(), {"role": "user", "content": "More"}]
    for reference in ({"type": "item_reference", "id": first.output[0].id}, {"id": first.output[0].id}):
        again = create(model="served", input=[whole[0], reference, whole[2]], max_output_tokens=4)
        assert again.usage.input_tokens == create(model="served", input=whole, max_output_tokens=4).usage.input_tokens
    with pytest.raises(openai.BadRequestError, match='the item "msg_x" is not kept. Send the item itself'):
        create(model="served", input=[whole[0], {"type": "item_reference", "id": "msg_x"}], max_output_tokens=4)


def test_a_previous_response_is_gone_on_with_and_its_instructions_are_not(served):
    create, text = served.client.responses.create, MESSAGES[0]["content"]
    first = create(model="served", instructions="Short.", input=text, max_output_tokens=4)
    again = create(model="served", previous_response_id=first.id, input="More", max_output_tokens=4)
    whole = [*MESSAGES, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "More"}]
    as_chat = ask(served, whole, max_tokens=4)
    assert again.output_text == as_chat.choices[0].message.content
    assert again.usage.input_tokens == as_chat.usage.prompt_tokens and again.previous_response_id == first.id
    assert served.client.responses.retrieve(first.id).output_text == first.output_text
    served.client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match="is not kept"):
        create(model="served", previous_response_id=first.id, input="More", max_output_tokens=4)
    unkept = create(model="served", input=text, store=False, max_output_tokens=1)
    with pytest.raises(openai.NotFoundError):
        served.client.responses.retrieve(unkept.id)


def test_a_round_of_tools_is_the_conversation_that_a_chat_has(served):
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "x"}'}
    items = [
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        call,
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    ]
    got = served.client.responses.create(model="served", input=items, tools=FLAT, max_output_tokens=3)
    function = {"name": "weather", "arguments": '{"city": "x"}'}
    said = {"role": "assistant", "content": "Let me see.", "reasoning": "Hm."}
    said["tool_calls"] = [{"id": "c1", "type": "function", "function": function}]
    chat = [{"role": "user", "content": "Weather?"}, said, {"role": "tool", "tool_call_id": "c1", "content": "rain"}]
    same = ask(served, chat, tools=[{"type": "function", "function": {"strict": False, **WEATHER[0]["function"]}}], max_tokens=3)
    assert (got.usage.input_tokens, got.output_text) == (same.usage.prompt_tokens, same.choices[0].message.content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": 3}, "input is 3; it must be text or a list of items"),
        ({"input": []}, "input is []; it must be a list with at least one message"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "an item of input is"),
        ({"max_output_tokens": 0}, "max_output_tokens is 0; it must be"),
        ({"truncation": "auto"}, 'truncation is "auto"; this server leaves nothing out'),
        ({"text": {"format": {"type": "yaml"}}}, "text.format is"),
        ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text.format: the JSON schema cannot be enforced"),
        ({"reasoning": {"effort": "huge"}}, 'reasoning.effort is "huge"'),
        ({"background": True}, "background is true; this server cannot do that"),
        ({"tool_choice": "required"}, "tools offers no function. Offer one"),
        ({"conversation": "c"}, "conversation is"),
        ({"instructions": 5}, "instructions is 5; it must be text or a list of text parts"),
        ({"store": "no"}, 'store is "no"; it must be true or false'),
    ],
)
def test_what_a_response_cannot_be_is_refused_by_its_own_names(served, change, message):
    status, body = served.post("/v1/responses", {"input": "x", "max_output_tokens": 1, **change})
    assert status == 400 and message in json.loads(body)["error"]["message"]


def test_a_prompt_that_is_too_long_is_told_in_the_word_that_clients_act_upon(served):
    asked = {"model": "served", "input": "word " * 5000}
    with pytest.raises(openai.BadRequestError) as caught:
        served.client.responses.create(**asked)
    assert caught.value.code == "context_length_exceeded"
    last = list(served.client.responses.create(**asked, stream=True))[-1]
    assert last.type == "response.failed" and last.response.error.code == "context_length_exceeded"
