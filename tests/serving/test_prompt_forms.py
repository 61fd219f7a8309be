"""What a template does not read is written in a way that it does: no message, call, result or tool is lost without a word."""

import json
import re

import pytest
from channels_kit import Marked
from kit import with_template
from mlx_lm.tokenizer_utils import load as load_tokenizer
from serving_kit import WEATHER

from dflash_mlx.serving.channels import Channels
from dflash_mlx.serving.messages import read_messages, render_chat


@pytest.fixture
def written(tmp_path):
    """What a template makes of messages and tools."""

    def write(template, messages, tools=None):
        tokenizer = load_tokenizer(with_template(tmp_path, template) and tmp_path)
        return tokenizer.decode(render_chat(tokenizer, read_messages(messages, tokenizer), tools).ids)

    return write


EACH = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
CALLS = "{% for c in m.tool_calls %}<{{ c.function.name }}:{{ c.function.arguments | tojson }}>{% endfor %}"
# What templates of public models lack, each with the model that it is cut down from.
LACKS = {
    # Phi-4-mini, Granite 3.1: a call is dropped.
    "calls": EACH,
    # Granite 3.0, Phi-3: so is what it found.
    "calls and results": "{% for m in messages %}{% if m.role != 'tool' %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}",
    # Gemma 2: roles must alternate, and there are only two.
    "roles": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) or m.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}",
    # Llama 3: one call at once, and no words beside it.
    "several calls": "{% for m in messages %}[{{ m.role }}]{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}"
    "{{ raise_exception('single tool-calls only') }}{% endif %}" + CALLS + "{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "nothing": EACH.replace("{% endfor %}", CALLS + "{% endfor %}"),
}


def call(city, id):
    return {"id": id, "type": "function", "function": {"name": "weather", "arguments": json.dumps({"city": city})}}


ASKED = {"role": "user", "content": "Warmer where, Oslo or Rome?"}
BOTH = {"role": "assistant", "content": "Let me look.", "tool_calls": [call("Oslo", "1"), call("Rome", "2")]}
FOUND = [{"role": "tool", "tool_call_id": "2", "content": "20"}, {"role": "tool", "tool_call_id": "1", "content": "7"}]
ROME = {"role": "assistant", "content": "Rome."}


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]], ids=["", "system"])
@pytest.mark.parametrize("template", LACKS.values(), ids=LACKS)
def test_calls_and_what_they_found_reach_every_template(written, template, system):
    prompt = written(template, [*system, ASKED, BOTH, *FOUND, ROME, {"role": "user", "content": "Sure?"}])
    said = [*(one["content"] for one in system), *("Let me look.", '"Oslo"', '"Rome"', "20", "7", "Rome.", "Sure?")]
    assert [text for text in said if text not in prompt.replace(ASKED["content"], "")] == []
    assert prompt.count("weather") == 2


def test_a_call_has_its_own_result_behind_it_where_one_is_taken_at_once(written):
    prompt = written(LACKS["several calls"], [ASKED, BOTH, *FOUND])
    one, other = '<weather:{"city": "Oslo"}>[tool]7', '<weather:{"city": "Rome"}>[tool]20'
    assert prompt == f"[user]{ASKED['content']}[assistant]Let me look.[assistant]{one}[assistant]{other}"


def test_a_template_that_writes_ids_in_place_of_names_gets_ids_that_hold_them(written):
    # As Kimi K2's: `functions.weather:0` is the name for its target, and clients send other ids.
    kimi = "{% for m in messages %}[{{ m.role }}{{ ':' + m.tool_call_id if m.role == 'tool' }}]{{ m.content }}" + (
        "{% for c in m.tool_calls %}<{{ c.id }}:{{ c.function.arguments | tojson }}>{% endfor %}{% endfor %}"
    )
    prompt = written(kimi, [ASKED, BOTH, *FOUND, ASKED, BOTH | {"tool_calls": [call("Bern", "3")]}])
    oslo, rome = "functions.weather:0", "functions.weather:1"
    assert f'<{oslo}:{{"city": "Oslo"}}><{rome}:{{"city": "Rome"}}>[tool:{rome}]20[tool:{oslo}]7' in prompt
    assert prompt.endswith('<functions.weather:2:{"city": "Bern"}>')
    # Results without ids belong to the calls in their order.
    unnamed = [{**result, "tool_call_id": None} for result in FOUND]
    assert f"[tool:{oslo}]20[tool:{rome}]7" in written(kimi, [ASKED, BOTH, *unnamed])
    # Its own ids are the same ones.
    own = [ASKED, {"role": "assistant", "content": "", "tool_calls": [call("Oslo", oslo)]}, FOUND[0] | {"tool_call_id": oslo}]
    assert f'<{oslo}:{{"city": "Oslo"}}>[tool:{oslo}]20' in written(kimi, own)


