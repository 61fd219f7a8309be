"""Tiny models, drafters, a tokenizer and the checks that several test files share.

All sizes differ (H, H of the drafter's MLP, heads * D, V), and random weights are scaled up: a default-initialised tiny model
repeats itself and passes wrong code.
"""

import hashlib
import inspect
import json
import random
import shutil
import textwrap
import time
from pathlib import Path

import mlx.core as mx
import mlx_lm
from mlx.utils import tree_flatten, tree_map
from mlx_lm.generate import generate_step
from mlx_lm.models import llama, qwen3
from mlx_lm.tokenizer_utils import TokenizerWrapper
from rows import tolerance

from dflash_mlx import stream_generate
from dflash_mlx.config import DrafterConfig
from dflash_mlx.draft_length.policy import FixedDraftLength
from dflash_mlx.kernels.autotune import NotFiniteError
from dflash_mlx.loading import make_drafter
from dflash_mlx.models.drafter import Drafter
from dflash_mlx.models.target import Target

DATA = Path(__file__).parents[1] / "data"
TINY = Path(inspect.getfile(Drafter)).parents[1] / "pairs" / "tiny"
# What a record says of its drafter.
TINY_DRAFTER_SHA256 = hashlib.sha256((TINY / "drafter" / "model.safetensors").read_bytes()).hexdigest()[:16]


def grow(model, factor=4.0):
    """Matrices times `factor`, evaluated: makes a random model's tokens varied."""
    model.update(tree_map(lambda a: a * factor if a.ndim > 1 else a, model.parameters()))
    mx.eval(model.parameters())
    return model


def tiny_target(seed=0, layers=4, hidden=24, vocab=61, **changes):
    """A random llama of `layers` layers, 4 heads of 8 over 2 key heads."""
    mx.random.seed(seed)
    args = {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 44,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        **changes,
    }
    return grow(llama.Model(llama.ModelArgs.from_dict(args)))


def tiny_qwen3(seed=0, layers=3, hidden=20, vocab=53):
    """A random qwen3 with tied embeddings; unlike llama it leaves `make_cache` to mlx-lm."""
    mx.random.seed(seed)
    args = {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 36,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocab,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    return grow(qwen3.Model(qwen3.ModelArgs.from_dict(args)))


def raw_config(hidden=24, vocab=61, taps=(0, 2), mask=3, block=5, **changes):
    """A small drafter's config.json: one sliding and one full layer; `changes` replace or (None) remove keys."""
    raw = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": 36,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "block_size": block,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 11,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": list(taps)},
        **changes,
    }
    return {k: v for k, v in raw.items() if v is not None}


def tiny_drafter(model, seed=1, factor=4.0, cls=Drafter, **changes):
    """A random drafter bound to `model`. Its drafts are hopeless unless `cls` replaces them."""
    inner = model.model
    vocab, hidden = inner.embed_tokens.weight.shape
    config = DrafterConfig.from_dict(raw_config(hidden, vocab, **changes))
    mx.random.seed(seed)
    drafter = grow(cls(config), factor)
    target = Target(model)
    return drafter.bind(target.embed, target.head, model)


def flat(module):
    return dict(tree_flatten(module.parameters()))


def variant(model, config, weights=TINY / "drafter" / "model.safetensors"):
    """The trained drafter of the built-in pair under another config."""
    return make_drafter(DrafterConfig.from_dict(config), dict(mx.load(str(weights))), model)


def full_forward(model, ids):
    """Outputs of every layer of a llama or qwen3 for ids [T], each [T, H], by a plain loop: no cache, no taps module."""
    h = model.model.embed_tokens(mx.array([ids]))
    outputs = []
    for layer in model.model.layers:
        h = layer(h, "causal", None)
        outputs.append(h[0])
    return outputs


