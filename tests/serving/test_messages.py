"""From messages to a prompt, for every kind of chat template."""

import json
import re
from http.client import HTTPResponse

import mlx.core as mx
import pytest
from kit import scripted, with_template
from mlx_lm.chat_templates import deepseek_v32
from mlx_lm.tokenizer_utils import load as load_tokenizer
from serving_kit import MESSAGES, TOOLS, WEATHER, ask, running

from dflash_mlx import load
from dflash_mlx.errors import DFlashError
from dflash_mlx.serving.messages import read_arguments, read_messages, render_chat
from dflash_mlx.serving.translate import of_responses


def test_what_a_tool_found_reaches_the_template(tmp_path, chatty):
    calls = "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.city }}{% endfor %}"
    with_template(tmp_path, TOOLS.replace("{{ m.content }}", calls))
    tokenizer = load_tokenizer(tmp_path)
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    with running(chatty[0], tokenizer) as server:
        usage = ask(server, messages, tools=WEATHER, max_tokens=1).usage
    messages[1] = {**messages[1], "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Oslo"}}}]}
    ids = tokenizer.apply_chat_template(messages, tools=WEATHER, add_generation_prompt=True)
    assert usage.prompt_tokens == len(ids) and "Oslo" in tokenizer.decode(ids) and "rain" in tokenizer.decode(ids)


def test_arguments_reach_the_chat_template(tmp_path):
    path = with_template(tmp_path, "{{ enable_thinking }}{{ style }}{% for m in messages %}{{ m.content }}{% endfor %}")
    model, tokenizer = load(path, dtype=mx.float32)
    with running(model, tokenizer, chat_template_args={"style": "plain"}) as server:
        for given, text in (({}, "Falseplain"), ({"enable_thinking": True, "style": "odd"}, "Trueodd")):
            body = {"messages": [{"role": "user", "content": "x = "}], "max_tokens": 1, "chat_template_kwargs": given}
            usage = json.loads(server.post("/v1/chat/completions", body)[1])["usage"]
            assert usage["prompt_tokens"] == len(tokenizer.encode(text + "x = "))


@pytest.fixture
def written(tmp_path):
    """What a template makes of messages."""

    def write(template, messages, **options):
        tokenizer = load_tokenizer(with_template(tmp_path, template) and tmp_path)
        mapping = options.get("role_mapping")
        return tokenizer.decode(render_chat(tokenizer, read_messages(messages, tokenizer, mapping), **options).ids)

    return write


def said(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


EACH = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
# As Qwen3.5's: nothing but these roles, and a system message only at the front.
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system must be first') }}"
    "{% elif m.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('unknown role') }}{% endif %}"
    "[{{ m.role }}]{{ m.content | trim }}{% endfor %}"
)
# As gpt-oss's: what is no user's or assistant's behind the front is dropped without a word.
FORGETFUL = (
    "{% if messages[0].role == 'system' %}[system]{{ messages[0].content }}{% endif %}"
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
NO_SYSTEM = EACH.replace("[{{", "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}[{{")


@pytest.mark.parametrize("template", [STRICT, FORGETFUL])
@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([("developer", "A"), ("user", "x")], "[system]A[user]x"),
        ([("system", "A"), ("system", "B"), ("user", "x")], "[system]A\n\nB[user]x"),
        ([("system", "A"), ("developer", "B"), ("user", "x")], "[system]A\n\nB[user]x"),
        (
            [("system", "A"), ("user", "x"), ("assistant", "y"), ("system", "B"), ("user", "z")],
            "[system]A\n\nB[user]x[assistant]y[user]z",
        ),
        ([("user", "x"), ("system", "B")], "[system]B[user]x"),
    ],
)
def test_system_messages_are_joined_in_front_where_the_template_wants_one(written, template, messages, prompt):
    assert written(template, said(*messages)) == prompt


def test_system_messages_stay_where_they_are_in_a_template_that_takes_them(written):
    messages = said(("system", "A"), ("user", "x"), ("developer", "B"), ("user", "z"))
    assert written(EACH, messages) == "[system]A[user]x[system]B[user]z"


def test_a_template_without_a_system_role_gets_its_text_with_the_first_message_of_the_user(written):
    assert written(NO_SYSTEM, said(("system", "A"), ("user", "x"), ("user", "y"))) == "[user]A\n\nx[user]y"


