"""Calls as each grammar writes them: values that hold marks, types, several calls, and text that is no call any more."""

import json

import pytest
from channels_kit import HARMONY, Marked, marked, told

from dflash_mlx.serving import channels
from dflash_mlx.serving.channels import Channels

PROPERTIES = {"a": {"type": "string"}, "n": {"type": "integer"}, "b": {"type": "boolean"}, "o": {"type": "object"}}
LS = [{"type": "function", "function": {"name": "ls", "parameters": {"properties": PROPERTIES}}}]
HEADER = "<|channel|>commentary to=functions.ls <|constrain|>json<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Hi!<|return|>"


def k3(*arguments, call='<|open|>call tool="ls" index="1"<|sep|>'):
    return f"{call}{''.join(arguments)}<|close|>call<|sep|>"


def argument(key, value, type=None):
    stated = f' type="{type}"' if type else ""
    return f'<|open|>argument key="{key}"{stated}<|sep|>{value}<|close|>argument<|sep|>'


# (mlx-lm's parser, what stands between the marks with VALUE for the text "a", marks of its own that the value may hold).
INNER = [
    ("kimi_k3", k3(argument("a", "VALUE", "string")), ["<|close|>call<|sep|>", "<|open|>call x<|sep|>"]),
    ("kimi_k3", k3('<|open|>json type="object"<|sep|>{"a": "VALUE"}<|close|>json<|sep|>'), ["<|close|>call<|sep|>"]),
    ("minicpm5", '"ls"><param name="a">VALUE</param>', ["</function>", '<function name="rm">']),
    ("minicpm5", '"ls"><param name="a"><![CDATA[VALUE]]></param>', ["</function>", "</param>", '<param name="b">1</param>']),
    ("minimax_m2", '<invoke name="ls"><parameter name="a">VALUE</parameter></invoke>', ["</invoke>", '<invoke name="rm">']),
    ("muse_spark", '<atem:invoke name="ls"><atem:parameter name="a">VALUE</atem:parameter></atem:invoke>', ["</atem:invoke>"]),
    ("qwen3_coder", "<function=ls><parameter=a>VALUE</parameter></function>", ["</function>", "<function=rm>"]),
    (
        "kimi_k2",
        '<|tool_call_begin|>functions.ls:0<|tool_call_argument_begin|>{"a": "VALUE"}<|tool_call_end|>',
        ["<|tool_call_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"],
    ),
    ("function_gemma", "call:ls{a:<escape>VALUE<escape>}", ["}", "{", "call:rm{}"]),
    ("gemma4", 'call:ls{a:<|"|>VALUE<|"|>}', ["}", "call:rm{}"]),
    ("pythonic", '[ls(a="VALUE")]', ["rm(x=1)", ")]"]),
    ("mistral", 'ls[ARGS]{"a": "VALUE"}', ["[CALL_ID]9[ARGS]", "[TOOL_CALLS]rm[ARGS]{}"]),
]


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize(("parser", "written", "mark"), [(p, w, m) for p, w, marks in INNER for m in marks])
def test_a_grammars_own_marks_within_a_value_are_the_values(parser, written, mark, step):
    family = marked(parser)
    text = f"{family.tool_call_start}{written.replace('VALUE', f'x{mark}y')}{family.tool_call_end}"
    assert told(family, text, tools=LS, step=step) == [("call", [("ls", json.dumps({"a": f"x{mark}y"}))])]


DSML = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="ls">\n{}\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'


def dsml(key, value, stated):
    return f'<｜DSML｜parameter name="{key}"{stated}>{value}</｜DSML｜parameter>'


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize(
    ("key", "value", "stated", "read"),
    [
        *(
            ("a", value, ' string="true"', value)
            for value in ("x", "3", " x\n", "</｜DSML｜tool_calls>", "</｜DSML｜invoke> \"it's")
        ),
        *(
            ("n", "3", ' string="false"', 3),
            ("o", '{"x": [1]}', ' string="false"', {"x": [1]}),
            ("a", "3", ' string="false"', "3"),
        ),
        *(("n", "3", "", 3), ("a", "3", "", "3"), ("z", "3", "", 3)),
    ],
)
def test_an_argument_of_deepseeks_is_what_is_stated_or_what_the_tool_asks_for(key, value, stated, read, step):
    text = DSML.format(dsml(key, value, stated))
    assert told(Marked("｜DSML｜"), text, tools=LS, step=step) == [
        ("call", [("ls", json.dumps({key: read}, ensure_ascii=False))])
    ]


