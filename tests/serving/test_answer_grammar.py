"""Answers that have to match something: grammars in each family's own marks, and what clients ask for and get."""

import json
import re

import anthropic
import jsonschema
import pytest
from kit import TINY
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import glm47, json_tools, mistral, pythonic, qwen3_coder
from pydantic import BaseModel, Field
from serving_kit import MESSAGES, WEATHER, ask
from transformers import AddedToken, AutoTokenizer

from dflash_mlx.cli.generate import _read_schema
from dflash_mlx.constraint import json_rule
from dflash_mlx.serving.answer_grammar import Demand, grammar_of, read_answer, read_tool
from dflash_mlx.serving.channels import Channels
from dflash_mlx.serving.engine import LoadedPair, Options
from dflash_mlx.serving.errors import RequestError
from dflash_mlx.serving.fields import CHAT, RESPONSES
from dflash_mlx.serving.requests import read_request

LS = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "n": {"type": "integer"}, "kind": {"enum": ["a", "b"]}},
    "required": ["path"],
    "additionalProperties": False,
}
RM = {
    "type": "object",
    "properties": {"o": {"type": "object", "properties": {"x": {"$ref": "#/$defs/yes"}}, "required": ["x"]}},
    "$defs": {"yes": {"type": "boolean"}},
    "required": ["o"],
    "additionalProperties": False,
}
FUNCTIONS = [{"name": "ls", "parameters": LS, "strict": True}, {"name": "rm", "parameters": RM, "strict": True}]
TOOLS = tuple(map(read_tool, FUNCTIONS))
OFFERED = [{"type": "function", "function": function} for function in FUNCTIONS]
NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ANSWER = Demand(f"answer: {json_rule(NUMBER)}\n", "response_format")


def family(*marks, parser=None, template=None):
    """The tiny tokenizer with these marks as special tokens, or spelled by its template alone."""
    tokenizer = AutoTokenizer.from_pretrained(TINY / "target")
    tokenizer.chat_template = template or "x"
    if template is None:
        tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks], special_tokens=True)
    calls = (parser.parse_tool_call, parser.tool_call_start, parser.tool_call_end) if parser else (None, None, None)
    return TokenizerWrapper(tokenizer, eos_token_ids=[0], tool_parser=calls[0], tool_call_start=calls[1], tool_call_end=calls[2])


def ends(tokenizer, demand, text, before=""):
    """Whether an answer may be this text and end there; else the part of it that may be."""
    held, ids = grammar_of(demand, tokenizer, "served", before).begin(tokenizer), tokenizer.encode(text, add_special_tokens=False)
    for n, token in enumerate(ids):
        if not held.advance(token):
            return tokenizer.decode(ids[:n])
    return bool(held.mask()[0] & 1)


THINKS = ("<think>", "</think>")
CALLS = ("<tool_call>", "</tool_call>")
CALL = '<tool_call>\n{"name": "ls", "arguments": {"path": "x"}}\n</tool_call>'
AGAIN = '\n<tool_call>\n{"name": "rm", "arguments": {"o": {"x": true}}}\n</tool_call>'
FORCED, FREE, ONE = Demand(tools=TOOLS, forced=True), Demand(tools=TOOLS), Demand(tools=TOOLS, many=False)


@pytest.mark.parametrize("template", [None, "".join((*THINKS, *CALLS))], ids=["tokens", "text"])
def test_an_answer_opens_behind_the_thinking(template):
    hermes = family(*THINKS, *CALLS, parser=json_tools, template=template)
    assert ends(hermes, ANSWER, '{"a": 1}') is True
    assert ends(hermes, ANSWER, '<think>Any {"b" of it.</think>\n\n{"a": 1}') is True
    assert ends(hermes, ANSWER, 'so</think>\n\n{"a": 1}', "<think>\n") is True
    # Thinking that the prompt opened must end, and with it nothing has.
    assert ends(hermes, ANSWER, '{"a": 1}', "<think>\n") is False
    assert ends(hermes, ANSWER, "so</think>y", "<think>\n") == "so</think>"
    assert ends(hermes, ANSWER, "Sure") == "" and ends(hermes, ANSWER, '{"b": 1}') == '{"'
    # A template that has closed it leaves no room for it.
    assert ends(hermes, ANSWER, "<think>", "<think>\n\n</think>\n\n") is not True


