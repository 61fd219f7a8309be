"""What to ask a target so that it writes training text: a chat frame, families of questions, and your own prompts.

Three sources, from most to least diverse: the target writes the question too (from the bare chat prefix, or from the few
words an opening gives it); a template is filled with numbers, names and pieces of the target's earlier answers; a JSONL
file. Whole families are held out, because an evaluation that shares templates with training says nothing.
Knows text and a tokenizer; knows no model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..errors import ConfigError
from .rollout import Frame

KINDS = ("chat", "maths", "code", "rewrite")

_NAMES = (
    "Anna", "Ben", "Carla", "David", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jamal", "Kira", "Leo", "Mia", "Noah",
    "Olga", "Priya", "Quinn", "Rosa", "Sam", "Tara", "Uma", "Victor",
)  # fmt: skip
_THINGS = ("apples", "books", "pencils", "marbles", "coins", "stickers", "tickets", "cookies", "oranges", "cards", "eggs")
_LANGUAGES = ("Python", "JavaScript", "Java", "C", "C++", "Go", "Rust", "Ruby", "TypeScript", "PHP", "Bash", "SQL")
_TONGUES = ("French", "Spanish", "German", "Italian", "Portuguese", "Dutch")
_UNITS = ("miles to kilometers", "pounds to kilograms", "hours to minutes", "feet to meters", "Celsius to Fahrenheit",
          "liters to gallons", "days to hours", "grams to ounces", "inches to centimeters")  # fmt: skip
_TONES = ("formal", "casual", "friendly", "concise", "professional", "polite", "persuasive", "simple", "dramatic", "cheerful")
_TASKS = (
    "reverse a string", "check whether a number is prime", "compute the factorial of a number", "sort a list of integers",
    "find the largest element of a list", "count the vowels in a string", "remove duplicates from a list",
    "merge two dictionaries", "read a file line by line", "compute the Fibonacci sequence", "check for a palindrome",
    "find the greatest common divisor of two numbers", "convert a temperature", "parse a CSV file", "flatten a nested list",
    "count words in a text", "generate a random password", "validate an email address", "compute the average of a list",
    "transpose a matrix", "implement a stack", "implement a queue", "search a sorted array", "traverse a binary tree",
)  # fmt: skip
_TOPICS = (
    "photosynthesis", "the water cycle", "black holes", "the French Revolution", "machine learning", "healthy eating",
    "climate change", "chess", "the Roman Empire", "gardening", "time management", "volcanoes", "jazz music", "recycling",
    "the human heart", "electric cars", "the stock market", "yoga", "the Great Wall of China", "coffee", "bees",
    "public speaking", "the solar system", "dinosaurs", "renewable energy", "meditation", "the Industrial Revolution",
    "vaccines", "Shakespeare", "football", "ocean currents", "the immune system", "remote work", "baking bread",
    "artificial intelligence", "space travel", "the Amazon rainforest", "inflation", "friendship", "photography",
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """Questions of one sort. `openings`: first words, the target writes the rest; `templates`: whole user turns."""

    name: str
    kind: str
    openings: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()
    weight: float = 1.0
    held_out: bool = False


_CHAT_OPENINGS = (
    "What is", "What are", "What's the best way to", "How do", "How does", "How can I", "Why do", "Why is", "Who was",
    "When did", "Where", "Can you", "Could you please", "Tell me about", "Explain", "Describe", "I", "I'm", "I want to",
    "I need help with", "My", "Is it", "Should", "Do you", "Give me", "What is the difference between", "Compare", "Discuss",
    "Help me", "Let's", "Hello", "Hi,", "Please", "Suggest", "Recommend", "What would happen if", "In", "The", "As a", "How to",
)  # fmt: skip
_WRITE_OPENINGS = (
    "Write a short story about", "Write a poem about", "Write an email to", "Write an essay on", "Write a blog post about",
    "Write a letter", "Write a product description for", "Create a", "Write a dialogue between", "Write a speech",
    "Compose", "Imagine", "Write a review of", "Design a", "Plan a", "Write a scene", "Generate a", "Draft a", "Write a",
)  # fmt: skip
_MATHS_OPENINGS = (
    "Calculate", "Solve", "Solve the equation", "What is 1", "What is 2", "If a train", "If x", "Find the", "How many",
    "A rectangle has", "The sum of", "A store sells", "Simplify", "Convert", "What is the square root of", "A farmer has",
    "What is the probability", "Compute", "Two numbers", "The price of", "Sarah has", "John", "In a class of", "Evaluate",
    "What is the area of", "What percentage of", "A car travels", "Find the value of", "Determine", "Prove that", "Let",
)  # fmt: skip
_LIST_OPENINGS = (
    "List", "List the top", "Make a list of", "Give me a list of", "Name three", "Name the", "List some", "What are the main",
    "What are the steps", "Give three examples of", "Enumerate", "Provide a list", "Create a table", "Give me 5", "Write down",
    "What are some", "Identify", "Step by step,", "Put the following in order:", "Classify the following", "Sort",
)  # fmt: skip
_CODE_OPENINGS = (
    "Write a Python function", "Write a Python program", "Write a function in JavaScript", "Write a Java", "Write a C",
    "Write a SQL query", "Write code", "Write a script", "Implement", "Create a class", "Write a program that", "How do I",
    "Write a function that takes", "Write a regular expression", "In Python, how", "Create an HTML", "Write a bash script",
    "Given an array", "Given a string", "Develop a", "Create a function", "Write an algorithm", "Using Python,", "def",
    "What does this code do?\n\n```python\n", "Fix the bug in this code:\n\n```python\n", "I have this code:\n\n```",
    "Write unit tests for", "Optimize the following code:\n\n```", "Convert this code to", "Write a React component",
)  # fmt: skip
_REWRITE_OPENINGS = (
    "Rewrite the following sentence:", "Summarize the following text:", "Paraphrase this:", "Correct the grammar:",
    "Rewrite the following paragraph", "Make this sentence", "Proofread the following", "Edit this text:", "Shorten this:",
    "Translate the following sentence", "Rephrase", "Fix the spelling", "Improve the following", "Summarize", "Rewrite",
    "Change the following sentence", "Convert the following", "Simplify the following text:", "Extract", "Expand",
)  # fmt: skip

FAMILIES: tuple[Family, ...] = (
    Family("open", "chat", openings=("",), weight=4),
    Family("chat-words", "chat", openings=_CHAT_OPENINGS, weight=2),
    Family("write-words", "chat", openings=_WRITE_OPENINGS, weight=1.5),
    Family("maths-words", "maths", openings=_MATHS_OPENINGS, weight=2),
    Family("list-words", "maths", openings=_LIST_OPENINGS, weight=1.5),
    Family("code-words", "code", openings=_CODE_OPENINGS, weight=3),
    Family("rewrite-words", "rewrite", openings=_REWRITE_OPENINGS, weight=2),
    Family(
        "explain", "chat", templates=("Explain {topic} in simple terms.", "Can you explain {topic}?", "Tell me about {topic}.")
    ),
    Family(
        "story", "chat", templates=("Write a short story about {topic}.", "Write a story in which {name} learns about {topic}.")
    ),
    Family("email", "chat", templates=("Write an email to {name} about {topic}.", "Draft a short message to {name} on {topic}.")),
    Family("question", "chat", templates=("Why is {topic} important?", "How does {topic} work?", "What is {topic}?")),
    Family("opinion", "chat", templates=("What do you think about {topic}?", "Is {topic} good or bad?")),
    Family("poem", "chat", templates=("Write a poem about {topic}.", "Write a haiku about {topic}.")),
    Family(
        "sum", "maths", templates=("What is {n} + {n2}?", "What is {n} - {m}?", "Add {n}, {m} and {n2}.", "Calculate {n} * {m}.")
    ),
    Family(
        "word-problem",
        "maths",
        templates=(
            "{name} has {n} {thing}. {name2} gives {name} {m} more. How many {thing} does {name} have now?",
            "{name} buys {m} {thing} for ${n} each. How much does {name} pay in total?",
            "If {m} {thing} cost ${n}, how much do {n2} {thing} cost?",
        ),
    ),
    Family("units", "maths", templates=("Convert {n} {unit}.", "How do I convert {n} from {unit}?")),
    Family("equation", "maths", templates=("Solve for x: {m}x + {n} = {n2}.", "Find x if {m}x - {n} = {n2}.")),
    Family("list-n", "maths", templates=("List {m} facts about {topic}.", "List {m} reasons why {topic} matters.")),
    Family(
        "table",
        "maths",
        templates=("Make a table of {m} things related to {topic}.", "Give a JSON list of {m} words on {topic}."),
    ),
    Family(
        "function",
        "code",
        weight=1.5,
        templates=("Write a {language} function to {task}.", "Write a function in {language} to {task}."),
    ),
    Family(
        "program",
        "code",
        templates=("Write a {language} program to {task} and explain it.", "Show me how to {task} in {language}."),
    ),
    Family(
        "explain-code", "code", templates=("Explain what this code does:\n\n```\n{code}\n```", "Explain this:\n```\n{code}\n```")
    ),
    Family("fix-code", "code", templates=("Fix this code:\n\n```\n{code}\n```", "Find the bug:\n\n```\n{code}\n```")),
    Family("comment-code", "code", templates=("Add comments to this code:\n\n```\n{code}\n```",)),
    Family(
        "tone",
        "rewrite",
        weight=1.5,
        templates=("Rewrite this in a {tone} tone:\n\n{paragraph}", "Make this more {tone}:\n\n{paragraph}"),
    ),
    Family(
        "grammar",
        "rewrite",
        weight=1.5,
        templates=("Correct the grammar and spelling:\n\n{paragraph}", "Proofread this text: {paragraph}"),
    ),
    Family(
        "paraphrase",
        "rewrite",
        weight=1.5,
        templates=("Paraphrase the following paragraph:\n\n{paragraph}", "Say this in other words: {sentence}"),
    ),
    Family(
        "copy",
        "rewrite",
        weight=1.5,
        templates=("Repeat the following text exactly:\n\n{paragraph}", "Copy this sentence: {sentence}"),
    ),
    Family(
        "shorten",
        "rewrite",
        weight=1.5,
        templates=("Shorten this text:\n\n{paragraph}", "Summarize the following text:\n\n{paragraph}"),
    ),
    Family("into", "rewrite", templates=("Translate into {tongue}: {sentence}", "Turn this into a question: {sentence}")),
    # Held out: none of these wordings is used in training.
    Family(
        "held-chat",
        "chat",
        held_out=True,
        templates=(
            "I'm curious about {topic}. Where should I begin?",
            "My friend {name} keeps talking about {topic}. What should I know before we meet?",
            "Which common misconceptions exist about {topic}, and what is true instead?",
            "Act as a tour guide and talk about {topic}.",
            "How would you teach {topic} to a class of ten-year-olds?",
            "What role does {topic} play in everyday life?",
        ),
    ),
    Family(
        "held-maths",
        "maths",
        held_out=True,
        templates=(
            "{name} reads {m} pages every day. How long will a book of {n} pages take?",
            "A box holds {m} {thing}. How many boxes are needed for {n} {thing}?",
            "Which is larger, {n} or {n2}, and by how much?",
            "Count from {m} to {m2} and say which numbers are even.",
            "Write out the multiplication table of {m} as a numbered list.",
            "Suggest {m} hobbies for someone who likes {topic}, one per line.",
            "In what order would you do things when learning about {topic}? Number the stages.",
        ),
    ),
    Family(
        "held-code",
        "code",
        held_out=True,
        templates=(
            "I am new to {language}. Could you show me some code to {task}?",
            "Please code a small {language} example where we {task}, then test it.",
            "What would a class in {language} look like that can {task}?",
            "Rename the variables in this snippet so that they are easier to read:\n\n```\n{code}\n```",
            "My colleague wrote this. Can it be made faster?\n\n```\n{code}\n```",
        ),
    ),
    Family(
        "held-rewrite",
        "rewrite",
        held_out=True,
        templates=(
            "Here is a draft of mine. Polish it, but keep the meaning:\n\n{paragraph}",
            "Please restate this for a newspaper: {paragraph}",
            "Replace difficult words with easier ones in this passage.\n\n{paragraph}",
            '"{sentence}" Put this sentence into the past tense.',
            "Give me a cleaned-up version of these notes:\n\n{paragraph}",
        ),
    ),
)
FAMILY_IDS = {family.name: i for i, family in enumerate(FAMILIES)}


@dataclass
class Pools:
    """Pieces of the target's earlier answers, for the slots of templates."""

    topic: list[str] = field(default_factory=lambda: list(_TOPICS))
    paragraph: list[str] = field(default_factory=list)
    sentence: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)

    def add(self, question: str, answer: str) -> None:
        """Take topics from a question, and paragraphs, sentences and code from its answer."""
        for topic in re.findall(r"\b(?:about|of|on|for)\s+((?:the\s+)?[a-zA-Z][a-zA-Z\- ]{3,28})[.?,!]", question):
            if topic.count(" ") < 4:
                self.topic.append(topic)
        for code in re.findall(r"```\w*\n(.+?)```", answer, re.S):
            if 2 <= code.count("\n") <= 20 and len(code) < 500:
                self.code.append(code.rstrip())
        for text in re.sub(r"```.*?(```|$)", "", answer, flags=re.S).split("\n\n"):
            text = text.strip()
            if 25 <= text.count(" ") <= 90 and text[-1] in ".!?" and "\n" not in text:
                self.paragraph.append(text)
            for sentence in re.findall(r"[A-Z][^.!?\n]{25,140}[.!?]", text)[:1]:
                self.sentence.append(sentence)

    def fill(self, template: str, rng: np.random.Generator) -> str | None:
        """The template with every slot filled, or None while a pool that it needs is empty."""
        values: dict[str, object] = {}
        for slot in re.findall(r"\{(\w+)\}", template):
            pool = {
                "name": _NAMES,
                "name2": _NAMES,
                "thing": _THINGS,
                "language": _LANGUAGES,
                "tongue": _TONGUES,
                "unit": _UNITS,
                "tone": _TONES,
                "task": _TASKS,
            }.get(slot) or getattr(self, slot, None)
            if slot in ("n", "n2"):
                values[slot] = int(rng.integers(10, 10 ** int(rng.integers(2, 5))))
            elif slot in ("m", "m2"):
                values[slot] = int(rng.integers(3, 13)) + 12 * (slot == "m2")
            elif not pool:
                return None
            else:
                values[slot] = pool[int(rng.integers(len(pool)))]
        return re.sub(r"\{(\w+)\}", lambda found: str(values[found[1]]), template)