@pytest.mark.parametrize("body", [dsml("n", "3 or 4", ' string="false"'), dsml("a", "x", "")[:-10], "words", "[1]"])
def test_a_call_of_deepseeks_that_cannot_be_read_is_text(body):
    text = DSML.format(body)
    assert told(Marked("｜DSML｜"), f"So: {text}", tools=LS) == [("answer", f"So: {text}")]


@pytest.mark.parametrize("between", ["\n", "", ";", "; "])
@pytest.mark.parametrize("marks", [("<tool_call>", "</tool_call>"), ("<tool_calls>", "</tool_calls>"), ("<|python_tag|>", "")])
def test_objects_in_a_row_are_calls_also_as_they_are_written(marks, between):
    family = marked("json_tools") if marks[0] == "<tool_call>" else Marked(*filter(None, marks))
    two = [f'{{"arguments": {{"n": {n}}}, "name": "{name}"}}' for n, name in ((1, "ls"), (2, "rm"))]
    tools = [*LS, {"type": "function", "function": {"name": "rm"}}]
    text = f"{marks[0]}{between.join(two)}{marks[1]}"
    assert told(family, text, tools=tools) == [("call", [("ls", '{"n": 1}'), ("rm", '{"n": 2}')])]
    channels = Channels(family, tools=tools, live=True)
    pieces = [piece for letter in text for piece in channels.feed(letter)] + channels.feed("", last=True)
    assert [call.name for piece in pieces for call in piece.calls] == ["ls", "rm"]


TYPED = [
    ("n", "3", None, 3),
    ("b", "true", None, True),
    ("a", "3", None, "3"),
    ("o", '{"x": 1}', None, {"x": 1}),
    # What is stated is not what the tool asks for, or not what is written.
    ("n", "3", "string", 3),
    ("a", "3", "number", "3"),
    ("a", "true", "boolean", "true"),
    ("a", "null", "string", "null"),
    ("b", "True", "boolean", True),
    # A tool that says nothing of it.
    ("z", "3", "number", 3),
    ("z", "3", "string", "3"),
    ("z", "3", None, 3),
    ("z", "x y", None, "x y"),
]


@pytest.mark.parametrize(("key", "value", "type", "read"), TYPED)
def test_an_argument_of_kimi_k3_has_the_type_that_the_tool_asks_for(key, value, type, read):
    family = marked("kimi_k3")
    text = f"{family.tool_call_start}{k3(argument(key, value, type))}{family.tool_call_end}"
    assert told(family, text, tools=LS) == [("call", [("ls", json.dumps({key: read}))])]