@pytest.mark.parametrize("template", [None, "<think></think><answer></answer>"], ids=["tokens", "text"])
def test_an_answer_may_stand_between_its_familys_marks(template):
    hunyuan = family(*THINKS, "<answer>", "</answer>", template=template)
    for text in ('{"a": 1}', '<think>x</think>\n<answer>\n{"a": 1}\n</answer>', '<answer>{"a": 1}</answer>'):
        assert ends(hunyuan, ANSWER, text) is True, text
    assert ends(hunyuan, ANSWER, "<answer>No") == "<answer>"


@pytest.mark.parametrize("template", [None, "".join((*THINKS, *CALLS))], ids=["tokens", "text"])
def test_calls_are_json_between_marks(template):
    hermes = family(*THINKS, *CALLS, parser=json_tools, template=template)
    for text, forced, free, one in (
        (CALL, True, True, True),
        (f"<think>x</think>\n{CALL}{AGAIN}", True, True, False),
        (f"Let me see. {CALL}", False, True, True),
        ("No call.", False, True, True),
        ('<tool_call>\n{"name": "cat", "arguments": {}}\n</tool_call>', False, False, False),
        (CALL.replace("path", "file"), False, False, False),
        ("<tool_call>", False, False, False),
    ):
        assert [ends(hermes, demand, text) is True for demand in (FORCED, FREE, ONE)] == [forced, free, one], text
    both = Demand(ANSWER.answer, tools=TOOLS)
    assert ends(hermes, Demand(ANSWER.answer, tools=TOOLS, forced=True), '{"a": 1}') is not True
    assert ends(hermes, both, '{"a": 1}') is True and ends(hermes, both, CALL) is True and ends(hermes, both, "No.") == ""


