"""When kernels are tried, and for how long, on a made-up Metal GPU whose clock and limits are the test's."""

import gc
import math

import mlx.core as mx
import mlx.nn as nn
import pytest
from metal_device import MetalDevice
from mlx_lm.models.switch_layers import SwitchGLU

from dflash_mlx import stream_generate
from dflash_mlx.first_use import try_after_answer, try_before_answers
from dflash_mlx.kernels import autotune, block_attention, block_qmm, crash_marker, head_argmax, trials
from dflash_mlx.kernels.routing import kernel_calls
from dflash_mlx.machine import open_stream
from dflash_mlx.models.intercept import intercept
from dflash_mlx.models.target import Target

PROMPT = "def fibonacci(n):"
# Said before the first answer's wait; the figure is the limit.
FIRST = "first run of this model on this GPU: testing kernels, at most 20 s"


@pytest.fixture
def device(monkeypatch, tmp_path):
    return MetalDevice().install(monkeypatch, tmp_path)


def ids(quantized, n=12):
    model, tokenizer, drafter = quantized
    return [r.token for r in stream_generate(model, tokenizer, PROMPT, max_tokens=n, draft_model=drafter, block_size=8)]


def begin(quantized):
    """A new process' first run up to its prompt."""
    drafter = quantized[2]
    drafter.pair = None
    try_before_answers(Target(quantized[0]))


def trials_of(results):
    return [(r.shape, r.rows) for r in results]


def test_all_before_the_first_answer_takes_20_s_and_one_line_and_the_largest_share_comes_first(device, quantized, caplog):
    # A trial's two texts: 1.5 s. Stock MLX's at 16 rows of the first shape alone would fill the time twice.
    device.compile_s = 0.75
    begin(quantized)
    found = autotune.results()
    assert 18 < device.now <= 20 + 1.6 and caplog.messages == [FIRST]
    shapes = list(dict.fromkeys(shape for shape, _ in trials_of(found)))
    sizes = {q.shape: share for q, share in autotune._waiting.values()}
    assert sizes and not set(shapes[:-1]) & set(sizes)
    # gate and up of six layers: twice as many bytes as down, more than the head.
    assert shapes[0] == "product mlx.core.float32 4 bit group 32 N 512 K 192"
    assert [rows for shape, rows in dict.fromkeys(trials_of(found)) if shape == shapes[0]] == [1, 2, 4, 8, 16]
    # What was cut off runs on stock MLX.
    device.launches.clear()
    model = quantized[0]
    Target(model)(mx.array([[1, 2, 3]]), None, kernels=True)
    assert {given["BITS"] for name, given, _ in device.launches if name == "block_qmm"} == {4}
    assert "block_attention" not in {name for name, *_ in device.launches}


def test_a_trial_takes_5_s_and_one_that_takes_longer_twice_is_not_run_again(device, quantized):
    question = one_question(lambda: None)
    device.compile_s = 6.0
    autotune.choose(question, 1)
    autotune.try_waiting(autotune.FIRST_S)
    assert device.now == pytest.approx(6.0, abs=0.1) and autotune.waiting() and not autotune.results()
    # Compiled by now.
    autotune.try_waiting(autotune.AFTER_S, autotune.AFTER_S)
    assert not autotune.waiting() and autotune.choose(question, 1)
    # Each call of it takes longer than a trial may.
    device.restart()
    autotune._results.path.unlink()
    device.compile_s, device.costs = 0.0, lambda name, given: 6.0
    for n in (1, 2):
        autotune.choose(question, 1)
        autotune.try_waiting(autotune.FIRST_S)
        assert autotune.waiting() == 2 - n
    device.restart()
    assert not autotune.choose(question, 1) and not autotune.waiting()
    assert autotune.results()[0].reason == "not timed: its trial took too long, or it was off"


def one_question(note, rows=(1,)):
    """A product of 64 x 64, as `block_qmm` asks it, in its first plan."""
    w, x = mx.quantize(mx.random.normal((64, 64)), group_size=32, bits=4), mx.ones((16, 64))

    def make(ways):
        def one(m):
            note()
            ours = [lambda x, way=way: [block_qmm.prepare_as(way, x.shape, x.dtype, 64, 32, 4)(x, *w)] for way in ways]
            return autotune.Trial(x[:m], ours, lambda x: [block_qmm.block_qmm_ops(x, *w, 32, 4)], autotune.same_floats(1e-3))

        return one

    return autotune.Question("s", block_qmm.candidates(mx.float32, 64, 32, 4)[:1], make, rows)


