"""Tokenizers that have the marks of a family and nothing else, and what is told apart in its text."""

import importlib
import json

from dflash_mlx.serving.channels import Channels


class Marked:
    """A tokenizer that has these marks and knows nothing else of its family."""

    has_thinking = has_tool_calling = False
    structural_markers, response_transitions, response_initial_state, chat_template = (), {}, None, ""

    def __init__(self, *marks):
        self.marks = dict.fromkeys(marks, 0)

    def get_vocab(self):
        return self.marks


class Hermes(Marked):
    """As mlx-lm's wrapper of a family that thinks and calls."""

    has_thinking = has_tool_calling = True
    think_start, think_end, tool_call_start, tool_call_end = "<think>", "</think>", "<tool_call>", "</tool_call>"
    tool_parser = staticmethod(lambda text, tools: json.loads(text))


def told(tokenizer, text, before="", tools=None, step=1):
    """Kinds with their joined texts, or the calls; the text comes in pieces of `step` letters."""
    channels, joined = Channels(tokenizer, before, tools), []
    pieces = [piece for at in range(0, len(text), step) for piece in channels.feed(text[at : at + step])]
    for piece in pieces + channels.feed("", last=True):
        if piece.kind != "call" and joined and joined[-1][0] == piece.kind:
            joined[-1] = (piece.kind, joined[-1][1] + piece.text)
        else:
            joined.append((piece.kind, piece.text or [(call.name, call.arguments) for call in piece.calls]))
    return joined


def marked(parser):
    """A tokenizer of a family that calls as this parser of mlx-lm's reads."""
    module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")

    class Family(Hermes):
        tool_parser = staticmethod(module.parse_tool_call)
        tool_call_start, tool_call_end = module.tool_call_start, module.tool_call_end

    return Family()


HARMONY = Marked("<|start|>", "<|channel|>", "<|message|>")