def test_two_equal_results_without_ids_both_stand_behind_their_calls(written):
    found = {"role": "tool", "content": "7"}
    prompt = written(LACKS["several calls"], [ASKED, BOTH, found, {**found}])
    calls = [f'[assistant]<weather:{{"city": "{city}"}}>[tool]7' for city in ("Oslo", "Rome")]
    assert prompt == f"[user]{ASKED['content']}[assistant]Let me look.{''.join(calls)}"


@pytest.mark.parametrize("template", LACKS.values(), ids=LACKS)
def test_messages_of_one_role_in_a_row_and_an_answer_in_front_reach_every_template(written, template):
    hello, more = {"role": "assistant", "content": "Hello!"}, {"role": "assistant", "content": "Or Turin."}
    prompt = written(template, [hello, ASKED, ROME, more, ASKED | {"content": "One."}, ASKED | {"content": "Two."}])
    assert [text for text in ("Hello!", ASKED["content"], "Rome.", "Or Turin.", "One.", "Two.") if text not in prompt] == []


# Gemma 4's first template reads results within the message of their calls, and copies the role of any other message.
WITHIN = (
    "{% for m in messages %}<{{ 'model' if m.role == 'assistant' else m.role }}|"
    "{% for c in m.tool_calls %}(call {{ c.function.name }}{{ c.function.arguments | tojson }}){% endfor %}"
    "{% for r in m.tool_responses %}(found {{ r.name }} {{ r.response }}){% endfor %}"
    "{{ m.content }}{% if m.content or not m.tool_responses %}>{% endif %}{% endfor %}"
    "{% if add_generation_prompt and (messages[-1].content or not messages[-1].tool_responses) %}<model|{% endif %}"
)
# Its later ones read a message of the role `tool` too.
WITHIN_OR_APART = WITHIN.replace(
    "<{{ 'model'", "{% if m.role == 'tool' %}(found {{ m.content }}){% continue %}{% endif %}<{{ 'model'", 1
)
SILENT = BOTH | {"content": None}
CALLED = '(call weather{"city": "Oslo"})(call weather{"city": "Rome"})'


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([BOTH, *FOUND], f"<model|Let me look.><model|{CALLED}(found weather 20)(found weather 7)"),
        ([BOTH, *FOUND, ROME], f"<model|Let me look.><model|{CALLED}(found weather 20)(found weather 7)Rome.><model|"),
        (
            [SILENT, *FOUND, ROME, ASKED],
            f"<model|{CALLED}(found weather 20)(found weather 7)Rome.><user|{ASKED['content']}><model|",
        ),
        # Another call after what was found, and a result that no call belongs to.
        (
            [
                BOTH | {"content": None},
                *FOUND,
                {"role": "assistant", "tool_calls": [call("Bari", "3")]},
                FOUND[0] | {"tool_call_id": "3"},
            ],
            f'<model|{CALLED}(found weather 20)(found weather 7)<model|(call weather{{"city": "Bari"}})(found weather 20)',
        ),
        ([ROME, FOUND[0]], "<model|Rome.><tool|20><model|"),
        ([SILENT, {"role": "tool", "content": "20"}], f"<model|{CALLED}(found weather 20)"),
    ],
)
def test_results_stand_within_the_message_of_their_calls_where_the_template_reads_them_there(written, messages, prompt):
    assert written(WITHIN, [ASKED, *messages]) == f"<user|{ASKED['content']}>{prompt}"


@pytest.mark.parametrize(
    ("results", "names"),
    [
        ([{}, {}], "ab"),
        ([{"tool_call_id": None}, {"tool_call_id": None}], "ab"),
        ([{"tool_call_id": ""}, {"tool_call_id": ""}], "ab"),
        ([{"name": "b"}, {"name": "a"}], "ba"),
        ([{"tool_call_id": "2"}, {"tool_call_id": "1"}], "ba"),
        ([{"tool_call_id": "2", "name": "a"}, {"name": "c"}], "bb"),
    ],
)
@pytest.mark.parametrize("ids", [("1", "2"), (None, None)])
def test_a_result_is_that_of_the_call_that_it_names_or_whose_place_it_has(written, results, names, ids):
    if ids[0] is None:
        results = [{key: value for key, value in result.items() if not value or key == "name"} for result in results]
        names = {"bb": "ab"}.get(names, names if "name" in results[0] else "ab")
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}} for id, name in zip(ids, "ab", strict=True)
    ]
    calls = [{key: value for key, value in call.items() if value is not None} for call in calls]
    found = [{"role": "tool", "content": str(n), **result} for n, result in enumerate(results)]
    prompt = written(WITHIN, [ASKED, {"role": "assistant", "content": None, "tool_calls": calls}, *found])
    assert prompt.endswith(f"(found {names[0]} 0)(found {names[1]} 1)")