# As Gemma 3's: a system message in front belongs to the user's turn, roles alternate, an unknown role is copied.
FOLDS = (
    "{% if messages[0].role == 'system' %}{% set prefix, rest = messages[0].content + '\n\n', messages[1:] %}"
    "{% else %}{% set prefix, rest = '', messages %}{% endif %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ 'model' if m.role == 'assistant' else m.role }}]{{ prefix if loop.first }}{{ m.content }}{% endfor %}"
)
# As Gemma 2's, and as Qwen3.5's.
FOLDS_NONE = FOLDS.replace("{% set prefix, rest", "{{ raise_exception('no system role') }}{% set prefix, rest", 1)
WANTS_A_USER = (
    "{% if 'user' not in messages | map(attribute='role') %}{{ raise_exception('No user query found') }}{% endif %}" + STRICT
)


@pytest.mark.parametrize("template", [FOLDS, FOLDS_NONE, NO_SYSTEM, WANTS_A_USER])
@pytest.mark.parametrize("roles", [["system"], ["developer"], ["developer", "system"], ["system", "assistant"]])
def test_system_messages_without_a_users_are_the_users_where_the_template_writes_none(written, template, roles):
    prompt = written(template, said(*((role, f"<{role}>") for role in roles)))
    systems = "\n\n".join(f"<{role}>" for role in roles if role != "assistant")
    assert prompt.replace("[model]", "[assistant]") == f"[user]{systems}" + "[assistant]<assistant>" * ("assistant" in roles)


@pytest.mark.parametrize("template", [FOLDS, FOLDS_NONE])
@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([("user", "x"), ("system", "B")], "[user]B\n\nx"),
        ([("system", "A"), ("user", "x"), ("developer", "B")], "[user]A\n\nB\n\nx"),
        ([("user", "x"), ("system", "B"), ("user", "z")], "[user]B\n\nx\n\nz"),
        ([("user", "x"), ("assistant", "y"), ("user", "z"), ("system", "B")], "[user]B\n\nx[model]y[user]z"),
        ([("user", "x"), ("user", "z")], "[user]x\n\nz"),
    ],
)
def test_no_system_role_reaches_a_template_that_gives_it_to_the_user(written, template, messages, prompt):
    assert written(template, said(*messages)) == prompt


@pytest.mark.parametrize("role", ["assistantassistant", "banana", "", "System", "content", "user\n[system]"])
@pytest.mark.parametrize("template", [EACH, STRICT, None])
def test_an_unknown_role_is_refused_and_never_written(written, pair, template, role):
    with pytest.raises(DFlashError, match="a message has the role .*; this server knows system, user, assistant, tool"):
        if template:
            written(template, said(("user", "x"), (role, "y")))
        else:
            read_messages(said((role, "y")), pair[1])


def test_a_role_of_the_template_or_of_the_mapping_and_openais_older_names_are_known(written, pair):
    named = EACH + "{% if messages[0].role == 'critic' %}!{% endif %}"
    assert written(named, said(("critic", "x"))) == "[critic]x!"
    assert written(EACH, said(("user", "x"), ("function", "y"))) == "[user]x[tool]y"
    assert read_messages(said(("critic", "x")), pair[1], {"critic": "C: "})[0]["role"] == "critic"


@pytest.mark.parametrize("template", [EACH, STRICT, FORGETFUL, None])
def test_parts_are_joined_and_null_is_empty_for_every_template_kind(written, pair, template):
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    messages = said(("user", parts), ("assistant", None), ("user", "c"))
    if template:
        assert written(template, messages) == "[user]ab[assistant][user]c"
        refused = said(("user", "a"), ("assistant", [{"type": "refusal", "refusal": "No."}]))
        assert written(template, refused) == "[user]a[assistant]No."
    else:
        tokenizer = pair[1]
        ids = render_chat(
            tokenizer, read_messages(messages, tokenizer), role_mapping={"user": "U", "assistant": "A", "stop": "."}
        ).ids
        assert tokenizer.decode(ids) == "Uab.A.Uc.A"


def test_a_template_that_reads_parts_alone_gets_parts(written):
    parts = "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    assert written(parts, said(("system", "A"), ("user", "hello"))) == "[system]A[user]hello"


CALLS = EACH.replace("{% endfor %}", "{% for c in m.tool_calls %}<{{ c.function.name }}:ARGS>{% endfor %}{% endfor %}")
JOINS = CALLS.replace("{{ c.function.name }}:ARGS", "{{ c.function.name + ':' + c.function.arguments + '' }}")
PRINTS = CALLS.replace("ARGS", "{{ c.function.arguments }}")
DUMPS = CALLS.replace("ARGS", "{{ c.function.arguments | tojson }}")
EITHER = CALLS.replace(
    "ARGS",
    "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}",
)
WALKS = CALLS.replace("ARGS", "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}")
LISTS = CALLS.replace("ARGS", "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}")
TEXT_ALONE = CALLS.replace("ARGS", "{{ c.function.arguments.strip() }}")


