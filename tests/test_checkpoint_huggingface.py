"""A folder opens in `transformers` with the same logits, and theirs open here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from variants import VARIANTS, make_model

from minigpt.checkpoint.files import read_json, read_tensors, write_json, write_tensors
from minigpt.checkpoint.folder import load, save_description, save_weights
from minigpt.checkpoint.huggingface import config_from_hf, config_to_hf, layout, stored_name
from minigpt.config import ModelConfig, RopeScaling
from minigpt.errors import ModelFolderError
from minigpt.model.cache import KVCache
from minigpt.model.transformer import GPT
from minigpt.text.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")

LONG = 128  # longer than the 100 positions after which a wrong rotary order or theta shows
LLAMA3 = {  # positions past 32 are past the first training
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
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


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found = model(tokens)
    logits: torch.Tensor = found if isinstance(model, GPT) else found.logits
    return logits


@torch.no_grad()
def cached_logits(model: GPT, tokens: torch.Tensor) -> torch.Tensor:
    """In pieces, through a ring no longer than the widest of them asks for."""
    sizes = [40, *[1] * 8, 40, 20, *[1] * 20]
    cache = KVCache(model.config, len(tokens), min(LONG, model.config.window + max(sizes) - 1))
    return torch.cat([model(piece, cache) for piece in tokens.split(sizes, dim=1)], dim=1)


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
    close(logits_of(theirs.eval(), tokens), logits_of(model, tokens))
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
    kinds = {
        "qwen3": transformers.Qwen3Config,
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "mistral": transformers.MistralConfig,
    }
    return kinds[kind](**(shared | llama | changes))


def saved_there(
    config: Any, tokenizer: Tokenizer, folder: Path, dtype: torch.dtype = torch.float32, **options: Any
) -> Any:
    """A random model of theirs with large weights, saved by their code."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    model.to(dtype).save_pretrained(folder, **options)
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
        ("llama", {"head_dim": 12, "tie_word_embeddings": True, "rope_parameters": LLAMA3}),
        ("llama", {"rope_parameters": LINEAR}),
        ("qwen3", {"rope_parameters": LINEAR}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4, "rope_parameters": LLAMA3}),
        ("qwen2", {"head_dim": 12, "sliding_window": 8, "max_window_layers": 1}),  # without use_sliding_window
        ("mistral", {"sliding_window": 24}),
        ("mistral", {"sliding_window": None, "num_key_value_heads": 1, "tie_word_embeddings": True}),
        ("mistral", {"head_dim": 12}),  # whose window of 4096 is larger than the context
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
    assert logits_of(theirs, tokens).std() > 0.5
    close(logits_of(ours.model, tokens), logits_of(theirs, tokens))
    close(cached_logits(ours.model, tokens), logits_of(theirs, tokens))
    # And back again.
    save_description(tmp_path / "again", ours.model.config, ours.tokenizer, {})
    save_weights(tmp_path / "again", ours.model)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    close(logits_of(again, tokens), logits_of(theirs, tokens))
    assert {0, 2} <= set(again.generation_config.eos_token_id)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("kind", "changes"),
    [("llama", {"rope_parameters": LLAMA3}), ("qwen2", {}), ("mistral", {"sliding_window": 24}), ("gpt2", {})],
    ids=str,
)
def test_their_narrow_sharded_folder_opens_here_and_ours_there(
    kind: str, changes: dict[str, Any], dtype: torch.dtype, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    saved_there(their_config(kind, **changes), tokenizer, tmp_path, dtype, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    assert not (tmp_path / "model.safetensors").exists()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = some_tokens(262)
    kept = load(tmp_path)
    assert {weight.dtype for weight in kept.model.parameters()} == {dtype}
    ours = load(tmp_path, dtype=torch.float32)
    close(logits_of(ours.model, tokens), logits_of(theirs, tokens))
    # And back again, as narrow and in as many files.
    save_description(tmp_path / "again", kept.model.config, kept.tokenizer, {})
    save_weights(tmp_path / "again", ours.model, dtype, 20_000)
    assert len(list((tmp_path / "again").glob("model-*-of-*.safetensors"))) > 2
    again, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(report.values()), report
    assert again.dtype == dtype  # that is what config.json says
    close(logits_of(again.float().eval(), tokens), logits_of(theirs, tokens))


def test_gpt2_files_of_the_first_release(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Names without a prefix, and the mask stored as if it were a weight."""
    theirs = saved_there(their_config("gpt2"), tokenizer, tmp_path)
    weights, metadata = read_tensors(tmp_path / "model.safetensors")
    old = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
    old |= {f"h.{layer}.attn.bias": torch.ones(1, 1, LONG, LONG).tril() for layer in range(2)}
    old |= {f"h.{layer}.attn.masked_bias": torch.tensor(-1e4) for layer in range(2)}
    write_tensors(tmp_path / "model.safetensors", old, metadata)
    tokens = some_tokens(262)
    close(logits_of(load(tmp_path).model, tokens), logits_of(theirs, tokens))


def test_a_gpt2_weight_with_its_prefix_and_without(tokenizer: Tokenizer, tmp_path: Path) -> None:
    saved_there(their_config("gpt2"), tokenizer, tmp_path)
    weights, metadata = read_tensors(tmp_path / "model.safetensors")
    weights["h.0.ln_1.weight"] = weights["transformer.h.0.ln_1.weight"] + 1
    write_tensors(tmp_path / "model.safetensors", weights, metadata)
    with pytest.raises(ModelFolderError, match=r"has a weight 'transformer\.h\.0\.ln_1\.weight' twice"):
        load(tmp_path)


def test_llama_files_that_store_rotary_frequencies(tokenizer: Tokenizer, tmp_path: Path) -> None:
    theirs = saved_there(their_config("llama"), tokenizer, tmp_path)
    weights, metadata = read_tensors(tmp_path / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    write_tensors(tmp_path / "model.safetensors", weights, metadata)
    tokens = some_tokens(262)
    close(logits_of(load(tmp_path).model, tokens), logits_of(theirs, tokens))


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
    "rope",
    [
        {"rope_theta": 500.0, "rope_scaling": LLAMA3},
        {"rope_theta": 500.0, "rope_scaling": {"type": "llama3"} | LLAMA3},
        {"rope_theta": 500.0, "rope_scaling": {key: value for key, value in LLAMA3.items() if "theta" not in key}},
        {"rope_parameters": LLAMA3},
        {"rope_parameters": LLAMA3, "rope_scaling": None, "rope_theta": 7.0},
        {
            "rope_parameters": {key: value for key, value in LLAMA3.items() if "original" not in key},
            "original_max_position_embeddings": 32,
        },
    ],
)
def test_scaling_is_found_where_each_generation_keeps_it(rope: dict[str, Any]) -> None:
    """And where our own code has it, `transformers` of today reads the same."""
    raw = {key: value for key, value in their_config("llama").to_dict().items() if not key.startswith("rope")}
    config = config_from_hf(raw | rope, "config.json")
    assert config.rope_theta == 500.0
    assert config.rope_scaling == RopeScaling(
        kind="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
    )
    theirs = transformers.LlamaConfig(**raw | json.loads(json.dumps(rope)))
    theirs.standardize_rope_params()  # as their model does
    assert {key: theirs.rope_parameters[key] for key in LLAMA3} == LLAMA3


def test_two_lengths_of_the_first_training_are_one_too_many() -> None:
    raw = their_config("llama").to_dict() | {"rope_parameters": LLAMA3, "original_max_position_embeddings": 64}
    with pytest.raises(ModelFolderError, match="original_max_position_embeddings is both 32 and 64"):
        config_from_hf(raw, "config.json")


def test_linear_scaling_of_older_files() -> None:
    raw = {key: value for key, value in their_config("llama").to_dict().items() if not key.startswith("rope")}
    config = config_from_hf(raw | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "config.json")
    assert config.rope_scaling == RopeScaling(kind="linear", factor=2.0)


@pytest.mark.parametrize("config", FOREIGN.values(), ids=FOREIGN)
def test_either_generation_of_transformers_finds_all_of_the_rope_in_our_config(config: ModelConfig) -> None:
    raw = config_to_hf(config, end_of_text_id=0, bos_id=None, pad_id=None)
    for older in ("rope_parameters", "rope_scaling"):
        assert config_from_hf({key: value for key, value in raw.items() if key != older}, "config.json") == config
    if config.traits.positions == "rotary":
        assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == config.rope_theta
        assert (raw["rope_scaling"] is None) == (config.rope_scaling is None)
    assert ("attention_bias" in raw) == (config.architecture in ("qwen3", "llama"))
    assert ("sliding_window" in raw) == (config.architecture == "mistral")


def test_a_window_that_is_not_named_is_that_of_their_class() -> None:
    raw = {key: value for key, value in their_config("mistral").to_dict().items() if key != "sliding_window"}
    assert config_from_hf(raw, "config.json").sliding_window == transformers.MistralConfig().sliding_window == 4096
    assert config_from_hf(raw | {"sliding_window": None}, "config.json").sliding_window is None


def test_defaults_of_sampling_are_found_there(tokenizer: Tokenizer, tmp_path: Path) -> None:
    config, chosen = VARIANTS["llama"], {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
    save_description(tmp_path, replace(config, vocab_size=tokenizer.vocab_size), tokenizer, {}, chosen)
    theirs = transformers.GenerationConfig.from_pretrained(tmp_path)
    assert {name: getattr(theirs, name) for name in chosen} == chosen
    assert theirs.do_sample
    assert theirs.eos_token_id == list(tokenizer.end_ids)


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
    close(logits_of(load(tmp_path).model, tokens), logits_of(theirs, tokens))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("model.embed_positions.weight", "transformer.wpe.weight"),
        ("model.layers.10.self_attn.k_proj", "transformer.h.10.attn.c_attn"),
        ("model.layers.1.self_attn.v_proj.bias", "transformer.h.1.attn.c_attn.bias"),
        ("model.layers.1.self_attn.o_proj", "transformer.h.1.attn.c_proj"),
        ("model.layers.0.mlp.down_proj", "transformer.h.0.mlp.c_proj"),
        ("model.layers.0.post_attention_layernorm.bias", "transformer.h.0.ln_2.bias"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_one_name_for_weights_and_for_the_modules_of_adapters(ours: str, theirs: str) -> None:
    assert stored_name(ours, VARIANTS["gpt2"]) == theirs
    assert stored_name(ours, VARIANTS["llama"]) == ours


def test_query_key_and_value_of_gpt2_are_in_this_order_whatever_order_they_come_in() -> None:
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "vqko"]
    assert layout(names, VARIANTS["gpt2"]) == {
        "transformer.h.0.attn.c_attn.weight": (names[1], names[2], names[0]),
        "transformer.h.0.attn.c_proj.weight": (names[3],),
    }