XML = "<tool_call>\n<function=ls>\n<parameter=path>\nVALUE\n</parameter>\n</function>\n</tool_call>"
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
COMMENTARY = '<|channel|>commentary to=functions.ls <|constrain|>json<|message|>{"path": "x"}'
# (marks, parser, a call that may be, its arguments as they are read, calls that may not be).
WRITTEN = [
    (CALLS, qwen3_coder, XML.replace("VALUE", 'a "b"\n<c'), {"path": 'a "b"\n<c'}, [XML.replace("VALUE", "null")]),
    (
        CALLS,
        qwen3_coder,
        XML.replace("</function>", "<parameter=n>\n3\n</parameter>\n<parameter=kind>\nb\n</parameter>\n</function>"),
        {"path": "VALUE", "n": 3, "kind": "b"},
        [XML.replace("=path", "=n"), XML.replace("</function>", "<parameter=kind>\nc\n</parameter>\n</function>")],
    ),
    (
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        pythonic,
        '<|tool_call_start|>[ls(path="a\\"é", n=3)]<|tool_call_end|>',
        {"path": 'a"é', "n": 3},
        ["<|tool_call_start|>[ls(n=3)]<|tool_call_end|>", '<|tool_call_start|>[ls(path="\\ud83d")]<|tool_call_end|>'],
    ),
    (HARMONY, None, COMMENTARY, {"path": "x"}, [COMMENTARY.replace("path", "file"), COMMENTARY.replace("ls", "cat")]),
    (HARMONY, None, f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{COMMENTARY}", {"path": "x"}, []),
]


@pytest.mark.parametrize("marks,parser,call,arguments,others", WRITTEN, ids=["xml", "xml types", "python", "harmony", "analysis"])
def test_each_familys_calls_are_held_and_read_as_they_are_written(marks, parser, call, arguments, others):
    tokenizer, before = family(*marks, parser=parser), "<|start|>assistant" if marks is HARMONY else ""
    for demand in (FORCED, FREE):
        assert ends(tokenizer, demand, call, before) is True
        assert not any(ends(tokenizer, demand, other, before) is True for other in others)
    pieces = Channels(tokenizer, before, OFFERED).feed(call + ("<|call|>" if marks is HARMONY else ""), last=True)
    (read,) = [one for piece in pieces for one in piece.calls]
    assert (read.name, json.loads(read.arguments)) == ("ls", arguments)


# (marks, parser, a call with VALUE for its arguments, what stands between two of them, whether its mark tells it from text).
LISTED = [
    (("<|python_tag|>",), None, '{"name": "ls", "parameters": VALUE}', "; ", False),
    (("[TOOL_CALLS]", "[ARGS]"), mistral, "[TOOL_CALLS]ls[ARGS]VALUE", "", True),
    (("[TOOL_CALLS]",), mistral, '[TOOL_CALLS][{"name": "ls", "arguments": VALUE}]', ", ", True),
    (("<|tool_call|>", "<|/tool_call|>"), None, '<|tool_call|>[{"name": "ls", "arguments": VALUE}]<|/tool_call|>', ", ", True),
    (("<|tool_call|>",), None, '<|tool_call|>[{"name": "ls", "arguments": VALUE}]', ", ", True),
    (("<tool_calls>", "</tool_calls>"), None, '<tool_calls>[{"name": "ls", "arguments": VALUE}]</tool_calls>', ", ", True),
    (("<|tools_prefix|>", "<|tools_suffix|>"), None, '<|tools_prefix|>[{"ls": VALUE}]<|tools_suffix|>', ", ", True),
    (
        ("<|START_ACTION|>", "<|END_ACTION|>"),
        None,
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "ls", "parameters": VALUE}]<|END_ACTION|>',
        *(", ", True),
    ),
    (
        ("<|action_start|>", "<|plugin|>", "<|action_end|>"),
        None,
        '<|action_start|><|plugin|>[{"name": "ls", "parameters": VALUE}]<|action_end|>',
        *(", ", True),
    ),
    (
        ("<|function_call|>", "<|message_sep|>"),
        None,
        '<|function_call|>{"name": "ls", "arguments": VALUE}<|message_sep|>',
        *("", True),
    ),
]


@pytest.mark.parametrize(("marks", "parser", "written", "between", "free"), LISTED, ids=[marks[0] for marks, *_ in LISTED])
def test_forced_calls_of_families_with_json_are_held_and_read(marks, parser, written, between, free):
    tokenizer, arguments = family(*marks, parser=parser), '{"path": "x", "n": 3}'
    one = written.replace("VALUE", arguments)
    # What a second call repeats of the first.
    inner = one[one.index("[{") + 1 : one.rindex("]")] if "[{" in one else one
    two, three = (one.replace(inner, between.join([inner] * count)) for count in (2, 3))
    assert all(ends(tokenizer, FORCED, text) is True for text in (one, two, three))
    if free:
        assert ends(tokenizer, ONE, one) is True and ends(tokenizer, ONE, two) is not True
    for other in (one.replace("path", "file"), one.replace("ls", "cat"), "Sure.", one[:-1]):
        assert ends(tokenizer, FORCED, other) is not True, other
    for text, count in ((one, 1), (two, 2), (three, 3)):
        pieces = Channels(tokenizer, "", OFFERED).feed(text, last=True)
        assert [(call.name, json.loads(call.arguments)) for piece in pieces for call in piece.calls] == [
            ("ls", {"path": "x", "n": 3})
        ] * count
    if free:
        assert ends(tokenizer, FREE, f"Let me see. {one}") is True and ends(tokenizer, FREE, "No call.") is True
    else:
        # Free text may begin as a call does.
        assert asked(tokenizer, tools=OFFERED).ignored == ["tools: strict"]


