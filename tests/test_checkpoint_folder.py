"""Model folders: what is saved comes back bit by bit, and whatever does not fit is one line that names the file."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from variants import VARIANTS, make_model

from minigpt.checkpoint.files import read_json, read_tensors, write_json, write_tensors
from minigpt.checkpoint.folder import holds_model, load, save_description, save_weights
from minigpt.config import ModelConfig
from minigpt.errors import ModelFolderError
from minigpt.text.tokenizer import Tokenizer

EMBEDDING = "model.embed_tokens.weight"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["the cat sat on the mat"] * 2, 262)


def fitted(config: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    return replace(config, vocab_size=tokenizer.vocab_size)


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """A folder with a good qwen3 model, for tests to spoil."""
    return saved(tmp_path / "model", fitted(VARIANTS["qwen3"], tokenizer), tokenizer)


def saved(folder: Path, config: ModelConfig, tokenizer: Tokenizer) -> Path:
    save_description(folder, config, tokenizer, {"made": "in a test"})
    save_weights(folder, make_model(config))
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(ModelFolderError) as caught:
        load(folder)
    text = str(caught.value)
    assert "\n" not in text
    assert str(folder) in text
    return text


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    weights, metadata = read_tensors(folder / "model.safetensors")
    change(weights)
    write_tensors(folder / "model.safetensors", weights, metadata)


def change_config(folder: Path, **changes: Any) -> None:
    raw = read_json(folder / "config.json") | changes
    write_json(folder / "config.json", {key: value for key, value in raw.items() if value is not ...})


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_save_and_load_are_bit_equal(config: ModelConfig, tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = replace(fitted(config, tokenizer), dropout=0.125)
    model = make_model(config)
    save_description(tmp_path / "new" / "model", config, tokenizer, {"é": [1]})
    save_weights(tmp_path / "new" / "model", model)
    loaded = load(tmp_path / "new" / "model")
    assert loaded.model.config == config
    assert loaded.record == {"é": [1]}
    assert loaded.tokenizer.fingerprint() == tokenizer.fingerprint()
    assert loaded.tokenizer.end_ids == tokenizer.end_ids
    assert not loaded.model.training
    assert loaded.model.state_dict().keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], weight), name
    assert (loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight) == config.tie_word_embeddings
    assert all(weight.requires_grad for weight in loaded.model.parameters())
    tokens = torch.tensor([[1, 200, 3]])
    assert torch.equal(loaded.model(tokens), model(tokens))


def test_what_a_folder_holds(folder: Path, tokenizer: Tokenizer) -> None:
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "minigpt.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert EMBEDDING in read_tensors(folder / "model.safetensors")[0]
    assert "lm_head.weight" not in read_tensors(folder / "model.safetensors")[0]  # tied
    assert read_json(folder / "generation_config.json")["eos_token_id"] == list(tokenizer.end_ids)


def test_whether_a_folder_holds_a_model(folder: Path) -> None:
    assert holds_model(folder)
    (folder / "model.safetensors").unlink()
    assert not holds_model(folder)
    assert not holds_model(folder / "none")


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_the_stored_type_is_kept_unless_another_is_asked_for(stored: torch.dtype, folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update({k: v.to(stored) for k, v in weights.items()}))
    expected = read_tensors(folder / "model.safetensors")[0]
    for asked, type_ in ((None, stored), (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)):
        model = load(folder, dtype=asked).model
        assert {weight.dtype for weight in model.parameters()} == {type_}
        assert torch.equal(model.model.embed_tokens.weight, expected[EMBEDDING].to(type_))
        assert model(torch.tensor([[1, 2]])).dtype == type_


def test_mixed_types_become_that_of_the_embedding(folder: Path) -> None:
    change_weights(
        folder, lambda weights: weights.update({k: v.bfloat16() for k, v in weights.items() if "norm" not in k})
    )
    assert {weight.dtype for weight in load(folder).model.parameters()} == {torch.bfloat16}


def test_a_loaded_model_outlives_its_file(folder: Path) -> None:
    model = load(folder).model
    before = model(torch.tensor([[1, 2, 3]]))
    save_weights(folder, make_model(model.config, seed=9))
    assert torch.equal(model(torch.tensor([[1, 2, 3]])), before)
    assert not torch.equal(load(folder).model(torch.tensor([[1, 2, 3]])), before)


def test_no_folder(tmp_path: Path) -> None:
    assert "no such model folder" in refusal(tmp_path / "none")
    assert "holds no model (no config.json in it)" in refusal(tmp_path)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert refusal(folder) == f"{folder} holds no model.safetensors"


def test_a_pickle_alone_is_never_opened(folder: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
            return os.mkdir, (str(tmp_path / "executed"),)

    for name in ("pytorch_model.bin", "model.pt"):
        (folder / name).write_bytes(pickle.dumps(Evil()))
    (folder / "model.safetensors").unlink()
    assert "model.pt is a pickle, which can run code and is never opened" in refusal(folder)
    (folder / "model.safetensors").write_bytes(pickle.dumps(Evil()))
    assert "no safetensors file" in refusal(folder)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("size", [0, 5, 100, 5000])
def test_cut_weights(size: int, folder: Path) -> None:
    os.truncate(folder / "model.safetensors", size)
    assert str(folder / "model.safetensors") in refusal(folder)


def test_a_missing_weight(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.__delitem__("model.layers.1.mlp.up_proj.weight"))
    text = refusal(folder)
    assert str(folder / "model.safetensors") in text
    assert "has no weight 'model.layers.1.mlp.up_proj.weight'" in text


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "_orig_mod.a", "module.x", "a\nb"])
def test_a_weight_with_no_place(name: str, folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update({name: torch.zeros(2)}))
    assert f"has a weight {name!r} with no place" in refusal(folder)


def test_prefixed_weights_are_not_silently_left_out(folder: Path) -> None:
    def prefix(weights: dict[str, Tensor]) -> None:
        for name in list(weights):
            weights[f"_orig_mod.{name}"] = weights.pop(name)

    change_weights(folder, prefix)
    assert "has no weight" in refusal(folder)


def test_a_wrong_shape(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update({"model.norm.weight": torch.ones(31)}))
    assert "model.norm.weight is [31], but config.json asks for [32]" in refusal(folder)
    change_weights(folder, lambda weights: weights.update({"model.norm.weight": torch.ones(1, 32)}))
    assert "model.norm.weight is [1, 32], but config.json asks for [32]" in refusal(folder)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.int64, "I64"), (torch.uint8, "U8"), (torch.bool, "BOOL"), (torch.float8_e4m3fn, "F8_E4M3")],
)
def test_weights_of_other_types(dtype: torch.dtype, name: str, folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update({"model.norm.weight": torch.ones(32).to(dtype)}))
    assert f"model.norm.weight has type {name}; supported are F32, BF16, F16, F64" in refusal(folder)


def test_a_tied_model_that_stores_its_output_embedding_too(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update({"lm_head.weight": weights[EMBEDDING].clone()}))
    model = load(folder).model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_an_untied_model_needs_its_output_embedding(folder: Path) -> None:
    change_config(folder, tie_word_embeddings=False)
    assert "has no weight 'lm_head.weight'" in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported (supported: qwen3, llama, qwen2, mistral, gpt2"),
        ({"model_type": ["llama"]}, "model_type ['llama'] is not supported"),
        ({"model_type": ...}, "model_type None is not supported"),
        ({"model_type": ["qwen3"]}, "model_type ['qwen3'] is not supported"),
        ({"hidden_size": ...}, "no 'hidden_size'"),
        ({"vocab_size": ...}, "no 'vocab_size'"),
        ({"num_attention_heads": ...}, "no 'num_attention_heads'"),
        ({"max_position_embeddings": ...}, "no 'max_position_embeddings'"),
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"hidden_size": 0}, "hidden_size is 0; it must be a whole number of at least 1"),
        ({"hidden_size": -32}, "hidden_size is -32"),
        ({"hidden_size": 32.0}, "hidden_size is 32.0"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"hidden_size": None, "head_dim": None}, "wrong kind"),
        ({"num_attention_heads": 0, "head_dim": None}, "wrong kind"),
        ({"num_attention_heads": 3}, "num_attention_heads 3 is no multiple of num_key_value_heads 2"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"rms_norm_eps": "1e-6"}, "norm_eps is '1e-6'"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        ({"attention_dropout": 2}, "dropout is 2"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope type 'yarn' is not supported"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, "rope type 'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "linear", "type": "llama3"}}, "rope type is both linear and llama3"),
        ({"rope_scaling": {"rope_type": "linear"}}, "no 'factor'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "rope_scaling factor is 0.5"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 1}}, "no 'original_max_position"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4}}, "high_freq_factor 4 is not above low_freq_factor 4"),
        ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 1.5}}, "original_max_position_embeddings is 1"),
        ({"rope_scaling": LLAMA3 | {"attention_factor": 2.0}}, "rope setting attention_factor is 2.0"),
        ({"rope_scaling": LLAMA3 | {"partial_rotary_factor": 0.5}}, "rope setting partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope setting full_attention is {'rope_"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25; that is not supported"),
        ({"is_causal": False}, "is_causal is False; that is not supported"),
        ({"per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config is {'0': {'head_dim': 4}}; that is not"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention'"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "the weights are quantised (gptq), which is not",
        ),
        ({"quantization_config": {"bits": 4}}, "the weights are quantised (an unnamed method)"),
        ({"quantization_config": "fp8"}, "wrong kind"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "quantised (compressed-tensors)"),
        ({"rope_parameters": {"rope_theta": "many"}}, "wrong kind"),
        ({"rope_parameters": {"rope_theta": None}}, "wrong kind"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta is nan"),
        ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta is inf"),
        ({"rope_parameters": [1]}, "wrong kind"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias is set"),
        ({"use_sliding_window": True}, "use_sliding_window is True; that is not supported"),
        ({"mlp_bias": True}, "mlp_bias is True; that is not supported"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0"),
        ({"model_type": "mistral", "layer_types": ["full_attention"]}, "layer_types has 'full_attention'"),
        ({"model_type": "qwen2"}, "has no weight 'model.layers.0.self_attn.k_proj.bias'"),
        ({"vocab_size": 100}, "the tokenizer has 262 tokens, the model only 100"),
        ({"vocab_size": 263}, "but config.json asks for [263, 32]"),
        ({"num_hidden_layers": 3}, "has no weight 'model.layers.2"),
        ({"num_hidden_layers": 1}, "has a weight 'model.layers.1"),
        ({"intermediate_size": 47}, "but config.json asks for"),
        ({"num_hidden_layers": 10**12}, "does not hold a model of the size"),
        ({"head_dim": 10**18}, "does not hold a model of the size"),
        ({"intermediate_size": 10**40}, "does not hold a model of the size"),
        ({"vocab_size": 10**15}, "but config.json asks for"),
        ({"model_type": "llama"}, "has a weight 'model.layers.0.self_attn.k_norm.weight'"),
    ],
    ids=str,
)
def test_a_config_that_is_wrong_or_does_not_fit(changes: dict[str, Any], reason: str, folder: Path) -> None:
    change_config(folder, **changes)
    assert reason in refusal(folder)


@pytest.mark.parametrize("text", ["", "[]", '{"model_type": "qwen3",', "nul"])
def test_a_config_that_is_no_json_object(text: str, folder: Path) -> None:
    (folder / "config.json").write_text(text)
    assert str(folder / "config.json") in refusal(folder)


def test_spoiled_tokenizer_and_record(folder: Path) -> None:
    (folder / "minigpt.json").write_text("[")
    assert "minigpt.json" in refusal(folder)
    (folder / "minigpt.json").unlink()
    assert load(folder).record == {}
    (folder / "tokenizer.json").write_text("{}")
    assert "tokenizer.json" in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"activation_function": "relu"}, "activation_function 'relu' is not supported"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True; that is not supported"),
        ({"scale_attn_weights": False}, "scale_attn_weights is False; that is not supported"),
        ({"add_cross_attention": True}, "add_cross_attention is True; that is not supported"),
        ({"n_head": 5}, "head_dim x heads = hidden_size"),
        ({"n_positions": ...}, "no 'n_positions'"),
        ({"n_inner": 47}, "but config.json asks for"),
        ({"n_positions": 17}, "transformer.wpe.weight is [16, 32], but config.json asks for [17, 32]"),
    ],
    ids=str,
)
def test_a_gpt2_config_that_does_not_fit(
    changes: dict[str, Any], reason: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folder = saved(tmp_path, fitted(VARIANTS["gpt2"], tokenizer), tokenizer)
    change_config(folder, **changes)
    assert reason in refusal(folder)


@pytest.mark.parametrize("shape", [(), (3,), (32, 95), (32, 96, 1), (2,)])
def test_gpt2_weights_that_cannot_be_cut_in_three(shape: tuple[int, ...], tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = saved(tmp_path, fitted(VARIANTS["gpt2"], tokenizer), tokenizer)
    name = "transformer.h.1.attn.c_attn.weight"
    change_weights(folder, lambda weights: weights.update({name: torch.zeros(shape)}))
    assert f"{name} is {list(shape)}, but config.json asks for [32, 96]" in refusal(folder)


def test_a_config_of_a_huge_number_is_refused(folder: Path) -> None:
    text = json.dumps(read_json(folder / "config.json")).replace('"vocab_size": 262', f'"vocab_size": {"9" * 5000}')
    (folder / "config.json").write_text(text)
    refusal(folder)


def test_code_that_a_folder_brings_along_is_never_run(folder: Path, tmp_path: Path) -> None:
    """`auto_map` is passed over: the folder opens as the standard model of its model_type."""
    expected = load(folder).model(torch.tensor([[1, 2, 3]]))
    (folder / "modeling_own.py").write_text(f"import os; os.mkdir({str(tmp_path / 'executed')!r})")
    change_config(folder, auto_map={"AutoConfig": "modeling_own.C", "AutoModelForCausalLM": "modeling_own.M"})
    assert torch.equal(load(folder).model(torch.tensor([[1, 2, 3]])), expected)
    assert not (tmp_path / "executed").exists()
    change_config(folder, model_type="own")
    assert "model_type 'own' is not supported" in refusal(folder)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({"temperature": 0.6, "top_p": 0.9, "do_sample": True}, {"temperature": 0.6, "top_p": 0.9}),
        ({"top_k": 20, "repetition_penalty": 1.1, "max_length": 9}, {"top_k": 20, "repetition_penalty": 1.1}),
        ({"do_sample": False}, {}),
        ({"temperature": None, "top_k": 0, "top_p": None}, {}),
        ({"temperature": 0.0}, {"temperature": 0.0}),
        ({"temperature": 1, "top_p": 1.0, "top_k": 50}, {"temperature": 1, "top_p": 1.0, "top_k": 50}),
    ],
    ids=str,
)
def test_defaults_of_sampling_are_read_and_survive_a_save(
    stored: dict[str, Any], expected: dict[str, Any], folder: Path
) -> None:
    path = folder / "generation_config.json"
    write_json(path, read_json(path) | stored)
    loaded = load(folder)
    assert loaded.generation == expected
    save_description(folder, loaded.model.config, loaded.tokenizer, loaded.record, loaded.generation)
    assert load(folder).generation == expected
    assert read_json(path).get("do_sample") == (
        None if expected.keys() <= {"repetition_penalty"} else bool(expected.get("temperature", 1))
    )
    path.unlink()
    assert load(folder).generation == {}


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": -1}, "temperature is -1"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"top_p": 2}, "top_p is 2"),
        ({"repetition_penalty": [1]}, "repetition_penalty is [1]"),
    ],
    ids=str,
)
def test_impossible_defaults_of_sampling(stored: dict[str, Any], reason: str, folder: Path) -> None:
    path = folder / "generation_config.json"
    write_json(path, read_json(path) | stored)
    assert f"{path}: {reason}" in refusal(folder)
