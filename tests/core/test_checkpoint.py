"""Headers, indexes, links, the hub: what is found without loading data, and the sentence for each fault."""

import errno
import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from convert_kit import SOME_CONFIG, shards, write_checkpoint
from gguf import GGMLQuantizationType
from gguf_files import FAMILIES, random_weights, write_model

from dflash_mlx import hub
from dflash_mlx.checkpoint import inspect_checkpoint, require_drafter, require_target
from dflash_mlx.errors import CheckpointError


def test_a_single_file_gives_names_shapes_and_types_unread(tmp_path):
    weights = {"a": mx.ones((2, 3), dtype=mx.bfloat16), "b": mx.zeros((0, 4)), "c": mx.array(1)}
    found = inspect_checkpoint(write_checkpoint(tmp_path, SOME_CONFIG, weights))
    assert {n: (t.dtype, t.shape, t.nbytes) for n, t in found.tensors.items()} == {
        "a": ("BF16", (2, 3), 12),
        "b": ("F32", (0, 4), 0),
        "c": ("I32", (), 4),
    }
    assert found.kind == "safetensors" and found.files == ("model.safetensors",)


def test_a_digest_is_of_the_weight_files_alone_in_the_order_of_their_names(tmp_path):
    before = inspect_checkpoint(shards(tmp_path / "a")).digest()
    files = sorted((tmp_path / "a").glob("*.safetensors"))
    assert before == hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    (tmp_path / "a" / "config.json").write_text(json.dumps({**SOME_CONFIG, "more": 1}))
    assert inspect_checkpoint(tmp_path / "a").digest() == before
    files[1].write_bytes(files[1].read_bytes()[:-1] + b"\x40")
    assert inspect_checkpoint(tmp_path / "a").digest() != before


def test_shards_are_read_with_and_without_an_index(tmp_path):
    assert list(inspect_checkpoint(shards(tmp_path / "a")).tensors) == ["t1", "t2"]
    assert list(inspect_checkpoint(shards(tmp_path / "b", index=False)).tensors) == ["t1", "t2"]


def test_stray_files_beside_an_index_are_left_alone_and_listed(tmp_path):
    shards(tmp_path)
    write_checkpoint(tmp_path, SOME_CONFIG, {"t1": mx.zeros((9, 9))}, "model-00001-of-00003.safetensors")
    found = inspect_checkpoint(tmp_path)
    assert found.tensors["t1"].shape == (1, 3)
    assert found.ignored == {"model-00001-of-00003.safetensors": "not named by the index"}