# (mlx-lm's parser, a call's head, a value under a key, a call's end) of grammars that tag their values.
TAGGED = [
    ("glm47", "ls\n", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n", ""),
    ("laguna", "ls", "<arg_key>{}</arg_key><arg_value>{}</arg_value>", ""),
    ("longcat", "ls\n", "<longcat_arg_key>{}</longcat_arg_key>\n<longcat_arg_value>{}</longcat_arg_value>\n", ""),
    ("minimax_m2", '\n<invoke name="ls">\n', '<parameter name="{}">{}</parameter>\n', "</invoke>\n"),
    ("minicpm5", '"ls">', '<param name="{}">{}</param>', ""),
    ("muse_spark", '<atem:invoke name="ls">', '<atem:parameter name="{}">{}</atem:parameter>', "</atem:invoke>"),
    ("qwen3_coder", "\n<function=ls>\n", "<parameter={}>\n{}\n</parameter>\n", "</function>\n"),
]
WORDS = {"type": "object", "properties": {**PROPERTIES, "s": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}
WORDY = [{"type": "function", "function": {"name": "ls", "parameters": WORDS}}]


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize("key", ["a", "s"])
@pytest.mark.parametrize("value", ["3", "true", "null", '{"x":1}', " x ", "    if a < b:\n        return\n", "\n", ""])
@pytest.mark.parametrize(("parser", "head", "part", "end"), TAGGED)
def test_a_value_that_is_to_be_text_is_the_text_that_was_written(parser, head, part, end, key, value, step):
    family = marked(parser)
    written = f"{family.tool_call_start}{head}{part.format(key, value)}{part.format('n', 3)}{end}{family.tool_call_end}"
    for live in (False, True):
        read = None if (key, value) == ("s", "null") else value
        assert called(family, written, WORDY, step, live) == [("ls", {key: read, "n": 3})]


def called(family, text, tools, step=1000, live=False):
    """The calls in a text, each with its arguments; no text may stand beside them."""
    reader, calls = Channels(family, tools=tools, live=live), []
    for at in range(0, len(text), step):
        for piece in reader.feed(text[at : at + step], last=at + step >= len(text)):
            calls += [[call.name, call.arguments] for call in piece.calls]
            if piece.kind == "arguments":
                calls[-1][1] += piece.text
            else:
                assert not piece.text
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("value", ['{"x": [1, {"y": null}], "<b>": "[c]"}', '{"x": [1, {"y": None}]}', "[broken", "3"])
def test_an_object_that_is_written_as_text_in_python_is_an_object_where_the_tool_wants_one(value):
    """As LFM2.5's template writes objects, and its model after it."""
    text = f"<|tool_call_start|>[ls(o={value!r}, a={value!r})]<|tool_call_end|>"
    (call,) = called(marked("pythonic"), text, LS)
    wanted = {"{": {"x": [1, {"y": None}], **({"<b>": "[c]"} if "<b>" in value else {})}, "3": 3}.get(value[0], value)
    assert call == ("ls", {"o": wanted, "a": value})


OPTIONAL = [
    *((kind, value, read) for kind, value, read in (("integer", "42", 42), ("number", "2.5", 2.5), ("boolean", "true", True))),
    *(("array", value, json.loads(value)) for value in ("[]", '["a", true, null]')),
    ("object", '{"a": true}', {"a": True}),
]


FORMS = {
    "list": lambda kind: {"type": [kind, "null"]},
    "anyOf": lambda kind: {"anyOf": [{"type": kind}, {"type": "null"}], "default": None},
    # As Pydantic writes the optional fields that are models.
    "anyOf ref": lambda kind: {"anyOf": [{"$ref": "#/$defs/V"}, {"type": "null"}]},
    "allOf ref": lambda kind: {"allOf": [{"$ref": "#/definitions/V"}], "default": None},
    "ref": lambda kind: {"$ref": "#/$defs/V"},
    "circle": lambda kind: {"$ref": "#/$defs/W"},
}


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("kind", "value", "read"), [*OPTIONAL, *((kind, "null", None) for kind, *_ in OPTIONAL[2:])])
@pytest.mark.parametrize(("parser", "head", "part", "end"), TAGGED)
def test_a_value_that_may_be_missing_has_its_type(parser, head, part, end, kind, value, read, form, live):
    """As Pydantic and MCP servers write an optional parameter."""
    family = marked(parser)
    written = f"{family.tool_call_start}{head}{part.format('v', value)}{end}{family.tool_call_end}"
    assert called(family, written, offered(FORMS[form](kind), kind), live=live) == [("ls", {"v": read})]


def offered(schema, kind="object"):
    """A function with one parameter, whose schema may refer to a type."""
    defined = {"V": {"type": kind}, "W": {"anyOf": [{"$ref": "#/$defs/W"}, {"$ref": "#/$defs/V"}]}}
    parameters = {"properties": {"v": schema}, "$defs": defined, "definitions": defined}
    return [{"type": "function", "function": {"name": "ls", "parameters": parameters}}]


# And those that may state what a value is.
STATING = [
    *TAGGED,
    ("kimi_k3", '<|open|>call tool="ls" index="1"<|sep|>', argument("{}", "{}"), "<|close|>call<|sep|>"),
    ("dsml", *(DSML[: DSML.index("{}")], dsml("{}", "{}", ""), DSML[DSML.index("{}") + 2 :])),
]


def in_marks(parser, written):
    """A family, and the text of a call of its."""
    family = Marked("｜DSML｜") if parser == "dsml" else marked(parser)
    return family, written if parser == "dsml" else f"{family.tool_call_start}{written}{family.tool_call_end}"


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("schema", [{}, {"description": "what is sought"}, {"$ref": "#/$defs/X"}, {"$ref": "#/$defs/V"}])
@pytest.mark.parametrize(("value", "read"), [('{"x": [1]}', {"x": [1]}), ("3", 3), ("x y", "x y")])
@pytest.mark.parametrize(("parser", "head", "part", "end"), STATING)
def test_a_value_of_no_type_is_json_if_it_can_be(parser, head, part, end, value, read, schema, live):
    family, text = in_marks(parser, f"{head}{part.format('v', value)}{end}")
    assert called(family, text, offered(schema), live=live) == [("ls", {"v": read})]


@pytest.mark.parametrize("schema", [{}, {"$ref": "#/$defs/V"}])
@pytest.mark.parametrize(
    ("parser", "part", "value", "read"),
    [
        ("kimi_k3", argument("v", "{}", "object"), '{"x": 1}', {"x": 1}),
        ("dsml", dsml("v", "{}", ' string="false"'), '{"x": 1}', {"x": 1}),
    ],
)
def test_a_value_of_no_type_is_of_the_type_that_the_call_states(parser, part, value, read, schema):
    head, end = next((head, end) for name, head, _, end in STATING if name == parser)
    assert called(*in_marks(parser, f"{head}{part.format(value)}{end}"), offered(schema)) == [("ls", {"v": read})]
    text = part.replace('"object"', '"string"').replace('"false"', '"true"').format("3")
    assert called(*in_marks(parser, f"{head}{text}{end}"), offered({})) == [("ls", {"v": "3"})]


EXACT = 2**53 + 1


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize(
    ("kind", "value", "read"),
    [
        *(("boolean", value, True) for value in ("true", " true", "True", "1", "yes", "on")),
        *(("boolean", value, False) for value in ("false", "False ", "0", "no", "off")),
        *(("integer", str(EXACT), EXACT), ("number", str(EXACT), EXACT), ("integer", "3.0", 3), ("number", "1e3", 1000)),
        # What is of no such type stays what it is: the tool says what is wrong with it.
        *(("integer", "3.5", 3.5), ("integer", "abc", "abc"), ("boolean", "maybe", "maybe"), ("number", "1e999", "1e999")),
        *(("object", "[1", "[1"), ("array", "NaN", "NaN"), ("object", "{'a': {1}}", "{'a': {1}}")),
    ],
)
@pytest.mark.parametrize(("parser", "head", "part", "end"), TAGGED)
def test_a_value_is_exactly_what_is_written_whole_or_in_a_stream(parser, head, part, end, kind, value, read, live):
    family, text = in_marks(parser, f"{head}{part.format('v', value)}{end}")
    (name, arguments), *more = called(family, text, offered({"type": kind}), live=live)
    assert (name, arguments, more) == ("ls", {"v": read}, []) and type(arguments["v"]) is type(read)


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("parameters", [None, {}, {"properties": None}, {"properties": {"v": True}}])
@pytest.mark.parametrize(("parser", "head", "part", "end"), [*STATING, ("mistral", "ls[ARGS]", '{{"{}": "{}"}}', "")])
def test_a_function_of_no_known_parameters_is_called(parser, head, part, end, parameters, live):
    family, text = in_marks(parser, f"{head}{part.format('v', 'x y')}{end}")
    tools = [{"type": "function", "function": {"name": "ls", "parameters": parameters}}]
    assert called(family, text, tools, live=live) == [("ls", {"v": "x y"})]


OBJECT = '{"a": "x <b>", "n": 3}'
TAGS = '{"a": "<function=ls><parameter=a>x</parameter>"}'


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize(
    ("parser", "written", "wanted"),
    [
        ("qwen3_coder", f"\n<function=ls>\n{OBJECT}\n</function>\n", OBJECT),
        ("qwen3_coder", f'\n{{"name": "ls", "arguments": {OBJECT}}}\n', OBJECT),
        ("qwen3_coder", f"\n<function=ls>\n{TAGS}\n</function>\n", TAGS),
        ("qwen3_coder", f'\n{{"name": "ls", "arguments": {TAGS}}}\n', TAGS),
        ("qwen3_coder", "\n<function=ls>\n<parameter=a>\nx\n</parameter>\n</function>  \n\n", '{"a": "x"}'),
        ("qwen3_coder", "\n<function=ls>\nthe files\n</function>\n", None),
        ("pythonic", f'[{{"name": "ls", "arguments": {OBJECT}}}]', OBJECT),
        ("pythonic", f'{{"name": "ls", "arguments": {OBJECT}}}', OBJECT),
        ("pythonic", '[ls("x <b>", n=3)]', None),
        ("pythonic", '[ls("x")]', None),
        ("pythonic", "[ls(x y)]", None),
        ("pythonic", '[ls(a="x", n="5", "z")]', None),
        ("pythonic", '[ls(a="x", **n)]', None),
        ("pythonic", "[ls(n=1, n=2)]", None),
        ("pythonic", '[ls(a="x", n=[y, z])]', '{"a": "x", "n": "[y, z]"}'),
        ("pythonic", '[ls(a="x\ny", n=3)]', '{"a": "x\\ny", "n": 3}'),
    ],
)
def test_arguments_in_another_form_are_read_or_left_as_text_and_never_dropped(parser, written, wanted, step, live):
    family = marked(parser)
    text = f"{family.tool_call_start}{written}{family.tool_call_end}"
    channels = Channels(family, tools=LS, live=live)
    pieces = [piece for at in range(0, len(text), step) for piece in channels.feed(text[at : at + step])] + channels.feed(
        "", True
    )
    calls = [call for piece in pieces for call in piece.calls]
    read = "".join(call.arguments for call in calls) + "".join(piece.text for piece in pieces)
    assert (read == text and not calls) if wanted is None else json.loads(read) == json.loads(wanted)


@pytest.mark.parametrize(("parser", "head", "part", "end"), TAGGED)
def test_a_call_with_tagged_values_may_have_none(parser, head, part, end):
    family = marked(parser)
    written = f"{family.tool_call_start}{head}{end}{family.tool_call_end}"
    assert told(family, written, tools=WORDY) == [("call", [("ls", "{}")])]


# As tools of MCP servers are called, and as some clients write a server before a tool.
NAMES = ["resolve-library-id", "mcp__fs__read_file", "fs.read", "fs.read-all", "fs:read", "fs/read"]
NAMED = [(parser, written) for parser, written, _ in INNER if "kimi_k3" not in parser and "CDATA" not in written]


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("parser", "written"), dict(NAMED).items())
def test_a_function_is_called_by_the_whole_of_its_name(parser, written, name, step):
    family = marked(parser)
    # The other names end as this one does, or begin so.
    tools = [{"type": "function", "function": {"name": other}} for other in (name, "read", "id", "fs", "resolve")]
    written = written.replace("ls", name, 1).replace("VALUE", f"{name}(")
    text = f"{family.tool_call_start}{written}{family.tool_call_end}"
    for live in (False, True):
        assert called(family, text, tools, step, live) == [(name, {"a": f"{name}("})]


