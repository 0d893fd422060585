"""A bundle is used as a whole on the model it was made for, or refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from speclight.modules.bundle import HeadBundle, fingerprint, fingerprint_checkpoint, fingerprint_tensors
from speclight.modules.layered_model import LayeredModel
from support import FAMILIES, hf_tiny, tiny_lm

BASE, OTHER = "a" * 64, "b" * 64


def small_bundle(**changes) -> HeadBundle:
    tensors = {"down.weight": torch.arange(6.0).view(2, 3), "draft_ids": torch.tensor([1, 5, 7])}
    fields = {"kind": "exit-heads", "config": {"layers": [4, 8], "rank": 3}, "tensors": tensors}
    return HeadBundle(**fields | {"base_fingerprint": BASE, "base_model": "tiny", "card": {"mat": 1.5}} | changes)


@pytest.fixture
def folder(tmp_path) -> Path:
    small_bundle().save(tmp_path / "bundle")
    return tmp_path / "bundle"


def rewrite(folder: Path, index: dict | None = None, tensors: dict[str, torch.Tensor] | None = None) -> None:
    """Change a bundle by hand, with the sums put right: what remains to be found is the contents."""
    if index is not None:
        stored = json.loads((folder / "bundle.json").read_bytes())
        (folder / "bundle.json").write_text(json.dumps(stored | index))
    if tensors is not None:
        (folder / "weights.safetensors").write_bytes(safetensors.torch.save(tensors))
    sums = [(hashlib.sha256((folder / name).read_bytes()).hexdigest(), name) for name in FILES]
    (folder / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for digest, name in sums))


FILES = ("weights.safetensors", "bundle.json")

# --- what is stored -----------------------------------------------------------------------------------------------


def test_what_is_loaded_is_what_was_saved(folder):
    saved, loaded = small_bundle(), HeadBundle.load(folder, BASE)
    assert saved.tensors.keys() == loaded.tensors.keys()
    for name, tensor in saved.tensors.items():
        assert torch.equal(tensor, loaded.tensors[name]) and tensor.dtype == loaded.tensors[name].dtype
    for name in ("kind", "config", "base_fingerprint", "base_model", "card"):
        assert getattr(saved, name) == getattr(loaded, name)


def test_a_folder_holds_no_pickle_and_the_same_bundle_gives_the_same_bytes(folder, tmp_path):
    small_bundle().save(tmp_path / "again")
    assert sorted(path.name for path in folder.iterdir()) == ["SHA256SUMS", "bundle.json", "weights.safetensors"]
    for path in folder.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_a_bundle_is_a_copy():
    """Heads that are trained on must not change what was exported."""
    weight = torch.zeros(3)
    bundle = small_bundle(tensors={"weight": weight})
    weight.fill_(1.0)
    assert bundle.tensors["weight"].tolist() == [0.0] * 3


def test_a_bundle_in_memory_is_what_it_is_after_loading():
    assert small_bundle(config={"layers": (4, 8)}).config == {"layers": [4, 8]}


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), torch.zeros(2), object()], ids=["nan", "inf", "tensor", "object"]
)
@pytest.mark.parametrize("name", ["card", "config"])
def test_what_json_cannot_hold_is_refused_before_it_is_written(name, value):
    with pytest.raises(ValueError, match=f"{name} must hold"):
        small_bundle(**{name: {"x": value}})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_were_never_loaded_or_have_diverged_cannot_be_exported(value):
    with pytest.raises(ValueError, match=r"tensor 'w' holds NaN"):
        small_bundle(tensors={"w": torch.tensor([1.0, value])})


def test_the_description_names_what_a_user_looks_for(folder):
    text = HeadBundle.load(folder).describe()
    for part in ("exit-heads", "tiny", BASE, "layers: [4, 8]", "rank: 3", "down.weight  float32 [2, 3]", "mat: 1.5"):
        assert part in text


# --- saving -------------------------------------------------------------------------------------------------------


def test_an_interrupted_save_leaves_nothing_and_the_old_bundle_in_place(folder, monkeypatch):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    write, written = Path.write_bytes, []

    def fail_at_the_second(path: Path, data: bytes) -> int:
        written.append(path)
        if len(written) % 2 == 0:
            raise OSError("disk full")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", fail_at_the_second)
    for target in (folder, folder.parent / "new"):
        with pytest.raises(OSError, match="disk full"):
            small_bundle(card={}).save(target, overwrite=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["bundle"]


def test_a_failed_swap_puts_the_old_bundle_back(folder, monkeypatch):
    rename = Path.rename

    def fail_for_the_new(path: Path, target: Path) -> Path:
        if path.name == "new":
            raise OSError("no permission")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_for_the_new)
    with pytest.raises(OSError, match="no permission"):
        small_bundle(card={}).save(folder, overwrite=True)
    assert HeadBundle.load(folder).card == {"mat": 1.5}


def test_a_bundle_replaces_another_only_when_asked(folder):
    with pytest.raises(ValueError, match="not empty; choose another, or overwrite"):
        small_bundle(card={}).save(folder)
    small_bundle(card={}).save(folder, overwrite=True)
    assert HeadBundle.load(folder).card == {}
    assert [path.name for path in folder.parent.iterdir()] == ["bundle"]


def test_a_folder_with_other_files_is_never_replaced(folder, tmp_path):
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds other files \(notes.txt\)"):
        small_bundle().save(folder, overwrite=True)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="is a file"):
        small_bundle().save(tmp_path / "file", overwrite=True)


def test_an_empty_or_missing_folder_is_filled(tmp_path):
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "empty", tmp_path / "a" / "b"):
        small_bundle().save(target)
        assert HeadBundle.load(target, BASE).base_model == "tiny"


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["weights.safetensors", "bundle.json", "SHA256SUMS"])
def test_any_one_changed_byte_is_refused(folder, name):
    """Every byte of every file, one bit of it flipped."""
    data = (folder / name).read_bytes()
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1 << place % 8
        (folder / name).write_bytes(changed)
        with pytest.raises(ValueError, match=r"damaged|format version|is not one"):
            HeadBundle.load(folder)
    (folder / name).write_bytes(data[:-1])
    with pytest.raises(ValueError, match=f"damaged: {name}"):
        HeadBundle.load(folder)


def test_another_base_model_is_refused_with_both_fingerprints(folder):
    with pytest.raises(ValueError, match=f"{BASE} \\(tiny\\), this model is {OTHER}"):
        HeadBundle.load(folder, OTHER)


def test_a_format_from_the_future_is_refused_whatever_else_it_changed(folder):
    rewrite(folder, {"version": 2})
    with pytest.raises(ValueError, match=r"format version 2; this speclight reads up to 1"):
        HeadBundle.load(folder)
    (folder / "SHA256SUMS").write_text("something new")
    with pytest.raises(ValueError, match=r"format version 2"):
        HeadBundle.load(folder)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"draft_ids": None}, "lacks the tensors draft_ids"),
        ({"extra": torch.zeros(1)}, "unexpected tensors: extra"),
        ({"down.weight": torch.zeros(3, 2)}, r"down.weight must be float32 \[2, 3\], got float32 \[3, 2\]"),
        ({"down.weight": torch.zeros(2, 3).half()}, r"must be float32 \[2, 3\], got float16"),
    ],
    ids=["missing", "unexpected", "shape", "dtype"],
)
def test_tensors_other_than_those_listed_are_refused(folder, changed, message):
    tensors = {k: t for k, t in (small_bundle().tensors | changed).items() if t is not None}
    rewrite(folder, tensors=tensors)
    with pytest.raises(ValueError, match=message):
        HeadBundle.load(folder)


@pytest.mark.parametrize("name", ["weights.safetensors", "bundle.json", "SHA256SUMS"])
def test_a_missing_file_is_refused(folder, name):
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"has no {name}"):
        HeadBundle.load(folder)


def test_files_that_only_look_like_a_bundle_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="is not one"):
        HeadBundle.load(tmp_path / "nowhere")
    rewrite(folder, {"more": 1})
    with pytest.raises(ValueError, match="not that of a speclight head bundle"):
        HeadBundle.load(folder)
    (folder / "weights.safetensors").write_bytes(b"no tensors")
    (folder / "bundle.json").write_text("{")
    rewrite(folder)
    with pytest.raises(ValueError, match="is not JSON"):
        HeadBundle.load(folder)


def test_weights_that_cannot_be_read_are_refused(folder):
    (folder / "weights.safetensors").write_bytes(b"no tensors")
    rewrite(folder)
    with pytest.raises(ValueError, match=r"weights.safetensors of bundle .* cannot be read"):
        HeadBundle.load(folder)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"weight": torch.zeros(2, 3)}, "bundle lacks the tensors bias"),
        ({"weight": torch.zeros(2, 3), "bias": torch.zeros(2), "x": torch.zeros(1)}, "unexpected tensors: x"),
        ({"weight": torch.zeros(3, 2), "bias": torch.zeros(2)}, r"weight must be \[2, 3\], got \[3, 2\]"),
    ],
    ids=["missing", "unexpected", "shape"],
)
def test_a_module_gets_all_its_tensors_or_is_left_with_nan(tensors, message):
    """Weights that a failed load leaves behind must not pass for trained ones."""
    module = torch.nn.Linear(3, 2)
    with pytest.raises(ValueError, match=message):
        small_bundle(tensors=tensors).load_into(module)
    assert bool(module.weight.isnan().all()) and bool(module.bias.isnan().all())


def test_a_module_gets_the_tensors_bit_for_bit():
    module, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    small_bundle(tensors=dict(other.state_dict())).load_into(module)
    assert torch.equal(module.weight, other.weight) and torch.equal(module.bias, other.bias)
    assert module.weight.requires_grad


# --- the base model's fingerprint ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_folder_transformers_model_and_layered_model_have_one_fingerprint(family, tied, tmp_path):
    """So that a bundle can be refused before weights are loaded. Sharded files are the same checkpoint too."""
    model = hf_tiny(family, dtype=torch.float32, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    prints = {fingerprint(model), fingerprint_tensors(model.config, model.state_dict())}
    prints |= {fingerprint_checkpoint(tmp_path / name) for name in ("whole", "shards")}
    prints |= {fingerprint(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole"))}
    prints |= {fingerprint(LayeredModel(model, fast=False))}
    assert len(prints) == 1 and len(prints.pop()) == 64


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_a_checkpoint_keeps_its_fingerprint_in_every_wider_dtype(stored, tmp_path):
    """Heads trained on a GPU in bfloat16 serve on a CPU in float32. Narrowing float32 to bfloat16 is covered too."""
    hf_tiny(dtype=stored).save_pretrained(tmp_path)
    expected = fingerprint_checkpoint(tmp_path)
    for dtype in (stored, torch.float32, torch.float64, *([torch.bfloat16] if stored == torch.float32 else [])):
        assert fingerprint(transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)) == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"seed": 1},
        {"num_hidden_layers": 3},
        {"rms_norm_eps": 1e-4},
        {"num_key_value_heads": 4, "num_attention_heads": 8, "head_dim": 4},  # every shape stays
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"tie_word_embeddings": True},
    ],
    ids=str,
)
def test_another_base_model_has_another_fingerprint(settings):
    assert fingerprint(hf_tiny(**settings)) != fingerprint(hf_tiny())


def test_training_any_one_tensor_changes_the_fingerprint():
    """One step of a small learning rate on a single tensor, as of a LoRA that was merged. A value of bfloat16 changes
    with a probability of about a fiftieth then, and a matrix of this size has 500 that are looked at."""
    model = hf_tiny(dtype=torch.float32)
    before = fingerprint(model)
    for parameter in model.parameters():
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.mul_(1.0 + (1e-4 if parameter.ndim > 1 else 1e-2))
            assert fingerprint(model) != before
            parameter.copy_(kept)
    assert fingerprint(model) == before


def test_the_fingerprint_does_not_depend_on_settings_of_generation_or_execution():
    model = hf_tiny()
    before = fingerprint(model)
    model.config.use_cache, model.config.eos_token_id, model.config._attn_implementation = False, 7, "sdpa"
    model.generation_config.temperature = 0.5
    assert fingerprint(model) == before


def test_a_fast_model_is_refused_rather_than_given_another_fingerprint():
    with pytest.raises(ValueError, match="take it from the transformers model before"):
        fingerprint(tiny_lm())


def test_a_folder_without_safetensors_is_refused(tmp_path):
    hf_tiny().config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no model.safetensors"):
        fingerprint_checkpoint(tmp_path)


def test_tensors_that_are_no_decoder_have_no_fingerprint():
    with pytest.raises(ValueError, match="no tensor of a decoder"):
        fingerprint_tensors(hf_tiny().config, {"vision_tower.layers.0.weight": torch.zeros(2, 2)})