def called(arguments, **more):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call], **more}
    return [*said(("user", "x")), answer, {"role": "tool", "tool_call_id": "1", "content": "4"}]


@pytest.mark.parametrize(
    ("arguments", "text", "walked"),
    [
        ('{"a": 1}', '{"a": 1}', "a=1;"),
        ({"a": 1}, '{"a": 1}', "a=1;"),
        ("", "{}", ""),
        (None, "{}", ""),
        # Encoded twice, as this server once sent them.
        ('"{\\"a\\": 1}"', '{"a": 1}', "a=1;"),
        # Cut off by the length limit.
        ('{"a": "b', '{"a": "b', 'arguments={"a": "b;'),
        ("[1]", "[1]", "arguments=[1];"),
    ],
)
@pytest.mark.parametrize("template", [JOINS, PRINTS, DUMPS, EITHER, WALKS, LISTS, TEXT_ALONE])
def test_arguments_of_earlier_calls_reach_every_kind_of_template(written, template, arguments, text, walked):
    prompt = written(template, called(arguments))
    if template in (WALKS, LISTS):
        text = walked
    elif template in (DUMPS, EITHER) and walked.startswith("arguments="):
        text = json.dumps({"arguments": text})
    assert prompt == f"[user]x[assistant]<f:{text}>[tool]4"


# As mlx-lm's renderer for DeepSeek 3.2, which is no template: it takes text and parses it.
class Parses:
    has_chat_template, has_thinking, has_tool_calling, chat_template = True, False, False, None

    def apply_chat_template(self, messages, **_):
        return deepseek_v32.apply_chat_template(messages, enable_thinking=False)

    def encode(self, text, **_):
        return [*map(ord, text)]

    def decode(self, ids):
        return "".join(map(chr, ids))


@pytest.mark.parametrize("arguments", ['{"a": "b', "[1]", "3", "", None, '{"a": 1}', '"x"'])
def test_odd_arguments_of_earlier_calls_reach_a_renderer_that_parses_them(arguments):
    messages = read_messages([*called(arguments), *said(("user", "go on"))], Parses())
    prompt = Parses().decode(render_chat(Parses(), messages).ids)
    assert 'invoke name="f"' in prompt and "go on" in prompt
    assert not arguments or '"' in arguments or arguments in prompt


@pytest.mark.parametrize("template", [JOINS, DUMPS, EITHER, WALKS, LISTS])
def test_half_a_surrogate_pair_in_an_earlier_call_never_reaches_a_tokenizer(written, template):
    prompt = written(template, called('{"a\\udc00": ["b\\ud800", "\\ud83d\\ude00"]}'))
    assert "b" in prompt and not any("\ud800" <= letter <= "\udfff" for letter in prompt)


def test_a_call_in_openais_older_form_reaches_the_template(written):
    older = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [*said(("user", "x")), older, {"role": "function", "name": "f", "content": "4"}]
    assert written(PRINTS, messages) == '[user]x[assistant]<f:{"a": 1}>[tool]4'


def test_a_call_of_a_tool_that_takes_text_reaches_the_template(written):
    custom = {"id": "c1", "type": "custom", "custom": {"name": "f", "input": "a\nb"}}
    messages = [*said(("user", "x")), {"role": "assistant", "content": None, "tool_calls": [custom]}]
    messages += [{"role": "tool", "tool_call_id": "c1", "content": "4"}]
    assert written(PRINTS, messages) == '[user]x[assistant]<f:{"input": "a\\nb"}>[tool]4'
    items = [
        {"type": "message", "role": "user", "content": "x"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "f", "input": "a\nb"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "4"},
    ]
    read = of_responses({"input": items}, lambda name: [])["messages"]
    assert written(PRINTS, read) == written(PRINTS, messages)