class Oracle(Drafter):
    """Checks the features that it is given against a plain full forward, then drafts the known continuation.

    `learn(line)` first: prompt and what the target says after it.
    """

    wrong = staticmethod(lambda position, token: token)

    def learn(self, line, model):
        self._line = list(line)
        outputs = full_forward(model, self._line)
        outputs.append(model.model.norm(outputs[-1]))
        self._features = mx.concatenate([outputs[i] for i in self.config.taps(len(model.layers))], axis=-1)
        mx.eval(self._features)
        return self

    def check(self, features, cache, start):
        rows = features.shape[1]
        held = {entry.offset for entry in cache}
        if held != {start}:
            raise AssertionError(f"context starts at row {start}, the drafter's cache holds {held}")
        # float32; one row and many are bit-equal with the reference BLAS, nearly so with others.
        near = tolerance()
        if not mx.allclose(features[0], self._features[start : start + rows], rtol=near, atol=near).item():
            raise AssertionError(f"context rows {start}..{start + rows - 1} are not the target's states there")

    def inject(self, features, cache, start):
        self.check(features, cache, start)
        super().inject(features, cache, start)

    def draft(self, anchor, features, cache, start, block_size):
        self.check(features, cache, start)
        super().inject(features, cache, start)
        at = start + features.shape[1]
        if anchor.tolist() != [self._line[at]]:
            raise AssertionError(f"anchor {anchor.tolist()} at position {at}, expected {self._line[at]}")
        known = self._line[at + 1 : at + block_size]
        known += [0] * (block_size - 1 - len(known))
        return mx.array([[self.wrong(at + 1 + i, t) for i, t in enumerate(known)]], dtype=mx.int32).reshape(1, -1)

    def draft_with_confidence(self, anchor, features, cache, start, block_size, *noise, n=None, accelerator=None):
        drafted = self.draft(anchor, features, cache, start, block_size)[:, :n]
        return drafted, mx.full(drafted.shape, 0.5)


class Noisy(Oracle):
    """Every third known token or so is replaced, by position, so that rounds end at all depths."""

    @staticmethod
    def wrong(position, token):
        return (token + 1) % 50 if (position * 7919) % 10 < 3 else token


class Shuffled(FixedDraftLength):
    """A draft-length policy's stand-in: any width from 0 to `most`; every other one is 0, and stretches of it are frequent.

    With `copies` every other round takes drafts from the text where there are any, any number of them. Half of the rounds are
    cut by confidence: then again any width is taken. `told` gets what `observe` was told, `confidence` what the cuts were."""

    wants_confidence = True

    def __init__(self, most, seed, copies=False):
        self.confidence, self.cuts_by_confidence = [], False
        self.most, self.chance, self.told, self.left, self.copies = most, random.Random(seed), [], 0, copies
        self.width = self.looked_up = self.asked = 0

    def next_length(self, pending=0):
        self.asked += 1
        return self.width

    def prompt_lookup_width(self, width, rates):
        return self.looked_up

    def confidence_cut(self, confidence):
        self.confidence.append(confidence)
        return self.chance.randint(0, self.most)

    def observe(self, width, accepted, more, seconds, usual, looked_up=False, confidence=None, waited=False):
        self.told.append((width, accepted, more, looked_up))
        self.cuts_by_confidence = self.chance.random() < 0.5
        self.left -= 1
        if self.left <= 0:
            self.width = self.chance.choice([0, self.chance.randint(1, self.most)])
            self.left = self.chance.choice([1, 1, 2, 5])
        self.looked_up = self.chance.choice([0, self.chance.randint(1, self.most)]) if self.copies else 0


def failing_pass(patch, nth):
    """Makes the nth pass of the next run one in which a kernel of ours gave a value that is not finite."""
    launched = []

    def finite_flag(self, hidden, margin=None, logits=None, compiled=False):
        launched.append(1)
        return [mx.array([len(launched) == nth], dtype=mx.int32)]

    def check(values, compiled=False):
        if any(values):
            raise NotFiniteError

    patch.setattr(Target, "finite_flag", finite_flag)
    patch.setattr(Target, "check", staticmethod(check))


class Letters:
    """A tokenizer without files: token i is the text `<i>`."""

    chat_template = bos_token = None

    def __init__(self, eos=None):
        self.eos_token_id = eos

    def decode(self, ids):
        return "".join(f"<{i}>" for i in ids)

    def encode(self, text, add_special_tokens=True):
        return [ord(c) % 50 for c in text]

    def get_vocab(self):
        return {}

    def apply_chat_template(self, messages, **kwargs):
        return [5]


def letters(*eos):
    """The wrapped tokenizer with any number of EOS ids."""
    return TokenizerWrapper(Letters(), eos_token_ids=eos)


