"""Taps, embedding and head of any mlx-lm model: the right values, the model as it was afterwards, and refusals in words."""

import inspect
import sys
import threading

import mlx.core as mx
import mlx.nn as nn
import pytest
from families import FAMILIES, family
from kit import full_forward, letters, raw_config, tiny_qwen3, tiny_target
from mlx_lm.models import cache as mlx_lm_cache
from rows import tolerance

from dflash_mlx import stream_generate
from dflash_mlx.config import DrafterConfig
from dflash_mlx.errors import GenerationError, TapError
from dflash_mlx.models import intercept as taps_module
from dflash_mlx.models.intercept import intercept
from dflash_mlx.models.target import Target
from dflash_mlx.pair_checks import check_pair

IDS = [5, 9, 33, 7, 20, 41, 3]


def first(value):
    return value[0] if isinstance(value, (tuple, list)) else value


def recorded(model, ids):
    """What each layer was given and gave in a plain pass, by a patch of the layers' classes: independent of taps.py."""
    layers = list(model.layers)
    given, gave = {}, {}
    before = {cls: cls.__call__ for cls in {type(layer) for layer in layers}}

    def patched(original):
        def call(self, *args, **kwargs):
            out = original(self, *args, **kwargs)
            given[id(self)] = args[0] if args else next(iter(kwargs.values()))
            gave[id(self)] = first(out)
            return out

        return call

    for cls, original in before.items():
        cls.__call__ = patched(original)
    try:
        logits = first(model(mx.array([ids])))
    finally:
        for cls, original in before.items():
            cls.__call__ = original
    return logits, [given[id(layer)] for layer in layers], [gave[id(layer)] for layer in layers]


def check_target(model, ids):
    logits, given, gave = recorded(model, ids)
    layers = list(model.layers)
    chosen = [len(layers) - 1, 0, 1]
    if any(gave[i].ndim != 3 for i in chosen):
        with pytest.raises(TapError, match=r"each layer of .* must give \[B, L, H\]"):
            Target(model, chosen)(mx.array([ids]))
        chosen = []
    classes = [type(layer) for layer in layers]
    target = Target(model, chosen)
    output = target(mx.array([ids]))
    hidden, features = output.hidden, output.features
    # Taps only look: bit-equal, whatever the type.
    if chosen:
        assert mx.array_equal(features, mx.concatenate([gave[i] for i in chosen], axis=-1)).item()
    assert mx.array_equal(target.head(hidden), logits).item()
    assert mx.array_equal(target.embed(mx.array([ids])), given[0]).item() or given[0].ndim != 3
    assert mx.array_equal(first(model(mx.array([ids]))), logits).item()
    assert [type(layer) for layer in layers] == classes
    assert not taps_module._held and not getattr(taps_module._local, "handlers", None)


def test_a_table_of_positions_is_no_vocabulary():
    target = Target(model := family("gpt2"))
    assert target.positions > target.vocabulary == model.model.wte.weight.shape[0]
    # Without a drafter too.
    with pytest.raises(GenerationError, match=f"this target's are 0 to {target.vocabulary - 1}"):
        next(stream_generate(model, letters(), [target.vocabulary], max_tokens=1))


@pytest.mark.parametrize("name", FAMILIES)
def test_taps_head_and_embedding_of_a_family_are_the_plain_passs(name):
    check_target(family(name), IDS)


def test_taps_are_the_outputs_of_the_layers_in_the_order_of_the_ids():
    for model in (tiny_target(), tiny_qwen3()):
        outputs = full_forward(model, IDS)
        features = Target(model, (2, 0))(mx.array([IDS])).features
        assert mx.array_equal(features[0], mx.concatenate([outputs[2], outputs[0]], axis=-1)).item()


def test_a_tap_with_a_cache_is_the_plain_passs_tap():
    model = tiny_target()
    outputs = full_forward(model, IDS)
    cache = mlx_lm_cache.make_prompt_cache(model)
    target = Target(model, (1, 3))
    parts = [target(mx.array([part]), cache).features for part in (IDS[:3], IDS[3:4], IDS[4:])]
    expected = mx.concatenate([outputs[1], outputs[3]], axis=-1)
    # float32; another number of rows a pass
    assert mx.allclose(mx.concatenate(parts, axis=1)[0], expected, rtol=tolerance(), atol=tolerance()).item()


