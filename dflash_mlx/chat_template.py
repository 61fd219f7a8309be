"""What a chat template reads beside the messages. Knows tokenizers and Jinja, no models."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

# What transformers' function takes beside a template's variables, and what templates are always given. Of another template nobody
# knows that it ends; without a prompt for an answer, or as tensors, there is nothing to go on from.
NO_VARIABLES = frozenset(
    "self conversation messages tools chat_template add_generation_prompt continue_final_message tokenize padding truncation "
    "max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs sanitize_control_tokens".split()
)


def template_variables(tokenizer: Any) -> set[str] | None:
    """Names that a tokenizer's chat template reads; None where it is a program of mlx-lm's and nobody can tell.

    A tokenizer without a chat template reads none.
    """
    if not tokenizer.has_chat_template:
        return set()
    template = getattr(tokenizer, "chat_template", None)
    if getattr(tokenizer, "_chat_template", None) is not None or not isinstance(template, (str, dict)):
        return None
    texts = template.values() if isinstance(template, dict) else [template]
    return {name for text in texts for name in _names(text)}


def without_effect(tokenizer: Any, arguments: Iterable[str]) -> list[str]:
    """Those of the arguments of a chat template that it does not read."""
    read = template_variables(tokenizer)
    return [] if read is None else [name for name in arguments if name not in read]


def _names(template: str) -> set[str]:
    import jinja2

    try:
        tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except jinja2.TemplateError:
        # A tag of transformers' own: any word may be a name.
        return set(re.findall(r"[A-Za-z_]\w*", template))
    return {node.name for node in tree.find_all(jinja2.nodes.Name)}