@pytest.mark.parametrize("key", ["max-results", "@type", "a.b", "from", "n"])
@pytest.mark.parametrize(
    "marks", ["<|tool_call_start|>[{}]<|tool_call_end|>", "<|python_tag|>[{}]", "<function_calls>{}</function_calls>"]
)
def test_a_parameter_has_the_whole_of_its_name_in_python(marks, key):
    start, end = marks.split("[{}]" if "[" in marks else "{}")
    family = marked("pythonic") if "start" in start else Marked(*filter(None, (start, end)))
    parameters = {"properties": {name: {} for name in (key, "results", "type", "b")}}
    tools = [{"type": "function", "function": {"name": "ls", "parameters": parameters}}]
    text = marks.format(f'ls({key}=3, results="{key}=4", b=true)')
    assert called(family, text, tools) == [("ls", {key: 3, "results": f"{key}=4", "b": True})]


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize("parser", ["gemma4", "function_gemma"])
@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("", {}),
        ("a:MxM,n:-3,b:true,z:null,f:2.5", {"a": "x", "n": -3, "b": True, "z": None, "f": 2.5}),
        ("o:{x:[1,MyM,{z:[]}],w:{}},n:1", {"o": {"x": [1, "y", {"z": []}], "w": {}}, "n": 1}),
        ("o:{MxM:1},max-results:5,@type:MtM", {"o": {"x": 1}, "max-results": 5, "@type": "t"}),
        ("a:Ma, b:{c}]M, n : 2", {"a": "a, b:{c}]", "n": 2}),
        ('a:"x, y"', {"a": "x, y"}),
        ("a:Paris", {"a": "Paris"}),
        # Colons and apostrophes are a text's.
        ("t:12:30,n:1", {"t": "12:30", "n": 1}),
        ("t:2026-11-30 12:30", {"t": "2026-11-30 12:30"}),
        ("a:https://x.y/z?q=1", {"a": "https://x.y/z?q=1"}),
        ("a: see https://x.y", {"a": "see https://x.y"}),
        ("a:it's", {"a": "it's"}),
        ("o:{t:12:30}", {"o": {"t": "12:30"}}),
        # The tool wants another type.
        ("a:42,n:M5M,b:MtrueM", {"a": "42", "n": 5, "b": True}),
        ("a:null,n:MfiveM", {"a": "null", "n": "five"}),
    ],
)
def test_values_of_gemmas_calls_are_read_at_every_depth(parser, written, read, step):
    family, mark = marked(parser), '<|"|>' if parser == "gemma4" else "<escape>"
    text = f"{family.tool_call_start}call:ls{{{written.replace('M', mark)}}}{family.tool_call_end}"
    assert told(family, text, tools=LS, step=step) == [("call", [("ls", json.dumps(read))])]


