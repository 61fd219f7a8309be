"""A conversation without a screen: thinking kept apart, settings checked, what a pair cannot do refused."""

import itertools
import re

import pytest
from kit import scripted, with_template
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dflash_mlx import load
from dflash_mlx.draft_length.policy import FixedDraftLength
from dflash_mlx.errors import DFlashError
from dflash_mlx.pair import DFlashPair
from dflash_mlx.prompt_files import PrefixFiles
from dflash_mlx.serving.chat import Chat
from dflash_mlx.serving.commands import run_command
from dflash_mlx.serving.conversation import Conversation, Pair, Settings


class Thinking:
    """A tokenizer whose token i is one character, with <think> marks and a template that opens a thinking block."""

    chat_template = "thinks"
    bos_token = eos_token_id = None
    alphabet = "abcdefghijklmnopqrstuvwxyz </>"

    def get_vocab(self):
        return {"<think>": 59, "</think>": 60}

    def decode(self, ids):
        return "".join({59: "<think>", 60: "</think>"}.get(i) or self.alphabet[i % 30] for i in ids)

    def encode(self, text, add_special_tokens=True):
        return {"<think>": [59], "</think>": [60]}.get(text) or [self.alphabet.find(c) % 30 for c in text]

    def apply_chat_template(self, messages, add_generation_prompt=False, tokenize=True, return_dict=False, **kwargs):
        ids = [t for m in messages for t in self.encode(m["content"])]
        return ids + ([59] if add_generation_prompt and kwargs.get("enable_thinking", True) else [])


def talk_with(model, tokenizer, **settings):
    return Conversation(Pair("m", None, model, tokenizer, None), settings)


def heard(conversation):
    got = {"answer": "", "thinking": ""}
    for kind, text, _ in conversation.answer(lambda: False, lambda done, total: None):
        got[kind] += text
    return got


def test_thinking_that_the_template_opened_is_kept_apart_from_the_answer():
    tokenizer = TokenizerWrapper(Thinking())
    words = tokenizer.encode("hmm") + [60] + tokenizer.encode("yes")
    conversation = talk_with(scripted(words), tokenizer, max_tokens=len(words))
    conversation.messages.append({"role": "user", "content": "go"})
    assert heard(conversation) == {"thinking": "hmm", "answer": "yes"}
    assert conversation.messages[-1] == {"role": "assistant", "content": "yes", "reasoning_content": "hmm"}


def test_an_answer_drops_one_leading_blank_however_the_template_ends(tmp_path):
    # An end that tells nothing: it changes with the messages.
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ messages[-1].content | length }}"
    tokenizer = load(with_template(tmp_path, template))[1]
    words = [*tokenizer.encode("  yes"), tokenizer.eos_token_id]
    conversation = talk_with(scripted(words, vocab=1536), tokenizer)
    conversation.messages += [{"role": "user", "content": "go"}]
    assert heard(conversation)["answer"] == " yes"


def test_letters_that_might_have_begun_a_mark_are_not_lost_where_an_answer_stops():
    tokenizer = TokenizerWrapper(Thinking())
    # "<" may begin "<think>" until the next letter is known.
    conversation = talk_with(scripted([60, *tokenizer.encode("yes <b"), *[0] * 20]), tokenizer, max_tokens=20)
    conversation.messages.append({"role": "user", "content": "go"})
    texts, looks = "", itertools.count(1)
    # It is asked twice during the prompt and after each token: </think>, four letters and "<".
    for _, text, _ in conversation.answer(lambda: next(looks) > 7, lambda done, total: None):
        texts += text
    assert texts == conversation.messages[-1]["content"] == "yes <" and conversation.stopped


