"""Answer, reasoning and tool calls told apart, whatever a target writes."""

import copy
import json

import mlx_lm.server
import pytest
from kit import scripted, text_of
from mlx_lm.tokenizer_utils import TokenizerWrapper
from serving_kit import MESSAGES, WEATHER, ask, running

from dflash_mlx import stream_generate
from dflash_mlx.serving.channels import parse_xml_call


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_is_told_from_text(chatty, stream):
    tokenizer = chatty[1]
    said = 'Let me see. <tool_call>{"name": "weather", "arguments": {"city": "Łódź"}}</tool_call>'
    line = [*tokenizer.encode(said), tokenizer.eos_token_id]
    with running(scripted(line, vocab=1536), tokenizer) as server:
        answer = ask(server, tools=WEATHER, tool_choice="auto", max_tokens=100, stream=stream)
        if stream:
            chunks = list(answer)
            text = "".join(c.choices[0].delta.content or "" for c in chunks)
            calls = [call for c in chunks for call in c.choices[0].delta.tool_calls or []]
            reason = chunks[-1].choices[0].finish_reason
        else:
            text, calls = answer.choices[0].message.content, answer.choices[0].message.tool_calls
            reason = answer.choices[0].finish_reason
    assert text == "Let me see. " and reason == "tool_calls"
    assert [(c.function.name, json.loads(c.function.arguments)) for c in calls] == [("weather", {"city": "Łódź"})]


def test_a_tool_call_that_cannot_be_read_is_text(chatty):
    tokenizer = chatty[1]
    with running(scripted(tokenizer.encode("<tool_call>{broken"), vocab=1536), tokenizer) as server:
        answer = ask(server, tools=WEATHER, max_tokens=len(tokenizer.encode("<tool_call>{broken")))
    assert answer.choices[0].message.content == "<tool_call>{broken" and answer.choices[0].message.tool_calls is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("given", "thought", "content"),
    [
        ({}, "Hmm. ", "Yes <"),
        ({"enable_thinking": True}, "Hmm. ", "Yes <"),
        # Closed by the template: what comes is the answer, and a mark that only closes is text.
        ({"enable_thinking": False}, "", "Hmm. </think>Yes <"),
    ],
)
def test_thinking_is_kept_apart_from_the_answer(thinker, given, thought, content, stream):
    line = [*thinker.encode("Hmm. </think>Yes <"), thinker.eos_token_id]
    with running(scripted(line, vocab=1540), thinker) as server:
        got = ask(server, max_tokens=50, stream=stream, extra_body={"chat_template_kwargs": given})
        parts = [c.choices[0].delta for c in got] if stream else [got.choices[0].message]
    assert "".join(getattr(part, "reasoning", None) or "" for part in parts) == thought
    # A letter that might have begun a mark is not lost at the end.
    assert "".join(part.content or "" for part in parts) == content
    assert stream or got.usage.completion_tokens == len(line)


def test_thinking_that_its_template_drops_costs_the_next_turn_nothing_before_it(thinker):
    line = [*thinker.encode("Hmm. </think>Yes"), thinker.eos_token_id]
    with running(scripted([*line, 0, *line], vocab=1540), thinker) as server:
        first = ask(server, max_tokens=50)
        assert (first.choices[0].message.content, first.choices[0].message.reasoning) == ("Yes", "Hmm. ")
        longer = [*MESSAGES, {"role": "assistant", "content": "Yes"}, {"role": "user", "content": "why"}]
        cached = ask(server, longer, max_tokens=1).usage.prompt_tokens_details.cached_tokens
    # All but the open mark.
    assert cached == first.usage.prompt_tokens - 1


def test_thinking_and_calls_are_told_apart_inside_the_blocks_of_a_pair(chatty):
    # Pieces of what this target says are declared to be the marks, so that its drafter's real blocks run across them.
    model, tokenizer, drafter = chatty
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tools=WEATHER)
    said = text_of(stream_generate(model, tokenizer, ids, max_tokens=60))
    first, second, third = said[9:14], said[30:35], said[50:54]
    assert [said.index(mark) for mark in (first, second, third)] == [9, 30, 50], said
    marked = copy.copy(tokenizer)
    start = tokenizer.encode("<|endoftext|>", add_special_tokens=False)
    # The template ends with that token: thinking is open where the answer begins.
    marked._think_start, marked._think_start_tokens = "<|endoftext|>", tuple(start)
    marked._think_end, marked._think_end_tokens = first, (-1,)
    marked._tool_call_start, marked._tool_call_end = second, third
    marked._tool_parser = lambda text, tools: {"name": tools[0]["function"]["name"], "arguments": {"said": text}}
    rest = {"tools": WEATHER, "max_tokens": 60}
    with running(model, marked, drafter) as server:
        for drafts in (0, 7):
            for stream in (False, True):
                got = ask(server, **rest, stream=stream, extra_body={"num_draft_tokens": drafts})
                parts = [c.choices[0].delta for c in got] if stream else [got.choices[0].message]
                assert "".join(getattr(part, "reasoning", None) or "" for part in parts) == said[:9]
                assert "".join(part.content or "" for part in parts) == said[14:30] + said[54:]
                calls = [call.function for part in parts for call in part.tool_calls or []]
                assert [(c.name, json.loads(c.arguments)) for c in calls] == [("weather", {"said": said[35:50]})]
                if not stream:
                    assert got.usage.completion_tokens == 60
                    assert (got.usage.completion_tokens_details.accepted_prediction_tokens > 0) == (drafts > 0)


# What channels.py and messages.py stand on. A new mlx-lm that fails here says which part of it to read again.


@pytest.mark.parametrize(
    "name",
    [
        *("has_thinking", "think_start", "think_end", "rfind_think_start", "has_tool_calling", "tool_call_start"),
        *("tool_call_end", "tool_parser", "structural_markers", "response_transitions", "response_initial_state"),
    ],
)
def test_mlx_lms_tokenizer_wrapper_still_names_a_familys_marks(name):
    assert hasattr(TokenizerWrapper, name)


def test_mlx_lm_still_writes_roles_out_and_parses_xml_calls():
    assert mlx_lm.server.convert_chat([{"role": "user", "content": "x"}], {"user": "U: ", "assistant": "A: "}) == "U: xA:"
    xml = "<function=ls><parameter=path>/tmp</parameter></function>"
    assert parse_xml_call(xml, None) == {"name": "ls", "arguments": {"path": "/tmp"}}
    assert mlx_lm.server.get_system_fingerprint()
