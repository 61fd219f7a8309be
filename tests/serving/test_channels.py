"""Answer, reasoning and tool calls told apart, whatever a target writes."""

import copy
import importlib
import json

import mlx_lm.server
import pytest
from channels_kit import HARMONY, Hermes, Marked, marked, told
from kit import scripted, text_of, with_template
from mlx_lm.chat_templates import muse_spark
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer
from serving_kit import MESSAGES, WEATHER, ask, running

from dflash_mlx import stream_generate
from dflash_mlx.serving.channels import Channels, has_tool_calls
from dflash_mlx.serving.tool_calls import parse_xml_call


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
            # The arguments come as they are written.
            assert len(calls) > 5 and [call.index for call in calls] == [0] * len(calls)
            calls[0].function.arguments = "".join(call.function.arguments for call in calls)
            calls = calls[:1]
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


CALLED = [("ls", '{"a": 1}')]
THOUGHT, FINAL = "<|channel|>analysis<|message|>hm<|end|>", "<|start|>assistant<|channel|>final<|message|>Hi!<|return|>"
ASKED = '<|channel|>commentary to=functions.ls <|constrain|>json<|message|>{"a": 1}'


@pytest.mark.parametrize("step", [1, 4, 1000])
@pytest.mark.parametrize(
    ("text", "options", "pieces"),
    [
        (THOUGHT + FINAL, {}, [("reasoning", "hm"), ("answer", "Hi!")]),
        ("<|channel|>final<|message|>Hi!", {}, [("answer", "Hi!")]),
        ("Hi <b>", {}, [("answer", "Hi <b>")]),
        # These begin as a header may.
        ("to be or not", {}, [("answer", "to be or not")]),
        (" <|x", {}, [("answer", " <|x")]),
        (
            f"{THOUGHT}<|start|>assistant{ASKED}<|call|>",
            {"tools": WEATHER},
            [("reasoning", "hm"), ("call", [("ls", '{"a": 1}')])],
        ),
        # The other order of a header, and an end that the tokenizer does not write.
        (
            ' to=functions.ls<|channel|>commentary json<|message|>{"a": 1}',
            {"tools": WEATHER},
            [("call", CALLED)],
        ),
        ("<|channel|>commentary<|message|>Let me look.<|end|>", {"tools": WEATHER}, [("answer", "Let me look.")]),
        ("<|channel|>analysis to=python code<|message|>1+1<|call|>", {"tools": WEATHER}, [("reasoning", "1+1")]),
        # Nobody offered tools; cut off by the length limit; no object.
        (ASKED + "<|call|>", {}, [("answer", ASKED + "<|call|>")]),
        (ASKED[:-1], {"tools": WEATHER}, [("answer", ASKED[:-1])]),
        (ASKED[:-8] + "3", {"tools": WEATHER}, [("answer", ASKED[:-8] + "3")]),
        # The prompt chose the channel.
        (
            "hm<|end|>" + FINAL,
            {"before": "<|start|>assistant<|channel|>analysis<|message|>"},
            [("reasoning", "hm"), ("answer", "Hi!")],
        ),
        ("Hi!", {"before": "<|start|>user<|message|>x<|end|><|start|>assistant"}, [("answer", "Hi!")]),
        # Words in what was to be a header, and none follows.
        ("<|channel|>final Hi, it is done.", {}, [("answer", "<|channel|>final Hi, it is done.")]),
        ("<|channel|>final Hi, it is done.<|end|>", {}, [("answer", "<|channel|>final Hi, it is done.")]),
        (
            THOUGHT + "<|start|>assistant<|channel|>final\nHi!",
            {},
            [("reasoning", "hm"), ("answer", "<|start|>assistant<|channel|>final\nHi!")],
        ),
        # Cut within a header: no mark reaches the client.
        (THOUGHT + "<|start|>assistant<|chan", {}, [("reasoning", "hm")]),
    ],
)
def test_gpt_oss_channels_are_answer_reasoning_and_calls(text, options, pieces, step):
    assert told(HARMONY, text, step=step, **options) == pieces


