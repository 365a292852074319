"""A folder opens in `transformers` with the same logits, and theirs open here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from variants import VARIANTS, make_model

from minigpt.checkpoint.files import read_json, read_tensors, write_json, write_tensors
from minigpt.checkpoint.folder import load, save_description, save_weights
from minigpt.checkpoint.huggingface import config_from_hf
from minigpt.config import ModelConfig
from minigpt.errors import ModelFolderError
from minigpt.model.transformer import GPT
from minigpt.text.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")

LONG = 128  # longer than the 100 positions after which a wrong rotary order or theta shows
FOREIGN = {name: config for name, config in VARIANTS.items() if config.architecture != "transformer-2017"}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """No progress bars of theirs on stderr."""
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["the cat sat on the mat"] * 2, 262)


def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found = model(tokens)
    logits: torch.Tensor = found if isinstance(model, GPT) else found.logits
    return logits


def some_tokens(vocab_size: int, length: int = LONG) -> torch.Tensor:
    return torch.randint(0, vocab_size, (2, length), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("config", FOREIGN.values(), ids=FOREIGN)
def test_our_folder_opens_there_with_equal_logits(config: ModelConfig, tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = replace(config, vocab_size=tokenizer.vocab_size, max_position_embeddings=LONG, dropout=0.25)
    model = make_model(config)
    save_description(tmp_path, config, tokenizer, {})
    save_weights(tmp_path, model)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    tokens = some_tokens(config.vocab_size)
    assert logits_of(model, tokens).std() > 0.5
    torch.testing.assert_close(logits_of(theirs.eval(), tokens), logits_of(model, tokens), rtol=1e-4, atol=1e-4)
    assert theirs.config.tie_word_embeddings == config.tie_word_embeddings
    assert theirs.generation_config.eos_token_id == list(tokenizer.end_ids)
    assert theirs.generation_config.bos_token_id == tokenizer.end_of_text_id
    assert theirs.generation_config.pad_token_id == tokenizer.pad_id
    dropouts = {m.p for m in theirs.modules() if isinstance(m, torch.nn.Dropout)} or {theirs.config.attention_dropout}
    assert dropouts == {0.25}


def test_greedy_text_is_the_same_there(tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = replace(VARIANTS["qwen3"], vocab_size=tokenizer.vocab_size, max_position_embeddings=LONG)
    model = make_model(config)
    save_description(tmp_path, config, tokenizer, {})
    save_weights(tmp_path, model)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = some_tokens(config.vocab_size, 5)[:1]
    mask = torch.ones_like(tokens)
    found = theirs.generate(tokens, attention_mask=mask, max_new_tokens=20, do_sample=False, eos_token_id=None)
    expected = tokens
    for _ in range(20):
        expected = torch.cat((expected, logits_of(model, expected)[:, -1:].argmax(-1)), dim=1)
    assert found.tolist() == expected.tolist()


def their_config(kind: str, **changes: Any) -> Any:
    shared = {"vocab_size": 262, "bos_token_id": 0, "eos_token_id": [0, 2], "pad_token_id": None}
    if kind == "gpt2":
        return transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=LONG, **(shared | changes))
    llama = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": LONG,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    }
    kinds = {"qwen3": transformers.Qwen3Config, "llama": transformers.LlamaConfig}
    return kinds[kind](**(shared | llama | changes))


def saved_there(config: Any, tokenizer: Tokenizer, folder: Path) -> Any:
    """A random model of theirs with large weights, saved by their code."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return model


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen3", {}),
        ("qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("qwen3", {"head_dim": 12, "rms_norm_eps": 1e-3}),
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        ("llama", {"head_dim": None, "num_key_value_heads": None, "attention_dropout": 0.1}),
        ("gpt2", {}),
        ("gpt2", {"tie_word_embeddings": False, "n_inner": 48, "layer_norm_epsilon": 1e-3}),
        ("gpt2", {"activation_function": "gelu_pytorch_tanh"}),
    ],
    ids=str,
)
def test_their_folder_opens_here_with_equal_logits(
    kind: str, changes: dict[str, Any], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    theirs = saved_there(their_config(kind, **changes), tokenizer, tmp_path)
    ours = load(tmp_path)
    assert ours.model.config.tie_word_embeddings == theirs.config.tie_word_embeddings
    if kind != "gpt2":
        assert ours.model.config.rope_theta == 500.0
    assert {0, 2} <= set(ours.tokenizer.end_ids)
    tokens = some_tokens(262)
    torch.testing.assert_close(logits_of(ours.model, tokens), logits_of(theirs, tokens), rtol=1e-4, atol=1e-4)
    # And back again.
    save_description(tmp_path / "again", ours.model.config, ours.tokenizer, {})
    save_weights(tmp_path / "again", ours.model)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    torch.testing.assert_close(logits_of(again, tokens), logits_of(theirs, tokens), rtol=1e-4, atol=1e-4)
    assert {0, 2} <= set(again.generation_config.eos_token_id)


def test_their_bfloat16_folder_keeps_its_type(tokenizer: Tokenizer, tmp_path: Path) -> None:
    theirs = saved_there(their_config("llama"), tokenizer, tmp_path)
    theirs.to(torch.bfloat16).save_pretrained(tmp_path)
    assert load(tmp_path).model.lm_head.weight.dtype == torch.bfloat16
    assert load(tmp_path, dtype=torch.float32).model.lm_head.weight.dtype == torch.float32


def test_gpt2_files_of_the_first_release(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Names without a prefix, and the mask stored as if it were a weight."""
    theirs = saved_there(their_config("gpt2"), tokenizer, tmp_path)
    weights, metadata = read_tensors(tmp_path / "model.safetensors")
    old = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
    old |= {f"h.{layer}.attn.bias": torch.ones(1, 1, LONG, LONG).tril() for layer in range(2)}
    old |= {f"h.{layer}.attn.masked_bias": torch.tensor(-1e4) for layer in range(2)}
    write_tensors(tmp_path / "model.safetensors", old, metadata)
    tokens = some_tokens(262)
    torch.testing.assert_close(logits_of(load(tmp_path).model, tokens), logits_of(theirs, tokens), rtol=1e-4, atol=1e-4)


def test_llama_files_that_store_rotary_frequencies(tokenizer: Tokenizer, tmp_path: Path) -> None:
    theirs = saved_there(their_config("llama"), tokenizer, tmp_path)
    weights, metadata = read_tensors(tmp_path / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    write_tensors(tmp_path / "model.safetensors", weights, metadata)
    tokens = some_tokens(262)
    torch.testing.assert_close(logits_of(load(tmp_path).model, tokens), logits_of(theirs, tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_theta": 777.0}, 777.0),
        ({"rope_theta": 777.0, "rope_scaling": None}, 777.0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 777}}, 777.0),
        ({"rope_parameters": {"rope_theta": 777.0}, "rope_theta": 5.0}, 777.0),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 777.0}, 777.0),
        ({}, 10_000.0),
    ],
)
def test_theta_is_found_where_each_generation_keeps_it(rope: dict[str, Any], expected: float) -> None:
    raw = {key: value for key, value in their_config("llama").to_dict().items() if not key.startswith("rope")}
    assert config_from_hf(raw | rope, "config.json").rope_theta == expected


@pytest.mark.parametrize(
    ("rope", "kind"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
    ],
)
def test_other_kinds_of_rope_are_refused(rope: dict[str, Any], kind: str) -> None:
    raw = {key: value for key, value in their_config("llama").to_dict().items() if not key.startswith("rope")}
    with pytest.raises(ModelFolderError, match=f"rope type '{kind}' is not supported"):
        config_from_hf(raw | rope, "config.json")


def test_the_model_of_2017_has_no_counterpart_there_and_says_so(tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = replace(VARIANTS["transformer-2017"], vocab_size=tokenizer.vocab_size)
    save_description(tmp_path, config, tokenizer, {})
    save_weights(tmp_path, make_model(config))
    with pytest.raises(ValueError, match="transformer-2017"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert load(tmp_path).model.config == config


def test_an_older_config_without_newer_keys_opens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    theirs = saved_there(their_config("llama", num_key_value_heads=4, rope_parameters=None), tokenizer, tmp_path)
    raw = read_json(tmp_path / "config.json")
    for key in ("head_dim", "num_key_value_heads", "rope_parameters", "rope_scaling", "attention_bias", "mlp_bias"):
        raw.pop(key, None)
    write_json(tmp_path / "config.json", raw)
    tokens = some_tokens(262)
    torch.testing.assert_close(logits_of(load(tmp_path).model, tokens), logits_of(theirs, tokens), rtol=1e-4, atol=1e-4)