@pytest.mark.parametrize("make", [tiny_target, tiny_qwen3])
def test_a_head_that_is_one_layer_is_called_alone_and_looked_up_each_time(make, monkeypatch):
    model = make(hidden=32)
    target, tied = Target(model), "lm_head" not in model
    head = lambda rows: model.model.embed_tokens.as_linear(rows) if tied else model.lm_head(rows)  # noqa: E731
    hidden = target(mx.array([IDS])).hidden
    target.head(hidden)
    calls, original = [], type(model).__call__
    monkeypatch.setattr(type(model), "__call__", lambda self, *args, **k: (calls.append(1), original(self, *args, **k))[1])
    assert mx.array_equal(target.head(hidden), head(hidden)) and not calls
    nn.quantize(model, 32, 4, class_predicate=lambda path, m: path in ("lm_head", "model.embed_tokens"))
    assert mx.array_equal(target.head(hidden), head(hidden)) and not calls


def scaled_hidden(self, ids, cache=None):
    return self.lm_head(self.model(ids, cache) * 3.0)


def scaled_logits_in_place(self, ids, cache=None):
    logits = self.lm_head(self.model(ids, cache))
    logits /= 4.0
    return logits


def logits_masked_in_place(self, ids, cache=None):
    logits = self.lm_head(self.model(ids, cache))
    logits[..., 50:] = -1e9
    return logits


@pytest.mark.parametrize("call", [scaled_hidden, scaled_logits_in_place, logits_masked_in_place])
def test_a_head_that_does_more_than_one_layer_runs_as_the_model_runs_it(call):
    model = tiny_target()
    model.__class__ = type("Changed", (type(model),), {"__call__": call})
    target = Target(model)
    hidden = target(mx.array([IDS])).hidden
    for _ in range(2):
        assert mx.array_equal(target.head(hidden), model(mx.array([IDS])))


def test_no_layers_gives_features_of_no_width():
    output = Target(tiny_target())(mx.array([IDS]))
    hidden, features = output.hidden, output.features
    assert hidden.shape == (1, 7, 24) and features.shape == (1, 7, 0)


class TupleLayer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __call__(self, *args, **kwargs):
        return self.inner(*args, **kwargs), "state", 3


class TupleBackbone(nn.Module):
    """Layers that return tuples, as several mlx-lm families' do."""

    def __init__(self, inner):
        super().__init__()
        self.embed_tokens, self.norm = inner.embed_tokens, inner.norm
        self.blocks = [TupleLayer(layer) for layer in inner.layers]

    def __call__(self, ids, cache=None):
        h = self.embed_tokens(ids)
        for block in self.blocks:
            h, state, number = block(h, "causal", None)
            assert (state, number) == ("state", 3)
        return self.norm(h)


class Wrapper(nn.Module):
    """A model whose `.layers` is another list at each access."""

    def __init__(self, inner, times=1):
        super().__init__()
        self.model, self.lm_head = TupleBackbone(inner.model), inner.lm_head
        self.times = times

    def __call__(self, ids, cache=None):
        for _ in range(self.times):
            h = self.model(ids)
        return self.lm_head(h)

    @property
    def layers(self):
        return [*self.model.blocks]


def test_layers_that_return_tuples_in_a_list_made_afresh_are_tapped():
    inner = tiny_target()
    model = Wrapper(inner)
    assert model.layers is not model.layers
    outputs = full_forward(inner, IDS)
    output = Target(model, (0, 2))(mx.array([IDS]))
    hidden, features = output.hidden, output.features
    assert mx.array_equal(features[0], mx.concatenate([outputs[0], outputs[2]], axis=-1)).item()
    assert mx.array_equal(Target(model).head(hidden), model(mx.array([IDS]))).item()