@pytest.mark.parametrize("step", [1, 5, 1000])
@pytest.mark.parametrize(
    ("start", "end"),
    [
        ("[THINK]", "[/THINK]"),
        ("<seed:think>", "</seed:think>"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<think>", "</think>"),
        ("<reasoning>", "</reasoning>"),
        ("◁think▷", "◁/think▷"),
        ("<|think|>", "<|end|>"),
        ("<mm:think>", "</mm:think>"),
        ("<|thought_start|>", "<|thought_end|>"),
        ("Here is my thought process:", "Here is my response:"),
        ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    ],
)
def test_reasoning_marks_that_mlx_lms_wrapper_lacks_are_known(start, end, step):
    spelled = Marked()
    spelled.chat_template = f"{start}{end}"
    for tokenizer in (Marked(start, end), spelled):
        assert told(tokenizer, f"{start}hm{end}Hi {start[:3]}", step=step) == [("reasoning", "hm"), ("answer", f"Hi {start[:3]}")]
        assert told(tokenizer, f"hm{end}Hi", before=f"x{start}", step=step) == [("reasoning", "hm"), ("answer", "Hi")]


@pytest.mark.parametrize("step", [1, 5, 1000])
@pytest.mark.parametrize(
    ("text", "reasoning"),
    [
        ("<think>\nhm</think>Hi", "\nhm"),
        ("\n<think>hm</think>Hi", "\nhm"),
        ("a <think> b</think>Hi", "a <think> b"),
        ("<thing>hm</think>Hi", "<thing>hm"),
        ("<think><think>hm</think>Hi", "<think>hm"),
    ],
)
def test_a_mark_that_repeats_the_prompts_is_no_reasoning(text, reasoning, step):
    """As DeepSeek-R1's distilled models write it where the template has opened the reasoning."""
    assert told(Hermes(), text, before="<think>\n", step=step) == [("reasoning", reasoning), ("answer", "Hi")]
    assert told(Hermes(), "<thi", before="<think>", step=step) == [("reasoning", "<thi")]


@pytest.mark.parametrize("step", [1, 1000])
def test_a_frame_round_an_answer_is_none_of_it(step):
    # As ERNIE's thinking models write; where the marks are no tokens they are text.
    text, marks = "hm</think>\n\n<response>\nHi\n</response>\n", ("<think>", "</think>")
    ernie = Marked(*marks, "<response>", "</response>")
    assert told(ernie, text, before="<think>", step=step) == [("reasoning", "hm"), ("answer", "\n\n\nHi\n\n")]
    assert told(Marked(*marks), text, before="<think>", step=step)[1] == ("answer", text.removeprefix("hm</think>"))


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_frame_that_the_template_spells_is_one_at_both_ends_of_an_answer_only(step):
    hunyuan, tools = Marked(), [{"function": {"name": "ls"}}]
    hunyuan.chat_template = "<think></think><answer></answer><tool_calls></tool_calls>"
    call = '<tool_calls>\n[{"name": "ls", "arguments": {"a": 1}}]\n</tool_calls>'
    thought = "<think>hm</think>"
    for text, before, pieces in (
        (thought + "\n<answer>\nHi\n</answer>", "", [("reasoning", "hm"), ("answer", "\n\nHi\n")]),
        ("<answer>a < b, </answer> and </ans</answer>\n", "", [("answer", "a < b, </answer> and </ans")]),
        (f"<answer>Look: {call}\n</answer>", "", [("answer", "Look: "), ("call", [("ls", '{"a": 1}')]), ("answer", "\n")]),
        (f"<answer>Look:</answer>\n{call}", "", [("answer", "Look:"), ("call", [("ls", '{"a": 1}')])]),
        ("Hi</answer>", "<answer>\n", [("answer", "Hi")]),
        # Not of an answer that they frame: its own text.
        ("Put it in <answer></answer>", "", [("answer", "Put it in <answer></answer>")]),
        ("<answer>cut </ans", "", [("answer", "cut </ans")]),
        ("<ans", "", [("answer", "<ans")]),
    ):
        assert told(hunyuan, text, before, tools, step) == pieces, text


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_call_within_reasoning_ends_it_and_its_mark_does_not_reach_the_client(step):
    call, tools = '<tool_call>{"name": "ls", "arguments": {}}</tool_call>', [{"function": {"name": "ls"}}]
    one = ("call", [("ls", "{}")])
    assert told(Hermes(), f"<think>hm{call}</think>Hi", tools=tools, step=step) == [("reasoning", "hm"), one, ("answer", "Hi")]
    # Where nothing opened it, it is text.
    assert told(Hermes(), f"{call}</think>Hi", tools=tools, step=step) == [one, ("answer", "</think>Hi")]


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_call_of_llamas_without_its_mark_is_the_whole_answer(step):
    llama, tools = Marked("<|python_tag|>"), [{"type": "function", "function": {"name": "ls"}}]
    call = '{"name": "ls", "parameters": {"a": 1}}'
    one = ("ls", '{"a": 1}')
    for text, pieces in (
        (call, [("call", [one])]),
        (f"\n {call}; {call}\n", [("call", [one, one])]),
        (f"<|python_tag|>{call};{call}", [("call", [one, one])]),
        (f"Sure: {call}", [("answer", f"Sure: {call}")]),
        (call + " is it", [("answer", call + " is it")]),
        (call.replace("ls", "rm"), [("answer", call.replace("ls", "rm"))]),
        ('{"a": {"name": "ls"}}', [("answer", '{"a": {"name": "ls"}}')]),
    ):
        got = told(llama, text, tools=tools, step=step)
        assert [piece for piece in got if piece[1].__class__ is list or piece[1].strip()] == pieces or got == pieces, text
        assert told(llama, text, step=step) == [("answer", text)]
    # Of Llama 4 also as Python writes it.
    llama = Marked("<|python_start|>")
    for text, pieces in (
        (call, [("call", [one])]),
        ('[ls(a=1), ls(a="x, y")]', [("call", [one, ("ls", '{"a": "x, y"}')])]),
        ("[rm(a=1)]", [("answer", "[rm(a=1)]")]),
        ("[1, 2] is a list", [("answer", "[1, 2] is a list")]),
        ("[ls(a=", [("answer", "[ls(a=")]),
    ):
        assert told(llama, text, tools=tools, step=step) == pieces, text
        assert told(llama, text, step=step) == [("answer", text)]
    # What is soon known to be none flows at once.
    channels = Channels(llama, tools=tools)
    assert channels.feed("[a, ")[0].text == "[a, "
    channels = Channels(llama, tools=tools)
    assert channels.feed('{"a') == [] and channels.feed('": ')[0].text == '{"a": '


M3 = "]<]minimax[>["
# DeepSeek 3.2's, 4's and 4.1's: with other outer tags, and with a blank in each.
DSML_TAGS = [("function_calls", ""), ("tool_calls", ""), ("calls", " ")]
DSML = """<｜DSML｜|calls>
<｜DSML｜|invoke name="ls">
<｜DSML｜|parameter name="a" string="false">1</｜DSML｜|parameter>
</｜DSML｜|invoke>
</｜DSML｜|calls>"""


@pytest.mark.parametrize("step", [1, 5, 1000])
@pytest.mark.parametrize(
    ("marks", "text"),
    [
        (("<tool_call>", "</tool_call>"), '<tool_call>{"name": "ls", "arguments": {"a": 1}}</tool_call>'),
        (("<TOOLCALL>", "</TOOLCALL>"), '<TOOLCALL>[{"name": "ls", "arguments": {"a": 1}}]</TOOLCALL>'),
        (
            ("<|START_ACTION|>", "<|END_ACTION|>"),
            '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "ls", "parameters": {"a": 1}}]<|END_ACTION|>',
        ),
        (("<|tools_prefix|>", "<|tools_suffix|>"), '<|tools_prefix|>[{"ls": {"a": 1}}]<|tools_suffix|>'),
        (("<|tool_call|>", "<|/tool_call|>"), '<|tool_call|>[{"name": "ls", "arguments": {"a": 1}}]<|/tool_call|>'),
        (("<|tool_call|>",), '<|tool_call|>[{"name": "ls", "arguments": {"a": 1}}]'),
        (("<|python_tag|>",), '<|python_tag|>{"name": "ls", "parameters": {"a": 1}}<|eom_id|>'),
        (("<tool_calls>", "</tool_calls>"), '<tool_calls>[{"name": "ls", "arguments": {"a": 1}}]</tool_calls>'),
        (("<function_calls>", "</function_calls>"), "<function_calls>\nls(a=1)\n</function_calls>"),
        (
            ("<seed:tool_call>", "</seed:tool_call>"),
            "<seed:tool_call><function=ls><parameter=a>1</parameter></function></seed:tool_call>",
        ),
        (
            ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>ls"
            '\n```json\n{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ),
        (
            ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>ls<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ),
        (
            ("<|action_start|>", "<|plugin|>", "<|action_end|>"),
            '<|action_start|><|plugin|>\n{"name": "ls", "parameters": {"a": 1}}<|action_end|>',
        ),
        (
            ("<|tool_calls|>", "<|tool_call:begin|>"),
            '<|tool_calls|><|tool_call:begin|>a1<|tool_call:name|>ls<|tool_call:args|>{"a": 1}<|tool_call:end|><|calls|>',
        ),
        (("<|python_start|>", "<|python_end|>"), "<|python_start|>[ls(a=1)]<|python_end|>"),
        (("<|python_start|>", "<|python_end|>"), '<|python_start|><|python_end|>{"name": "ls", "parameters": {"a": 1}}'),
        (("<|python_tag|>",), "<|python_tag|>[ls(a=1)]"),
        # Firefunction's, Functionary's, MiniMax-M3's.
        (("functools[",), 'functools[{"name": "ls", "arguments": {"a": 1}}]'),
        (("<function=", "</function>", "<|python_tag|>"), '<function=ls>{"a": 1}</function>'),
        ((M3,), f'{M3}<tool_call>\n{M3}<invoke name="ls">{M3}<a>1{M3}</a>{M3}</invoke>\n{M3}</tool_call>'),
        *((("｜DSML｜",), DSML.replace("calls", outer).replace("|", blank)) for outer, blank in DSML_TAGS),
        (("｜DSML｜",), '<｜DSML｜tool_calls><｜DSML｜invoke name="ls">{"a": 1}</｜DSML｜invoke></｜DSML｜tool_calls>'),
    ],
)
def test_tool_calls_that_mlx_lms_wrapper_lacks_are_read(marks, text, step):
    tools = [{"type": "function", "function": {"name": "ls", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
    assert has_tool_calls(Marked(*marks)) and not has_tool_calls(Marked())
    assert told(Marked(*marks), "Look: " + text, tools=tools, step=step) == [("answer", "Look: "), ("call", [("ls", '{"a": 1}')])]
    assert told(Marked(*marks), "Look: " + text, step=step) == [("answer", "Look: " + text)]


@pytest.mark.parametrize("marks", [("<tool_calls>", "</tool_calls>"), ("<|tool_call|>",), ("<TOOLCALL>", "</TOOLCALL>")])
def test_a_list_that_goes_on_as_text_flows_as_soon_as_it_is_no_json(marks):
    channels = Channels(Marked(*marks), tools=[{"type": "function", "function": {"name": "ls"}}])
    said = f"{marks[0]}[[1], see below] more words"
    assert "".join(piece.text for letter in said for piece in channels.feed(letter)) == said


def test_solar_opens_frames_reach_nobody():
    marks = ("<|begin|>", "<|end|>", "<|think|>", "<|content|>", "<|flush|>", "<|tool_calls|>")
    text = "<|think|>hm<|end|><|begin|>assistant<|content|>Hi <b>"
    assert told(Marked(*marks), text + "<|end|>") == [("reasoning", "hm"), ("answer", "Hi <b>")]
    # Another family's answers may hold one of these.
    assert told(Marked("<|end|>"), "Hi<|content|>") == [("answer", "Hi<|content|>")]


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("known", [False, True])
def test_headers_of_muses_messages_reach_nobody(known, step):
    """mlx-lm knows the format of Muse Spark, and of Muse Glimmer its calls alone."""
    muse, tools = marked("muse_spark"), [{"type": "function", "function": {"name": "ls"}}]
    muse.has_thinking = False
    if known:
        muse.response_transitions = muse_spark.RESPONSE_FORMAT["transitions"]
        muse.response_initial_state = muse_spark.RESPONSE_FORMAT["initial_state"]
    else:
        muse.chat_template = "<|start|>assistant to=self<|message|>"
    thought, head = " to=self<|message|>hm<|eom|>", "<|start|>assistant"
    call = '<atem:function_calls>\n<atem:invoke name="ls">\n</atem:invoke>\n</atem:function_calls>'
    hm, one = ("reasoning", "hm"), ("call", [("ls", "{}")])
    for text, pieces in (
        (" to=user<|message|>Hi to=you", [("answer", "Hi to=you")]),
        (f"{thought}{head} to=user<|message|>Hi", [hm, ("answer", "Hi")]),
        (f"{thought}{head} to=ls<|message|>{call}", [hm, one]),
        (f" to=user<|message|>Look.<|eom|>{head} to=ls<|message|>{call}<|eom|>{head} to=ls<|message|>{call}", None),
        # What is no header is text.
        ("to be, or not", [("answer", "to be, or not")]),
        (f"{thought}{head} is my role.", [hm, ("answer", f"{head} is my role.")]),
        (f"{thought}{head} to=us", [hm]),
    ):
        got = [piece for piece in told(muse, text, tools=tools, step=step) if piece[1]]
        assert got == (pieces or [("answer", "Look."), one, one]), text


def test_of_several_grammars_that_a_template_names_the_one_that_it_writes_is_its_own(tmp_path):
    """Apriel 1.5's names the marks of one call in its words about tools, and writes those of several."""
    template = (
        "{# within <tool_call></tool_call> tags, as: #}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.tool_calls %}"
        "<tool_calls>[{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}]</tool_calls>{% endif %}{% endfor %}"
    )
    call, tools = '[{"name": "ls", "arguments": {"a": 1}}]', [{"type": "function", "function": {"name": "ls"}}]
    for own, other in (("<tool_calls>", "<tool_call>"), ("<tool_call>", "<tool_calls>")):
        written = (
            template if own == "<tool_calls>" else template.replace("tool_calls>", "tool_c>").replace("tool_call>", "tool_calls>")
        )
        tokenizer = load_tokenizer(with_template(tmp_path, written.replace("tool_c>", "tool_call>")) and tmp_path)
        text = f"{own}{call}{own.replace('<', '</')}"
        assert told(tokenizer, text, tools=tools) == [("call", [("ls", '{"a": 1}')])]
        text = text.replace(own[1:], other[1:])
        assert told(tokenizer, text, tools=tools) == [("answer", text)]


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_apriels_answer_is_what_stands_behind_its_reasoning_and_before_its_last_mark(step):
    apriel, opened = Marked(), "<|assistant|>\nHere are my reasoning steps:\n"
    apriel.chat_template = "Here are my reasoning steps:\\n [BEGIN FINAL RESPONSE] ... [END FINAL RESPONSE]."
    thought = "hm\n[BEGIN FINAL RESPONSE]"
    for text, answer in (
        (f"{thought}\nHi [1]\n[END FINAL RESPONSE]\n", "\nHi [1]\n"),
        (f"{thought}\nEnd it with [END FINAL RESPONSE]!", "\nEnd it with [END FINAL RESPONSE]!"),
        (f"{thought}\ncut [END FI", "\ncut [END FI"),
    ):
        assert told(apriel, text, opened, step=step) == [("reasoning", "hm\n"), ("answer", answer)]


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_minimax_m3s_answers_and_calls_are_told_apart(step):
    """mlx-lm takes its marks for those of calls in JSON."""

    class Family(Hermes):
        think_start, think_end = "<mm:think>", "</mm:think>"

    family = Family(M3, "<mm:think>", "</mm:think>", "[e~[")
    properties = {"o": {"type": "object"}, "l": {"type": "array", "items": {"type": "string"}}, "s": {"type": "string"}}
    tools = [{"function": {"name": "ls", "parameters": {"properties": properties}}}]
    inner = "<o><x><item>1</item><item><y>it's <b></y></item></x></o><l><item>2</item></l><s>3</s><e></e>"
    marked = inner.replace("<", f"{M3}<").replace(f"{M3}<b>", "<b>")
    call = f'{M3}<tool_call>\n{M3}<invoke name="ls">{marked}{M3}</invoke>\n{M3}</tool_call>'
    read = {"o": {"x": [1, {"y": "it's <b>"}]}, "l": ["2"], "s": "3", "e": ""}
    thought = told(family, f"<mm:think>hm</mm:think>Look: {call}", tools=tools, step=step)
    assert thought == [("reasoning", "hm"), ("answer", "Look: "), ("call", [("ls", json.dumps(read))])]
    # Where it thinks of nothing, its answer begins with the mark.
    assert told(family, f"</mm:think>Hi{call}{call}", tools=tools, step=step)[0] == ("answer", "Hi")
    for damaged in (call.replace(f"{M3}</s>", ""), call.replace(f"{M3}<s>", f" words {M3}<s>")):
        assert told(family, damaged, tools=tools, step=step) == [("answer", damaged)]


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_gigachats_answer_and_call_are_told_apart(step):
    tools = [{"function": {"name": "ls"}}]
    for call in (
        'function call<|role_sep|>\n{"name": "ls", "arguments": {"a": 1}}',
        '<|function_call|>{"name": "ls", "arguments": {"a": 1}}',
    ):
        gigachat = Marked("<|message_sep|>", "<|role_sep|>", *(["<|function_call|>"] if call[0] == "<" else []))
        one = ("call", [("ls", '{"a": 1}')])
        for end in ("", "<|message_sep|>"):
            assert told(gigachat, call + end, tools=tools, step=step) == [one]
            assert told(gigachat, f"Look:<|message_sep|>\n\n{call}{end}", tools=tools, step=step) == [
                ("answer", "Look:\n\n"),
                one,
            ]
        assert told(gigachat, "A function call<|message_sep|>", tools=tools, step=step) == [("answer", "A function call")]


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_call_that_leaves_its_mark_out_is_a_call_if_its_function_was_offered(step):
    """Qwen3-Coder's: `<function=ls>` comes without the mark before it as often as not."""
    coder, tools = marked("qwen3_coder"), [{"type": "function", "function": {"name": "ls"}}]
    one, y = "<function=ls>\n</function>", "<function=ls>\n<parameter=path>\ny\n</parameter>\n</function>"
    call, with_y = ("call", [("ls", "{}")]), ("call", [("ls", '{"path": "y"}')])
    for text, pieces in (
        (f"Look:\n{y}\n</tool_call>", [("answer", "Look:\n"), with_y]),
        (f"Look:\n{y}", [("answer", "Look:\n"), with_y]),
        (f"{one}\n</tool_call>\n{y}\n</tool_call>", [call, ("answer", "\n"), with_y]),
        (f"<tool_call>\n{one}\n</tool_call>\n{y}", [call, ("answer", "\n"), with_y]),
    ):
        assert told(coder, text, tools=tools, step=step) == pieces, text
        assert told(coder, text, step=step) == [("answer", text)]
    for text in ("Use <function=ls> to list.", "<function=cat>\n</function>", f"{y[:-3]}", "<function=l"):
        assert told(coder, text, tools=tools, step=step) == [("answer", text)]
    # An answer that is held to calls writes their marks.
    (piece,) = Channels(coder, tools=tools, marked=True).feed(one, last=True)
    assert (piece.kind, piece.text) == ("answer", one)


@pytest.mark.parametrize("step", [1, 1000])
def test_gpt_oss_may_leave_the_namespace_of_a_function_out(step):
    tools, call = (
        [{"type": "function", "function": {"name": "ls"}}],
        '<|channel|>commentary to=NAME json<|message|>{"a": 1}<|call|>',
    )
    for name, pieces in (
        *((name, [("call", [("ls", '{"a": 1}')])]) for name in ("ls", "functions.ls")),
        ("python", [("reasoning", '{"a": 1}')]),
    ):
        assert told(HARMONY, call.replace("NAME", name), tools=tools, step=step) == pieces
    assert told(HARMONY, call.replace("NAME", "ls"), step=step) == [("reasoning", '{"a": 1}')]


GOOD = '{"name": "ls", "arguments": {}}'


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize(
    "written",
    [
        *("3", "null", "[]", '"ls"', "[3]", f"[{GOOD}, 3]", f"[{GOOD}, []]", "{}", '{"arguments": {}}', '{"name": null}'),
        *(
            '{"name": "", "arguments": {}}',
            '{"name": 3, "arguments": {}}',
            '{"name": "ls", "arguments": 3}',
            "{broken",
            "[" * 5000,
        ),
        # A call of nothing would lose what these ask for.
        *('{"name": "ls", "args": {"x": 1}}', '{"name": "ls", "input": {}}', '{"name": "ls", "path": "/tmp"}'),
        *('{"function": {"name": "ls", "arguments": null}, "tool_input": {"x": 1}}',),
        *('{"name": "ls", "arguments": [1]}', '{"name": "ls", "arguments": "Paris"}', '{"name": "ls", "arguments": {"x": NaN}}'),
    ],
)
def test_a_call_that_cannot_be_read_is_text_with_its_marks(written, step):
    for text in (f"<tool_call>{written}</tool_call>", f"<tool_call>{written}"):
        assert told(Hermes(), f"Look: {text}", tools=WEATHER, step=step) == [("answer", f"Look: {text}")]


# What stands between the marks, with VALUE for a text, by mlx-lm's parser.
VALUES = {
    "json_tools": '{"name": "ls", "arguments": {"a": "VALUE", "b": "c"}}',
    "kimi_k2": 'functions.ls:0<|tool_call_argument_begin|>{"a": "VALUE", "b": "c"}',
    "pythonic": '[ls(a="VALUE", b="c")]',
    "gemma4": 'call:ls{a:<|"|>VALUE<|"|>,b:<|"|>c<|"|>}',
    "qwen3_coder": "<function=ls><parameter=a>VALUE</parameter><parameter=b>c</parameter></function>",
    "minimax_m2": '<invoke name="ls"><parameter name="a">VALUE</parameter><parameter name="b">c</parameter></invoke>',
    "glm47": "ls<arg_key>a</arg_key><arg_value>VALUE</arg_value><arg_key>b</arg_key><arg_value>c</arg_value>",
    "kimi_k3": '<|open|>call tool="ls" index="1"<|sep|><|open|>argument key="a" type="string"<|sep|>VALUE<|close|>argument<|sep|>'
    '<|open|>argument key="b" type="string"<|sep|>c<|close|>argument<|sep|><|close|>call<|sep|>',
    "longcat": "ls<longcat_arg_key>a</longcat_arg_key><longcat_arg_value>VALUE</longcat_arg_value>"
    "<longcat_arg_key>b</longcat_arg_key><longcat_arg_value>c</longcat_arg_value>",
    "function_gemma": "call:ls{a:<escape>VALUE<escape>,b:<escape>c<escape>}",
    "minicpm5": '"ls"><param name="a">VALUE</param><param name="b">c</param>',
    "muse_spark": '<atem:invoke name="ls"><atem:parameter name="a">VALUE</atem:parameter>'
    '<atem:parameter name="b">c</atem:parameter></atem:invoke>',
}


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize("value", ["END", "x END y", "x STARTq END END"])
@pytest.mark.parametrize("parser", VALUES)
def test_the_end_of_a_call_within_a_value_is_the_values(parser, value, step):
    family = marked(parser)
    start, end = family.tool_call_start, family.tool_call_end
    value = value.replace("START", start).replace("END", end)
    text = f"{start}{VALUES[parser].replace('VALUE', value)}{end}"
    call = ("call", [("ls", json.dumps({"a": value, "b": "c"}))])
    assert told(family, f"Look: {text}It's {text}.", tools=WEATHER, step=step) == [
        *(("answer", "Look: "), call, ("answer", "It's "), call, ("answer", "."))
    ]


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize("parser", VALUES)
def test_a_value_that_is_never_closed_is_text_and_costs_no_other_call(parser, step):
    family = marked(parser)
    start, end = family.tool_call_start, family.tool_call_end
    torn = f"{start}{VALUES[parser].partition('VALUE')[0]}x{end}"
    good = f"{start}{VALUES[parser].replace('VALUE', 'y')}{end}"
    assert told(family, torn, tools=WEATHER, step=step) == [("answer", torn)]
    assert told(family, f"{torn} and {good}.", tools=WEATHER, step=step) == [
        *(("answer", f"{torn} and "), ("call", [("ls", '{"a": "y", "b": "c"}')]), ("answer", "."))
    ]


def test_an_end_tag_is_no_name_of_a_function():
    text = '<function name="ls"><param name="a">x</function><param name="b">1</param></function>'
    assert told(marked("minicpm5"), text, tools=WEATHER) == [("answer", text)]


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('[TOOL_CALLS]ls[ARGS]{"a": 1}', [("ls", '{"a": 1}', None)]),
        ('[TOOL_CALLS]ls[CALL_ID]9[ARGS]{"a": 1}', [("ls", '{"a": 1}', "9")]),
        ("[TOOL_CALLS]ls[CALL_ID]a1B2c3[ARGS]{}[TOOL_CALLS]rm[CALL_ID]9[ARGS]{}", [("ls", "{}", "a1B2c3"), ("rm", "{}", "9")]),
        ('[TOOL_CALLS][{"name": "ls", "arguments": {}, "id": "9"}]', [("ls", "{}", "9")]),
    ],
)
def test_the_id_of_a_mistral_call_is_its_id_and_not_its_name(text, calls, step):
    channels = Channels(marked("mistral"), tools=WEATHER)
    pieces = [piece for at in range(0, len(text), step) for piece in channels.feed(text[at : at + step])]
    read = [call for piece in pieces + channels.feed("", last=True) for call in piece.calls]
    assert [(call.name, call.arguments) for call in read] == [(name, arguments) for name, arguments, _ in calls]
    assert all(call.id == given or given is None for call, (_, _, given) in zip(read, calls, strict=True))


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("<think>a <tool_call> b</think>c", [("reasoning", "a <tool_call> b"), ("answer", "c")]),
        ("<think>a<tool_call>3</tool_call>b</think>c", [("reasoning", "a<tool_call>3</tool_call>b"), ("answer", "c")]),
        (f"Say <tool_call>: <tool_call>{GOOD}</tool_call>", [("answer", "Say <tool_call>: "), ("call", [("ls", "{}")])]),
    ],
)
def test_what_stands_behind_a_call_that_cannot_be_read_is_read_anew(text, pieces, step):
    assert told(Hermes(), text, tools=WEATHER, step=step) == pieces


@pytest.mark.parametrize(
    ("written", "calls"),
    [
        ('{"name": "ls"}', [("ls", "{}")]),
        ('{"name": "ls", "arguments": null}', [("ls", "{}")]),
        ('{"name": "ls", "arguments": ""}', [("ls", "{}")]),
        # Text is not encoded a second time.
        ('{"name": "ls", "arguments": "{\\"a\\": 1}"}', [("ls", '{"a": 1}')]),
        ('{"name": "ls", "parameters": {"a": "é"}}', [("ls", '{"a": "é"}')]),
        ('{"type": "function", "function": {"name": "ls", "arguments": {"a": 1}}}', [("ls", '{"a": 1}')]),
        (f"[{GOOD}, {GOOD}]", [("ls", "{}"), ("ls", "{}")]),
        # Half of a surrogate pair is no character that could be sent.
        ('{"name": "ls", "arguments": {"a": "\\ud800"}}', [("ls", '{"a": "\\ud800"}')]),
        ('{"name": "caf\\u00e9", "arguments": {"\\u00e9": 1}}', [("café", '{"é": 1}')]),
    ],
)
def test_calls_of_odd_but_readable_shapes_are_calls(written, calls):
    assert told(Hermes(), f"<tool_call>{written}</tool_call>", tools=WEATHER) == [("call", calls)]


def test_a_parser_that_fails_in_any_way_leaves_text():
    class Failing(Hermes):
        tool_parser = staticmethod(lambda text, tools: text.no_such_method())

    assert told(Failing(), "<tool_call>x</tool_call>.", tools=WEATHER) == [("answer", "<tool_call>x</tool_call>.")]


@pytest.mark.parametrize("written", ["", "{}", "[5]", "ls 5", '{"name": 5}', 'ls(a="x")', "<function=ls></function>"])
@pytest.mark.parametrize("parser", ["glm47", "laguna", "minicpm5"])
def test_what_a_lenient_parser_takes_for_a_call_is_text(parser, written):
    class Lenient(Hermes):
        tool_parser = staticmethod(importlib.import_module(f"mlx_lm.tool_parsers.{parser}").parse_tool_call)

    assert told(Lenient(), f"<tool_call>{written}</tool_call>", tools=WEATHER) == [
        ("answer", f"<tool_call>{written}</tool_call>")
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("offer", [{}, {"tools": []}, {"tools": WEATHER, "tool_choice": "none"}])
def test_a_call_that_nobody_offered_stays_text(chatty, offer, stream):
    tokenizer, said = chatty[1], 'So: <tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    with running(scripted([*tokenizer.encode(said), tokenizer.eos_token_id], vocab=1536), tokenizer) as server:
        got = ask(server, max_tokens=100, stream=stream, extra_body=offer)
        choices = [chunk.choices[0] for chunk in got] if stream else [got.choices[0]]
    parts = [choice.delta if stream else choice.message for choice in choices]
    assert "".join(part.content or "" for part in parts) == said and choices[-1].finish_reason == "stop"
    assert not any(part.tool_calls for part in parts)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("written", ['{"name": "weather"}', "3", f"[{GOOD}, 3]", '{"arguments": {}}', "{broken"])
def test_an_odd_call_costs_neither_the_answer_nor_its_stream(chatty, written, stream):
    tokenizer, said = chatty[1], f"Look: <tool_call>{written}</tool_call>"
    with running(scripted([*tokenizer.encode(said), tokenizer.eos_token_id], vocab=1536), tokenizer) as server:
        status, body = server.post(
            "/v1/chat/completions", {"messages": MESSAGES, "tools": WEATHER, "max_tokens": 99, "stream": stream}
        )
    if stream:
        assert body.endswith("data: [DONE]\n\n")
        choices = [json.loads(line[6:])["choices"][0] for line in body.splitlines() if line.startswith("data: {")]
        parts = [choice["delta"] for choice in choices]
    else:
        choices = json.loads(body)["choices"]
        parts = [choices[0]["message"]]
    calls = [call for part in parts for call in part.get("tool_calls", [])]
    assert status == 200 and choices[-1]["finish_reason"] == ("tool_calls" if calls else "stop")
    text = "".join(part.get("content") or "" for part in parts)
    assert text == ("Look: " if calls else said) and bool(calls) == (written == '{"name": "weather"}')


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_completion_is_all_text(thinker, stream):
    said = "<think>Hmm. </think>Yes"
    line = [*thinker.encode(said), thinker.eos_token_id]
    with running(scripted(line, vocab=1540), thinker) as server:
        got = server.client.completions.create(model="served", prompt="x", max_tokens=50, stream=stream)
        text = "".join(chunk.choices[0].text for chunk in got) if stream else got.choices[0].text
    assert text == said


@pytest.mark.parametrize("stream", [False, True])
def test_gpt_oss_answers_reach_the_client_without_marks(chatty, stream):
    tokenizer = copy.copy(chatty[1])
    tokenizer.__class__ = type("Harmony", (TokenizerWrapper,), {"get_vocab": lambda self: HARMONY.marks})
    said = f"{THOUGHT}<|start|>assistant{ASKED}<|call|><|start|>assistant{FINAL}"
    line = [*tokenizer.encode(said), tokenizer.eos_token_id]
    with running(scripted(line, vocab=1536), tokenizer) as server:
        got = ask(server, tools=WEATHER, max_tokens=200, stream=stream)
        parts = [chunk.choices[0].delta for chunk in got] if stream else [got.choices[0].message]
    assert "".join(part.content or "" for part in parts) == "Hi!"
    assert "".join(getattr(part, "reasoning", None) or "" for part in parts) == "hm"
    assert [(call.function.name, call.function.arguments) for part in parts for call in part.tool_calls or []] == [
        ("ls", '{"a": 1}')
    ]
