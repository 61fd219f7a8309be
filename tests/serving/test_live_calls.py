"""Calls while they are written: the same arguments as at their end, earlier."""

import json

import pytest
from channels_kit import HARMONY, Marked, marked

from dflash_mlx.serving.channels import Channels

PROPERTIES = {"a": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}}
LS = [{"type": "function", "function": {"name": "ls", "parameters": {"properties": PROPERTIES}}}]
LONG = "word " * 30 + 'a "quote", a \\ and\na line <b> </parameter'


def parts_of(tokenizer, text, step):
    """Calls with their arguments as they came, each in pieces, and the text."""
    channels, calls, said = Channels(tokenizer, "", LS, live=True), [], ""
    for at in range(0, len(text), step):
        for piece in channels.feed(text[at : at + step], at + step >= len(text)):
            if piece.kind == "arguments":
                calls[-1][1].append(piece.text)
            else:
                said += piece.text
            calls += [(call.name, [call.arguments]) for call in piece.calls]
    return [(name, ["", *filter(None, pieces)]) for name, pieces in calls], said


JSON = json.dumps({"name": "ls", "arguments": {"a": LONG, "o": {"name": "x", "arguments": {}}}})
XML = f"<function=ls>\n<parameter=a>\n{LONG}\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>"
WRITTEN = [
    ("json_tools", JSON, {"a": LONG, "o": {"name": "x", "arguments": {}}}),
    ("json_tools", '{"arguments": {"a": 1}, "name": "ls"}', None),
    ("qwen3_coder", XML, {"a": LONG, "n": 3}),
    ("qwen3_coder", "<function=ls>\n<parameter=a>\nnull\n</parameter>\n<parameter=o>\n{}\n</parameter>\n</function>", None),
    ("mistral", 'ls[ARGS]{"a": ' + json.dumps(LONG) + "}", {"a": LONG}),
]


@pytest.mark.parametrize("step", [1, 7, 10_000])
@pytest.mark.parametrize(("parser", "written", "arguments"), WRITTEN)
def test_arguments_come_as_they_are_written_and_are_those_of_the_whole_call(parser, written, arguments, step):
    family = marked(parser)
    text = f"So: {family.tool_call_start}{written}{family.tool_call_end}"
    calls, said = parts_of(family, text, step)
    (whole,) = [piece for piece in Channels(family, "", LS).feed(text, True) if piece.calls]
    assert said == "So: " and [name for name, _ in calls] == ["ls"]
    assert json.loads("".join(calls[0][1])) == json.loads(whole.calls[0].arguments)
    if arguments is not None:
        assert json.loads("".join(calls[0][1])) == arguments and (step > 7 or len(calls[0][1]) > 15)


@pytest.mark.parametrize("step", [1, 9, 10_000])
def test_a_gpt_oss_call_comes_as_it_is_written(step):
    body = json.dumps({"a": LONG})
    header = "<|channel|>commentary to=functions.ls <|constrain|>json<|message|>"
    calls, said = parts_of(HARMONY, f"{header}{body}<|call|>", step)
    assert calls[0][0] == "ls" and "".join(calls[0][1]) == body and said == "" and (step > 9 or len(calls[0][1]) > 15)


@pytest.mark.parametrize("step", [1, 10_000])
def test_two_calls_come_apart_and_a_call_that_is_cut_off_stays_one(step):
    family = marked("qwen3_coder")
    one = "<function=ls>\n<parameter=a>\nx\n</parameter>\n</function>"
    calls, _ = parts_of(family, f"<tool_call>{one}{one}</tool_call>", step)
    assert [(name, json.loads("".join(pieces))) for name, pieces in calls] == [("ls", {"a": "x"})] * 2
    family = Marked("<tool_call>", "</tool_call>")
    calls, said = parts_of(family, '<tool_call>{"name": "ls", "arguments": {"a": "x', step)
    assert [(name, "".join(pieces)) for name, pieces in calls] == [("ls", '{"a": "x')] and said == ""


ODD = ['{"name": "rm", "arguments": {"a": ', '[{"name": "ls", "arguments": {}}, 3]', '{"name": "ls", "arg']


@pytest.mark.parametrize("step", [1, 10_000])
@pytest.mark.parametrize("written", ODD)
def test_what_may_be_no_call_is_held_to_its_end(written, step):
    calls, said = parts_of(Marked("<tool_call>", "</tool_call>"), f"<tool_call>{written}", step)
    assert calls == [] and said == f"<tool_call>{written}"
