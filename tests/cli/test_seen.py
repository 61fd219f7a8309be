"""What a person sees in a terminal: no line over the width, no torn word, no silence, no word of ours."""

import sys

from screen import Screen

HELLO = "import time; print('hello ' * 5); print('word ' * 2); time.sleep(0.4); input('name? ')"


def test_the_terminal_of_the_tests_sees_torn_words_long_lines_and_pauses():
    with Screen([sys.executable, "-c", HELLO], columns=20, program=True) as screen:
        screen.wait_for("name?")
        screen.send("bob\r")
        assert screen.end() == 0
    assert screen.text.splitlines() == ["hello hello hello he", "llo hello", "word word", "name? bob"]
    assert screen.torn == screen.over == ["hello hello hello he"] and 0.3 < screen.longest_pause < 2