def test_a_template_that_reads_results_in_both_places_gets_them_as_they_came(written):
    prompt = written(WITHIN_OR_APART, [ASKED, BOTH, *FOUND])
    assert prompt == f"<user|{ASKED['content']}><model|{CALLED}Let me look.>(found 20)(found 7)<model|"


# OLMo 3's reads tools, calls and results under names of its own, and drops every role that it does not name.
OWN_NAMES = (
    "{% for m in messages %}{% if m.role == 'system' %}<s>{{ m.content }}{% if m.functions %}(may {{ m.functions }}){% else %}"
    "(may nothing){% endif %}{% elif m.role == 'user' %}<u>{{ m.content }}{% elif m.role == 'assistant' %}<a>{{ m.content }}"
    "{% if m.function_calls %}<function_calls>{{ m.function_calls }}</function_calls>{% endif %}"
    "{% elif m.role == 'environment' %}<e>{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("system", ["", "Be brief."])
def test_tools_calls_and_results_stand_under_the_names_that_the_template_has_for_them(written, system):
    front = [{"role": "system", "content": system}] if system else []
    prompt = written(OWN_NAMES, [*front, ASKED, BOTH, *FOUND, ROME], WEATHER)
    offered = json.dumps([tool["function"] for tool in WEATHER])
    calls = '<function_calls>weather(city="Oslo")\nweather(city="Rome")</function_calls>'
    assert prompt == f"<s>{system}(may {offered})<u>{ASKED['content']}<a>Let me look.{calls}<e>20<e>7<a>Rome."
    # What it is told to write is what is read.
    written_calls = calls.replace('"Rome"', "null")
    (piece,) = Channels(Marked("<function_calls>", "</function_calls>"), tools=WEATHER).feed(written_calls, last=True)
    assert [json.loads(call.arguments) for call in piece.calls] == [{"city": "Oslo"}, {"city": None}]


@pytest.mark.parametrize("role", ["environment", "observation", "ipython", "function", "tool_response"])
def test_a_result_has_the_role_that_the_template_names_for_it(written, role):
    template = OWN_NAMES.replace("environment", role)
    assert written(template, [ASKED, ROME, FOUND[0]]) == f"<u>{ASKED['content']}<a>Rome.<e>20"


# The marks of a call, as a comment that no template writes; what a call looks like between them.
MARKS = {
    "<tool_call></tool_call>": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    "<|tool_call|><|/tool_call|>": '<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo"}}]<|/tool_call|>',
    "<|tools_prefix|><|tools_suffix|>": '<|tools_prefix|>[{"weather": {"city": "Oslo"}}]<|tools_suffix|>',
    "<|python_tag|>": '{"name": "weather", "parameters": {"city": "Oslo"}}',
    "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    '{"city": "Oslo"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    # As mlx-lm knows LFM2's calls, whose first template drops them.
    "<|tool_call_start|><|tool_call_end|>": '<|tool_call_start|>[weather(city="Oslo")]<|tool_call_end|>',
    "": '{"name": "weather", "arguments": {"city": "Oslo"}}',
}


@pytest.mark.parametrize("marks", MARKS)
def test_a_call_that_the_template_drops_is_written_as_its_target_writes_calls(written, marks):
    messages = [ASKED, {"role": "assistant", "content": None, "tool_calls": [call("Oslo", "1")]}, FOUND[1]]
    prompt = written(f"{{# {marks} #}}{EACH}", messages)
    assert prompt == f"[user]{ASKED['content']}[assistant]{MARKS[marks]}[tool]7"


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("{{ tools }}" + EACH, None),
        # As Phi-4-mini's, and as GLM-4's.
        (EACH.replace("[{{", "{% if m.tools %}{{ '<tools>' + m.tools }}{% endif %}[{{"), "<tools>["),
        (EACH.replace("[{{", "{% for t in m.tools %}{{ t.function | tojson }}{% endfor %}[{{"), '{"'),
        # As DeepSeek's, which write none.
        ("{# <tool_call></tool_call> #}" + EACH, '[system]You can call these functions:\n{"name": "weather"'),
    ],
)
def test_tools_reach_every_template(written, template, wanted):
    prompt = written(template, [ASKED], WEATHER)
    assert "weather" in prompt and (wanted is None or prompt.startswith(wanted))
    # What stands in front stays there.
    assert "Be brief." in written(template, [{"role": "system", "content": "Be brief."}, ASKED], WEATHER)
    if "<tool_call>" in template:
        assert '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>' in prompt