@pytest.mark.parametrize(
    "written", ['call:ls{a:<|"|>x}', "call:ls{a}", "call:ls{a:1 b:2}", "call:ls{a:1", "call:ls{a:1}, or not", "ls"]
)
def test_what_gemma_breaks_off_is_text(written):
    family = marked("gemma4")
    text = f"{family.tool_call_start}{written}{family.tool_call_end}"
    assert told(family, text, tools=LS) == [("answer", text)]


def test_every_call_between_one_pair_of_marks_is_read():
    family = marked("qwen3_coder")
    two = "".join(f"<function=ls><parameter=n>{n}</parameter></function>" for n in (1, 2))
    assert told(family, f"<tool_call>{two}</tool_call>", tools=LS) == [("call", [("ls", '{"n": 1}'), ("ls", '{"n": 2}')])]


@pytest.mark.parametrize(
    ("parser", "written"),
    [
        ("kimi_k3", k3(argument("a", "x", "string")) + k3(call='<|open|>call index="2"<|sep|>')),
        ("qwen3_coder", "<function=ls><parameter=n>1</parameter></function><function=ls>words</function>"),
        ("pythonic", "[ls(n=1), ls(n=)]"),
    ],
)
def test_no_call_is_left_out_because_another_could_be_read(parser, written):
    family = marked(parser)
    text = f"{family.tool_call_start}{written}{family.tool_call_end}"
    assert told(family, text, tools=LS) == [("answer", text)]