def test_a_format_of_answers_that_mlx_lm_knows_says_where_thinking_begins():
    # As gpt-oss's, whose vocabulary has no marks that open and close thinking.
    class Channels(Thinking):
        def get_vocab(self):
            return {}

    transitions = {"normal": [("<final>", "normal"), ("<thought>", "reasoning")], "reasoning": [("<final>", "normal")]}
    for start, thinking in (("reasoning", "hmm"), ("normal", "")):
        tokenizer = TokenizerWrapper(Channels(), response_format={"transitions": transitions, "initial_state": start})
        words = tokenizer.encode("hmm<final>yes")
        conversation = talk_with(scripted(words), tokenizer, max_tokens=len(words))
        conversation.messages.append({"role": "user", "content": "say"})
        assert heard(conversation) == {"thinking": thinking, "answer": "yes" if thinking else "hmmyes"}


def test_stats_count_the_tokens_that_were_copied(pair, monkeypatch):
    model, tokenizer, drafter = pair
    # Always where something stood before.
    monkeypatch.setattr(DFlashPair, "draft_length_policy", lambda *_: FixedDraftLength(7))
    conversation, rounds, tokens = Conversation(Pair("m", "d", model, tokenizer, drafter), {"max_tokens": 60}), 0, 0
    for text in ("import os\n", "import os\n"):
        conversation.messages.append({"role": "user", "content": text})
        heard(conversation)
        copied = conversation.last.stats.sources["prompt_lookup"]
        rounds, tokens = rounds + copied["rounds"], tokens + copied["accepted"]
    said = []
    room = Chat(conversation, None)
    monkeypatch.setattr(room, "note", lambda text, style="dim": said.append(text))
    run_command(room, "/stats")
    assert rounds > 2 and f"prompt lookup: {tokens} tokens in {rounds} of these rounds" in said[0]