@pytest.mark.full
def test_what_was_cut_off_is_tried_after_answers_2_s_at_a_time(device, quantized):
    device.compile_s = 0.75
    want = ids(quantized)
    rounds = 0
    while autotune.waiting():
        before, rounds = device.now, rounds + 1
        assert ids(quantized) == want and rounds < 60
        assert device.now - before < 2 + 1.6 + 0.1
    before = device.now
    assert ids(quantized) == want and device.now - before < device.compile_s and rounds > 1


def test_nothing_is_tried_while_a_stream_is_open_or_where_it_is_not_read_to_its_end(device, quantized):
    device.info["architecture"], device.compile_s = "applegpu_g17p", 0.9
    model, tokenizer, drafter = quantized
    drafter.pair = None
    with open_stream():
        ids(quantized)
        assert autotune.waiting() and not autotune.results()
    stream = stream_generate(model, tokenizer, PROMPT, max_tokens=9, draft_model=drafter, block_size=8)
    next(stream)
    stream.close()
    assert autotune.waiting() and not autotune.results()
    try_after_answer(stop=lambda: True)
    assert not autotune.results()
    ids(quantized)
    assert autotune.results()


def test_on_g17_and_unknown_gpus_nothing_is_tried_before_the_first_answer(device, quantized):
    for architecture in ("applegpu_g17p", "applegpu_g18s", "", "applegpu_g13g", "applegpu_g16s"):
        device.info["architecture"] = architecture
        assert autotune.tries_first() is architecture.endswith(("g13g", "g16s"))
    device.info["architecture"] = "applegpu_g17p"
    begin(quantized)
    assert autotune.waiting() and not autotune.results()
    # As `doctor --report` does.
    device.compile_s = 2.0
    try_before_answers(Target(quantized[0]), always=True)
    assert autotune.results()


def test_what_is_asked_for_is_tried_by_the_pass_that_asks(device, quantized, monkeypatch):
    device.info["architecture"] = "applegpu_g17p"
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "block_qmm")
    # Slower, too.
    device.costs = lambda name, given: 9.0
    assert autotune.may_run() and autotune.choose(one_question(lambda: None), 1)


def test_calls_of_a_trial_hang_on_each_other_as_in_a_pass():
    calls = []

    def call(x):
        calls.append(x)
        return [x * (math.nan if len(calls) == 1 else 1)]

    (out,) = trials.chained(call, mx.ones((2, 3)), 5)
    # What is no number in the first call is in the last.
    assert len(calls) == 5 and bool(mx.all(mx.isnan(out)))
    (out,) = trials.chained(lambda x: [x.astype(mx.int32)], mx.array([[3, 4]], dtype=mx.int32), 5)
    assert out.tolist() == [[3, 4]] and out.dtype == mx.int32


def test_trials_are_made_of_chains(device, monkeypatch):
    seen = []
    monkeypatch.setattr(trials, "chained", lambda call, x, length: seen.append(length) or call(x))
    autotune.choose(one_question(lambda: None), 1)
    autotune.try_waiting(1.0)
    assert trials.LENGTH > 1 and seen == [trials.LENGTH] * 2 * trials.SAMPLES


def test_the_mac_picks_its_plan_at_each_row_count(device):
    """Two columns at 16 rows, where registers are short; four below."""
    device.costs = lambda name, given: 1e-3 * (1.5 if (given["ROWS"] == 16) == (given["COLS"] == 4) else 1)
    w = mx.quantize(mx.random.normal((96, 64)), group_size=32, bits=4)
    mx.eval(w)
    block_qmm.block_qmm(mx.ones((3, 64)), *w, 32, 4)
    autotune.try_waiting(20.0)
    for rows, columns in ((1, 4), (3, 4), (8, 4), (9, 2), (16, 2)):
        device.launches.clear()
        mx.eval(block_qmm.block_qmm(mx.ones((rows, 64)), *w, 32, 4))
        ((_, given, _),) = device.launches
        assert given["COLS"] == columns, rows


