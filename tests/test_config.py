"""Configs: frozen, keyword-only, and every impossible value or combination is one line that names what is wrong."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError, asdict, dataclass, fields
from typing import Any, get_args

import pytest

from minigpt.config import (
    ARCHITECTURES,
    PRESETS,
    ArchitectureName,
    ModelConfig,
    RopeScaling,
    SamplingConfig,
    TrainConfig,
    from_mapping,
    preset_config,
)
from minigpt.errors import ConfigError

MODEL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 16,
}
TRAIN: dict[str, Any] = {
    "total_steps": 10,
    "batch_size": 8,
    "micro_batch_size": 4,
    "context": 16,
    "seed": 0,
    "learning_rate": 1e-3,
    "warmup_steps": 2,
}
LONGER = {"architecture": "mistral", "sliding_window": 8, "rope_scaling": RopeScaling(kind="llama3", factor=8.0)}
KINDS = {
    "model": (ModelConfig, MODEL),
    "longer model": (ModelConfig, MODEL | LONGER),
    "rope scaling": (RopeScaling, {"kind": "linear", "factor": 2.0}),
    "train": (TrainConfig, TRAIN),
    "sampling": (SamplingConfig, {}),
}
every_kind = pytest.mark.parametrize(("cls", "values"), KINDS.values(), ids=KINDS)


def refusal(cls: type[Any], values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        cls(**values)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@dataclass(frozen=True, kw_only=True)
class Outer:
    """Tables inside of a config: one that must be there, one that may be, and one of no kind."""

    first: RopeScaling
    second: RopeScaling | None = None
    other: dict[str, int] | None = None


@every_kind
def test_frozen_and_keyword_only(cls: type[Any], values: dict[str, Any]) -> None:
    config = cls(**values)
    with pytest.raises(FrozenInstanceError):
        setattr(config, fields(cls)[0].name, 1)
    with pytest.raises(TypeError, match="positional"):
        cls(*values.values(), 1)
    assert config == cls(**values)
    assert hash(config) == hash(cls(**values))


@every_kind
def test_a_mapping_round_trip_through_json(cls: type[Any], values: dict[str, Any]) -> None:
    config = cls(**values)
    assert from_mapping(cls, json.loads(json.dumps(asdict(config))), "a.json") == config


@pytest.mark.parametrize(
    ("cls", "values", "message"),
    [
        (ModelConfig, {**MODEL, "hiden_size": 1}, "a.toml: unknown setting 'hiden_size' (known: architecture, dropout"),
        (ModelConfig, {k: v for k, v in MODEL.items() if k != "head_dim"}, "a.toml: setting 'head_dim' is missing"),
        (ModelConfig, {**MODEL, "head_dim": 7}, "a.toml: head_dim 7 is odd; rotary positions need an even one"),
        (ModelConfig, {**MODEL, "architecture": ["qwen3"]}, "a.toml: architecture ('qwen3',) is unknown"),
        (
            ModelConfig,
            {**MODEL, "rope_scaling": {"kind": "linear"}},
            "a.toml: rope_scaling: setting 'factor' is missing",
        ),
        (
            ModelConfig,
            {**MODEL, "rope_scaling": {"kind": "yarn", "factor": 2}},
            "a.toml: rope_scaling: rope_scaling kind",
        ),
        (SamplingConfig, {"top_p": 2}, "a.toml: top_p is 2; it must be in (0, 1]"),
        (SamplingConfig, {"stop": 5}, "a.toml: stop is 5; it must be a list of strings"),
        (TrainConfig, {}, "a.toml: setting 'total_steps' is missing"),
    ],
)
def test_a_mapping_that_is_wrong_names_its_place(cls: type[Any], values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(cls, values, "a.toml")
    assert str(caught.value).startswith(message)


def test_a_table_becomes_what_the_setting_is_made_of() -> None:
    found = from_mapping(Outer, {"first": {"kind": "linear", "factor": 2}, "other": {"a": 1}}, "a.toml")
    assert found == Outer(first=RopeScaling(kind="linear", factor=2), other={"a": 1})
    with pytest.raises(ConfigError, match=r"^a\.toml: second: unknown setting 'x'"):
        from_mapping(Outer, {"first": {"kind": "linear", "factor": 2}, "second": {"x": 1}}, "a.toml")


def test_lists_of_a_file_become_tuples() -> None:
    assert from_mapping(SamplingConfig, {"stop": ["a", "b"]}, "a.toml").stop == ("a", "b")


def test_every_size_must_be_a_whole_number_of_at_least_1() -> None:
    for name in MODEL:
        for wrong in (0, -1, 1.0, "8", None, True, [8], math.nan):
            message = refusal(ModelConfig, MODEL | {name: wrong})
            assert message == f"{name} is {wrong!r}; it must be a whole number of at least 1"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architecture": "bert"},
            "architecture 'bert' is unknown (choose from qwen3, llama, qwen2, mistral, gpt2, transformer-2017)",
        ),
        (
            {"architecture": "mistral", "sliding_window": 0},
            "sliding_window is 0; it must be a whole number of at least 1",
        ),
        ({"sliding_window": 8}, "sliding_window is 8; only architecture mistral has one"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; it must be a table with kind and factor"),
        (
            {"architecture": "gpt2", "num_key_value_heads": 4, "rope_scaling": RopeScaling(kind="linear", factor=2)},
            "rope_scaling needs rotary positions; architecture gpt2 has others",
        ),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"num_key_value_heads": 8}, "num_attention_heads 4 is no multiple of num_key_value_heads 8"),
        ({"head_dim": 7}, "head_dim 7 is odd; rotary positions need an even one"),
        (
            {"architecture": "transformer-2017", "hidden_size": 33},
            "hidden_size 33 is odd; sinusoidal positions need an even one",
        ),
        (
            {"architecture": "gpt2"},
            "architecture gpt2 needs as many key/value heads as heads and head_dim x heads = hidden_size "
            "(got 2 of 4 heads, 8 x 4 and 32)",
        ),
        (
            {"architecture": "gpt2", "num_key_value_heads": 4, "head_dim": 6},
            "architecture gpt2 needs as many key/value heads as heads and head_dim x heads = hidden_size "
            "(got 4 of 4 heads, 6 x 4 and 32)",
        ),
        ({"rope_theta": 0.5}, "rope_theta is 0.5; it must be in [1, inf)"),
        ({"rope_theta": math.inf}, "rope_theta is inf; it must be in [1, inf)"),
        ({"rope_theta": math.nan}, "rope_theta is nan; it must be in [1, inf)"),
        ({"norm_eps": -1e-6}, "norm_eps is -1e-06; it must be in [0, 1]"),
        ({"norm_eps": "1e-6"}, "norm_eps is '1e-6'; it must be in [0, 1]"),
        ({"dropout": 1.0}, "dropout is 1.0; it must be in [0, 0.99]"),
        ({"dropout": True}, "dropout is True; it must be in [0, 0.99]"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; it must be true or false"),
    ],
    ids=str,
)
def test_impossible_models(changes: dict[str, Any], message: str) -> None:
    assert refusal(ModelConfig, MODEL | changes) == message


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 16},  # wider than hidden_size / heads
        {"architecture": "mistral", "sliding_window": 1},
        {"architecture": "mistral", "sliding_window": 100},
        {"rope_scaling": RopeScaling(kind="linear", factor=1)},
        {"num_key_value_heads": 1},
        {"architecture": "transformer-2017", "head_dim": 7},
        {"architecture": "gpt2", "num_key_value_heads": 4},
        {"dropout": 0},
        {"rope_theta": 1},
        {"norm_eps": 0},
    ],
    ids=str,
)
def test_possible_models(changes: dict[str, Any]) -> None:
    assert ModelConfig(**(MODEL | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({name: 0}, f"{name} is 0; it must be a whole number of at least 1") for name in list(TRAIN)[:4]),
        ({"eval_every": 0}, "eval_every is 0; it must be a whole number of at least 1"),
        ({"micro_batch_size": 9}, "micro_batch_size 9 is larger than batch_size 8"),
        ({"warmup_steps": -1}, "warmup_steps is -1; it must be a whole number of at least 0"),
        ({"seed": -1}, "seed is -1; it must be a whole number of at least 0"),
        ({"seed": "x"}, "seed is 'x'; it must be a whole number of at least 0"),
        ({"short_steps": -1}, "short_steps is -1; it must be a whole number of at least 0"),
        ({"short_steps": 1, "context": 7}, "short_steps is 1, and windows of 7 have no half"),
        ({"optimizer": "sgd"}, "optimizer 'sgd' is unknown (choose from adamw, muon)"),
        ({"schedule": "step"}, "schedule 'step' is unknown (choose from cosine, linear)"),
        ({"compute_dtype": "int8"}, "compute_dtype 'int8' is unknown (choose from float32, bfloat16, float16)"),
        ({"learning_rate": -1}, "learning_rate is -1; it must be in [0, 10]"),
        ({"learning_rate": math.nan}, "learning_rate is nan; it must be in [0, 10]"),
        ({"final_learning_rate_ratio": 1.1}, "final_learning_rate_ratio is 1.1; it must be in [0, 1]"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1; it must be in [0, 10]"),
        ({"beta1": 1.0}, "beta1 is 1.0; it must be in [0, 1)"),
        ({"beta2": 1}, "beta2 is 1; it must be in [0, 1)"),
        ({"max_grad_norm": -1.0}, "max_grad_norm is -1.0; it must be in [0, inf]"),
    ],
    ids=str,
)
def test_impossible_runs(changes: dict[str, Any], message: str) -> None:
    assert refusal(TrainConfig, TRAIN | changes) == message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be a whole number of at least 1"),
        ({"temperature": -0.1}, "temperature is -0.1; it must be in [0, inf)"),
        ({"temperature": math.inf}, "temperature is inf; it must be in [0, inf)"),
        ({"temperature": math.nan}, "temperature is nan; it must be in [0, inf)"),
        ({"top_k": 0}, "top_k is 0; it must be a whole number of at least 1"),
        ({"top_k": 1.5}, "top_k is 1.5; it must be a whole number of at least 1"),
        ({"top_p": 0}, "top_p is 0; it must be in (0, 1]"),
        ({"top_p": 1.01}, "top_p is 1.01; it must be in (0, 1]"),
        ({"min_p": -0.1}, "min_p is -0.1; it must be in [0, 1]"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; it must be in (0, inf)"),
        ({"stop": ("a", "")}, "stop: an empty stop string would end every text at once; leave it out"),
        ({"stop": "END"}, "stop is 'END'; it must be a list of strings"),
        ({"stop": (1,)}, "stop is (1,); it must be a list of strings"),
        ({"logprobs": -1}, "logprobs is -1; it must be a whole number of at least 0"),
        ({"logprobs": "5"}, "logprobs is '5'; it must be a whole number of at least 0"),
    ],
    ids=str,
)
def test_impossible_sampling(changes: dict[str, Any], message: str) -> None:
    assert refusal(SamplingConfig, changes) == message


def test_the_borders_of_sampling_are_possible() -> None:
    SamplingConfig(max_new_tokens=1, temperature=0, top_k=1, top_p=1.0, min_p=0.0, logprobs=0)
    SamplingConfig(temperature=100, min_p=1, repetition_penalty=0.5, stop=("a",))


@pytest.mark.parametrize("architecture", get_args(ArchitectureName))
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_fits_every_architecture(preset: str, architecture: ArchitectureName) -> None:
    config = preset_config(preset, vocab_size=1000, architecture=architecture)
    assert config.architecture == architecture
    assert config.head_dim * config.num_attention_heads == config.hidden_size
    assert config.max_position_embeddings == PRESETS[preset].context
    assert preset_config(preset, vocab_size=1000, architecture=architecture, context=99).max_position_embeddings == 99
    # The MLP holds about 8 C^2 weights in every architecture.
    matrices = 3 if config.traits.mlp == "swiglu" else 2
    share = matrices * config.intermediate_size / (8 * config.hidden_size)
    assert 1.0 <= share < 1.13


def test_presets_grow() -> None:
    def body(name: str) -> int:
        config = preset_config(name, vocab_size=1)
        return config.num_hidden_layers * config.hidden_size**2

    sizes = [body(name) for name in PRESETS]
    assert sizes == sorted(set(sizes))


def test_unknown_presets_and_architectures() -> None:
    with pytest.raises(ConfigError, match=r"preset 'giant' is unknown \(choose from nano, micro"):
        preset_config("giant", vocab_size=300)
    with pytest.raises(ConfigError, match="architecture 'bert' is unknown"):
        preset_config("nano", vocab_size=300, architecture="bert")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "yarn"}, "rope_scaling kind 'yarn' is unknown (choose from linear, llama3)"),
        ({"factor": 0.5}, "rope_scaling factor is 0.5; it must be in [1, inf)"),
        ({"factor": math.nan}, "rope_scaling factor is nan; it must be in [1, inf)"),
        ({"low_freq_factor": 0}, "low_freq_factor is 0; it must be in (0, inf)"),
        ({"high_freq_factor": math.inf}, "high_freq_factor is inf; it must be in (0, inf)"),
        ({"low_freq_factor": 4.0}, "high_freq_factor 4.0 is not above low_freq_factor 4.0"),
        (
            {"original_max_position_embeddings": 0},
            "original_max_position_embeddings is 0; it must be a whole number of at least 1",
        ),
    ],
    ids=str,
)
def test_impossible_scaling(changes: dict[str, Any], message: str) -> None:
    assert refusal(RopeScaling, {"kind": "llama3", "factor": 8.0} | changes) == message


def test_a_token_sees_the_smaller_of_window_and_context() -> None:
    assert ModelConfig(**MODEL).window == 16
    for sliding, expected in ((None, 16), (5, 5), (16, 16), (4096, 16)):
        assert ModelConfig(**MODEL, architecture="mistral", sliding_window=sliding).window == expected


def test_the_traits_of_each_architecture() -> None:
    assert set(ARCHITECTURES) == set(get_args(ArchitectureName))
    first = ModelConfig(**MODEL | {"architecture": "transformer-2017"}).traits
    assert (first.positions, first.norm, first.norm_first, first.mlp) == ("sinusoidal", "layer", False, "relu")
    assert first.scale_embedding
    assert ModelConfig(**MODEL).traits.qk_norm
    assert not ModelConfig(**MODEL | {"architecture": "llama"}).traits.qk_norm
    biases = {"gpt2": "all", "transformer-2017": "all", "qwen2": "qkv"}
    assert {name: traits.bias for name, traits in ARCHITECTURES.items()} == dict.fromkeys(
        ARCHITECTURES, "none"
    ) | biases