# As Ministral 3's: earlier reasoning is a part of the content.
THINKS_WITHIN = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'thinking' %}[THINK]{{ part.thinking }}[/THINK]{% elif part.type == 'text' %}{{ part.text }}{% else %}"
    "{{ raise_exception('only text and thinking') }}{% endif %}{% endfor %}{% endif %}" + CALLS + "{% endfor %}"
)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking", "part"])
def test_earlier_reasoning_reaches_a_template_that_reads_it_within_the_content(written, key):
    def thinks(message):
        if key != "part":
            return {**message, key: "Hm."}
        inner = [{"type": "text", "text": message["content"]}] if message["content"] else []
        return {**message, "content": [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}, *inner]}

    calls = {"role": "assistant", "content": None, "tool_calls": [call("Oslo", "1")]}
    prompt = written("{{ tools | tojson }}" + THINKS_WITHIN, [ASKED, thinks(calls), FOUND[1], thinks(ROME), ASKED], WEATHER)
    asked, one = f"[user]{ASKED['content']}", '<weather:{"city": "Oslo"}>'
    assert (
        prompt
        == f"{json.dumps(WEATHER)}{asked}[assistant][THINK]Hm.[/THINK]{one}[tool]7[assistant][THINK]Hm.[/THINK]Rome.{asked}"
    )
    # A template that has a name for it, or none, gets texts.
    for reads in ("m.reasoning_content", "m.reasoning", ""):
        named = EACH.replace("{{ m.content }}", "{{ %s }}{{ m.content }}" % (reads or "''"))
        prompt = written(named, [ASKED, thinks(ROME), ASKED])
        assert prompt == f"{asked}[assistant]{'Hm.' if reads else ''}Rome.{asked}"


# SmolLM3's reads tools under another name. Firefunction's cannot do without functions and a day.
XML_TOOLS = "{% if xml_tools %}<tools>{% for t in xml_tools[:] %}{{ t | string }}{% endfor %}</tools>{% endif %}" + EACH
FUNCTIONS = "{% set about = 'Functions: ' + functions + ' Today is ' + datetime + '.' %}{{ about }}" + EACH


def test_what_a_template_reads_under_other_names_is_given_to_it(written):
    assert written(XML_TOOLS, [ASKED], WEATHER).startswith("<tools>{'type': 'function', 'function': {'name': 'weather'")
    assert written(XML_TOOLS, [ASKED]) == f"[user]{ASKED['content']}"
    listed = json.dumps([tool["function"] for tool in WEATHER])
    for tools, said in ((WEATHER, listed), (None, "[]")):
        prompt = written(FUNCTIONS, [ASKED], tools)
        assert re.fullmatch(re.escape(f"Functions: {said} Today is ") + r"\d{4}-\d\d-\d\d\.\[user\].*", prompt)
    # A template that reads `tools` gets nothing twice.
    assert written("{{ tools }}{{ functions }}" + EACH, [ASKED], WEATHER).count("weather") == 1


def test_the_template_is_rendered_as_often_for_many_tools_as_for_one(tmp_path, monkeypatch):
    # As Phi-4-mini's, which reads tools within a system message.
    template = EACH.replace("[{{", "{% if m.tools %}{{ '<tools>' + m.tools }}{% endif %}[{{")
    tokenizer = load_tokenizer(with_template(tmp_path, template) and tmp_path)
    rendered, render = [], tokenizer.apply_chat_template
    monkeypatch.setattr(tokenizer, "apply_chat_template", lambda *given, **more: rendered.append(0) or render(*given, **more))
    counts = []
    for n in (1, 9):
        rendered.clear()
        tools = [{"type": "function", "function": {"name": f"weather{i}"}} for i in range(n)]
        assert '"weather0"' in tokenizer.decode(render_chat(tokenizer, read_messages([ASKED], tokenizer), tools).ids)
        counts.append(len(rendered))
    assert counts[0] == counts[1] > 0


# Qwen3-Coder's first template: a value that is no text is written as Python writes it.
AS_PYTHON = "{% for k, v in c.function.arguments | items %}<{{ k }}>{{ v if v is string else v | string }}</{{ k }}>{% endfor %}"


@pytest.mark.parametrize(
    "value", [{"city": {"name": "Łódź", "n": [1, None, True]}}, {"days": ["Mon", None], "city": "Oslo", "n": 3}]
)
def test_objects_and_lists_among_the_arguments_are_never_written_as_python_does(written, value):
    calls = "{% for c in m.tool_calls %}<f={{ c.function.name }}>" + AS_PYTHON + "</f>{% endfor %}"
    template = EACH.replace("{% endfor %}", calls + "{% endfor %}")
    made = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": json.dumps(value)}}
    prompt = written(template, [ASKED, {"role": "assistant", "content": "Let me look.", "tool_calls": [made]}, FOUND[1]])
    spelled = [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in value.values()]
    assert all(f"<{key}>{one}</{key}>" in prompt for key, one in zip(value, spelled, strict=True))
    assert "Let me look." in prompt and "7" in prompt