def test_an_index_may_write_a_dot_before_its_file_names(tmp_path):
    path = shards(tmp_path)
    weight_map = {"t1": "./model-00001-of-00002.safetensors", "t2": ".//model-00002-of-00002.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = inspect_checkpoint(path)
    assert found.files == ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    assert found.ignored == {} and found.tensors["t2"].file == found.files[1]


def test_paths_with_a_tilde_and_a_trailing_slash_are_paths(tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "m", SOME_CONFIG, {"a": mx.ones((1,))})
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for path in ("~/m", "m", "./m/", f"{tmp_path}/m/"):
        assert list(inspect_checkpoint(path).tensors) == ["a"]


def test_links_into_the_hub_cache_are_followed(tmp_path):
    repository = tmp_path / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "abc123", repository / "blobs"
    write_checkpoint(blobs, SOME_CONFIG, {"a": mx.ones((1,))})
    snapshot.mkdir(parents=True)
    (blobs / "chat_template.jinja").write_text("x")
    for name in ("config.json", "model.safetensors", "chat_template.jinja"):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert list(inspect_checkpoint(snapshot).tensors) == ["a"]


def test_the_hub_caches_own_folder_of_a_repository_is_its_snapshot(tmp_path):
    repository = tmp_path / "models--org--name"
    write_checkpoint(repository / "snapshots" / "abc123", SOME_CONFIG, {"a": mx.ones((1,))})
    write_checkpoint(repository / "snapshots" / "def456", SOME_CONFIG, {"b": mx.ones((1,))})
    with pytest.raises(CheckpointError, match="models--org--name has no config.json"):
        inspect_checkpoint(repository)
    (repository / "refs").mkdir()
    for ref, commit in (("main", "abc123"), ("v2", "def456"), ("gone", "777")):
        (repository / "refs" / ref).write_text(commit)
    assert list(inspect_checkpoint(repository).tensors) == ["a"]
    for revision in ("v2", "def456"):
        assert list(inspect_checkpoint(repository, revision=revision).tensors) == ["b"]
    with pytest.raises(CheckpointError, match="has no config.json"):
        inspect_checkpoint(repository, revision="gone")


def test_a_gguf_file_is_known_by_how_it_begins_as_ollama_keeps_it(tmp_path):
    write_model(tmp_path / "m.gguf", "llama", random_weights(FAMILIES["llama"]))
    blob = (tmp_path / "m.gguf").rename(tmp_path / "sha256-3f8a")
    assert inspect_checkpoint(blob).kind == "gguf" and inspect_checkpoint(blob).role == "target"
    (tmp_path / "sha256-00").write_bytes(b"{}")
    os.mkfifo(tmp_path / "pipe")
    for name in ("sha256-00", "pipe"):
        with pytest.raises(CheckpointError, match="is neither a checkpoint directory nor a GGUF file. Give the directory"):
            inspect_checkpoint(tmp_path / name)


@pytest.mark.parametrize("config", ["top", "folder", "both"])
def test_weights_in_a_folder_of_their_own_are_found(tmp_path, config):
    shards(tmp_path / "draft")
    if config != "folder":
        (tmp_path / "config.json").write_text(json.dumps({**SOME_CONFIG, "vocab_size": 7}))
    if config == "top":
        (tmp_path / "draft" / "config.json").unlink()
    found = inspect_checkpoint(tmp_path)
    # The config beside the weights is theirs.
    assert (found.config.get("vocab_size") == 7) == (config == "top")
    assert list(found.tensors) == ["t1", "t2"] and list(found.load()) == ["t1", "t2"]
    assert all(found.file_path(name).parent == tmp_path / "draft" for name in found.files)
    assert found.source == (str(tmp_path) if config == "top" else f"{tmp_path}/draft")
    shards(tmp_path / "other")
    with pytest.raises(CheckpointError, match="has no weights, and 2 folders that have: draft, other. Name one: .*/draft"):
        inspect_checkpoint(tmp_path)


@pytest.mark.parametrize("kind", ["single", "odd", "shards", "index", "folder", "gguf"])
def test_what_macos_writes_beside_each_file_on_a_foreign_drive_is_no_file_of_a_model(tmp_path, kind):
    path = tmp_path / "model"
    if kind == "gguf":
        path.mkdir()
        write_model(path / "m.gguf", "llama", random_weights(FAMILIES["llama"]), GGMLQuantizationType.F16)
    elif kind in ("single", "odd"):
        write_checkpoint(path, SOME_CONFIG, {"t1": mx.ones((1, 3))}, "model.safetensors" if kind == "single" else "w.safetensors")
    else:
        shards(path / "part" if kind == "folder" else path, index=kind == "index")
    clean = inspect_checkpoint(path)
    for file in [file for file in path.rglob("*") if file.is_file()]:
        file.with_name(f"._{file.name}").write_bytes(b"\0\5\x16\7" + bytes(60))
    found = inspect_checkpoint(path)
    assert (found.files, found.path, found.kind, found.ignored) == (clean.files, clean.path, clean.kind, {})


def test_a_folder_of_a_hub_repository_is_named_behind_it(tmp_path, monkeypatch):
    repository, asked = tmp_path / "models--org--name", []
    snapshot, blobs = repository / "snapshots" / "abc123", repository / "blobs"
    write_checkpoint(blobs, SOME_CONFIG, {"a": mx.ones((1,))})
    (snapshot / "draft" / "4bit").mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (snapshot / "draft" / "4bit" / name).symlink_to(f"../../../../blobs/{name}")

    def snapshot_download(repo, allow_patterns, **more):
        asked.append((repo, allow_patterns))
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    found = inspect_checkpoint("org/name/draft/4bit")
    assert list(found.tensors) == ["a"] and found.path == snapshot / "draft" / "4bit"
    assert asked[0][0] == "org/name" and all(pattern.startswith("draft/4bit/") for pattern in asked[0][1])
    with pytest.raises(CheckpointError, match="org/name has no folder other. See https://huggingface.co/org/name/tree/main"):
        inspect_checkpoint("org/name/other")
    # One file of many, and a repository of such files alone.
    (snapshot / "draft" / "q8").mkdir()
    write_model(snapshot / "draft" / "q8" / "m.gguf", "llama", random_weights(FAMILIES["llama"]))
    assert inspect_checkpoint("org/name/draft/q8/m.gguf").kind == "gguf" and asked[-1][1] == ["draft/q8/m.gguf"]
    assert inspect_checkpoint(snapshot / "draft" / "q8").kind == "gguf"
    with pytest.raises(CheckpointError, match="org/name has no file q8.gguf"):
        inspect_checkpoint("org/name/q8.gguf")
    (snapshot / "none").mkdir()
    with pytest.raises(CheckpointError, match="org/name/none has no config.json. If it holds GGUF files, name one of them"):
        inspect_checkpoint("org/name/none")


@pytest.mark.parametrize(
    ("address", "name", "revision"),
    [
        ("https://huggingface.co/org/name", "org/name", None),
        ("https://huggingface.co/org/name/", "org/name", None),
        ("http://www.huggingface.co/org/name?show=1#files", "org/name", None),
        ("https://hf.co/org/name/tree/v2", "org/name", "v2"),
        # as Ollama and llama.cpp take it
        ("hf.co/org/name", "org/name", None),
        ("huggingface.co/org/name/blob/main/m.gguf", "org/name/m.gguf", "main"),
        ("https://huggingface.co/org/name/tree/main/draft/4bit", "org/name/draft/4bit", "main"),
        ("https://huggingface.co/org/name/blob/main/m.Q4_K_M.gguf", "org/name/m.Q4_K_M.gguf", "main"),
        ("https://huggingface.co/org/name/resolve/main/m.gguf?download=true", "org/name/m.gguf", "main"),
    ],
)
def test_the_address_of_a_page_names_its_repository(monkeypatch, address, name, revision):
    asked = []
    monkeypatch.setattr(hub, "_download", lambda *given: asked.append(given) or Path("found"))
    assert hub.locate(address, None) == Path("found") and hub.locate(address, "v1") == Path("found")
    assert asked == [(name, revision), (name, "v1")]
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *given, **more: asked.append((*given, more["revision"])))
    assert hub.file_beside(address, "a.json", None) is None
    inside = "/".join([*name.split("/")[2:], "a.json"])
    assert asked[-1] == ("org/name", inside, revision)
    with pytest.raises(CheckpointError, match="does not exist; it must be a directory"):
        hub.locate("https://example.org/org/name", None)


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer.json", "additional_chat_templates/tool.jinja", "merges.txt"])
def test_a_file_beside_the_weights_that_links_outside_is_refused(tmp_path, name):
    path = write_checkpoint(tmp_path / "m", SOME_CONFIG, {"a": mx.ones((1,))})
    (tmp_path / "secret").write_text("{}")
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=f"{name} is a symbolic link out of the directory, to .*secret. Copy"):
        inspect_checkpoint(path)


