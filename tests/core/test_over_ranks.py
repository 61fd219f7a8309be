"""Several ranks of `mlx.launch` over the loopback: one text, the same ids and widths everywhere, with drafts and without."""

import json

import pytest
from kit import TINY
from launching import SUPPORT, output_of
from sharded import sharded_families

NEAR = 1e-3


def found_by(tmp_path, count, cases, timeout=300):
    """What each rank found."""
    said = output_of(count, SUPPORT / "over_ranks.py", tmp_path, json.dumps(cases), timeout=timeout)
    files = sorted(tmp_path.glob("rank-*.json"))
    assert len(files) == count, said
    return [json.loads(path.read_text()) for path in files]


def parts_at(ids, line, margins):
    """Where ids leave a whole model's line, and how far its best two tokens lie apart there; None: nowhere."""
    return next(((i, margins[i]) for i, (a, b) in enumerate(zip(ids, line, strict=True)) if a != b), None)


def check(found, exact=True):
    """All ranks the same; drafted as plain, bit for bit with `exact`; a whole model's up to a near tie."""
    first = found[0]
    for other in found[1:]:
        assert other.keys() == first.keys()
        for name, runs in first.items():
            shared = {key: value for key, value in runs.items() if key not in ("alone", "alone sampled", "margins")}
            assert {key: other[name][key] for key in shared} == shared, name
    for name, runs in first.items():
        for kind in ("", " sampled"):
            if exact and f"drafted{kind}" in runs:
                assert runs[f"drafted{kind}"]["ids"] == runs[f"plain{kind}"]["ids"], name + kind
        parts = parts_at(runs["plain"]["ids"], runs["alone"], runs["margins"])
        assert parts is None or parts[1] < NEAR, (name, parts)


def test_two_ranks_write_one_text(tmp_path):
    cases = [
        {"family": "llama", "sampled": True, "processors": True, "lm": True, "n": 12},
        {"family": "qwen3_5", "sampled": True, "processors": True, "batch": True, "n": 10},
        {"name": "astray", "family": "qwen3", "astray": True, "policy": True, "batch": True, "n": 10},
    ]
    found = found_by(tmp_path, 2, cases)
    check(found)
    first = found[0]
    for name in ("llama", "qwen3_5"):
        # Drafts of all depths were kept, and some were not.
        kept = [r[1] for r in first[name]["drafted"]["rounds"]]
        assert 0 < sum(kept) < 4 * len(kept), name
    assert first["llama"]["mlx-lm's loop"]["ids"] == first["llama"]["plain"]["ids"]
    for name in ("llama", "qwen3_5"):
        assert first[name]["processed"]["ids"] == first[name]["processed plain"]["ids"] != first[name]["plain"]["ids"]
    # In company a row writes what it writes alone.
    assert first["qwen3_5"]["batch"][0]["ids"] == first["qwen3_5"]["plain"]["ids"]
    # A rank of other logits, other drafts and another clock (`check`) has rank 0's drafts and its widths too.
    assert {r[3] for r in first["astray"]["chosen"]["rounds"]} > {0}


def test_loading_holds_the_share_and_one_tensor(tmp_path):
    for one in found_by(tmp_path, 2, [{"load": str(TINY / "target")}]):
        sizes = one["load"]
        assert sizes["share"] < 0.8 * sizes["whole"]
        # What MLX rounds up to is not counted.
        assert sizes["peak"] < sizes["share"] + 1.1 * sizes["largest"]


@pytest.mark.full
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("part", range(4))
def test_every_family_that_mlx_lm_shards(tmp_path, count, part):
    names = sharded_families()
    assert len(names) >= 22
    cases = [{"family": name, "sampled": True, "n": 12, "layers": None} for name in names[part::4]]
    found = found_by(tmp_path, count, cases, 380)
    assert len(found[0]) == len(cases)
    check(found, exact=count == 2)