def test_a_plan_that_the_gpu_refuses_costs_no_other_plan(device, caplog):
    device.most_threads = lambda name, given: 128
    q, k = mx.random.normal((1, 4, 3, 32)), mx.random.normal((1, 2, 40, 32))
    block_attention.block_attention(q, k, k, 0.2)
    autotune.try_waiting(20.0)
    device.launches.clear()
    mx.eval(block_attention.block_attention(q, k, k, 0.2))
    assert [threads for name, _, threads in device.launches if name == "block_attention"] == [128]
    assert not autotune._off and not caplog.messages
    refused = [r.reason for r in autotune.results() if r.plan == "simdgroups 8"]
    assert len(refused) == 5 and all("Thread group size (256) is greater" in reason for reason in refused)


def test_at_head_size_256_no_launch_is_refused_by_an_m1(device):
    device.most_threads = lambda name, given: 256
    q, k = mx.random.normal((1, 24, 16, 256)).astype(mx.float16), mx.random.normal((1, 4, 40, 256)).astype(mx.float16)
    mx.eval(block_attention.block_attention_kernel(q, k, k, 0.06))
    ((_, given, threads),) = [launch for launch in device.launches if launch[0] == "block_attention"]
    assert threads == 256 and given["ROWS"] * 8 <= block_attention.MAX_HELD


def test_the_heads_argmax_takes_fewer_columns_at_16_rows(device):
    w = mx.random.normal((200, 64))
    for rows, columns in ((1, 4), (8, 4), (9, 2), (16, 2)):
        head_argmax.head_argmax_kernel(mx.ones((rows, 64)), w)
        name, given, _ = device.launches[-2]
        assert (name, given["COLS"], given["COLS"] * given["STEPS"] * given["SIMDGROUPS"]) == ("head_argmax", columns, 128)


def test_experts_are_tried_on_the_layers_own_weights_and_the_cache_is_cleared_after(device, monkeypatch):
    experts, cleared, asked = SwitchGLU(64, 96, 6), [], []
    nn.quantize(experts, 32, 4)
    mx.eval(experts.parameters())
    layer, maker = experts.gate_proj, mx.fast.metal_kernel
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(1))
    monkeypatch.setattr(mx, "quantize", lambda *args, **kwargs: pytest.fail("weights were made"))
    monkeypatch.setattr(mx.fast, "metal_kernel", lambda name, **about: noting(maker(name, **about), asked))

    def run():
        with intercept(kernel_calls(layer)):
            mx.eval(layer(mx.ones((1, 3, 1, 1, 64)), mx.array([[[0, 1], [2, 3], [4, 5]]], dtype=mx.uint32)))

    run()
    autotune.try_waiting(20.0)
    own = {id(a) for a in (layer["weight"], layer["scales"], layer["biases"])}
    assert cleared and asked and all({id(a) for a in given[1:4]} == own for given in asked)
    device.launches.clear()
    run()
    assert [name for name, *_ in device.launches] == ["block_gather_qmm"]


def noting(launch, asked):
    return lambda *, inputs, **given: asked.append(inputs) or launch(inputs=inputs, **given)


def test_a_layer_that_is_gone_is_not_tried_and_the_next_one_is(device):
    def run():
        experts = SwitchGLU(64, 96, 6)
        nn.quantize(experts, 32, 4)
        mx.eval(experts.parameters())
        with intercept(kernel_calls(experts.gate_proj)):
            experts.gate_proj(mx.ones((1, 3, 1, 1, 64)), mx.array([[[0, 1], [2, 3], [4, 5]]], dtype=mx.uint32))
        return experts

    run()
    gc.collect()
    autotune.try_waiting(20.0)
    assert autotune.waiting() == 1 and not autotune.results()
    held = run()
    autotune.try_waiting(20.0)
    assert held and not autotune.waiting() and len(autotune.results()) == 20


def test_where_memory_is_short_stock_mlx_serves_and_the_next_start_tries_again(device):
    def no_memory():
        raise RuntimeError("[metal::malloc] Attempting to allocate 134217728 bytes")

    question = one_question(no_memory)
    autotune.choose(question, 1)
    autotune.try_waiting(20.0)
    assert not autotune.waiting() and autotune.choose(question, 1) is None and not autotune._off
    assert "no trial could be made: RuntimeError: [metal::malloc]" in autotune.results()[0].reason
    device.restart()
    question = one_question(lambda: None)
    autotune.choose(question, 1)
    autotune.try_waiting(20.0)
    assert autotune.choose(question, 1)