def greedy_ids(model, prompt, n, cache=None, **options):
    """n tokens of mlx-lm's own plain greedy decoding, whatever they are."""
    steps = generate_step(mx.array(prompt), model, max_tokens=n, prompt_cache=cache, **options)
    return [token for token, _ in steps]


def plain(model, tokenizer, prompt, **options):
    """mlx-lm's own responses."""
    return list(mlx_lm.stream_generate(model, tokenizer, prompt, **options))


def run(model, drafter, prompt, max_tokens=30, tokenizer=None, **options):
    """Our responses, with a tokenizer that has no EOS unless one is given.

    With a DFlash drafter every round is as wide as its config says, so that rounds can be compared; block_size=None lets the
    width rule choose.
    """
    if isinstance(drafter, Drafter) and "num_draft_tokens" not in options:
        options.setdefault("block_size", drafter.config.block_size)
    tokenizer = letters() if tokenizer is None else tokenizer
    return list(stream_generate(model, tokenizer, prompt, max_tokens=max_tokens, draft_model=drafter, **options))


def ids_of(responses):
    return [r.token for r in responses]


def text_of(responses):
    return "".join(r.text for r in responses)


def rounds_of(responses):
    """Every round of a run as plain tuples."""
    return [(r["drafted"], r["accepted"], r["bonus"]) for r in responses[-1].stats.rounds]


def listed(rounds):
    """Reference rounds that must be met exactly: the last listed one may differ or be absent."""
    return [(r["drafted"], r["accepted"], r["bonus"]) for r in rounds][:-1]


def meets(responses, ids, rounds):
    """Whether a run has exactly the reference's ids and every round but the last listed one."""
    expected = listed(rounds)
    return ids_of(responses) == ids and rounds_of(responses)[: len(expected)] == expected


def references(path):
    """A variants/*.json or rounds.json file."""
    return json.loads(path.read_text())


def offsets(entries):
    return [entry.offset for entry in entries]


def plant(monkeypatch, owner, name, old, new):
    """Replace `old` by `new` in the source of owner.name for one test. Fails if `old` is not there exactly once."""
    function = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{name} does not hold {old!r} exactly once"
    scope = {}
    exec(compile(source.replace(old, new), f"<planted {name}>", "exec"), function.__globals__, scope)
    monkeypatch.setattr(owner, name, scope[name])


CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


def with_template(path, template=CHAT_TEMPLATE):
    """The built-in target in a folder of its own, with a chat template."""
    for file in (TINY / "target").iterdir():
        shutil.copy(file, path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return str(path)


def scripted(line, vocab=61, wait_s=0.0):
    """A plain target that says `line` of token ids whatever it reads, then token 0. `.passes` counts its calls.

    wait_s: seconds that each takes, or what each calls first."""
    model = tiny_target(vocab=vocab)
    counts = {"passes": 0, "said": 0}

    def call(self, inputs, cache=None, **kwargs):
        wait_s() if callable(wait_s) else time.sleep(wait_s)
        rows = mx.zeros((1, 2, inputs.shape[1], 8))
        for entry in cache:
            entry.update_and_fetch(rows, rows)
        counts["passes"] += 1
        counts["said"] += inputs.shape[1] == 1
        at = counts["said"] - 1
        token = line[at] if 0 <= at < len(line) else 0
        return mx.broadcast_to(mx.arange(vocab) == token, (1, inputs.shape[1], vocab)).astype(mx.float32) * 9

    model.__class__ = type("Scripted", (type(model),), {"__call__": call, "passes": property(lambda self: counts["passes"])})
    return model


def figures_of(**more):
    """The fields of `generate --json` that the figures under an answer are made from: 24 tokens in plain decoding, or `more`."""
    fields = {"prompt_tokens": 3, "prompt_tps": 90.0, "generation_tokens": 24, "generation_tps": 10.0, "finish_reason": "stop"}
    fields |= {"peak_memory_gb": 0.1, "tau": None, "plain_tps": None, "has_measured": False, "widths": {}, "confidence_cut": {}}
    fields |= {"width_reason": None}
    sources = {name: {"rounds": 0, "accepted": 0} for name in ("drafter", "prompt_lookup")}
    return fields | {"acceptance_lengths": [], "sources": sources, "seconds": {"draft": None}, "seed": None} | more