def test_a_linked_directory_of_chat_templates_is_refused(tmp_path):
    path = write_checkpoint(tmp_path / "m", SOME_CONFIG, {"a": mx.ones((1,))})
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "tool.jinja").write_text("secret")
    (path / "additional_chat_templates").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="additional_chat_templates/tool.jinja is a symbolic link out"):
        inspect_checkpoint(path)


def test_links_that_stay_in_the_directory_and_links_that_are_never_read_are_left_alone(tmp_path):
    path = write_checkpoint(tmp_path / "m", SOME_CONFIG, {"a": mx.ones((1,))})
    (path / "real.jinja").write_text("x")
    (path / "chat_template.jinja").symlink_to("real.jinja")
    (tmp_path / "README.md").write_text("x")
    (path / "README.md").symlink_to(tmp_path / "README.md")
    assert list(inspect_checkpoint(path).tensors) == ["a"]


def test_a_gguf_file_of_a_directory_that_links_outside_is_refused(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    (tmp_path / "m" / "a.gguf").symlink_to(tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match="a.gguf is a symbolic link out"):
        inspect_checkpoint(tmp_path / "m")


def test_tagged_infinities_become_floats(tmp_path):
    path = write_checkpoint(tmp_path, {"model_type": "x", "limit": [0.0, {"__float__": "Infinity"}]}, {"a": mx.ones((1,))})
    assert inspect_checkpoint(path).config["limit"] == [0.0, float("inf")]


@pytest.mark.parametrize(
    "config, names, role",
    [
        ({"model_type": "llama"}, ["model.embed_tokens.weight"], "target"),
        ({"model_type": "qwen3", "dflash_config": {"mask_token_id": 1}}, ["fc.weight"], "drafter"),
        ({"model_type": "qwen3"}, ["model.fc.weight", "model.hidden_norm.weight"], "drafter"),
        ({"speculators_model_type": "dflash2"}, ["fc.weight"], "drafter"),
        ({"speculators_model_type": "eagle3"}, ["fc.weight", "hidden_norm.weight"], "speculators"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, ["fc.weight"], "EAGLE"),
        ({"model_type": "llama"}, ["midlayer.self_attn.q_proj.weight"], "EAGLE"),
        ({"dflash_config": {"projector_type": "dspark"}}, ["fc.weight"], "drafter"),
        ({"architectures": ["Qwen3DSparkModel"]}, ["fc.weight"], "drafter"),
        ({"dflash_config": {"projector_type": "domino"}}, ["fc.weight"], "drafter"),
        ({"architectures": ["QwenDFlareDraftModel"]}, ["layer_fusion_weights"], "drafter"),
        ({"architectures": ["Qwen3DFlashDraftModel"]}, ["layers.0.mlp.up_proj.weight"], "drafter"),
        ({"architectures": ["Qwen3DFlyModel"]}, ["context_proj.weight"], "drafter"),
        ({"model_type": "k3_dspark"}, ["context_proj.weight"], "drafter"),
        ({"architectures": ["MuseGlimmerAssistantModel"]}, ["encoder.fc.weight"], "drafter"),
        ({"medusa_num_heads": 4}, ["0.linear.weight"], "Medusa"),
    ],
)
def test_roles_are_told_apart(tmp_path, config, names, role):
    found = inspect_checkpoint(write_checkpoint(tmp_path, config, {name: mx.ones((1,)) for name in names}))
    assert found.role == role
    for wanted, require in (("target", require_target), ("drafter", require_drafter)):
        if role == wanted:
            require(found)
        else:
            with pytest.raises(
                CheckpointError,
                match=f"{found.source} is .*belongs here",
            ):
                require(found)


def raw_checkpoint(directory, header, data=bytes(64)):
    """A checkpoint whose one weight file has this header (an object, or the text itself) and this data."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(SOME_CONFIG))
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return directory


def entry(shape, *offsets, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


def test_tensors_in_any_order_of_the_header_are_read(tmp_path):
    header = {
        "b": entry([8], 32, 64),
        "empty": entry([0, 3], 32, 32),
        "a": entry([2, 4], 0, 32),
        "__metadata__": {"format": "pt"},
    }
    assert sorted(inspect_checkpoint(raw_checkpoint(tmp_path, header)).tensors) == ["a", "b", "empty"]


DEEP = b"[" * 200_000 + b"]" * 200_000
# safetensors' own reader refuses each of them: a reader of ours would be a second opinion about the format.
DAMAGED = {
    "two tensors at one place": {"a": entry([8], 0, 32), "b": entry([8], 0, 32), "c": entry([8], 32, 64)},
    "overlap": {"a": entry([8], 0, 32), "b": entry([8], 28, 60)},
    "gap": {"a": entry([8], 0, 32), "b": entry([7], 36, 64)},
    "gap at the beginning": {"a": entry([8], 32, 64)},
    "data without a tensor": {"a": entry([8], 0, 32)},
    "no tensor": {},
    "negative offset": {"a": entry([8], -32, 0), "b": entry([16], 0, 64)},
    "end before the beginning": {"a": entry([8], 64, 32)},
    "negative shape": {"a": entry([-4, -4], 0, 64)},
    "fractional shape": {"a": entry([16.0], 0, 64)},
    "fractional offset": {"a": entry([16], 0, 64.0)},
    "true for a number": {"a": entry([True, 16], False, 64)},
    "text for a shape": {"a": entry("16", 0, 64)},
    "text for an offset": {"a": entry([16], "0", "64")},
    "object for a shape": {"a": entry({"16": 1}, 0, 64)},
    "three offsets": {"a": entry([16], 0, 64, 128)},
    "unknown type": {"a": entry([16], 0, 64, dtype="Q4_0")},
    "list for a type": {"a": entry([16], 0, 64, dtype=["F32"])},
    "number for a tensor": {"a": 5},
    "more bytes than the shape": {"a": entry([8], 0, 64)},
    "beyond the file": {"a": entry([32], 0, 128)},
    "list": [1],
    "number": 5,
    "null": None,
    "200,000 deep": DEEP,
    "a number of 5,000 digits": b'{"a": ' + b"9" * 5000 + b"}",
    "bytes": b"\xff{}",
    "metadata that is no map": {"__metadata__": 5, "a": entry([16], 0, 64)},
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_headers_are_refused_with_the_file_and_a_remedy(tmp_path, name):
    with pytest.raises(CheckpointError, match=r"model.safetensors is no whole safetensors file: .*\. Download the file again"):
        inspect_checkpoint(raw_checkpoint(tmp_path, DAMAGED[name]))


@pytest.mark.parametrize("cut", [0, 4, 8, 40, -1])
def test_a_file_that_is_cut_short_is_refused(tmp_path, cut):
    path = write_checkpoint(tmp_path, SOME_CONFIG, {"a": mx.ones((3, 5))})
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"model.safetensors is no whole safetensors file: .*\. Download the file again"):
        inspect_checkpoint(path)


@pytest.mark.parametrize("dtype, shape", [("F64", [8]), ("F8_E5M2", [64])])
def test_number_types_that_mlx_does_not_read_are_named(tmp_path, dtype, shape):
    with pytest.raises(CheckpointError, match=f"a in .*model.safetensors is {dtype}, a number type that MLX does not read"):
        inspect_checkpoint(raw_checkpoint(tmp_path, {"a": entry(shape, 0, 64, dtype=dtype)}))


@pytest.mark.parametrize(
    "dtype, items",
    [("BOOL", 64), ("U8", 64), ("F8_E4M3", 64), ("F8_E8M0", 64), ("BF16", 32), ("I32", 16), ("U64", 8)],
)
def test_a_tensors_bytes_follow_from_its_type_and_shape(tmp_path, dtype, items):
    found = inspect_checkpoint(raw_checkpoint(tmp_path, {"a": entry([items], 0, 64, dtype=dtype)}))
    assert found.tensors["a"].nbytes == 64


def replace(file, make):
    file.unlink()
    make(file)


@pytest.mark.parametrize("name, what", [("config.json", "valid JSON"), ("model.safetensors", "whole safetensors file")])
@pytest.mark.parametrize(
    "make",
    [lambda f: f.mkdir(), lambda f: os.mkfifo(f), lambda f: f.symlink_to("gone"), lambda f: f.symlink_to(f.name)],
    ids=["directory", "pipe", "dangling link", "link to itself"],
)
def test_files_that_are_no_ordinary_files_are_refused_by_name(tmp_path, name, what, make):
    path = write_checkpoint(tmp_path, SOME_CONFIG, {"a": mx.ones((1,))})
    replace(path / name, make)
    with pytest.raises(
        CheckpointError, match=f"{name} is (no {what}: |a symbolic link)|no readable checkpoint: .*{name}|has no {name}"
    ):
        inspect_checkpoint(path)


@pytest.mark.parametrize(
    "text, message",
    [
        (DEEP, ".*recursion"),
        (b'{"a":' * 80 + b"1" + b"}" * 80, "values nested more than 64 deep"),
        (b'{"limit": {"__float__": 5}}', ""),
        (b'{"model_type": "\xff"}', ".*codec can't decode"),
        (b"[]", "list where an object belongs"),
    ],
    ids=["200000 deep", "80 deep", "tag", "bytes", "list"],
)
def test_a_config_that_cannot_be_parsed_is_refused(tmp_path, text, message):
    path = write_checkpoint(tmp_path, SOME_CONFIG, {"a": mx.ones((1,))})
    (path / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=f"config.json is no valid JSON: {message}"):
        inspect_checkpoint(path)


@pytest.mark.parametrize("change", [{"architectures": 5}, {"architectures": [5]}, {"dflash_config": "x"}], ids=str)
def test_a_config_that_names_no_kind_of_model_is_refused(tmp_path, change):
    path = write_checkpoint(tmp_path, SOME_CONFIG | change, {"a": mx.ones((1,))})
    with pytest.raises(CheckpointError, match="config.json is no config with architectures and dflash_config: "):
        require_target(inspect_checkpoint(path))


@pytest.mark.parametrize(
    "name, message",
    [
        ("d.safetensors", "d.safetensors is no whole safetensors file: no ordinary file"),
        ("x" * 5000 + ".safetensors", "File name too long: x+"),
    ],
    ids=["directory", "long name"],
)
def test_an_index_that_names_no_file_is_refused(tmp_path, name, message):
    path = shards(tmp_path)
    (path / "d.safetensors").mkdir()
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"t1": name}}))
    with pytest.raises(CheckpointError, match=message) as error:
        inspect_checkpoint(path)
    assert len(str(error.value)) < 500


def hub_answers(monkeypatch, error):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **kwargs: (_ for _ in ()).throw(error))


def response(status):
    """What the hub's errors keep of an answer, whichever HTTP library is installed."""
    return SimpleNamespace(status_code=status, headers={}, request=None, url="https://huggingface.co/org/name", json=dict)


def test_hub_errors_name_the_page_and_what_to_do(monkeypatch):
    from huggingface_hub import errors as hub

    # Whatever the environment of the tests says.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    cases = [
        (
            hub.GatedRepoError("no", response=response(403)),
            "org/name is gated: .*huggingface.co/org/name, .*set HF_TOKEN",
        ),
        (hub.RepositoryNotFoundError("no", response=response(404)), "neither a directory here nor .*private.*HF_TOKEN"),
        (hub.RevisionNotFoundError("no", response=response(404)), "org/name has no revision v9"),
        (hub.HfHubHTTPError("no", response=response(401)), "no access to org/name .it answered 401.*HF_TOKEN"),
        (hub.LocalEntryNotFoundError("no"), "is not on this machine yet and Hugging Face cannot be reached"),
        (hub.OfflineModeIsEnabled("no"), "is not on this machine yet and HF_HUB_OFFLINE is set"),
        (ConnectionError("unreachable"), "could not be fetched from Hugging Face or its cache: unreachable"),
    ]
    for error, message in cases:
        hub_answers(monkeypatch, error)
        with pytest.raises(CheckpointError, match=message) as raised:
            inspect_checkpoint("org/name", revision="v9")
        # one exception, not the frames of the libraries below
        assert raised.value.__suppress_context__ and raised.value.__cause__ is None


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_full_disk_while_fetching_is_told_as_that(monkeypatch, wrapped):
    from huggingface_hub import errors as hub

    error = OSError(errno.ENOSPC, "No space left on device")
    if wrapped:
        outer = hub.LocalEntryNotFoundError("no")
        outer.__cause__ = error
        error = outer
    hub_answers(monkeypatch, error)
    with pytest.raises(CheckpointError, match="the disk of the hub cache .* is full. Free some space .*what was fetched is kept"):
        inspect_checkpoint("org/name")


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("number", [errno.EEXIST, errno.ENOTDIR, errno.EACCES, errno.EROFS])
def test_a_hub_cache_that_cannot_be_used_names_its_variable(monkeypatch, number, wrapped):
    from huggingface_hub import errors as hub

    error = OSError(number, os.strerror(number), "/some/cache/token")
    if wrapped:
        outer = hub.LocalEntryNotFoundError("no")
        outer.__cause__ = error
        error = outer
    hub_answers(monkeypatch, error)
    said = rf"the hub cache \(.*\) cannot be used: /some/cache/token: {os.strerror(number)}. Set HF_HOME to a directory"
    with pytest.raises(CheckpointError, match=said):
        inspect_checkpoint("org/name")


