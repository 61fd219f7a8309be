"""A chat whose model is a script: the real chat in a real terminal, without the seconds that loading a model takes.

python talker.py '{"answer": "Hello, *you*.", "thinking": "hm", "delay_s": 0.01, "raw": false, "session": "work"}'
"""

import json
import sys
import time
from types import SimpleNamespace

from dflash_mlx.serving import recap
from dflash_mlx.serving.chat import Chat
from dflash_mlx.serving.conversation import Conversation, Pair, Settings
from dflash_mlx.serving.sessions import read_session, session_path

PROGRAM = __file__


class Tokenizer:
    """A token is a word."""

    has_chat_template = True

    def encode(self, text, add_special_tokens=True):
        return text.split()


class Talker(Conversation):
    """Says what the script holds, a word at a time; `echo` instead repeats the message."""

    def __init__(self, script):
        self.script = script
        tokenizer = Tokenizer()
        tokenizer.has_chat_template = not script.get("raw")
        drafter = None
        if script.get("drafter"):
            quiet = SimpleNamespace(finish_measuring=lambda limit_s: None)
            drafter = SimpleNamespace(config=SimpleNamespace(block_size=4), pair=quiet)
        super().__init__(Pair(script.get("model", "scripted"), drafter and "drafts", None, tokenizer, drafter), {})

    def use(self, pair):
        self.pair, self.limit, self.last, self.stopped, self.used, self.held = pair, 500, None, False, 0, 0
        self.vocabulary, self.largest, self.store, self.settings = 100, None, None, Settings()

    def without_effect(self, names):
        return {}

    def answer(self, should_stop, progress):
        self.last, self.stopped = None, False
        texts, count = {"thinking": self.script.get("thinking", ""), "answer": self.script.get("answer", "")}, 0
        if self.script.get("echo"):
            texts["answer"] = self.messages[-1]["content"]
        said = {"thinking": "", "answer": ""}
        time.sleep(self.script.get("wait_s", 0))
        for kind, text in texts.items():
            for piece in [word + " " for word in text.split(" ")] if text else []:
                count += 1
                self.last = SimpleNamespace(generation_tokens=count, generation_tps=9.0, stats=None, finish_reason="stop")
                said[kind] += piece
                yield kind, piece, self.last
                time.sleep(self.script.get("delay_s", 0.0))
                if should_stop():
                    self.stopped = True
                    break
        self.last = self.last or SimpleNamespace(generation_tokens=0, generation_tps=0.0, stats=None, finish_reason="stop")
        message = {"role": "assistant", "content": said["answer"]}
        self.messages.append(message | ({"reasoning_content": said["thinking"]} if said["thinking"] else {}))
        self.used = count


def main(script):
    recap._size = lambda model: "7.2 million parameters, 14.4 MB"
    name = script.get("session", "last")
    state = read_session(name) if session_path(name).exists() else None
    talk = Talker(script)
    if state:
        talk.restore(state)
    Chat(talk, None, session=name, resumed=state, plain=script.get("plain", False)).run()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