def read_prompts(path: str | Path) -> list[list[dict[str, str]]]:
    """Conversations from a JSONL file: {"messages": [...]}, a list of messages, {"prompt": text}, or a plain line.

    Raises:
      ConfigError: names every line that is none of these.
    """
    found, faults = [], []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError:
            value = line
        if isinstance(value, dict):
            value = value.get("messages") or value.get("prompt")
        if isinstance(value, (str, int, float)):
            value = [{"role": "user", "content": str(value) if isinstance(value, str) else line}]
        good = isinstance(value, list) and value and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value)
        if not good or value[-1]["role"] != "user":
            faults.append(str(number))
            continue
        found.append(value)
    if faults or not found:
        wrong = f"other things on lines {', '.join(faults[:20])}" if faults else "no prompt"
        raise ConfigError(
            f"{path} holds {wrong}; it must hold one prompt a line: plain text, or JSON with messages that end with the user's",
            "Correct the file",
        )
    return found


def make_frame(tokenizer) -> Frame:
    """Read off a tokenizer's chat template which ids stand round the turns.

    The template is rendered with marks for the texts; what stands before, between and after them is the frame. Without a
    template the frame is the id that starts a text.
    """
    eos = tuple(sorted(tokenizer.eos_token_ids))
    if not getattr(tokenizer, "chat_template", None):
        start = tokenizer.bos_token_id
        return Frame((eos[0] if start is None else start,), (), (), eos)
    ask, reply, more = "@first@", "@reply@", "@second@"

    def render(messages: list[tuple[str, str]]) -> str:
        turns = [{"role": role, "content": content} for role, content in messages]
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)

    one = render([("user", ask)])
    prefix, glue = one.split(ask)
    try:
        two = render([("user", ask), ("assistant", reply), ("user", more)])
        again = two[two.index(reply) + len(reply) : two.index(more)]
    except Exception:  # a template may refuse a second turn
        again = ""

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    after = ids(again)
    if after and after[0] in eos:
        after = after[1:]  # the answer ended with it
    return Frame(tuple(ids(prefix)), tuple(ids(glue)), tuple(after), eos)


def chat_ids(tokenizer, messages: Iterable[dict[str, str]]) -> list[int]:
    """Ids of a conversation up to where the answer starts; plain text of the last message where there is no template."""
    messages = list(messages)
    if not getattr(tokenizer, "chat_template", None):
        return tokenizer.encode(messages[-1]["content"])
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