# As DeepSeek-R1's: calls are written where content is null, and content where it is not.
NULL_OR_TEXT = (
    "{% for m in messages %}[{{ m['role'] }}]{% if m['role'] == 'assistant' and m['content'] is none %}"
    "{% for c in m.tool_calls %}{{ '<' + c.function.name + ':' + c.function.arguments + '>' }}{% endfor %}{% endif %}"
    "{% if m['role'] != 'assistant' or m['content'] is not none %}{{ m['content'] }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("spelled", [NULL_OR_TEXT, NULL_OR_TEXT.replace("m['content']", "m.content")], ids=["item", "attribute"])
def test_calls_reach_a_template_that_writes_them_where_content_is_null(written, spelled):
    assert written(spelled, called('{"a": 1}')) == '[user]x[assistant]<f:{"a": 1}>[tool]4'
    assert written(spelled, called('{"a": 1}', content="")) == '[user]x[assistant]<f:{"a": 1}>[tool]4'
    said_too = written(spelled, called('{"a": 1}', content="Look."))
    assert said_too == '[user]x[assistant]Look.[assistant]<f:{"a": 1}>[tool]4'


# As Mistral's.
NINE = CALLS.replace(
    ":ARGS>", ":{{ c.id }}>{% if c.id is not defined or c.id|length != 9 %}{{ raise_exception('not 9 characters') }}{% endif %}"
).replace("[{{ m.role }}]", "[{{ m.role }}{{ ':' + m.tool_call_id if m.role == 'tool' }}]")


@pytest.mark.parametrize("given", ["abcDEF123", "call_0123456789", "1", None])
def test_ids_of_calls_are_shortened_for_a_template_that_wants_nine_characters(written, given):
    messages = called("{}")
    for holder, key in ((messages[1]["tool_calls"][0], "id"), (messages[2], "tool_call_id")):
        holder[key] = given
    call, result = re.fullmatch(r"\[user\]x\[assistant\]<f:(\w{9})>\[tool:(\w{9})\]4", written(NINE, messages)).groups()
    assert call == result and (given != "abcDEF123" or call == given)


def test_arguments_are_an_object_with_a_text_of_their_own():
    arguments = read_arguments('{"b":2}')
    assert arguments == {"b": 2} and arguments.text == '{"b":2}'


@pytest.mark.parametrize("calls", [[], None])
def test_an_empty_list_of_calls_is_none(written, calls):
    template = EACH.replace("[{{", "{% if 'tool_calls' in m %}{{ m.tool_calls[0].function.name }}{% endif %}[{{")
    assert written(template, [{"role": "assistant", "content": "y", "tool_calls": calls}]) == "[assistant]y"


@pytest.mark.parametrize(
    "calls", ["f", [3], [{"function": 3}], [{"function": {"arguments": "{}"}}], {}, [{"id": [], "function": {"name": "f"}}]]
)
def test_calls_that_are_none_are_refused(written, calls):
    with pytest.raises(DFlashError, match="tool.call"):
        written(EACH, [{"role": "assistant", "content": "y", "tool_calls": calls}])


@pytest.mark.parametrize("sent", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("read", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_comes_back_under_the_name_that_the_template_reads(tmp_path, written, sent, read):
    for spelled in (f"m.{read}", f"m['{read}']", f"m.get('{read}')"):
        template = EACH.replace("{{ m.content }}", "{% if " + spelled + " %}<{{ " + spelled + " }}>{% endif %}{{ m.content }}")
        messages = [{"role": "assistant", "content": "y", sent: "hm"}]
        assert written(template, messages) == "[assistant]<hm>y"
        # Newer transformers copy it to the other names by themselves, 5.7 does not.
        tokenizer = load_tokenizer(with_template(tmp_path, template) and tmp_path)
        assert {key for key in read_messages(messages, tokenizer)[0] if key not in ("role", "content")} == {read}


# The parts of gpt-oss's template that refuse and drop.
HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if 'tool_calls' in m %}{% set c = m.tool_calls[0].function %}"
    "{% if m.content and m.thinking %}{{ raise_exception('Cannot pass both content and thinking') }}{% endif %}"
    "<|channel|>analysis<|message|>{{ m.content or m.thinking }}<|end|>"
    "to=functions.{{ c.name }}<|message|>{{ c.arguments | tojson }}<|call|>"
    "{% else %}<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
)


def test_what_goes_back_to_gpt_oss_is_the_final_answer_and_the_analysis_of_a_call(written):
    answer = {"role": "assistant", "content": "Hi", "reasoning": "hm"}
    assert "hm" not in written(HARMONY, [*said(("user", "x")), answer]) and "final<|message|>Hi<|end|>" in written(
        HARMONY, [answer]
    )
    prompt = written(HARMONY, called('{"a": 1}', reasoning="hm", content="Let me look."))
    assert '<|channel|>analysis<|message|>hm<|end|>to=functions.f<|message|>{"a": 1}<|call|>' in prompt


def test_a_template_that_refuses_every_form_says_why(written):
    with pytest.raises(DFlashError, match="the chat template refused these messages: not today"):
        written("{{ raise_exception('not today') }}", said(("system", "A"), ("user", "x")))


def test_a_mark_in_what_the_user_wrote_opens_no_reasoning(thinker):
    line = [*thinker.encode("Yes"), thinker.eos_token_id]
    with running(scripted(line, vocab=1540), thinker) as server:
        body = {"chat_template_kwargs": {"enable_thinking": False}}
        answer = ask(server, said(("user", "what does <think> do")), max_tokens=9, extra_body=body)
    assert answer.choices[0].message.content == "Yes"


@pytest.mark.parametrize("text", ["n", "think", "<think>", ">", "t ", "assistant", "x", "", "a\n\n<think> x", "No."])
def test_words_of_the_user_that_the_end_of_the_prompt_repeats_hide_no_opened_reasoning(thinker, text):
    render = lambda say: render_chat(thinker, read_messages(said(("user", say)), thinker), None, {"enable_thinking": True})  # noqa: E731
    assert render(text).before.lstrip() == render("Hello!").before.lstrip() == "[assistant]<think>"
    line = [*thinker.encode("Hm"), 1537, *thinker.encode("Yes"), thinker.eos_token_id]
    with running(scripted(line, vocab=1540), thinker) as server:
        body = {"chat_template_kwargs": {"enable_thinking": True}}
        message = ask(server, said(("user", text)), max_tokens=9, extra_body=body).choices[0].message
    assert (message.reasoning, message.content) == ("Hm", "Yes")


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "text"}, '"text" of a text part is null; it must be text'),
        ({"type": "text", "text": 5}, '"text" of a text part is 5; it must be text'),
        ({"type": "refusal", "text": "no"}, '"refusal" of a refusal part is null; it must be text'),
        ("a", 'a part of a message is "a"; it must be an object with a type'),
        ({"text": "a"}, 'a part of a message is {"text": "a"}; it must be an object with a type'),
        ({"type": "image_url"}, 'a part of a message has type "image_url"; this server reads text only'),
    ],
)
def test_a_part_that_is_no_text_is_refused_for_what_it_is(pair, part, said):
    with pytest.raises(DFlashError, match=f"^{re.escape(said)}"):
        read_messages([{"role": "user", "content": [part]}], pair[1])


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
SEES = {"role": "user", "content": [{"type": "text", "text": "What is it?"}, IMAGE]}
NOT_SHOWN = "\n[image not shown: this model reads text only]\n"


