import mlx.core as mx
import pytest
from kit import full_forward, tiny_target
from rows import tolerance

from dflash_mlx.models.target import Target
from dflash_mlx.rollback import rollback, rollback_point
from dflash_mlx.target_sampler import TargetSampler
from dflash_mlx.verify import logprobs, verify_block

PROMPT, BLOCK = [5, 9, 33, 7], [20, 41, 3, 17]


def test_a_block_gets_the_states_of_a_full_forward_and_lengthens_the_cache_by_its_rows():
    model = tiny_target()
    target, cache = Target(model, (0, 2)), model.make_cache()
    target(mx.array([PROMPT]), cache)
    output = verify_block(target, mx.array(BLOCK[:1]), mx.array([BLOCK[1:]]), cache, rollback_point(cache, 4))
    hidden, features = output.hidden, output.features
    outputs = full_forward(model, PROMPT + BLOCK)
    # float32; another number of rows a pass
    near = {"rtol": tolerance(), "atol": tolerance()}
    expected = mx.concatenate([outputs[0], outputs[2]], axis=-1)[4:]
    assert features.shape == (1, 4, 48) and mx.allclose(features[0], expected, **near).item()
    assert mx.allclose(hidden[0], model.model.norm(outputs[-1])[4:], **near).item()
    assert [entry.offset for entry in cache] == [8] * 4


def test_a_block_of_the_anchor_alone_is_a_plain_step():
    model = tiny_target()
    target, cache = Target(model, (1,)), model.make_cache()
    target(mx.array([PROMPT]), cache)
    hidden = verify_block(target, mx.array(BLOCK[:1]), mx.zeros((1, 0), dtype=mx.int32), cache, rollback_point(cache, 4)).hidden
    assert hidden.shape == (1, 1, 24) and cache[0].offset == 5
    assert mx.allclose(target.head(hidden)[0, 0], model(mx.array([PROMPT + BLOCK[:1]]))[0, -1], rtol=1e-5, atol=1e-5).item()


@pytest.mark.parametrize("width", [0, 3])
def test_a_pass_on_the_cpu_begins_at_its_taps(width, monkeypatch):
    model, seen = tiny_target(), []
    target, cache, cls = Target(model, (0, 2)), model.make_cache(), type(model.layers[0])
    layer, start = cls.__call__, mx.async_eval
    monkeypatch.setattr(cls, "__call__", lambda self, *args, **kwargs: (seen.append("layer"), layer(self, *args, **kwargs))[1])
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: (seen.append([a.shape for a in arrays]), start(*arrays))[1])
    with mx.stream(mx.cpu):
        verify_block(target, mx.array(BLOCK[:1]), mx.array([BLOCK[1 : 1 + width]], mx.int32), cache, rollback_point(cache, 0))
    tap = [(1, width + 1, 24)]
    assert seen == ["layer", tap, "layer", "layer", tap, "layer"]


@pytest.mark.parametrize("device, width, handed", [(mx.gpu, 3, 2), (mx.gpu, 0, 1), (mx.cpu, 3, 1)])
def test_a_gpu_begins_a_blocks_last_layers_before_what_is_read_of_it_is_put_together(device, width, handed, monkeypatch):
    model, seen, start = tiny_target(), [], mx.async_eval
    target, cache = Target(model, (0, 2)), model.make_cache()
    output = target(mx.array([BLOCK[: 1 + width]]), cache)
    hidden = output.hidden
    monkeypatch.setattr(mx, "default_device", lambda: device)
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: (seen.append(arrays), start(*arrays))[1])
    drafted = mx.array([BLOCK[1 : 1 + width]], mx.int32)
    _, read, _ = TargetSampler(None, [], None).enqueue(target, output, drafted, [cache[0].keys], 1)
    assert len(seen) == handed and (handed == 1 or seen[0][0] is hidden and seen[0][2][0] is cache[0].keys)
    assert seen[-1][1] is hidden and seen[-1][0] is not hidden
    expected = mx.argmax(model(mx.array([BLOCK[: 1 + width]]))[0], axis=-1).tolist()
    result = read()
    assert result.drafted == BLOCK[1 : 1 + width] and result.bonus == expected[result.accepted]


def test_rows_rolled_back_after_a_block_leave_no_trace():
    model = tiny_target()
    target, cache = Target(model, (1,)), model.make_cache()
    target(mx.array([PROMPT]), cache)
    point = rollback_point(cache, 4)
    verify_block(target, mx.array(BLOCK[:1]), mx.array([BLOCK[1:]]), cache, point)
    rollback(cache, point, 6)
    assert [entry.offset for entry in cache] == [6] * 4
    hidden = target(mx.array([[50, 51]]), cache).hidden
    expected = model(mx.array([PROMPT + BLOCK[:2] + [50, 51]]))[0, -2:]
    assert mx.allclose(target.head(hidden)[0], expected, rtol=1e-5, atol=1e-5).item()


def test_logprobs_are_the_heads_logits_normalised():
    model = tiny_target()
    target = Target(model)
    hidden = target(mx.array([PROMPT])).hidden
    rows = logprobs(target, hidden)
    logits = model(mx.array([PROMPT]))
    assert mx.array_equal(rows, logits - mx.logsumexp(logits, axis=-1, keepdims=True)).item()
    # float32 sum over 61 probabilities.
    assert mx.allclose(mx.exp(rows).sum(axis=-1), mx.ones((1, 4)), atol=1e-5).item()