def test_only_who_set_the_offline_variable_is_told_to_unset_it(monkeypatch):
    from huggingface_hub import errors as hub

    for offline, reason in ((False, "Hugging Face cannot be reached"), (True, "HF_HUB_OFFLINE is set")):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
        hub_answers(monkeypatch, hub.LocalEntryNotFoundError("no"))
        with pytest.raises(CheckpointError, match=f"org/name is not on this machine yet and {reason}") as raised:
            inspect_checkpoint("org/name")
        assert ("Unset HF_HUB_OFFLINE" in str(raised.value)) == offline


def test_a_revision_and_no_code_are_asked_of_the_hub(monkeypatch, tmp_path):
    asked = {}

    def download(repo, **options):
        asked.update(options, repo=repo)
        return str(write_checkpoint(tmp_path, SOME_CONFIG, {"a": mx.ones((1,))}))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert inspect_checkpoint("org/name", revision="v2").revision == "v2"
    assert asked["repo"] == "org/name" and asked["revision"] == "v2"
    assert not any(pattern.endswith((".py", ".bin")) for pattern in asked["allow_patterns"])


# --- which of several files -------------------------------------------------------------------------------------------


def test_a_complete_set_of_shards_beside_a_single_file_is_refused(tmp_path):
    shards(tmp_path, index=False)
    write_checkpoint(tmp_path, SOME_CONFIG, {"stray": mx.ones((2, 2))})
    with pytest.raises(CheckpointError, match="two sets of weights: model.safetensors, and 2 shards .model-00001-of-00002"):
        inspect_checkpoint(tmp_path)