def found_by_tools(*kinds):
    """An agent's request whose tool found an image, and what should stand in the prompt for it."""
    result = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "a.png:"}, *({"type": k} for k in kinds)]}
    return [*called("{}")[:2], result], "a.png:" + "".join(NOT_SHOWN.replace("image", k) for k in kinds)


def test_an_image_that_a_tool_found_or_that_came_earlier_ends_no_conversation(written):
    """As Claude Code, Codex and opencode send it with every later request."""
    for messages, text in (
        found_by_tools("image"),
        found_by_tools("document", "audio"),
        # opencode sends what a tool attached as a message of the user.
        (
            [*called("{}"), {"role": "user", "content": [{"type": "text", "text": "From the tool:"}, IMAGE]}],
            "From the tool:" + NOT_SHOWN,
        ),
        # Another model answered it.
        ([SEES, {"role": "assistant", "content": "A cat."}, *said(("user", "Sure?"))], "What is it?" + NOT_SHOWN),
        ([SEES, *called("{}")[1:]], "What is it?" + NOT_SHOWN),
        ([SEES, *said(("user", "Hm?"))], "What is it?" + NOT_SHOWN),
    ):
        assert text in written(PRINTS, messages)
    for messages in ([SEES], [*said(("user", "x"), ("assistant", "y")), SEES], [SEES, *said(("system", "Be brief."))]):
        with pytest.raises(DFlashError, match='type "image_url"; this server reads text only'):
            written(PRINTS, messages)


def test_what_is_not_shown_is_named_in_a_header(chatty):
    messages = [*MESSAGES, *called("{}")[1:2], found_by_tools("image")[0][-1]]
    with running(chatty[0], chatty[1]) as server:
        body = {"messages": messages, "max_tokens": 1}
        with server.send("/v1/chat/completions", body) as link:
            answer = HTTPResponse(link)
            answer.begin()
            assert (answer.status, answer.getheader("x-ignored-fields")) == (200, "messages: image")
        blocks = [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": {}}]}]
        call = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
        turns = [*MESSAGES, {"role": "assistant", "content": [call]}, {"role": "user", "content": blocks}]
        assert server.post("/v1/messages", {"messages": turns, "max_tokens": 1, "model": "served"})[0] == 200
        items = [
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image", "image_url": "x"}]},
        ]
        asked = {"input": [{"role": "user", "content": "x"}, *items], "max_output_tokens": 1}
        assert server.post("/v1/responses", asked)[0] == 200