def test_without_a_chat_template_texts_are_joined_as_they_are(pair):
    model, tokenizer, drafter = pair
    conversation = Conversation(Pair("m", "d", model, tokenizer, drafter), {"max_tokens": 5})
    conversation.messages.append({"role": "user", "content": "def test"})
    heard(conversation)
    conversation.messages.append({"role": "user", "content": "(x)"})
    ids = conversation.prompt().ids
    answer = conversation.messages[1]["ids"]
    assert ids == [*tokenizer.encode("def test"), *answer, *tokenizer.encode("(x)")] and len(answer) == 5
    assert conversation.undo() == "(x)" and conversation.undo() == "def test" and conversation.undo() is None


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("temp", "-1", "temp is -1.0; it must be a number from 0 to"),
        ("temp", "nan", "temp is nan"),
        ("temp", "inf", "temp is inf"),
        ("top_p", "1.5", "from 0 to 1"),
        ("seed", "4294967296", "from 0 to 4294967295"),
        ("max_tokens", "2.5", "a whole number"),
        ("thinking", "maybe", "on, off or default"),
        ("colour", "red", "there is no setting 'colour'. The settings are temp"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(name, text, message):
    with pytest.raises(DFlashError, match=re.escape(message)):
        Settings().changed(name, text)


def test_a_setting_taken_back_is_the_default():
    assert Settings(temp=0.5, seed=3, thinking=True).changed("temp", "default").changed("seed", "default") == Settings(
        thinking=True
    )
    assert Settings().changed("thinking", "on").changed("top_p", "1") == Settings(thinking=True, top_p=1)


def test_what_this_pair_cannot_do_is_refused_at_set_and_changes_nothing(pair):
    model, tokenizer, drafter = pair
    conversation = Conversation(Pair("m", "d", model, tokenizer, drafter), {})
    conversation.set("top_k", "1535")
    conversation.set("block_size", "64")
    kept = conversation.settings
    for name, text, message in (
        ("top_k", "1536", "top_k is 1536; it must be below 1536, the target's vocabulary"),
        ("block_size", "65", "block_size is 65; it must be at most 64 with this drafter"),
        ("temp", "hot", "temp is 'hot'"),
    ):
        with pytest.raises(DFlashError, match=message):
            conversation.set(name, text)
        assert conversation.settings == kept
    with pytest.raises(DFlashError, match="must be below 1536"):
        Conversation(Pair("m", None, model, tokenizer, None), {"top_k": 9999})
    # Without a drafter there are no blocks; with one the same settings are too much.
    plain = Conversation(Pair("m", None, model, tokenizer, None), {"block_size": 9999})
    with pytest.raises(DFlashError, match="must be at most 64"):
        plain.use(Pair("m", "d", model, tokenizer, drafter))
    assert plain.pair.draft_name is None
    with pytest.raises(DFlashError, match="must be below 1536"):
        conversation.restore({**conversation.state(), "settings": {"top_k": 2000}, "system": "other"})
    assert conversation.settings == kept and conversation.system is None


RECOMMENDED = {"temp": 0.6, "top_k": 20, "repetition_penalty": 1.1}


def held_of(conversation):
    return {name: getattr(conversation.settings, name) for name in RECOMMENDED}


def test_what_a_model_recommends_goes_at_temp_0_and_with_the_model_and_what_was_set_stays(pair):
    model, tokenizer, _ = pair
    first = Pair("m", None, model, tokenizer, None, RECOMMENDED)
    conversation = Conversation(first, {"top_k": 5})
    assert held_of(conversation) == {"temp": 0.6, "top_k": 5, "repetition_penalty": 1.1}
    conversation.set("temp", "0")
    assert held_of(conversation) == {"temp": 0, "top_k": 5, "repetition_penalty": 1}
    conversation.set("temp", "0.3")
    assert held_of(conversation) == {"temp": 0.3, "top_k": 5, "repetition_penalty": 1.1}
    conversation.set("temp", "default")
    assert held_of(conversation)["temp"] == 0.6
    conversation.set("repetition_penalty", "1")
    assert held_of(conversation)["repetition_penalty"] == 1
    # The next model's recommendation takes the place of the first one's.
    conversation.use(Pair("n", None, model, tokenizer, None, {"temp": 0.9, "repetition_penalty": 1.3}))
    assert held_of(conversation) == {"temp": 0.9, "top_k": 5, "repetition_penalty": 1}
    conversation.use(Pair("o", None, model, tokenizer, None))
    assert held_of(conversation) == {"temp": 0, "top_k": 5, "repetition_penalty": 1}


def test_a_session_keeps_what_was_set_and_not_what_its_model_recommended(pair):
    model, tokenizer, _ = pair
    state = Conversation(Pair("m", None, model, tokenizer, None, RECOMMENDED), {"top_k": 5}).state()
    other = Conversation(Pair("n", None, model, tokenizer, None, {"temp": 0.9}), {})
    other.restore(state)
    assert held_of(other) == {"temp": 0.9, "top_k": 5, "repetition_penalty": 1}
    # One of an earlier version does not say which were set: all of them are.
    other.restore({name: value for name, value in state.items() if name != "given"})
    assert held_of(other) == {"temp": 0.6, "top_k": 5, "repetition_penalty": 1.1}


def test_a_chat_that_is_opened_again_reads_only_what_no_file_keeps(tmp_path, pair):
    model, tokenizer, drafter = pair

    def opened():
        files = PrefixFiles(tmp_path, 1 << 30)
        return Conversation(Pair("tiny", "tiny", model, tokenizer, drafter), {"max_tokens": 8}, files=files)

    first = opened()
    first.messages.append({"role": "user", "content": "def add(a, b):"})
    heard(first)
    first.keep()
    second = opened()
    second.restore(first.state())
    second.messages.append({"role": "user", "content": " # more"})
    heard(second)
    assert first.held == 0 and second.held >= first.used - 1
    # Another model does not read them.
    second.use(Pair("other", None, model, tokenizer, None))
    second.messages.append({"role": "user", "content": " # still more"})
    heard(second)
    assert second.held == 0