@pytest.mark.parametrize("step", [1, 7, 1000])
@pytest.mark.parametrize("said", ["x<|end|>y", "<|call|>", "a<|channel|>b", f"<|end|>{FINAL}"])
def test_gpt_oss_marks_within_a_string_are_the_strings(said, step):
    body = json.dumps({"a": said})
    assert told(HARMONY, f"{HEADER}{body}<|call|>", tools=LS, step=step) == [("call", [("ls", body)])]
    if FINAL not in said:
        answer = f"<|channel|>final <|constrain|>json<|message|>{body}<|return|>"
        assert told(HARMONY, answer, tools=LS, step=step) == [("answer", body)]


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_gpt_oss_may_write_about_its_marks(step):
    said = "`<|end|>` ends a message, `<|start|>` begins one, `<|channel|>` names it: <|end|>."
    for kind, channel in (("answer", "final"), ("reasoning", "analysis")):
        text = f"<|channel|>{channel}<|message|>{said}<|end|>{FINAL}"
        wanted = [(kind, said), ("answer", "Hi!")] if kind == "reasoning" else [("answer", f"{said}Hi!")]
        assert told(HARMONY, text, tools=LS, step=step) == wanted
    # Reasoning that only begins as JSON does ends where its message does.
    assert told(HARMONY, f'<|channel|>analysis<|message|>[5" wide<|end|>{FINAL}', step=step) == [
        *(("reasoning", '[5" wide'), ("answer", "Hi!"))
    ]


