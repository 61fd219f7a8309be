"""What a message of the chat names with @: files, paths that lead nowhere, and words."""

from dflash_mlx.serving.attachments import named_files, no_files


def test_a_path_or_a_file_name_that_leads_nowhere_is_told_from_a_word(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.txt").write_text("x")
    text = 'see @here.txt, @gone.txt, @no/such, @"gone too.md", @dataclass, @functools.cache, @app.route("/") and me@host.com'
    assert named_files(text) == ["here.txt"]
    assert no_files(text) == ["gone.txt", "no/such", "gone too.md"]
