"""What a person sees in a terminal: no line over the width, no torn word, no silence, no word of ours."""

import _imp
import io
import os
import re
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from kit import figures_of
from screen import Screen, private_words

from dflash_mlx import loading
from dflash_mlx.cli import app as cli_app
from dflash_mlx.cli import inputs, output
from dflash_mlx.cli import live as cli_live
from dflash_mlx.cli.live import Line
from dflash_mlx.progress import hub_bar, listening, tell
from dflash_mlx.serving import interrupt
from dflash_mlx.stats import GenerationStats

HELLO = "import time; print('hello ' * 5); print('word ' * 2); time.sleep(0.4); input('name? ')"


def test_the_terminal_of_the_tests_sees_torn_words_long_lines_and_pauses():
    with Screen([sys.executable, "-c", HELLO], columns=20, program=True) as screen:
        screen.wait_for("name?")
        screen.send("bob\r")
        assert screen.end() == 0
    assert screen.text.splitlines() == ["hello hello hello he", "llo hello", "word word", "name? bob"]
    assert screen.torn == screen.over == ["hello hello hello he"] and 0.3 < screen.longest_pause < 20


# Slow parts of every kind: one long step, known and unknown ends, words said meanwhile, and text at the end.
SLOW = """
import sys, time
from dflash_mlx.cli.live import live
from dflash_mlx.cli.output import say
from dflash_mlx.progress import tell
with live("Loading an-owner/a-model-with-a-long-name") as line:
    for done in range(4):
        tell("Fetching an-owner/a-model-with-a-long-name", done * 2.1e9, 8.4e9, "bytes")
        time.sleep(PART)
    say("A sentence that somebody says while it goes on, which is longer than a narrow terminal is wide.")
    line.prefill(0, 3700)
    time.sleep(2 * PART)
    line.prefill(3700, 3700)
    print("the answer")
"""


def slow_parts(columns, part):
    return quiet([sys.executable, "-c", SLOW.replace("PART", str(part))], columns, program=True)


@pytest.mark.full
def test_the_live_line_says_what_goes_on_how_far_and_leaves():
    screen = slow_parts(80, 0.7)
    assert screen.text.splitlines()[-1] == "the answer" and "Fetching" not in screen.text and "Reading" not in screen.text
    lines = [row for row in screen.rows if "2.1 of 8.4 GB" in row]
    assert lines and all(row.startswith("Fetching an-owner/a-model-with-a-long-name: 2.1 of 8.4 GB, ") for row in lines)
    assert any(row.startswith("Reading the prompt: 0 of 3,700 tokens, 1 s") for row in screen.rows)
    assert any(" s, about " in row and row.endswith(" s left") for row in screen.rows)
    assert not screen.over and not screen.terminal.cursor.hidden


@pytest.mark.full
@pytest.mark.parametrize("columns", [40, 80, 200])
def test_nothing_is_silent_for_two_seconds_nor_over_the_width(columns):
    screen = slow_parts(columns, 2.5)
    assert screen.longest_pause < 2 and not screen.over, (screen.changes, screen.over)
    assert any("6.3 of 8.4 GB" in row for row in screen.rows) and any("tokens, 4 s" in row for row in screen.rows)


def test_the_live_line_says_at_once_that_ctrl_c_was_heard():
    # As inside of MLX, where Python itself hears of the signal only when the pass is through.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        with cli_live.live("Warming up") as line:
            signal.raise_signal(signal.SIGINT)
            until = time.monotonic() + 60
            while "Stopping" not in line.text(79) and time.monotonic() < until:
                time.sleep(0.01)
            line.update("Timing", 1, 3, "turns")
            assert line.text(79) == "Stopping after this: Timing: 1 of 3 turns, 0 s"
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("hangs", ["import", "drawing"])
def test_a_line_that_cannot_be_drawn_keeps_no_command_from_ending(monkeypatch, hangs):
    # As Ctrl-C leaves it where it comes inside of Python's own import: main holds the lock of all imports for good.
    if hangs == "import":
        for name in [name for name in sys.modules if name.startswith("rich.live")]:
            monkeypatch.delitem(sys.modules, name)
        _imp.acquire_lock()
    else:
        monkeypatch.setattr(Line, "_draw", lambda *_: threading.Event().wait())
    monkeypatch.setattr(cli_live, "_LEFT_S", 0.2)
    line = Line("Starting")
    try:
        line.show()
        time.sleep(cli_live._DELAY_S + 0.2)
        stopping = threading.Thread(target=line.stop, daemon=True)
        stopping.start()
        stopping.join(60)
        assert not stopping.is_alive()
    finally:
        if hangs == "import":
            _imp.release_lock()