@pytest.mark.parametrize("step", [1, 1000])
def test_a_string_of_gpt_oss_that_is_never_closed_costs_no_other_message(step):
    torn = f'{HEADER}{{"a": "x<|end|>'
    assert told(HARMONY, f"{torn}{FINAL}", tools=LS, step=step) == [("answer", f"{torn}Hi!")]
    good = f'{torn}<|start|>assistant{HEADER}{{"n": 1}}<|call|>'
    assert told(HARMONY, good, tools=LS, step=step) == [("answer", torn), ("call", [("ls", '{"n": 1}')])]


def shown(tokenizer, text, tools=LS):
    """The text that has come out before the stream ends."""
    reader = Channels(tokenizer, tools=tools)
    return "".join(piece.text for at in range(0, len(text), 5) for piece in reader.feed(text[at : at + 5]))


JSON_MARKS = [("<tool_call>", marked("json_tools")), ("<|python_tag|>", Marked("<|python_tag|>")), (HEADER, HARMONY)]


@pytest.mark.parametrize(("start", "tokenizer"), JSON_MARKS, ids=["json_tools", "python_tag", "gpt_oss"])
@pytest.mark.parametrize(
    "written", [" is the mark. ", '{"name": "ls", "arguments": {"a": "x</tool_call>\nIt failed. ', '{"name": "ls"} and so on. ']
)
def test_text_flows_as_soon_as_it_can_be_no_json_call(start, tokenizer, written):
    text = f"Look: {start}{written}" if start != HEADER else f"{start}{written}"
    assert shown(tokenizer, text + "And more. " * 3).startswith(text)


@pytest.mark.parametrize("parser", ["qwen3_coder", "json_tools"])
def test_text_behind_the_end_of_a_call_is_held_within_a_bound(parser, monkeypatch):
    monkeypatch.setattr(channels, "_MOST_HELD", 400)
    inside = "<function=ls><parameter=a>x" if parser == "qwen3_coder" else '{"name": "ls", "arguments": {"a": "x'
    text = f"<tool_call>{inside}</tool_call>"
    assert shown(marked(parser), text + "z" * 300) == ""
    assert shown(marked(parser), text + "z" * 500).startswith(text)
    # Without an end it may be a long value.
    assert shown(marked(parser), f"<tool_call>{inside}" + "z" * 5000) == ""


def test_a_call_of_gpt_oss_is_held_within_a_bound(monkeypatch):
    monkeypatch.setattr(channels, "_MOST_HELD", 400)
    text = f'{HEADER}{{"a": "x<|end|>'
    assert shown(HARMONY, text + "z" * 300) == ""
    assert shown(HARMONY, text + "z" * 500).startswith(text)