def test_gigachats_call_is_a_message_of_its_own():
    tokenizer = family("<|message_sep|>", "<|role_sep|>")
    call = 'function call<|role_sep|>\n{"name": "ls", "arguments": {"path": "x"}}<|message_sep|>'
    for text, forced, free, one in (
        (f"<|message_sep|>\n\n{call}", True, True, True),
        (f"<|message_sep|>\n\n{call}\n\n{call}", True, True, False),
        (f"A function call: <|message_sep|>\n\n{call}", False, True, True),
        (f"<|message_sep|>\n\n{call.replace('path', 'file')}", False, False, False),
        ("A function call.", False, True, True),
    ):
        assert [ends(tokenizer, demand, text) is True for demand in (FORCED, FREE, ONE)] == [forced, free, one], text
        calls = [one for piece in Channels(tokenizer, "", OFFERED).feed(text, last=True) for one in piece.calls]
        assert len(calls) == text.count("role_sep")


def test_gpt_oss_answers_in_its_final_channel():
    tokenizer, before = family(*HARMONY), "<|start|>assistant"
    assert ends(tokenizer, ANSWER, '<|channel|>final<|message|>{"a": 1}', before) is True
    assert ends(tokenizer, ANSWER, '<|channel|>final <|constrain|>json<|message|>{"a": 1}', before) is True
    assert ends(tokenizer, FREE, "<|channel|>final<|message|>Hi", before) is True
    assert ends(tokenizer, FORCED, "<|channel|>final<|message|>Hi", before) is not True
    assert ends(tokenizer, ANSWER, "<|channel|>final<|message|>Hi", before) == "<|channel|>final<|message|>"
    assert ends(tokenizer, ANSWER, COMMENTARY, before) != True  # noqa: E712 - a text is true too


def asked(tokenizer, api=CHAT, **body):
    pair = LoadedPair.__new__(LoadedPair)
    pair.__dict__.update(name="served", names={"served", "default_model"}, draft_name=None, tokenizer=tokenizer, vocabulary=1536)
    pair.most_drafts = None
    base = {"messages": MESSAGES} if api == CHAT else {"input": "x"}
    return read_request({**base, **body}, api, pair, Options())


def test_a_family_whose_calls_cannot_be_enforced_is_refused_by_name_where_calls_are_forced():
    tokenizer = family("<tool_call>", "</tool_call>", parser=glm47)
    with pytest.raises(
        Exception,
        match=r"tool_choice: calls of served begin with '<tool_call>', and calls of that form cannot be enforced; JSON, Qwen3",
    ):
        asked(tokenizer, tools=OFFERED, tool_choice="required")
    # Sent by default: an agent could offer no tool at all.
    assert asked(tokenizer, tools=OFFERED).ignored == ["tools: strict"]
    assert asked(tokenizer, RESPONSES, tools=OFFERED[:1], parallel_tool_calls=False).ignored == [
        "tools: strict",
        "parallel_tool_calls",
    ]


def allowed(mode, *names, nested=True):
    """A `tool_choice` in the shape of chat completions, or of Responses."""
    if nested:
        return {
            "type": "allowed_tools",
            "allowed_tools": {"mode": mode, "tools": [{"type": "function", "function": {"name": name}} for name in names]},
        }
    return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}