def test_an_empty_name_is_not_the_directory_that_we_are_in(tmp_path, monkeypatch):
    """As of an unset variable of a shell."""
    monkeypatch.chdir(write_checkpoint(tmp_path, SOME_CONFIG, {"a": mx.ones((2, 2))}))
    assert list(inspect_checkpoint(".").tensors) == ["a"]
    with pytest.raises(CheckpointError, match="an empty name does not exist"):
        inspect_checkpoint("")


@pytest.mark.parametrize(
    "spelling", ["model-{:05d}-of-{:06d}", "model_{}-of-{}", "model-{:02d}_of_{:02d}", "model.safetensors-{:05d}-of-{:05d}"]
)
def test_shards_are_known_however_publishers_write_their_numbers(tmp_path, spelling):
    """DeepSeek's have six digits in their count."""
    for i in range(1, 12):
        write_checkpoint(tmp_path, SOME_CONFIG, {f"t{i}": mx.ones((1,))}, spelling.format(i, 11) + ".safetensors")
    assert len(inspect_checkpoint(tmp_path).tensors) == 11
    write_checkpoint(tmp_path, SOME_CONFIG, {"stray": mx.ones((2, 2))})
    with pytest.raises(CheckpointError, match="two sets of weights"):
        inspect_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / f"{spelling.format(7, 11)}.safetensors").unlink()
    with pytest.raises(CheckpointError, match=f"lacks 1 of 11 shards: {spelling.format(7, 11)}"):
        inspect_checkpoint(tmp_path)


