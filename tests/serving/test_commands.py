"""Commands, attached files and pastes of the chat, without a terminal."""

import io
import re

import pytest
from prompt_toolkit.document import Document
from talker import Talker

from dflash_mlx.errors import DFlashError
from dflash_mlx.serving.attachments import Attachment, named_files, no_files, with_files
from dflash_mlx.serving.chat import Chat
from dflash_mlx.serving.commands import run_command
from dflash_mlx.serving.conversation import Conversation
from dflash_mlx.serving.editor import Pastes, completer


@pytest.fixture
def room(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return Chat(Talker({"answer": "fine"}), None, stdin=io.StringIO(), stdout=io.StringIO(), stderr=io.StringIO())


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("/hepl", "there is no command /hepl. Did you mean /help?"),
        ("/Session", "Did you mean /sessions?"),
        *((f"/{word}", f"there is no command /{word}. /help lists them") for word in ("nope", "note", "stop", "info")),
        *((typed, f"Did you mean /{meant}?") for typed, meant in (("/udno", "undo"), ("/retyr", "retry"), ("/statss", "stats"))),
        ("/xyzzy", "there is no command /xyzzy. /help lists them"),
        ("/edit", "/edit needs a terminal"),
        ("/copy", "there is no answer to copy"),
        ("/file", "/file needs the path of a text file"),
        ("/thoughts maybe", "/thoughts takes on or off"),
        ("/save ../x", "'../x' cannot be the name of a session"),
    ],
)
def test_a_command_that_cannot_be_done_says_what_to_type(room, typed, message):
    with pytest.raises(DFlashError, match=re.escape(message)):
        run_command(room, typed)


@pytest.mark.parametrize("typed", ["/exit", "/quit", "/bye"])
def test_the_names_of_other_chats_leave_too(room, typed):
    assert run_command(room, typed)


def test_a_message_that_is_refused_is_taken_back_and_its_sentence_advises_no_undo(room, monkeypatch):
    room.say("first")
    talk = room.conversation
    talk.limit = 3
    monkeypatch.setattr(Talker, "raw", True)
    monkeypatch.setattr(Conversation, "_raw_ids", lambda self, message: [1, 2, 3, 4])
    monkeypatch.setattr(Talker, "answer", lambda self, *_: iter([self.prompt()]))
    before = list(talk.messages)
    with pytest.raises(DFlashError) as refused:
        room.say("more")
    assert "the target's context holds 3" in str(refused.value) and "/undo" not in str(refused.value)
    assert talk.messages == before
    # /retry takes the answer back first; where no new one comes the old one stays.
    with pytest.raises(DFlashError):
        run_command(room, "/retry")
    assert talk.messages == before


def test_files_of_a_message_that_was_refused_wait_for_the_next(room, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("alpha")
    run_command(room, "/file a.txt")
    with pytest.raises(DFlashError, match="is a folder"):
        (tmp_path / "folder").mkdir()
        room.say("look @./folder")
    assert [file.name for file in room.files] == ["a.txt"] and not room.conversation.messages
    room.say("now")
    assert room.conversation.messages[0]["content"].endswith("a.txt:\n```\nalpha\n```") and not room.files


def test_only_files_are_named_by_an_at(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "src").mkdir()
    message = 'see @a.txt. and (@a.txt) me@a.txt @src @dataclass @"a.txt" @no/such'
    assert named_files(message) == ["a.txt"] and no_files(message) == ["no/such"]
    fenced = with_files("m", [Attachment("f", "a\n````\nb", 8, 3)], raw=False)
    assert fenced == "m\n\nf:\n`````\na\n````\nb\n`````"
    assert with_files("m", [Attachment("f", "def f", 5, 2)], raw=True) == "def fm"


def test_tab_offers_commands_and_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / ".ahidden").write_text("x")
    (tmp_path / "src").mkdir()
    offer = completer(lambda: ["/file", "/help"])
    for line, wanted in {
        "look @a": "look @a.txt",
        "/file s": "/file src",
        "@": "@a.txt",
        "@.a": "@.ahidden",
        "/h": "/help",
        "me@a": None,
        "so /h": None,
    }.items():
        found = [*offer.get_completions(Document(line), None)]
        made = [line[: len(line) + one.start_position] + one.text for one in found]
        assert made[:1] == ([wanted] if wanted else []), line


def test_a_paste_is_folded_by_its_lines_or_letters_and_comes_back_whole():
    pastes = Pastes()
    assert pastes.fold("one\r\ntwo") == "one\ntwo"
    long, wide = "\n".join("abcdefghijklm"), "x" * 801
    line = f"see {pastes.fold(long)} and {pastes.fold(wide)}"
    assert line == "see [paste 1: 13 lines] and [paste 2: 801 letters]"
    assert pastes.unfold(line) == f"see {long} and {wide}"
