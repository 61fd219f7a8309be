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


@pytest.mark.parametrize("step", [1, 10_000])
@pytest.mark.parametrize("key", ["a", "n"])
def test_no_letter_of_a_call_that_is_cut_off_within_a_value_is_lost(key, step):
    one = "<function=ls>\n<parameter=a>\nx\n</parameter>\n"
    calls, said = parts_of(marked("qwen3_coder"), f"<tool_call>\n{one}<parameter={key}>\n1234 and so", step)
    assert "".join(calls[0][1]) == f'{{"a": "x", "{key}": "1234 and so' and said == ""


ODD = ['{"name": "rm", "arguments": {"a": ', '[{"name": "ls", "arguments": {}}, 3]', '{"name": "ls", "arg']


@pytest.mark.parametrize("step", [1, 10_000])
@pytest.mark.parametrize("written", ODD)
def test_what_may_be_no_call_is_held_to_its_end(written, step):
    calls, said = parts_of(Marked("<tool_call>", "</tool_call>"), f"<tool_call>{written}", step)
    assert calls == [] and said == f"<tool_call>{written}"


# Calls as a family writes them, by mlx-lm's parser or by marks that its wrapper lacks.
TWO_PARTS = {
    "glm47": "<tool_call>ls\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n<arg_key>n</arg_key><arg_value>3</arg_value>"
    "</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="ls">\n<parameter name="a">x</parameter>\n</invoke>\n</minimax:tool_call>',
    "muse_spark": '<atem:function_calls><atem:invoke name="ls"><atem:parameter name="a">x</atem:parameter></atem:invoke>'
    "</atem:function_calls>",
    "minicpm5": '<function name="ls"><param name="a">x</param></function>',
    "qwen3_coder": "<tool_call>\n<function=ls>\n<parameter=a>\nx\n</parameter>\n</function>\n<function=ls>\n</function>\n"
    "</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|>"
    '<|tool_call_begin|>functions.ls:0<|tool_call_argument_begin|>{"a": "x"}<|tool_call_end|>'
    "<|tool_call_begin|>functions.ls:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="ls"<|sep|><|open|>argument key="a"<|sep|>x<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>",
    "longcat": "<longcat_tool_call>ls<longcat_arg_key>a</longcat_arg_key><longcat_arg_value>x</longcat_arg_value>"
    "</longcat_tool_call>",
    "pythonic": '<|tool_call_start|>[ls(a="x"), ls(n=3)]<|tool_call_end|>',
    "gemma4": '<|tool_call>call:ls{a:<|"|>x<|"|>}<tool_call|>',
    "mistral": '[TOOL_CALLS]ls[ARGS]{"a": "x"}[TOOL_CALLS]ls[CALL_ID]abcdefghi[ARGS]{"n": 3}',
    "json_tools": '<tool_call>\n{"name": "ls", "arguments": {"a": "x"}}\n{"name": "ls", "arguments": {}}\n</tool_call>',
}
GPT_OSS = '<|channel|>commentary to=functions.ls <|constrain|>json<|message|>{"a": "x"}<|call|>'
OWN_MARKS = {
    ("<TOOLCALL>", "</TOOLCALL>"): '<TOOLCALL>[{"name": "ls", "arguments": {"a": "x"}}]</TOOLCALL>',
    ("<|python_tag|>",): '<|python_tag|>{"name": "ls", "parameters": {"a": "x"}}; {"name": "ls", "parameters": {}}',
    ("<function_calls>", "</function_calls>"): '<function_calls>ls(a="x")\nls(n=3)</function_calls>',
    ("<seed:tool_call>", "</seed:tool_call>"): "<seed:tool_call><function=ls>\n<parameter=a>x</parameter></function>"
    "</seed:tool_call>",
    ("｜DSML｜",): '<｜DSML｜calls>\n<｜DSML｜invoke name="ls">\n{"a": "x"}</｜DSML｜invoke>\n</｜DSML｜calls>',
}


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("family", [*TWO_PARTS, *OWN_MARKS], ids=str)
def test_a_word_that_is_written_anywhere_in_a_call_never_disappears(family, live):
    """Readers of mlx-lm's skip what they do not know between, beside and within the marks of a call."""
    tokenizer, text = (marked(family), TWO_PARTS[family]) if family in TWO_PARTS else (Marked(*family), OWN_MARKS[family])
    for at in range(len(text) + 1):
        if text[at - 1 : at + 1].isalnum():
            continue
        channels, told = Channels(tokenizer, "", LS, live=live), ""
        for letters in (text[:at], " WORD", " ", text[at:]):
            pieces = channels.feed(letters)
            told += "".join(
                piece.text + "".join(f"{call.name} {call.arguments} {call.id}" for call in piece.calls) for piece in pieces
            )
        for piece in channels.feed("", last=True):
            told += piece.text + "".join(f"{call.name} {call.arguments} {call.id}" for call in piece.calls)
        assert told.count("WORD") == 1, text[:at] + " WORD " + text[at:]


@pytest.mark.parametrize("family", [*TWO_PARTS, *OWN_MARKS, "gpt-oss"], ids=str)
def test_a_call_that_is_cut_off_is_none_with_fewer_arguments(family):
    """As the length limit cuts it. An agent would write a file without its text."""
    tokenizer, text = (HARMONY, GPT_OSS) if family == "gpt-oss" else (None, "")
    if tokenizer is None:
        tokenizer, text = (marked(family), TWO_PARTS[family]) if family in TWO_PARTS else (Marked(*family), OWN_MARKS[family])

    def called(written):
        pieces = Channels(tokenizer, "", LS).feed(written, last=True)
        return [(call.name, call.arguments) for piece in pieces for call in piece.calls]

    whole = called(text)
    assert whole and all(called(text[:at]) == whole[: len(called(text[:at]))] for at in range(len(text)))


@pytest.mark.parametrize("live", [False, True])
def test_words_behind_calls_that_no_mark_ends_are_text(live):
    """As Mistral's models go on after a call."""
    for between in (" Now the other: ", ""):
        text = f'Look: [TOOL_CALLS]ls[ARGS]{{"a": "x"}}{between}[TOOL_CALLS]ls[ARGS]{{"n": 3}} Done.'
        for step in (1, 10_000):
            tokenizer, said, calls = marked("mistral"), "", []
            channels = Channels(tokenizer, "", LS, live=live)
            for letters in [text[at : at + step] for at in range(0, len(text), step)] + [""]:
                for piece in channels.feed(letters, last=not letters):
                    if piece.kind == "arguments":
                        calls[-1] += piece.text
                    else:
                        said += piece.text
                    calls += [call.arguments for call in piece.calls]
            assert calls == ['{"a": "x"}', '{"n": 3}'] and said == f"Look: {between} Done."


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        '[TOOL_CALLS]ls[ARGS]{"a": "x"}[TOOL_CALLS]ls[ARGS]{"a": "one\n WORD"}',
        '[TOOL_CALLS]ls[ARGS]{"n": 1}ls[ARGS][1, 2] WORD',
        '[TOOL_CALLS]ls[ARGS]{"n": NaN} WORD',
        GPT_OSS.replace("<|call|>", " WORD<|call|>"),
    ],
)
def test_what_stands_in_or_behind_a_damaged_call_comes_once(text, live):
    channels, told = Channels(HARMONY if "<|call|>" in text else marked("mistral"), "", LS, live=live), ""
    for piece in [piece for letter in text for piece in channels.feed(letter)] + channels.feed("", last=True):
        told += piece.text + "".join(call.arguments for call in piece.calls)
    assert told.count("WORD") == 1
