"""From messages to a prompt, for every kind of chat template."""

import json

import mlx.core as mx
from kit import with_template
from mlx_lm.tokenizer_utils import load as load_tokenizer
from serving_kit import MESSAGES, TOOLS, WEATHER, ask, running

from dflash_mlx import load


def test_what_a_tool_found_reaches_the_template(tmp_path, chatty):
    calls = "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}"
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
    messages[1] = {**messages[1], "content": "", "tool_calls": [{"function": {"arguments": {"city": "Oslo"}}}]}
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