class Freed:
    """Ctrl-C comes while this is freed, where no exception can be raised."""

    def __del__(self):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_ctrl_c_that_came_where_nothing_can_be_raised_comes_again(monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", interrupt.bring_back)
    with pytest.raises(KeyboardInterrupt):
        Freed()
        time.sleep(60)


def test_loading_ends_where_somebody_caught_the_ctrl_c(monkeypatch):
    def load(*names, **options):
        try:
            signal.raise_signal(signal.SIGINT)
        except BaseException:
            time.sleep(0.1)
        return "model", "tokenizer"

    monkeypatch.setattr(loading, "load", load)
    for name in ("check_run", "read_weights", "load_drafter"):
        monkeypatch.setattr(loading, name, lambda *_, **__: None)
    with pytest.raises(KeyboardInterrupt), cli_live.live("Starting"):
        inputs.load_pair("tiny", "tiny", None, None, None, False)


def test_a_ctrl_c_that_a_library_caught_comes_again_until_the_block_ends(monkeypatch):
    monkeypatch.setattr(interrupt, "_CAUGHT_S", 0.5)
    caught = 0
    with pytest.raises(KeyboardInterrupt), interrupt.insistent():
        signal.raise_signal(signal.SIGINT)
        pytest.fail("Ctrl-C raised nothing")
    with interrupt.insistent():
        pass
    with pytest.raises(KeyboardInterrupt), interrupt.insistent():
        for _ in range(3):
            try:
                signal.raise_signal(signal.SIGINT) if not caught else time.sleep(60)
            except BaseException:
                caught += 1
        time.sleep(60)
    assert caught == 3
    # Behind it nothing comes any more.
    time.sleep(1)


def test_what_is_closed_behind_the_block_is_not_interrupted_once_more(monkeypatch):
    monkeypatch.setattr(interrupt, "_CAUGHT_S", 0.3)
    killed = []
    monkeypatch.setattr(os, "kill", lambda *given: killed.append(given))
    with pytest.raises(KeyboardInterrupt), interrupt.insistent():
        signal.raise_signal(signal.SIGINT)
    time.sleep(2 * interrupt._CAUGHT_S)
    assert not killed


def test_ctrl_c_that_python_wrapped_ends_a_command_as_ctrl_c(monkeypatch):
    class Field:
        def __set_name__(self, owner, name):
            raise KeyboardInterrupt

    def wrapped(*_):
        # Up to Python 3.11 this is a RuntimeError.
        try:
            type("Settings", (), {"seed": Field()})
        except KeyboardInterrupt as error:
            raise RuntimeError("Error calling __set_name__") from error

    monkeypatch.setattr(cli_app, "app", wrapped)
    with pytest.raises(SystemExit) as end:
        cli_app.main()
    assert end.value.code == 130 and not interrupt.is_ctrl_c(ValueError())


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_a_narrow_line_keeps_its_figures_and_cuts_the_name(width):
    now = [0.0]
    line = Line("Fetching", clock=lambda: now[0])
    line.update("Fetching an-owner/a-model-with-a-long-name", 0, 8e9, "bytes")
    now[0] = 14.0
    line.update("Fetching an-owner/a-model-with-a-long-name", 2e9, 8e9, "bytes")
    text = line.text(width)
    assert len(text) <= width and text.startswith("Fetch") and " 14 s" in text
    assert ("2.0 of 8.0 GB" in text) == (width > 20) and ("about 42 s left" in text) == (width >= 80)


def test_what_is_left_comes_from_this_work_alone():
    now = [0.0]
    line = Line("Loading", clock=lambda: now[0])
    now[0] = 50.0
    line.update("Training", 900, 1000, "steps")
    assert line.text(80) == "Training: 900 of 1,000 steps, 0 s"
    now[0] = 60.0
    line.update("Training", 950, 1000, "steps")
    assert line.text(80) == "Training: 950 of 1,000 steps, 10 s, about 10 s left"


def test_in_a_pipe_a_line_comes_every_ten_seconds(monkeypatch, capsys):
    assert cli_live._PRINTED_S == 10
    monkeypatch.setattr(cli_live, "_PRINTED_S", 0.2)
    with cli_live.live("Loading tiny"):
        began = time.monotonic()
        tell("Converting", 3, 12, "tensors")
        said = printed(capsys, 2)
    most = (time.monotonic() - began) / cli_live._PRINTED_S
    out, err = capsys.readouterr()
    said += err
    assert not out and 2 <= said.count("Converting: 3 of 12 tensors, ") == len(said.splitlines()) <= most, said


def printed(capsys, lines):
    """What was printed on stderr, once it is so many lines."""
    said, until = "", time.monotonic() + 60
    while said.count("\n") < lines and time.monotonic() < until:
        time.sleep(0.01)
        said += capsys.readouterr().err
    return said


def test_a_chat_in_a_pipe_is_not_silent_for_ten_seconds(capsys):
    with cli_live.live("Starting", printed_after=0.1) as line:
        said = printed(capsys, 1)
        now = line._clock() - line._state[4]
    assert re.fullmatch(r"Starting: \d s\n", said + capsys.readouterr().err) and now < cli_live._PRINTED_S


def test_quick_work_shows_nothing_and_what_is_told_without_a_listener_is_nothing(capsys):
    tell("Converting", 3, 12, "tensors")
    with cli_live.live("Loading tiny") as line:
        with cli_live.live("Loading the drafter") as inner:
            assert inner is line and line.text(80).startswith("Loading the drafter: ")
        assert line.is_shown
    assert capsys.readouterr() == ("", "")


def test_fetching_tells_its_bytes_and_draws_no_bars_of_the_hubs(capsys):
    told = []
    with listening(lambda *state: told.append(state)):
        bar = hub_bar("Fetching org/name")
    came, written, files = bar(total=0, unit="B", desc="Downloading bytes"), bar(total=0, unit="B"), bar(total=3, unit="it")
    for each in (came, written):
        each.total = 100
    written.update(40)
    written.refresh()
    came.update(10)
    came.refresh()
    files.update(3)
    files.refresh()
    for each in (came, written, files):
        each.close()
    assert told[-1] == ("Fetching org/name", 40, 100, "bytes") and {what for what, *_ in told} == {"Fetching org/name"}
    assert capsys.readouterr() == ("", "")


# --- the figures under an answer --------------------------------------------------------------------------------------

DRAFTED = {"widths": {7: 80, 0: 5}, "tau": 3.1, "acceptance_lengths": [3] * 80, "width_reason": "7 of 15 drafts verified in most"}


def test_the_figures_are_one_line_with_the_gain_over_plain_decoding():
    result = figures_of(generation_tokens=256, generation_tps=11.2, plain_tps=5.3, **DRAFTED)
    assert output.figures(result) == "256 tokens, 11.2 tokens/s, 2.1 times as fast as without drafts, 3.0 tokens a round"


@pytest.mark.parametrize("plain_tps, tokens", [(None, 256), (5.3, 15)])
def test_no_gain_is_said_where_plain_decoding_was_not_timed_or_the_answer_is_short(plain_tps, tokens):
    result = figures_of(generation_tokens=tokens, plain_tps=plain_tps, **DRAFTED)
    assert "as fast as" not in output.figures(result) and "tokens a round" in output.figures(result)


@pytest.mark.parametrize(
    ("available", "gpu", "named"), [(False, False, "this CPU"), (True, True, "this Mac's GPU"), (False, True, "this GPU")]
)
def test_where_drafting_is_off_the_device_is_named(monkeypatch, available, gpu, named):
    import mlx.core as mx

    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu if gpu else mx.cpu)
    monkeypatch.setattr(mx.metal, "is_available", lambda: available)
    off = {
        "widths": {0: 97, 7: 3},
        "tau": 1.2,
        "width_reason": "97 % of passes checked no drafts: checking 7 takes",
    }
    said = output.figures(figures_of(generation_tokens=110, plain_tps=9.0, **off)).splitlines()
    assert said == ["110 tokens, 10.0 tokens/s", f"Drafting is off: on {named} it would be slower."]
    # A width that was asked for is none that was chosen.
    assert not output.is_off(figures_of(widths={0: 100}))


