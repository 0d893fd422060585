"""What is loaded is what was meant, and what cannot be run is refused before any weight is read."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch
from checkpoint import TOKENS, save_gguf, save_tiny, tiny_tokenizer
from safetensors.torch import load_file, save_file
from speclight.infer import loading
from speclight.infer.loading import (
    check_same_tokenizer,
    load_model,
    load_tokenizer,
    load_weights,
    resolve_device,
    resolve_dtype,
    resolve_model,
    text_config,
)
from speclight.modules.batch import BatchItem, RaggedBatch
from support import hf_tiny

IDS = [3, 17, 42, 8]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "model")


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def ruin_weights(folder: Path) -> None:
    """From here on, reading the weights fails."""
    (folder / "model.safetensors").write_bytes(b"not weights")


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model(RaggedBatch.build([BatchItem(IDS)], None))


def reference_logits() -> torch.Tensor:
    with torch.no_grad():
        return hf_tiny("llama", 0, torch.float32)(torch.tensor([IDS])).logits[0]


def test_a_folder_loads_with_its_own_weights_and_tokenizer(folder: Path) -> None:
    model, tokenizer = load_model(str(folder))
    torch.testing.assert_close(logits_of(model), reference_logits(), atol=1e-5, rtol=1e-5)  # float32 rounding
    assert tokenizer.decode(tokenizer("Hi there").input_ids) == "Hi there"


def test_loading_prints_nothing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    load_model(str(folder))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("stored", "asked", "got"),
    [
        (torch.float32, "auto", torch.float32),
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.float16, "auto", torch.float32),
        (torch.float16, "float16", torch.float16),
        (torch.bfloat16, "float32", torch.float32),
    ],
)
def test_auto_keeps_the_dtype_of_the_checkpoint_except_float16_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stored: torch.dtype, asked: str, got: torch.dtype
) -> None:
    model, _ = load_model(str(save_tiny(tmp_path, dtype=stored)), dtype=asked, device="cpu")
    assert model.dtype == got
    assert ("using float32" in capsys.readouterr().err) == (stored == torch.float16 and asked == "auto")


def test_an_unsupported_architecture_is_refused_by_name_before_weights_are_read(folder: Path) -> None:
    edit_config(folder, model_type="mamba", architectures=["MambaForCausalLM"])
    ruin_weights(folder)
    with pytest.raises(ValueError, match=r"'mamba' \(MambaForCausalLM\).*supported: llama, "):
        resolve_model(str(folder))


@pytest.mark.parametrize("missing", ["model.safetensors", "tokenizer.json"])
def test_what_a_model_is_comes_before_what_it_lacks(folder: Path, missing: str) -> None:
    """Who mends the missing file first would only then learn that it was for nothing."""
    for path in folder.glob(missing.partition(".")[0] + "*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors|no tokenizer"):
        resolve_model(str(folder))
    edit_config(folder, model_type="mamba", architectures=["MambaForCausalLM"])
    with pytest.raises(ValueError, match=r"'mamba' \(MambaForCausalLM\).*supported: llama, "):
        resolve_model(str(folder))


def test_a_gguf_file_of_an_unsupported_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "other.gguf"), "rwkv7")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"other\.gguf.*rwkv7"):
        resolve_model(str(tmp_path / "other.gguf"))


@pytest.mark.parametrize("content", ["{not json", "[1]", '{"model_type": 3}', "{}"])
def test_a_configuration_that_cannot_be_read_is_a_users_error_not_a_crash(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ValueError, match=str(folder)):
        load_model(str(folder))


def test_the_limits_known_before_weights_are_those_of_the_model(folder: Path, tmp_path: Path) -> None:
    gguf_source = resolve_model(str(save_gguf(tmp_path / "tiny.gguf")), cache_dir=str(tmp_path / "cache"))
    for source in (resolve_model(str(folder)), gguf_source):
        config, model = text_config(source), load_weights(source)
        assert (config.vocab_size, config.max_position_embeddings) == (model.vocab_size, model.max_positions)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors"])
def test_a_quantised_checkpoint_is_refused_by_name_before_weights_are_read(folder: Path, method: str) -> None:
    edit_config(folder, quantization_config={"quant_method": method})
    ruin_weights(folder)
    with pytest.raises(ValueError, match=method):
        load_model(str(folder))


def test_a_pickle_is_refused_unless_allowed(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"pytorch_model\.bin.*--allow-pickle"):
        load_model(str(folder))
    model, _ = load_model(str(folder), allow_pickle=True)
    torch.testing.assert_close(logits_of(model), reference_logits(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["nope", "/no/such/folder", "weights.gguf", "owner/file.gguf", "a/b/c"])
def test_a_path_that_does_not_exist_says_what_would_be_valid(name: str) -> None:
    with pytest.raises(ValueError, match=rf"'{name}' does not exist; it must be a hub id .*folder.*\.gguf"):
        resolve_model(name)


def test_a_misspelt_path_below_an_existing_folder_is_not_looked_up_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(ValueError, match="does not exist"):
        resolve_model("models/smol")


def test_a_hub_id_that_cannot_be_fetched_is_an_error_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise OSError("no connection\nand more lines")

    monkeypatch.setattr(loading.PreTrainedConfig, "get_config_dict", offline)
    with pytest.raises(ValueError, match=r"'owner/name' has no configuration that can be read \(no connection\)"):
        resolve_model("owner/name")


def test_a_model_without_a_tokenizer_is_refused_before_weights_are_read(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    ruin_weights(folder)
    with pytest.raises(ValueError, match=r"no tokenizer: none of tokenizer\.json"):
        load_model(str(folder))


def test_a_broken_tokenizer_is_a_one_line_error(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="no tokenizer that can be loaded") as raised:
        load_tokenizer(resolve_model(str(folder)))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("contents", [[], ["a.gguf", "b.gguf"]])
def test_a_folder_that_is_no_model_says_what_it_lacks(tmp_path: Path, contents: list[str]) -> None:
    for name in contents:
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"2 \.gguf files" if contents else "neither config.json nor a .gguf"):
        resolve_model(str(tmp_path))


def test_a_missing_shard_is_found_before_weights_are_read(folder: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"not weights")
    with pytest.raises(ValueError, match="lacks the weight files model-00002-of-00002"):
        resolve_model(str(folder))


def test_damaged_weights_are_a_users_error_not_a_crash(folder: Path) -> None:
    ruin_weights(folder)
    with pytest.raises(ValueError, match="cannot be read"):
        load_model(str(folder))


def test_weights_that_are_missing_are_refused_instead_of_random(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"incomplete: model\.layers\.2\.mlp\.up_proj\.weight"):
        load_model(str(folder))


def test_dtype_device_and_attention_are_checked_before_the_model_is_looked_for() -> None:
    with pytest.raises(ValueError, match="dtype must be one of auto, float32"):
        load_model("nope", dtype="float23")
    with pytest.raises(ValueError, match="device must be auto, cpu, cuda or cuda:N"):
        load_model("nope", device="gpu")
    with pytest.raises(ValueError, match="attention must be one of sdpa, flex, got 'flash'"):
        load_model("nope", attention="flash")
    with pytest.raises(ValueError, match="is not there"):
        resolve_device("cuda:99")
    assert resolve_dtype("bfloat16") is torch.bfloat16


def test_a_gguf_file_is_converted_once_and_its_weights_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path, cache = save_gguf(tmp_path / "tiny.gguf"), str(tmp_path / "cache")
    model, tokenizer = load_model(str(path), cache_dir=cache)
    torch.testing.assert_close(logits_of(model), reference_logits(), atol=1e-5, rtol=1e-5)
    assert tokenizer("ab").input_ids == [TOKENS.index("ab")]
    assert capfd.readouterr().err.count("\n") == 1  # the message, and no bars

    monkeypatch.setattr(loading, "_dequantise", None)  # a second conversion would fail
    again, _ = load_model(str(tmp_path), cache_dir=cache)  # the folder with this one file
    assert torch.equal(logits_of(again), logits_of(model))
    assert capfd.readouterr().err == ""


def test_a_gguf_file_that_changed_is_converted_anew(tmp_path: Path) -> None:
    path, cache = save_gguf(tmp_path / "tiny.gguf"), str(tmp_path / "cache")
    before, _ = load_model(str(path), cache_dir=cache)
    save_gguf(path, seed=1)
    after, _ = load_model(str(path), cache_dir=cache)
    assert not torch.equal(logits_of(before), logits_of(after))


def test_a_conversion_that_was_cut_off_leaves_nothing_that_would_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(source: loading.ModelSource, target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise KeyboardInterrupt

    source = resolve_model(str(save_gguf(tmp_path / "tiny.gguf")), cache_dir=str(tmp_path / "cache"))
    with monkeypatch.context() as patch:
        patch.setattr(loading, "_dequantise", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load_weights(source)
    assert list((tmp_path / "cache").iterdir()) == []
    torch.testing.assert_close(logits_of(load_weights(source)), reference_logits(), atol=1e-5, rtol=1e-5)


def test_a_drafter_with_another_tokenizer_is_refused_naming_both_and_the_first_difference() -> None:
    other = tiny_tokenizer(tokens=[*TOKENS[:40], TOKENS[41], TOKENS[40], *TOKENS[42:]])
    with pytest.raises(ValueError, match=rf"'small'.*'big'.*token id 40 is '{TOKENS[41]}'.*'{TOKENS[40]}'"):
        check_same_tokenizer(tiny_tokenizer(), other, "big", "small")


def test_another_added_token_for_the_same_id_is_refused() -> None:
    target, draft = tiny_tokenizer(), tiny_tokenizer()
    target.add_tokens(["<think>"])
    draft.add_tokens(["<tool>"])
    with pytest.raises(ValueError, match=r"token id 96 is '<tool>'.*'<think>'"):
        check_same_tokenizer(target, draft, "big", "small")


@pytest.mark.parametrize("merges", [[("b", "c"), ("a", "b")], [("a", "b")], []])
def test_other_merges_for_the_same_vocabulary_are_refused(merges: list[tuple[str, str]]) -> None:
    tokens = [*TOKENS, "bc"]
    target = tiny_tokenizer(tokens=tokens, merges=[("a", "b"), ("b", "c")])
    with pytest.raises(ValueError, match=r"merge [01] is .* here"):
        check_same_tokenizer(target, tiny_tokenizer(tokens=tokens, merges=merges), "big", "small")


def test_vocabularies_padded_to_different_sizes_are_the_same_tokenizer() -> None:
    longer = tiny_tokenizer()
    longer.add_tokens(["<pad0>", "<pad1>"])
    check_same_tokenizer(tiny_tokenizer(), longer)
    check_same_tokenizer(longer, tiny_tokenizer())


@pytest.mark.model
@pytest.mark.xdist_group("model")
def test_the_demo_model_loads_from_its_gguf_file(smollm2: tuple[str, str]) -> None:
    path, cache_dir = smollm2
    model, tokenizer = load_model(str(Path(path).parent), cache_dir=cache_dir)
    assert (model.num_layers, model.vocab_size) == (30, 49152)
    assert tokenizer.chat_template
