"""GGUF out and in again: values, names, orders and settings, against the `gguf` package and `transformers`."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf as package
import numpy as np
import pytest
import torch
import transformers
from gguf.constants import GGMLQuantizationType, TokenType
from gguf_bytes import altered
from tiny_folder import TEXT
from variants import VARIANTS, make_model

from minigpt.checkpoint.gguf import encode, read_gguf, write_gguf
from minigpt.checkpoint.gguf_weights import halve, interleave
from minigpt.checkpoint.huggingface import config_to_hf
from minigpt.config import GGUFType, ModelConfig, RopeScaling
from minigpt.errors import ConfigError, ModelFolderError
from minigpt.model.positions import scaled
from minigpt.model.transformer import GPT
from minigpt.text.tokenizer import Tokenizer

TYPES: tuple[GGUFType, ...] = ("f32", "f16", "bf16", "q8_0", "q4_0")
CONTEXT = 128
POSITIONS = (0, 1, 100)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([TEXT, "猫 and café\n"], 290)


def config_of(name: str, tokenizer: Tokenizer, **changes: Any) -> ModelConfig:
    """A config that llama.cpp knows: its windows as long as its context."""
    found = {"vocab_size": tokenizer.vocab_size, "max_position_embeddings": CONTEXT} | changes
    return replace(VARIANTS[name], **{"sliding_window": None} | found)


WRITABLE = [name for name, config in VARIANTS.items() if config.architecture != "transformer-2017"]


def same_scaling(one: ModelConfig, other: ModelConfig) -> bool:
    """Llama 3's settings may come back multiplied by a common factor: the frequencies are the same."""
    if one.rope_scaling is None or other.rope_scaling is None:
        return one.rope_scaling == other.rope_scaling
    frequencies = one.rope_theta ** -(torch.arange(0, one.head_dim, 2) / one.head_dim)
    return torch.allclose(scaled(frequencies, one.rope_scaling), scaled(frequencies, other.rope_scaling), rtol=1e-5)


@torch.no_grad()
def logits(model: GPT, length: int = 101) -> torch.Tensor:
    tokens = torch.arange(length) * 7 % model.config.vocab_size
    return model(tokens[None])[0]