def test_an_answer_that_was_slowed_by_timing_says_so():
    slowed = "Meanwhile the model and its drafter were timed, once; that slowed this answer."
    assert slowed in output.figures(figures_of(has_measured=True)).splitlines()
    assert slowed not in output.figures(figures_of())


def test_a_chats_answer_has_its_gain_too():
    from dflash_mlx.serving import recap

    class Rule(SimpleNamespace):
        def reason(self, *rounds):
            return "chosen"

    def line(tokens=256, plain_s=1 / 5.3, drafted=True, has_measured=False):
        stats = GenerationStats(16, rule=Rule(plain_s=plain_s, has_measured=has_measured))
        for n in range(85):
            stats.add_round([1] * 7, 2, 1, 7 if drafted or n < 2 else 0, "drafter")
        last = SimpleNamespace(generation_tokens=tokens, generation_tps=11.2, stats=stats, finish_reason="stop")
        return recap.figures(SimpleNamespace(last=last, limit=None, used=None, stopped=False))

    assert line() == "256 tokens, 11.2 tokens/s, 2.1 times as fast as without drafts, 3.0 tokens a round"
    measured = line(plain_s=None, has_measured=True)
    assert measured == "256 tokens, 11.2 tokens/s, 3.0 tokens a round, slowed once by timing the model"
    assert "as fast as" not in line(tokens=15)
    assert line(drafted=False) == "256 tokens, 11.2 tokens/s, 3.0 tokens a round, drafting off, as it would be slower here"