def test_a_layer_that_runs_twice_in_a_pass_is_refused():
    with pytest.raises(
        TapError, match="layer 1 ran 2 times; TupleBackbone ran 2 times in a pass; .* It runs its layers in loops"
    ):
        Target(Wrapper(tiny_target(), times=2), (1,))(mx.array([IDS]))


def test_a_model_without_layers_or_an_owner_of_them_is_refused():
    model = tiny_target()
    with pytest.raises(TapError, match=r"Linear \(Linear\) has no .layers, as an mlx-lm model has them. Pass the model"):
        Target(nn.Linear(2, 3))
    with pytest.raises(TapError, match="1 modules of LlamaModel own its layers; there must be one, inside the model"):
        Target(model.model)


@pytest.mark.parametrize("ids", [(5,), (-2,), (0, 9)])
def test_a_tap_outside_the_layers_is_refused(ids):
    with pytest.raises(TapError, match=r"taps at layers \[(5|-2|9)\] are outside of llama's layers 0..3. Use the drafter"):
        Target(tiny_target(), ids)


class CompiledInside(nn.Module):
    """A backbone whose layers run inside a function that was compiled before: they are called once, while it is traced."""

    def __init__(self, inner):
        super().__init__()
        self.model, self.lm_head = inner.model, inner.lm_head
        self.fast = mx.compile(lambda ids: inner.model(ids))
        self.fast(mx.array([IDS]))

    def __call__(self, ids, cache=None):
        return self.lm_head(self.fast(ids))

    @property
    def layers(self):
        return self.model.layers


def test_a_target_compiled_beforehand_is_refused():
    model = CompiledInside(tiny_target())
    with pytest.raises(TapError, match="layer 1 ran 0 times.*If the model or a part of it was compiled"):
        Target(model, (1,))(mx.array([IDS]))


@pytest.mark.parametrize("compiled", [mx.compile, CompiledInside])
def test_the_pair_check_refuses_a_compiled_target(compiled):
    # Traced inside the tapped pass, its layer outputs are placeholders; traced before, its layers do not run at all.
    target, config = Target(compiled(tiny_target())), DrafterConfig.from_dict(raw_config())
    with pytest.raises(
        TapError, match="(?s)layer outputs are traced ones.*; they must be plain arrays. Pass the uncompiled model"
    ):
        check_pair(config, target)
    with pytest.raises(TapError, match="If the model or a part of it was compiled, pass the uncompiled one"):
        Target(target.model, (0, 2))(mx.zeros((1, 1), dtype=mx.int32))


def test_a_compiled_function_round_a_tapped_pass_works():
    model = tiny_target()
    target = Target(model, (0, 2))
    expected = target(mx.array([IDS]))
    compiled = mx.compile(lambda ids: (target(ids).hidden, target(ids).features))
    for _ in range(2):
        hidden, features = compiled(mx.array([IDS]))
        # float32; compiled elementwise kernels may fuse a multiply and an add.
        assert mx.allclose(hidden, expected.hidden, rtol=1e-4, atol=1e-5).item()
        assert mx.allclose(features, expected.features, rtol=1e-4, atol=1e-5).item()


def untouched(model):
    names = {type(module).__name__ for module in model.modules()}
    return not any(name.startswith("Tapped") for name in names) and not taps_module._held


