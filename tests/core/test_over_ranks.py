"""Several ranks of `mlx.launch` over the loopback: one text, the same ids and widths everywhere, with drafts and without."""

import json
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
from kit import TINY
from launching import SUPPORT, output_of
from near_ties import NEAR, compare, parting
from sharded import sharded_families, sharded_family

from dflash_mlx import loading
from dflash_mlx.ranks import RanksError
from dflash_mlx.shares import take_share


def found_by(tmp_path, count, cases, timeout=300):
    """What each rank found."""
    said = output_of(count, SUPPORT / "over_ranks.py", tmp_path, json.dumps(cases), timeout=timeout)
    files = sorted(tmp_path.glob("rank-*.json"))
    assert len(files) == count, said
    return [json.loads(path.read_text()) for path in files]


def check(found, exact=True):
    """All ranks the same; drafted as a whole model and as plain up to a near tie, as plain bit for bit with `exact`."""
    for one in found[1:]:
        assert one.keys() == found[0].keys()
        for name, runs in found[0].items():
            assert {k: v for k, v in one[name].items() if k != "gaps"} == {k: v for k, v in runs.items() if k != "gaps"}, name
    for name, runs in found[0].items():
        for kind in {"", " sampled"} & {found_kind.removeprefix("drafted") for found_kind in runs}:
            drafted, plain = runs[f"drafted{kind}"]["ids"], runs[f"plain{kind}"]["ids"]
            if exact:
                assert drafted == plain, name + kind
            near = [f"{one}{kind}" for one in ("alone", "plain") if f"{one}{kind}" in runs["gaps"]]
            assert near, name
            for other in near:
                apart = parting(drafted, runs[other]["ids"], runs["gaps"][other])
                assert apart is None or apart[1] < NEAR, (name, other, apart)


def test_two_ranks_write_one_text(tmp_path):
    cases = [
        {"family": "llama", "sampled": True, "processors": True, "lm": True, "n": 12},
        {"family": "qwen3_5", "sampled": True, "processors": True, "batch": True, "n": 10},
        {"name": "scaled", "family": "llama", "sampled": True, "scaled": 0.9, "n": 12},
        {"name": "astray", "family": "qwen3", "astray": True, "policy": True, "lm": True, "batch": True, "n": 10},
    ]
    found = found_by(tmp_path, 2, cases)
    # A planted fault, logits of the drafted run a tenth smaller: texts part where the two best tokens are not near.
    scaled = [{"scaled": one.pop("scaled")} for one in found]
    with pytest.raises(AssertionError, match=r"\('scaled', 'alone sampled', \[\d+, 0\.\d+\]\)"):
        check(scaled, exact=False)
    check(found)
    first = found[0]
    for name in ("llama", "qwen3_5"):
        # Drafts of all depths were kept, and some were not.
        kept = [r[1] for r in first[name]["drafted"]["rounds"]]
        assert 0 < sum(kept) < 4 * len(kept), name
    for name in ("llama", "astray"):
        assert first[name]["mlx-lm's loop"]["ids"] == first[name]["plain"]["ids"] == first[name]["mlx-lm's drafts"]["ids"]
        assert any(first[name]["mlx-lm's drafts"]["from_draft"])
    for name in ("llama", "qwen3_5"):
        assert first[name]["processed"]["ids"] == first[name]["processed plain"]["ids"] != first[name]["plain"]["ids"]
    # In company a row writes what it writes alone.
    assert first["qwen3_5"]["batch"][0]["ids"] == first["qwen3_5"]["plain"]["ids"]
    # A rank of other logits, other drafts and another clock (`check`) has rank 0's drafts and its widths too.
    assert {r[3] for r in first["astray"]["chosen"]["rounds"]} > {0}


@pytest.mark.full
def test_two_ranks_keep_no_draft_of_a_hopeless_drafter_and_end_inside_of_a_block(tmp_path):
    hopeless = {"quality": "hopeless", "batch": True, "n": 10}
    ends = {"ends": True, "n": 14}
    cases = [
        {"name": "hopeless", "family": "llama", **hopeless},
        {"name": "hopeless, recurrent", "family": "qwen3_5", **hopeless},
        {"name": "hopeless, windows", "family": "gpt_oss", **hopeless, "ends": True},
        {"name": "whole blocks", "family": "llama", "quality": "oracle", **ends},
        {"name": "whole blocks, recurrent", "family": "qwen3_5", "quality": "oracle", **ends},
        {"name": "astray", "family": "qwen3", "astray": True, **ends},
    ]
    found = found_by(tmp_path, 2, cases)
    check(found)
    for name, runs in found[0].items():
        kept = [r[1] for r in runs["drafted"]["rounds"]]
        assert "hopeless" not in name or not any(kept), name
        assert "whole" not in name or kept[:-1] == [4] * (len(kept) - 1), name
        for ended in {one for one in runs if one.startswith("ended ") and "plain" not in one}:
            ids = runs[ended]["ids"]
            assert ids == runs[ended.replace("ended", "ended plain")]["ids"] == runs["plain"]["ids"][: len(ids)], (name, ended)
            assert 1 < len(ids) < 14, (name, ended)