def rounded(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """What is left of a weight, by the package alone, row by row."""
    number = GGMLQuantizationType[kind.upper()]
    rows = [package.dequantize(package.quantize(row[None], number), number)[0] for row in weight.numpy()]
    return torch.from_numpy(np.stack(rows))


@pytest.mark.parametrize("name", WRITABLE)
def test_in_float32_everything_comes_back_bit_for_bit(name: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = make_model(config_of(name, tokenizer))
    path = tmp_path / "model.gguf"
    assert write_gguf(path, model, tokenizer, "f32") == []
    read = read_gguf(path)
    architecture = "llama" if model.config.architecture == "mistral" else model.config.architecture
    assert same_scaling(read.config, model.config)
    assert replace(read.config, rope_scaling=None) == replace(
        model.config, architecture=architecture, rope_scaling=None
    )
    assert read.exact_dtype() == torch.float32
    found = read.build(torch.float32)
    assert not found.training
    ours, theirs = model.state_dict(), found.state_dict()
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []
    assert (found.lm_head.weight is found.model.embed_tokens.weight) == model.config.tie_word_embeddings
    exact = model.config.rope_scaling is None
    torch.testing.assert_close(
        logits(found)[list(POSITIONS)], logits(model)[list(POSITIONS)], rtol=0, atol=0 if exact else 1e-4
    )


@pytest.mark.parametrize("kind", TYPES[1:])
@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen2", "gpt2"])
def test_narrower_types_are_what_the_package_makes_of_each_row(
    name: str, kind: GGUFType, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = make_model(config_of(name, tokenizer, intermediate_size=64))
    path = tmp_path / "model.gguf"
    assert write_gguf(path, model, tokenizer, kind) == []
    found = read_gguf(path).build(torch.float32).state_dict()
    for key, weight in model.state_dict().items():
        wide = weight.dim() == 1 or "embed_positions" in key
        embedding = "q8_0" if kind == "q4_0" else kind
        expected = weight if wide else rounded(weight, embedding if "embed_tokens" in key or "lm_head" in key else kind)
        assert torch.equal(found[key], expected), key
        assert wide or not torch.equal(found[key], weight), key


def test_rows_that_fit_no_blocks_stay_float16(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = make_model(config_of("llama", tokenizer))  # 48 wide in the middle
    path = tmp_path / "model.gguf"
    assert write_gguf(path, model, tokenizer, "q4_0") == ["blk.0.ffn_down.weight", "blk.1.ffn_down.weight"]
    types = {tensor.name: tensor.tensor_type.name for tensor in package.GGUFReader(path).tensors}
    assert types["blk.0.ffn_down.weight"] == "F16"
    assert types["blk.0.ffn_up.weight"] == "Q4_0"
    assert types["token_embd.weight"] == "Q8_0"
    assert types["blk.0.attn_norm.weight"] == "F32"


def test_rows_are_interleaved_as_worked_out_by_hand() -> None:
    rows = torch.arange(8.0)[:, None].expand(8, 3)  # two heads, four wide: pairs (0, 2), (1, 3) and (4, 6), (5, 7)
    assert interleave(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    wide = torch.arange(6.0)[:, None]  # one head: pairs (0, 3), (1, 4), (2, 5)
    assert interleave(wide, 1)[:, 0].tolist() == [0, 3, 1, 4, 2, 5]
    for heads in (1, 2, 4):
        assert torch.equal(halve(interleave(rows, heads), heads), rows)


def test_turned_by_neighbours_the_stored_rows_of_a_llama_attend_alike(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """llama.cpp turns (x[2i], x[2i + 1]): done so by complex numbers, queries and keys have the same products."""
    model = make_model(config_of("llama", tokenizer))
    path = tmp_path / "model.gguf"
    write_gguf(path, model, tokenizer, "f32")
    stored = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in package.GGUFReader(path).tensors}
    config, attention = model.config, model.model.layers[0].self_attn
    x = torch.randn(101, config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        query, key, _ = attention.project(x[None], model.model.rotary(torch.arange(101)))

    def turned(name: str) -> torch.Tensor:
        pairs = (x @ stored[f"blk.0.{name}.weight"].T).unflatten(-1, (-1, config.head_dim // 2, 2)).double()
        speed = config.rope_theta ** -(torch.arange(0, config.head_dim, 2).double() / config.head_dim)
        angle = torch.arange(101).double()[:, None, None] * speed
        return torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)

    queries, keys = turned("attn_q"), turned("attn_k").repeat_interleave(2, dim=1)
    for head, (one, two) in itertools.product(range(4), [(1, 0), (100, 0), (100, 99)]):
        expected = float(query[0, head, one] @ key[0, head // 2, two])
        assert float((queries[one, head] * keys[two, head].conj()).sum().real) == pytest.approx(expected, abs=1e-4)


def test_gpt2_has_query_key_and_value_in_one(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = make_model(config_of("gpt2", tokenizer))
    path = tmp_path / "model.gguf"
    write_gguf(path, model, tokenizer, "f32")
    stored = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in package.GGUFReader(path).tensors}
    attention = model.model.layers[1].self_attn
    for kind in ("weight", "bias"):
        parts = [getattr(projection, kind) for projection in (attention.q_proj, attention.k_proj, attention.v_proj)]
        assert torch.equal(stored[f"blk.1.attn_qkv.{kind}"], torch.cat(parts).detach())
    assert "blk.1.attn_q.weight" not in stored


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "name", ["qwen3-wide-heads", "llama", "llama-untied-ungrouped", "llama-long-rope", "qwen2", "gpt2"]
)
def test_transformers_reads_what_we_write(name: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """It does not read the head width, the rope scaling and GPT-2's width from the file; these it is told."""
    model = make_model(config_of(name, tokenizer, intermediate_size=128))
    write_gguf(tmp_path / "model.gguf", model, tokenizer, "f32")
    config = transformers.AutoConfig.for_model(
        **config_to_hf(model.config, end_of_text_id=tokenizer.end_of_text_id, bos_id=None, pad_id=None)
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", config=config, dtype=torch.float32
    ).eval()
    tokens = torch.arange(101) * 7 % model.config.vocab_size
    with torch.no_grad():
        found = theirs(tokens[None]).logits[0]
    torch.testing.assert_close(found[list(POSITIONS)], logits(model)[list(POSITIONS)], rtol=0, atol=1e-4)


def test_the_metadata_is_what_llama_cpp_looks_for(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = make_model(config_of("qwen3-wide-heads", tokenizer, vocab_size=tokenizer.vocab_size + 2))
    path = tmp_path / "model.gguf"
    about = {"name": "tiny", "license": "mit"}
    write_gguf(path, model, tokenizer, "bf16", about=about, generation={"temperature": 0.7, "top_k": 9})
    reader = package.GGUFReader(path)
    found = {name: (field.types[0].name, field.contents()) for name, field in reader.fields.items()}
    head = {key: value for key, value in found.items() if not key.startswith(("GGUF.", "tokenizer."))}
    assert head == {
        "general.architecture": ("STRING", "qwen3"),
        "general.name": ("STRING", "tiny"),
        "general.license": ("STRING", "mit"),
        "general.type": ("STRING", "model"),
        "general.size_label": ("STRING", head["general.size_label"][1]),
        "general.file_type": ("UINT32", 32),
        "general.sampling.temp": ("FLOAT32", pytest.approx(0.7)),
        "general.sampling.top_k": ("UINT32", 9),
        "qwen3.context_length": ("UINT32", CONTEXT),
        "qwen3.embedding_length": ("UINT32", 32),
        "qwen3.block_count": ("UINT32", 2),
        "qwen3.feed_forward_length": ("UINT32", 48),
        "qwen3.attention.head_count": ("UINT32", 4),
        "qwen3.attention.head_count_kv": ("UINT32", 2),
        "qwen3.attention.key_length": ("UINT32", 12),
        "qwen3.attention.value_length": ("UINT32", 12),
        "qwen3.attention.layer_norm_rms_epsilon": ("FLOAT32", pytest.approx(1e-6)),
        "qwen3.rope.dimension_count": ("UINT32", 12),
        "qwen3.rope.freq_base": ("FLOAT32", 500.0),
        "qwen3.vocab_size": ("UINT32", tokenizer.vocab_size + 2),
    }
    assert found["tokenizer.ggml.tokens"][1][-2:] == [f"[PAD{tokenizer.vocab_size + more}]" for more in range(2)]
    assert found["tokenizer.ggml.token_type"][1][-2:] == [TokenType.UNUSED] * 2
    read = read_gguf(path)
    assert read.config == model.config
    assert read.tokenizer.vocab_size == tokenizer.vocab_size
    assert read.generation() == {"temperature": 0.7, "top_k": 9}


def test_linear_scaling_comes_back(tokenizer: Tokenizer, tmp_path: Path) -> None:
    scaling = RopeScaling(kind="linear", factor=2.5)
    model = make_model(config_of("qwen3", tokenizer, rope_scaling=scaling))
    write_gguf(tmp_path / "model.gguf", model, tokenizer, "f32")
    read = read_gguf(tmp_path / "model.gguf")
    assert read.config == model.config
    assert torch.equal(logits(read.build(torch.float32)), logits(model))


@pytest.mark.parametrize(
    "settings",
    [
        (64, 500_000.0, 32.0, 1.0, 4.0, 8192),  # Llama 3.2
        (32, 10_000.0, 8.0, 2.0, 6.0, 64),  # two frequencies between
        (16, 10_000.0, 4.0, 1.0, 4.0, 100),  # one
        (8, 500.0, 4.0, 0.1, 1.0, 8),
        (128, 10_000.0, 3.0, 1.5, 1.6, 777),  # none
    ],
)
def test_the_scaling_of_llama_3_is_found_from_its_factors(
    settings: tuple[int, float, float, float, float, int], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    head_dim, theta, factor, low, high, original = settings
    scaling = RopeScaling(
        kind="llama3",
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original,
    )
    config = config_of("llama", tokenizer, head_dim=head_dim, rope_theta=theta, rope_scaling=scaling)
    write_gguf(tmp_path / "model.gguf", make_model(config), tokenizer, "f32")
    read = read_gguf(tmp_path / "model.gguf").config
    assert same_scaling(read, config)
    if original == 8192:
        assert read == config
    stored = next(t for t in package.GGUFReader(tmp_path / "model.gguf").tensors if t.name == "rope_freqs.weight").data
    for place, divisor in enumerate(stored):  # as the paper of the model has it, one by one
        frequency = theta ** (-2 * place / head_dim)
        turns = original * frequency / (2 * math.pi)
        kept = min(1.0, max(0.0, (turns - low) / (high - low)))
        assert frequency / divisor == pytest.approx(frequency * (kept + (1 - kept) / factor), rel=1e-5)


def test_types_that_keep_every_value_are_found(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for kind, dtype in (("f16", torch.float16), ("bf16", torch.bfloat16)):
        model = make_model(config_of("llama", tokenizer))
        write_gguf(path, model, tokenizer, kind)
        assert read_gguf(path).exact_dtype() == torch.float32, "norms do not fit"
        model = model.to(dtype).float()
        write_gguf(path, model, tokenizer, kind)
        read = read_gguf(path)
        assert read.exact_dtype() == dtype
        found = read.build(dtype).state_dict()
        assert all(torch.equal(found[key].float(), weight) for key, weight in model.state_dict().items())
        assert read.type_counts() == {"F16" if kind == "f16" else "BF16": 15, "F32": 5}
    write_gguf(path, model, tokenizer, "q8_0")
    assert read_gguf(path).exact_dtype() == torch.float32


def test_bfloat16_is_rounded_as_pytorch_rounds() -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-20, 12).repeat(128)
    raw = encode("w", values.view(64, 64), GGMLQuantizationType.BF16)
    assert torch.equal(torch.from_numpy(raw.copy()).view(torch.bfloat16), values.to(torch.bfloat16))


def test_what_float16_cannot_hold_is_refused_and_nothing_is_left(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = make_model(config_of("llama", tokenizer))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = 1e5
    with pytest.raises(ConfigError, match=r"blk.1.ffn_up.weight holds values beyond float16; choose --type bf16"):
        write_gguf(tmp_path / "model.gguf", model, tokenizer, "f16")
    assert list(tmp_path.iterdir()) == []
    write_gguf(tmp_path / "model.gguf", model, tokenizer, "bf16")


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("transformer-2017", {}, "transformer-2017 has no counterpart in llama.cpp"),
        ("mistral", {"sliding_window": 6}, "sliding window of 6 tokens in a context of 128"),
        ("qwen2", {"head_dim": 12}, "4 heads x 12 is not hidden_size 32"),
        ("qwen3", {"rope_scaling": RopeScaling(kind="llama3", factor=4.0)}, "llama3 cannot be written for qwen3"),
    ],
)
def test_what_llama_cpp_would_not_compute_alike_is_refused(
    name: str, changes: dict[str, Any], words: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = make_model(config_of(name, tokenizer, **changes))
    with pytest.raises(ConfigError, match=words):
        write_gguf(tmp_path / "model.gguf", model, tokenizer, "f32")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def llama(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "llama.gguf"
    write_gguf(path, make_model(config_of("llama", tokenizer)), tokenizer, "f32")
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ModelFolderError) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_that_is_written_again_is_read_alike(llama: Path, tmp_path: Path) -> None:
    path = altered(llama, tmp_path)
    assert read_gguf(path).config == read_gguf(llama).config


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"general.architecture": "phi3"}, "architecture 'phi3' is not supported"),
        ({"llama.block_count": 0}, "num_hidden_layers"),
        ({"llama.block_count": 10**9}, "does not hold a model of the size"),
        ({"llama.block_count": 3}, "has no tensor 'blk.2.attn_k.weight'"),
        ({"llama.block_count": 1}, "has a tensor 'blk.1.attn_k.weight' with no place"),
        ({"llama.block_count": "two"}, "block_count is 'two'; a whole number is needed"),
        ({"llama.attention.head_count": [4, 4]}, "head_count is '[4, 4]'; a whole number is needed"),
        ({"llama.attention.head_count": 0}, "num_attention_heads"),
        ({"llama.attention.head_count": 3}, "num_attention_heads 3 is no multiple"),
        ({"llama.embedding_length": 2**31}, "token_embd.weight is [290, 32], but the metadata asks for"),
        ({f"llama.{key}_length": 2**32 - 1 for key in ("feed_forward", "embedding")}, "not hold a model of the size"),
        ({"llama.context_length": True}, "context_length is 'True'; a whole number is needed"),
        ({"llama.attention.layer_norm_rms_epsilon": "small"}, "rms_epsilon is 'small'; a number is needed"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "rms_epsilon is 'nan'; a number is needed"),
        ({"llama.rope.freq_base": -1.0}, "rope_theta"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count differs from the head width 8"),
        ({"llama.attention.value_length": 16}, "llama.attention.value_length differs from the head width 8"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "rope scaling 'yarn' is not supported"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope' is not supported"),
        ({"llama.rope.scaling.factor": 0.5}, "rope_scaling factor is 0.5"),
        ({"llama.expert_count": 8}, "llama.expert_count is 8; that is not supported"),
        ({"llama.attention.causal": False}, "llama.attention.causal is False; that is not supported"),
        ({"llama.attention.sliding_window": 64}, "llama.attention.sliding_window is 64; that is not supported"),
    ],
)  # fmt: skip
def test_what_the_metadata_says_is_checked(llama: Path, tmp_path: Path, values: dict[str, Any], words: str) -> None:
    assert words in refusal(altered(llama, tmp_path, values=values))


def test_what_the_metadata_lacks_is_named(llama: Path, tmp_path: Path) -> None:
    assert "architecture None" in refusal(altered(llama, tmp_path, values={"general.architecture": ""}))
    for key in ("llama.block_count", "llama.attention.layer_norm_rms_epsilon", "llama.context_length"):
        assert f"{key} is missing" in refusal(altered(llama, tmp_path, drop=(key,)))


def test_what_the_metadata_may_lack_has_the_defaults_of_llama_cpp(llama: Path, tmp_path: Path) -> None:
    keys = ("attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base", "vocab_size")
    read = read_gguf(altered(llama, tmp_path, drop=tuple(f"llama.{key}" for key in keys))).config
    assert read == replace(read_gguf(llama).config, rope_theta=10_000.0)
    read = read_gguf(altered(llama, tmp_path, values={"llama.rope.scaling.factor": 0.0})).config
    assert read.rope_scaling is None
    read = read_gguf(altered(llama, tmp_path, values={"llama.rope.scale_linear": 4.0})).config
    assert read.rope_scaling == RopeScaling(kind="linear", factor=4.0)
    read = read_gguf(altered(llama, tmp_path, values={"llama.rope.scaling.type": "none"})).config
    assert read.rope_scaling is None


@pytest.mark.parametrize(
    ("drop", "tensors", "words"),
    [
        (("blk.1.attn_norm.weight",), {}, "has no tensor 'blk.1.attn_norm.weight'"),
        (("token_embd.weight",), {}, "has no matrix 'token_embd.weight'"),
        ((), {"token_embd.weight": (290,)}, "has no matrix 'token_embd.weight'"),
        ((), {"blk.0.attn_q.bias": (32,)}, "has a tensor 'blk.0.attn_q.bias' with no place"),
        ((), {"blk.0.attn_q.weight": (16, 32)}, "blk.0.attn_q.weight is [16, 32], but the metadata asks for [32, 32]"),
        ((), {"output.weight": (289, 32)}, "output.weight is [289, 32], but the metadata asks for [290, 32]"),
        ((), {"rope_freqs.weight": (5,)}, "rope_freqs.weight does not go with its head width"),
        ((), {"rope_freqs.weight": (4,)}, "rope_freqs.weight is not the scaling of Llama 3.1"),
    ],
)
def test_tensors_are_checked(
    llama: Path, tmp_path: Path, drop: tuple[str, ...], tensors: dict[str, tuple[int, ...]], words: str
) -> None:
    draw = np.random.default_rng(0)
    arrays = {name: draw.uniform(1.0, 2.0, shape).astype(np.float32) for name, shape in tensors.items()}
    assert words in refusal(altered(llama, tmp_path, drop=drop, tensors=arrays))


def test_two_kinds_of_rope_scaling_are_refused(llama: Path, tmp_path: Path) -> None:
    factors = {"rope_freqs.weight": np.array([1, 1, 2, 2], dtype=np.float32)}
    path = altered(llama, tmp_path, tensors=factors, values={"llama.rope.scaling.factor": 2.0})
    assert "other rope scaling" in refusal(path)
    assert read_gguf(altered(llama, tmp_path, tensors=factors)).config.rope_scaling is not None
    ones = {"rope_freqs.weight": np.ones(4, dtype=np.float32)}
    assert read_gguf(altered(llama, tmp_path, tensors=ones)).config.rope_scaling is None


def test_an_untied_output_is_told_from_a_tied_one(llama: Path, tmp_path: Path) -> None:
    output = {"output.weight": np.full((290, 32), 0.5, dtype=np.float32)}
    read = read_gguf(altered(llama, tmp_path, tensors=output))
    assert not read.config.tie_word_embeddings
    assert bool((read.build(torch.float32).lm_head.weight == 0.5).all())


def test_settings_of_sampling_that_cannot_be_are_left_out(llama: Path, tmp_path: Path) -> None:
    values = {"temp": -1.0, "top_p": 0.9, "top_k": "many", "penalty_repeat": float("nan"), "mirostat": 2}
    read = read_gguf(
        altered(llama, tmp_path, values={f"general.sampling.{key}": value for key, value in values.items()})
    )
    assert read.generation() == {"top_p": 0.9}