def test_classes_are_given_back_after_an_error_in_the_pass(monkeypatch):
    model = tiny_target()
    target = Target(model, (0, 2))
    monkeypatch.setattr(type(model.model.layers[3].mlp), "__call__", lambda self, x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        target(mx.array([IDS]))
    assert untouched(model)
    monkeypatch.undo()
    assert target(mx.array([IDS])).features.shape == (1, 7, 48)


def test_nothing_is_stored_on_the_model():
    model = tiny_target()
    before = {name: id(value) for name, value in model.named_modules()}
    keys = {name: set(module.keys()) for name, module in model.named_modules()}
    Target(model, (0, 2))(mx.array([IDS]))
    assert {name: id(value) for name, value in model.named_modules()} == before
    assert {name: set(module.keys()) for name, module in model.named_modules()} == keys


def test_the_made_class_is_kept_per_class():
    model = tiny_target()
    Target(model, (0, 2))(mx.array([IDS]))
    made = dict(taps_module._made)
    Target(tiny_target(seed=4), (1,))(mx.array([IDS]))
    assert taps_module._made == made


def test_passes_in_several_threads_each_get_their_own_taps():
    model = tiny_target()
    rows = [[(7 * i + k) % 61 for i in range(6)] for k in range(4)]
    expected = [mx.concatenate([full_forward(model, ids)[i] for i in (0, 2)], axis=-1) for ids in rows]
    mx.eval(expected)
    right = [0] * 4

    def work(k):
        target = Target(model, (0, 2))
        for _ in range(10):
            right[k] += mx.array_equal(target(mx.array([rows[k]])).features[0], expected[k]).item()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [10] * 4 and untouched(model)


def test_a_pass_that_ends_leaves_modules_to_one_that_still_holds_them():
    module, seen = nn.Linear(2, 2), []

    def note(name):
        return lambda inner, args, kwargs: seen.append(name) or inner(*args, **kwargs)

    with taps_module.intercept([(module, note("outer"))]):
        with taps_module.intercept([(module, note("inner"))]):
            module(mx.ones((1, 2)))
        module(mx.ones((1, 2)))
    module(mx.ones((1, 2)))
    assert seen == ["inner", "outer", "outer"] and type(module) is nn.Linear


def test_an_interruption_at_any_line_before_the_pass_gives_the_classes_back():
    model = tiny_target()
    target = Target(model, (0, 2))
    lines, start = inspect.getsourcelines(taps_module.intercept.__wrapped__)
    last = next(i for i, line in enumerate(lines) if line.strip() == "yield")
    # Not at the `with` itself: a tracer can raise where it is left and skip the release, a signal cannot.
    entry = {start + i for i, line in enumerate(lines[: last + 1]) if not line.strip().startswith("with")}
    for number in range(1, 100):
        left = [number]

        def trace(frame, event, arg, left=left):
            if frame.f_code.co_filename != taps_module.__file__:
                return None
            if frame.f_code.co_name == "intercept" and event == "line" and frame.f_lineno in entry:
                left[0] -= 1
                if not left[0]:
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            target(mx.array([IDS]))
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        if left[0] > 0:
            break
        assert untouched(model) and not getattr(taps_module._local, "handlers", None), f"line event {number}"
    assert 10 < number < 99


def test_a_layer_whose_class_inherits_from_a_tapped_one_keeps_its_class():
    """mlx-lm builds families upon each other: mistral4's decoder is a subclass of deepseek_v3's."""
    parent, model = tiny_target(seed=1), tiny_target(seed=2)
    Target(parent, (0,))(mx.array([IDS]))
    child = type("Child", (type(model.layers[0]),), {})
    for layer in model.layers:
        layer.__class__ = child
    assert child.__mro__[1] in taps_module._made
    features = Target(model, (1,))(mx.array([IDS])).features
    assert mx.array_equal(features[0], full_forward(model, IDS)[1])
    assert {type(layer) for layer in model.layers} == {child}


def test_a_call_that_was_looked_up_while_another_thread_held_the_module_runs():
    layer, x = nn.Linear(3, 3), mx.ones((1, 3))
    with intercept([(layer, lambda inner, args, kwargs: inner(*args, **kwargs))]):
        begun = type(layer).__call__
    assert mx.array_equal(begun(layer, x), layer(x))


def test_a_pass_gives_everything_it_made_and_leaves_nothing_on_the_target():
    model = tiny_target()
    target = Target(model, (0, 2))
    target(mx.array([[7]]))  # what is looked for once
    held = {name: value for name, value in vars(target).items()}
    row, block = target(mx.array([[7]])), target(mx.array([[7, 8, 9]]))
    assert vars(target) == held
    assert mx.array_equal(row.logits, model(mx.array([[7]]))) and mx.array_equal(row.logits, target.head(row.hidden))
    assert block.logits is None and not row.compiled and not block.compiled
    assert row.features.shape == (1, 1, 48) and block.hidden.shape == (1, 3, 24)
    with pytest.raises(TypeError, match="iterable"):
        hidden, features = block