def test_two_complete_sets_of_shards_are_refused(tmp_path):
    shards(tmp_path, index=False)
    shards(tmp_path, count=3, index=False)
    with pytest.raises(CheckpointError, match="shards of 2 sets"):
        inspect_checkpoint(tmp_path)


def test_what_is_left_of_another_download_is_left_alone_and_listed(tmp_path):
    write_checkpoint(tmp_path, SOME_CONFIG, {"a": mx.ones((2, 2))})
    write_checkpoint(tmp_path, SOME_CONFIG, {"b": mx.ones((2, 2))}, "model-00002-of-00003.safetensors")
    found = inspect_checkpoint(tmp_path)
    assert list(found.tensors) == ["a"] and found.ignored == {"model-00002-of-00003.safetensors": "beside model.safetensors"}


SIDE_FILES = ["more.safetensors", "more.npz", "more.pt", "extra.bin", "other.gguf", "row.npy"]
SIDE_FILES += ["tf_model.h5", "flax_model.msgpack", "model.onnx", "mask.pkl", "MASK.NPZ", "rust_model.ot"]


@pytest.mark.parametrize("sharded", [False, True])
def test_side_files_that_are_not_read_are_listed(tmp_path, sharded):
    path = shards(tmp_path) if sharded else write_checkpoint(tmp_path, SOME_CONFIG, {"a": mx.ones((2, 2))})
    for name in SIDE_FILES:
        (path / name).write_bytes(b"x")
    for name in ("training_args.bin", "optimizer.pt", "rng_state_0.pth", "tokenizer.model", "model.imatrix.gguf"):
        (path / name).write_bytes(b"x")
    assert sorted(inspect_checkpoint(path).ignored) == sorted(SIDE_FILES)