@pytest.mark.full
def test_a_whole_first_day(device, quantized, monkeypatch, caplog):
    """Load, an interrupt in every trial, an answer, a second start, an update of macOS, a start with little memory."""
    want = plain_ids(device, quantized, monkeypatch)
    put, done = autotune._results.put, [0]
    monkeypatch.setattr(autotune._results, "put", lambda *entry: done.__setitem__(0, done[0] + 1) or put(*entry))

    def interrupted(name):
        if done[0]:
            raise KeyboardInterrupt

    # Each start tries one thing and is interrupted in the next.
    starts, folder = 0, autotune._directory()
    device.before = interrupted
    while True:
        starts, done[0] = starts + 1, 0
        quantized[2].pair = None
        try:
            assert ids(quantized) == want
            break
        except KeyboardInterrupt:
            assert not list(folder.glob("*.trying")) and len(autotune._results.read()) == starts < 100
            device.restart()
    tried = len(autotune._results.read())
    assert tried > 30 and starts >= tried and not autotune._off
    # The answer ran on our kernels.
    assert {"block_qmm", "block_attention", "head_argmax"} <= {name for name, *_ in device.launches}

    # A second start tries nothing and says nothing.
    device.before, at = (lambda name: None), device.now
    device.restart(), caplog.clear()
    quantized[2].pair = None
    done[0] = 0
    assert ids(quantized) == want and not done[0] and not caplog.messages and device.launches
    assert device.now - at < 1.0

    # macOS was updated: tried anew, beside what is known of the old one.
    identity = autotune.system_identity()
    monkeypatch.setattr(autotune, "system_identity", lambda: (*identity[:-1], "another build"))
    device.restart()
    quantized[2].pair = None
    assert ids(quantized) == want and done[0] == tried and len(caplog.messages) == 1

    # The updated system kills the process in a trial: that row count of that shape is stock MLX's for some starts, no other.
    monkeypatch.setattr(autotune, "system_identity", lambda: (*identity[:-1], "a third build"))
    device.restart()
    key = next(key for key in autotune._results.read() if "N 512 K 192 rows 16" in key)
    about = next(tuple(e["about"]) for k, e in autotune._results.read().items() if k == key)
    marker = folder / f"{autotune._digest(autotune._key(about, 16))}.trying"
    marker.write_text('{"trying": true, "crashes": 0, "skipped": 0}')
    quantized[2].pair = None
    caplog.clear()
    assert ids(quantized) == want and not autotune._off
    assert any(f"tried again {crash_marker.OFF_STARTS} starts later" in line for line in caplog.messages)
    off = [r for r in autotune.results() if "a process ended in its trial" in r.reason]
    assert {(r.shape, r.rows) for r in off} == {(about[0], 16)}

    # Little memory: no trial can be made; stock MLX answers, and nothing is held against the kernels.
    monkeypatch.setattr(autotune, "system_identity", lambda: (*identity[:-1], "a fourth build"))
    device.restart()
    quantized[2].pair = None
    made = len(autotune._results.read())
    with monkeypatch.context() as patch:
        patch.setattr(mx.random, "normal", lambda *args, **kwargs: short_of_memory())
        assert ids(quantized) == want and not autotune._off
    assert {e["about"][0] for e in [*autotune._results.read().values()][made:]} <= {"drafts B 1"}


def short_of_memory():
    raise RuntimeError("[metal::malloc] Attempting to allocate 134217728 bytes")


def plain_ids(device, quantized, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("DFLASH_MLX_KERNELS", "off")
        return ids(quantized)


def test_two_threads_passes_do_not_share_what_served_them(device, quantized):
    import threading

    target, found = Target(quantized[0]), []
    try_before_answers(target)
    hidden = target(mx.array([[1, 2, 3]]), None, kernels=True).hidden
    other = threading.Thread(target=lambda: found.append(target.routes.served))
    other.start(), other.join()
    assert target.finite_flag(hidden) and found == [False]