@pytest.mark.parametrize("api", [CHAT, RESPONSES])
def test_of_allowed_tools_alone_calls_are_written(api):
    hermes, loose = family(*CALLS, parser=json_tools), [{"type": "function", "function": {"name": name}} for name in ("ls", "rm")]
    for mode, free in (("auto", True), ("required", False)):
        read = asked(hermes, api, tools=loose, tool_choice=allowed(mode, "ls", nested=api == CHAT))
        # What is not allowed stays in the prompt, so that a kept prefix serves every choice.
        assert len(read.tools) == 2 and read.ignored == []
        call = '<tool_call>\n{"name": "NAME", "arguments": {}}\n</tool_call>'
        said = [
            ends(hermes, read.demand, text) is True for text in (call.replace("NAME", "ls"), call.replace("NAME", "rm"), "No.")
        ]
        assert said == [True, False, free]
    # All of them: as if it were left out.
    assert not asked(hermes, api, tools=loose, tool_choice=allowed("auto", "rm", "ls")).demand.holds


def test_tools_that_are_not_allowed_are_not_offered_where_calls_cannot_be_held_to():
    tokenizer = family("<tool_call>", "</tool_call>", parser=glm47)
    read = asked(tokenizer, tools=OFFERED, tool_choice=allowed("auto", "rm"))
    assert [tool["function"]["name"] for tool in read.tools] == ["rm"] and not read.demand.holds
    with pytest.raises(Exception, match="tool_choice: calls of served begin with"):
        asked(tokenizer, tools=OFFERED, tool_choice=allowed("required", "rm"))


@pytest.mark.parametrize(
    "choice,message",
    [
        (allowed("auto", "cat"), 'tool_choice allows "cat", and tools offers no such function. Offer it'),
        (allowed("any", "ls"), 'allowed_tools must have mode "auto" or "required", and tools with functions'),
        (allowed("auto"), "and tools with functions"),
        ({"type": "allowed_tools", "mode": "auto", "tools": "ls"}, "and tools with functions"),
        ({"type": "allowed_tools", "allowed_tools": ["ls"]}, "and tools with functions"),
        (allowed("auto", None), "and tools with functions"),
    ],
)
def test_an_odd_choice_of_tools_is_refused(choice, message):
    with pytest.raises(RequestError, match=re.escape(message)):
        asked(family(*CALLS, parser=json_tools), tools=OFFERED, tool_choice=choice)


STRICT = [
    (json_tools, {"type": "array", "uniqueItems": True}, "uniqueItems"),
    (json_tools, {"type": "object", "minProperties": 3}, "minProperties of the JSON schema is 3"),
    (qwen3_coder, {"type": "string", "pattern": "a+"}, "'pattern' of the parameter 'p' of 'f'"),
    (qwen3_coder, {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "the parameter 'p' of 'f' has no single type"),
]


@pytest.mark.parametrize("parser,schema,named", STRICT, ids=["keyword", "dropped", "pattern", "types"])
def test_a_strict_schema_that_cannot_be_held_to_is_refused_and_another_is_any_object(parser, schema, named):
    tokenizer = family(*CALLS, parser=parser)
    function = {"name": "f", "parameters": {"type": "object", "properties": {"p": schema}}}
    tool = {"type": "function", "function": {**function, "strict": True}}
    with pytest.raises(Exception, match=named):
        asked(tokenizer, tools=[tool])
    held = asked(tokenizer, tools=[{"type": "function", "function": function}], tool_choice="required").demand
    text = {
        json_tools: '{"name": "f", "arguments": {"p": [1, 1]}}',
        qwen3_coder: "<function=f>\n<parameter=p>\nx\n</parameter>\n</function>",
    }
    assert ends(tokenizer, held, f"<tool_call>\n{text[parser]}\n</tool_call>") is True


@pytest.mark.parametrize(
    "name,value", [("response_format", {"type": "structural_tag"}), ("structured_outputs", {"structural_tag": "{}"})]
)
def test_tags_within_free_text_are_refused_by_name(name, value):
    with pytest.raises(RequestError, match=f"{name} asks for structural_tag; .* no parts of free text. Send tools with strict"):
        read_answer({name: value})


def test_a_schema_of_the_command_line_is_a_files_or_itself(tmp_path):
    (tmp_path / "s.json").write_text(json.dumps(NUMBER))
    assert _read_schema(f" {json.dumps(NUMBER)}") == _read_schema(str(tmp_path / "s.json"))


def test_a_grammar_of_llama_cpp_is_read():
    held = grammar_of(read_answer({"grammar": 'root ::= "a" item*\nitem ::= "b" | "c"'}), family(), "served", None).begin(
        family()
    )
    assert all(map(held.advance, family().encode("abc", add_special_tokens=False)))


# On the built-in pair, through a server


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)
    tags: list[str] = Field(max_length=2)