def test_a_cut_answer_says_how_to_go_on_and_one_is_singular():
    said = output.figures(figures_of(generation_tokens=1, finish_reason="length", widths={}))
    assert said.startswith("1 token, ") and "Stopped at the limit of 1 token: --max-tokens 2 allows more, -1 any number." in said
    assert output.figures(figures_of(finish_reason="interrupted")).endswith("Stopped by Ctrl-C.")
    details = output.figures(figures_of(tau=3.0, widths={7: 1}, acceptance_lengths=[3], generation_tokens=4), details=True)
    assert "Rounds: 1 round for the 3 tokens" in details and "over 1 round;" in details and "1 rounds" not in details


def test_figures_hold_no_word_of_ours_unless_they_are_asked_for():
    for result in (figures_of(generation_tokens=256, plain_tps=5.0, **DRAFTED), figures_of(widths={0: 9})):
        assert not private_words(output.figures(result)) and private_words(output.figures(result, details=True))
    assert private_words("3.0 tokens a round, 1 round, Slot 3, --trials 4, width.") == ["slot", "width", "round"]


@pytest.mark.full
@pytest.mark.parametrize("columns", [40, 80, 200])
def test_generate_says_what_it_says_within_the_width_and_in_no_words_of_ours(columns):
    # The text is the model's own, so its lines may be longer: it is left out.
    command = ["generate", "--model", "tiny", "--draft-model", "auto", "-p", "x = 1", "-m", "20"]
    # Other work on this machine may hold it up once.
    for _ in range(3):
        with Screen(command, columns=columns) as screen:
            assert screen.end() == 0
        if screen.longest_pause < 2:
            break
    said = screen.text.partition("This model has no")[2]
    assert "20 tokens, " in said and "--max-tokens 40" in " ".join(said.split()) and not private_words(said), said
    assert screen.longest_pause < 2 and not [row for row in screen.torn if "token" in row], screen.changes


@pytest.mark.full
@pytest.mark.parametrize("columns", [40, 200])
def test_keys_typed_during_an_answer_of_generate_are_not_shown_in_it_and_come_to_the_shell(columns):
    command = f"{sys.executable} -m dflash_mlx generate --model tiny -p 'x = 1' -m 300"
    line = f"{command}; stty -a | tr ' ' '\\n' | grep echo$; read k; echo got $k"
    with Screen(["sh", "-c", line], columns=columns, program=True) as screen:
        screen.wait_for("self.interp.write, self")
        screen.send("qqq")
        screen.wait_for("tokens/s")
        shown = screen.text
        screen.send("\r")
        assert screen.end() == 0
    assert "q" not in shown.partition("drafts.")[2], shown
    assert "drafts." in shown, shown
    assert "got qqq" in screen.text and "-echo" not in screen.text.split(), screen.text


def test_a_sentence_is_broken_between_words_on_a_terminal_and_whole_in_a_pipe(monkeypatch):
    text = "A sentence that is longer than the terminal is wide.\nAnd --a-long-flag-that-is-not-broken."
    assert output.wrapped(text, io.StringIO()) == text
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((20, 24)))
    lines = output.wrapped(text, sys.__stderr__).splitlines()
    assert max(map(len, lines[:3])) <= 20 and "--a-long-flag-that-is-not-broken." in lines[-1]
    assert " ".join(lines) == text.replace("\n", " ")


def quiet(command, columns, **more):
    """The screen of a command, the quietest of three: other work on this machine may hold it up once."""
    for _ in range(3):
        with Screen(command, columns=columns, **more) as screen:
            assert screen.end() == 0, screen.text
        if screen.longest_pause < 2:
            break
    return screen


@pytest.mark.full
def test_converting_and_training_are_not_silent_nor_over_the_width(tmp_path):
    for command in (
        "convert --hf-path tiny --mlx-path m -q --force",
        "train data --model tiny --out data --answer-tokens 50 --rows 2 --max-len 96 --held-out 1",
    ):
        screen = quiet(command.split(), 40, cwd=str(tmp_path))
        assert screen.longest_pause < 2, screen.changes
        assert not screen.over, screen.over


@pytest.mark.full
def test_ctrl_c_while_the_prompt_is_read_leaves_no_line_and_shows_the_cursor(tmp_path):
    (tmp_path / "long.txt").write_text("word " * 1_900)
    command = ["generate", "--model", "tiny", "--draft-model", "tiny", "--prompt-file", str(tmp_path / "long.txt"), "-m", "4"]
    with Screen([*command, "--prefill-step-size", "1"], columns=80) as screen:
        screen.wait_for("Reading the prompt: ")
        screen.send("\x03")
        assert screen.end() == 130
    assert "Stopped before the first token." in screen.text and "Reading the prompt" not in screen.text, screen.text
    assert not screen.terminal.cursor.hidden