def one_of(size, rank):
    """A rank whose others are not there: enough for what is said before a message is sent."""
    return SimpleNamespace(group=SimpleNamespace(rank=lambda: rank, size=lambda: size), size=size, agree=lambda values: None)


RANK = """
import socket, sys
from types import SimpleNamespace
from dflash_mlx import ranks
peer = socket.socket(fileno=int(sys.argv[1]))
ranks._connect = lambda of: [(1 - of.rank, peer)]
ranks.Ranks(SimpleNamespace(rank=lambda: int(sys.argv[2]), size=lambda: 2))
exec(sys.argv[3])
"""


@pytest.mark.parametrize(
    ("rank", "end", "leaves"),
    [(1, "pass", True), (1, "raise KeyboardInterrupt", True), (1, "raise ValueError('a fault')", False), (0, "1 / 0", True)],
)
def test_a_rank_that_an_error_ends_does_not_take_leave(rank, end, leaves):
    mine, its = socket.socketpair()
    with mine, its:
        arguments = [sys.executable, "-c", RANK, str(its.fileno()), str(rank), end]
        process = subprocess.Popen(arguments, pass_fds=[its.fileno()], stderr=subprocess.PIPE)
        its.close()
        said = b"".join(iter(lambda: mine.recv(4096), b""))
        errors = process.communicate()[1]
    assert (b"Traceback" in errors) is (end != "pass") and said.endswith(b"false") is leaves


def test_heads_that_do_not_divide_are_found_before_a_weight_is_read(monkeypatch):
    read = []
    monkeypatch.setattr(loading, "read_weights", lambda *about: read.append(about))
    with pytest.raises(RanksError, match=r"tiny does not divide by 3 ranks: n_kv_heads is 2\."):
        loading.load("tiny", ranks=one_of(3, 1))
    assert not read
    loading.load("tiny", ranks=one_of(2, 1))
    assert len(read) == 1


def test_a_pipeline_takes_layers_and_a_family_without_one_is_refused():
    model = sharded_family("qwen3_moe", layers=5)
    layers = model.layers
    take_share(model, one_of(2, 1), "it", pipeline=True)
    # Rank 0 has the last ones, and of an odd number one more.
    assert [one is layers[i] for i, one in enumerate(model.layers)] == [True, True]
    with pytest.raises(RanksError, match=r"it is of a family that mlx-lm .* does not pipeline\. Leave --pipeline out"):
        take_share(sharded_family("gpt_oss"), one_of(2, 1), "it", pipeline=True)


def test_loading_holds_the_share_and_one_tensor(tmp_path):
    for one in found_by(tmp_path, 2, [{"load": str(TINY / "target")}]):
        sizes = one["load"]
        assert sizes["share"] < 0.8 * sizes["whole"]
        # What MLX rounds up to is not counted.
        assert sizes["peak"] < sizes["share"] + 1.1 * sizes["largest"]


@pytest.mark.full
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("part", range(2))
def test_every_family_that_mlx_lm_shards(tmp_path, count, part):
    names = sharded_families()
    assert len(names) >= 22
    cases = [{"family": name, "sampled": True, "n": 5} for name in names[part::2]]
    found = found_by(tmp_path, count, cases)
    assert len(found[0]) == len(cases)
    check(found, exact=count == 2)


@pytest.mark.full
@pytest.mark.parametrize("count, texts", [(2, 10), (3, 10)])
def test_texts_part_only_where_two_tokens_are_nearly_as_likely(tmp_path, count, texts):
    found, accepted = compare(count, range(texts), tmp_path)
    # Rounds end at all depths.
    assert 0.5 < accepted < 3.5
    assert len(found) == count - 1
    for partings in found.values():
        parted = [apart for apart in partings if apart is not None]
        assert len(partings) == texts and len(parted) <= 1, partings
        assert all(gap < NEAR for _, gap in parted), parted