@pytest.mark.full
def test_openais_client_parses_a_model_in_both_apis_and_streams_it(served):
    parse = served.client.chat.completions.parse
    message = parse(model="served", messages=MESSAGES, response_format=Person, max_tokens=150, seed=3, temperature=1).choices[0]
    assert message.finish_reason == "stop" and isinstance(message.message.parsed, Person)
    answer = served.client.responses.parse(model="served", input="x", text_format=Person, max_output_tokens=150)
    assert isinstance(answer.output_parsed, Person)
    body = {"type": "json_schema", "json_schema": {"name": "p", "schema": Person.model_json_schema(), "strict": True}}
    parts = served.client.chat.completions.create(
        model="served", messages=MESSAGES, response_format=body, max_tokens=150, seed=3, temperature=1, stream=True
    )
    assert "".join(part.choices[0].delta.content or "" for part in parts) == message.message.content


@pytest.mark.full
@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_langchain_gets_structured_output(served, method):
    from langchain_openai import ChatOpenAI

    address = f"{served.client.base_url}"
    chat = ChatOpenAI(model="served", base_url=address, api_key="none", max_tokens=200, temperature=1, seed=3)
    found = chat.with_structured_output(dict if method == "json_mode" else Person, method=method).invoke("x")
    assert isinstance(found, dict if method == "json_mode" else Person)


@pytest.mark.full
def test_forced_calls_come_as_calls(served):
    tool = {"type": "function", "function": {"name": "ls", "parameters": LS, "strict": True}}
    for choice in ("required", {"type": "function", "function": {"name": "ls"}}):
        answer = ask(
            served, tools=[*WEATHER, tool], tool_choice=choice, parallel_tool_calls=False, max_tokens=200, seed=2, temperature=1
        )
        (call,) = answer.choices[0].message.tool_calls
        if choice != "required":
            assert call.function.name == "ls"
            jsonschema.validate(json.loads(call.function.arguments), LS)
    client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{served.port}", api_key="x", max_retries=0)
    said = client.messages.create(
        model="served",
        messages=MESSAGES,
        max_tokens=200,
        tools=[{"name": "ls", "input_schema": LS}],
        tool_choice={"type": "tool", "name": "ls"},
    )
    (used,) = [block for block in said.content if block.type == "tool_use"]
    jsonschema.validate(used.input, LS)


def test_what_vllm_names_is_held_to(served):
    held = {
        "guided_regex": ("[ab]{3}", lambda text: len(text) == 3),
        "guided_choice": (["left", "right"], ["left", "right"].__contains__),
        "structured_outputs": ({"json": NUMBER}, lambda text: isinstance(json.loads(text)["a"], int)),
        "guided_grammar": ('start: "x" | "y"', "xy".__contains__),
    }
    for name, (value, fits) in held.items():
        assert fits(ask(served, max_tokens=40, extra_body={name: value}).choices[0].message.content), name
    status, body = served.post("/v1/completions", {"prompt": "x = ", "max_tokens": 40, "guided_json": NUMBER})
    assert status == 200 and list(json.loads(json.loads(body)["choices"][0]["text"])) == ["a"]


def test_an_answer_that_is_cut_says_length(served):
    answer = ask(served, max_tokens=1, response_format={"type": "json_object"}).choices[0]
    assert answer.finish_reason == "length" and answer.message.content.startswith("{")
