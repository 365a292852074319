"""Every setting of a model, a training run and sampling: frozen, keyword-only, checked when made."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from minigpt.errors import ConfigError

ArchitectureName = Literal["qwen3", "llama", "qwen2", "mistral", "gpt2", "transformer-2017"]
DTypeName = Literal["float32", "bfloat16", "float16"]
GGUFType = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]
QuantizeName = Literal["int8", "int4"]
ScheduleName = Literal["cosine", "linear"]
OptimizerName = Literal["adamw", "muon"]
PresetName = Literal["nano", "micro", "tiny", "mini", "small", "medium", "base", "large", "xl"]

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What sets one family of decoders apart from the others."""

    positions: Literal["rotary", "learned", "sinusoidal"]
    norm: Literal["rms", "layer"]
    norm_first: bool
    mlp: Literal["swiglu", "gelu", "relu"]
    bias: Literal["none", "qkv", "all"]
    qk_norm: bool
    scale_embedding: bool


_LLAMA = Architecture(
    positions="rotary", norm="rms", norm_first=True, mlp="swiglu", bias="none", qk_norm=False, scale_embedding=False
)
ARCHITECTURES: dict[str, Architecture] = {
    "qwen3": replace(_LLAMA, qk_norm=True),
    "llama": _LLAMA,
    "qwen2": replace(_LLAMA, bias="qkv"),
    "mistral": _LLAMA,  # with a sliding window, where the config gives one
    "gpt2": Architecture(
        positions="learned", norm="layer", norm_first=True, mlp="gelu", bias="all", qk_norm=False, scale_embedding=False
    ),
    "transformer-2017": Architecture(
        positions="sinusoidal",
        norm="layer",
        norm_first=False,
        mlp="relu",
        bias="all",
        qk_norm=False,
        scale_embedding=True,
    ),
}


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary positions are slowed down to reach further than they were trained for.

    `linear` divides every frequency by `factor` (Chen et al. 2023, "Extending Context Window …"). `llama3` (Llama 3.1)
    divides those alone that turn fewer than `low_freq_factor` times in `original_max_position_embeddings` tokens, keeps
    those that turn more than `high_freq_factor` times, and goes over smoothly between; `linear` knows none of these.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        check_choice("rope_scaling kind", self.kind, ("linear", "llama3"))
        _check_range("rope_scaling factor", self.factor, 1.0, math.inf, end=False)
        _check_range("low_freq_factor", self.low_freq_factor, 0.0, math.inf, start=False, end=False)
        _check_range("high_freq_factor", self.high_freq_factor, 0.0, math.inf, start=False, end=False)
        _check_int("original_max_position_embeddings", self.original_max_position_embeddings, least=1)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"high_freq_factor {self.high_freq_factor} is not above low_freq_factor {self.low_freq_factor}"
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of one decoder; names follow the Llama family of `transformers`."""

    architecture: ArchitectureName = "qwen3"
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_choice("architecture", self.architecture, ARCHITECTURES)
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
            "max_position_embeddings",
        ):
            _check_int(name, getattr(self, name), least=1)
        if not isinstance(self.tie_word_embeddings, bool):
            raise ConfigError(f"tie_word_embeddings is {self.tie_word_embeddings!r}; it must be true or false")
        _check_range("rope_theta", self.rope_theta, 1.0, math.inf, end=False)
        _check_range("norm_eps", self.norm_eps, 0.0, 1.0)
        _check_range("dropout", self.dropout, 0.0, 0.99)
        if self.sliding_window is not None:
            _check_int("sliding_window", self.sliding_window, least=1)
        if not isinstance(self.rope_scaling, RopeScaling | None):
            raise ConfigError(f"rope_scaling is {self.rope_scaling!r}; it must be a table with kind and factor")
        self._check_together()

    def _check_together(self) -> None:
        """Refuse settings that are possible one by one, but not with each other."""
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.traits.positions == "rotary" and self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} is odd; rotary positions need an even one")
        if self.traits.positions == "sinusoidal" and self.hidden_size % 2:
            raise ConfigError(f"hidden_size {self.hidden_size} is odd; sinusoidal positions need an even one")
        if self.architecture == "gpt2" and (
            self.num_key_value_heads != self.num_attention_heads
            or self.head_dim * self.num_attention_heads != self.hidden_size
        ):
            raise ConfigError(
                f"architecture gpt2 needs as many key/value heads as heads and head_dim x heads = hidden_size "
                f"(got {self.num_key_value_heads} of {self.num_attention_heads} heads, "
                f"{self.head_dim} x {self.num_attention_heads} and {self.hidden_size})"
            )
        if self.sliding_window is not None and self.architecture != "mistral":
            raise ConfigError(f"sliding_window is {self.sliding_window}; only architecture mistral has one")
        if self.rope_scaling is not None and self.traits.positions != "rotary":
            raise ConfigError(f"rope_scaling needs rotary positions; architecture {self.architecture} has others")

    @property
    def traits(self) -> Architecture:
        """What the architecture's name stands for."""
        return ARCHITECTURES[self.architecture]

    @property
    def window(self) -> int:
        """How many tokens a token sees, itself among them."""
        return min(self.sliding_window or self.max_position_embeddings, self.max_position_embeddings)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model size by name: everything that does not depend on the corpus."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    context: int


PRESETS: dict[str, Preset] = {
    "nano": Preset(layers=4, hidden=64, heads=4, kv_heads=2, context=128),
    "micro": Preset(layers=4, hidden=128, heads=4, kv_heads=2, context=256),
    "tiny": Preset(layers=5, hidden=192, heads=6, kv_heads=3, context=256),
    "mini": Preset(layers=6, hidden=256, heads=4, kv_heads=2, context=256),
    "small": Preset(layers=6, hidden=384, heads=6, kv_heads=3, context=512),
    "medium": Preset(layers=8, hidden=512, heads=8, kv_heads=4, context=1024),
    "base": Preset(layers=12, hidden=768, heads=12, kv_heads=4, context=1024),
    "large": Preset(layers=24, hidden=1024, heads=16, kv_heads=8, context=2048),
    "xl": Preset(layers=20, hidden=2048, heads=32, kv_heads=8, context=2048),
}


def preset_config(
    name: str, *, vocab_size: int, architecture: ArchitectureName = "qwen3", context: int | None = None
) -> ModelConfig:
    """Spell a preset out for one vocabulary; raises ConfigError for an unknown name."""
    check_choice("preset", name, PRESETS)
    check_choice("architecture", architecture, ARCHITECTURES)
    preset = PRESETS[name]
    traits = ARCHITECTURES[architecture]
    # Three matrices of 8/3 C hold as many weights as two of 4 C (Shazeer 2020, "GLU Variants Improve Transformer").
    width = 32 * math.ceil(preset.hidden * 8 / 3 / 32) if traits.mlp == "swiglu" else 4 * preset.hidden
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=preset.hidden,
        num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads,
        num_key_value_heads=preset.kv_heads if traits.positions == "rotary" else preset.heads,
        head_dim=preset.hidden // preset.heads,
        intermediate_size=width,
        max_position_embeddings=preset.context if context is None else context,
        norm_eps=1e-6 if traits.norm == "rms" else 1e-5,
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How one run trains; a step is `batch_size` windows of `context` tokens, whatever the micro-batch."""

    total_steps: int
    batch_size: int
    micro_batch_size: int
    context: int
    seed: int
    learning_rate: float
    warmup_steps: int
    optimizer: OptimizerName = "muon"
    schedule: ScheduleName = "cosine"
    final_learning_rate_ratio: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 1.0
    eval_every: int = 100
    patience: int = 0  # evaluations without a better one after which a run ends; 0 is never
    compute_dtype: DTypeName = "float32"
    compile: bool = False
    short_steps: int = 0  # the first so many steps read each window as two texts of half its length

    def __post_init__(self) -> None:
        for name in ("total_steps", "batch_size", "micro_batch_size", "context", "eval_every"):
            _check_int(name, getattr(self, name), least=1)
        for name in ("seed", "warmup_steps", "patience", "short_steps"):
            _check_int(name, getattr(self, name), least=0)
        if self.micro_batch_size > self.batch_size:
            raise ConfigError(f"micro_batch_size {self.micro_batch_size} is larger than batch_size {self.batch_size}")
        if self.short_steps and self.context % 2:
            raise ConfigError(f"short_steps is {self.short_steps}, and windows of {self.context} have no half")
        check_choice("optimizer", self.optimizer, get_args(OptimizerName))
        check_choice("schedule", self.schedule, get_args(ScheduleName))
        check_choice("compute_dtype", self.compute_dtype, get_args(DTypeName))
        if not isinstance(self.compile, bool):
            raise ConfigError(f"compile is {self.compile!r}; it must be true or false")
        _check_range("learning_rate", self.learning_rate, 0.0, 10.0)
        _check_range("final_learning_rate_ratio", self.final_learning_rate_ratio, 0.0, 1.0)
        _check_range("weight_decay", self.weight_decay, 0.0, 10.0)
        _check_range("beta1", self.beta1, 0.0, 1.0, end=False)
        _check_range("beta2", self.beta2, 0.0, 1.0, end=False)
        _check_range("max_grad_norm", self.max_grad_norm, 0.0, math.inf)


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Which matrices get an adapter and how large it is; `targets` None is every one that a block has.

    The update is alpha / rank times the product of two narrow matrices (Hu et al. 2021, section 4.1).
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _check_int("rank", self.rank, least=1)
        _check_range("alpha", self.alpha, 0.0, math.inf, start=False, end=False)
        _check_range("dropout", self.dropout, 0.0, 0.99)
        if self.targets is not None:
            if not self.targets:
                raise ConfigError(f"targets is empty; choose from {', '.join(LORA_TARGETS)}")
            for target in self.targets:
                check_choice("target", target, LORA_TARGETS)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How the next token is drawn from the logits; temperature 0 is greedy."""

    max_new_tokens: int = 256
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_int("max_new_tokens", self.max_new_tokens, least=1)
        _check_range("temperature", self.temperature, 0.0, math.inf, end=False)
        if self.top_k is not None:
            _check_int("top_k", self.top_k, least=1)
        if self.top_p is not None:
            _check_range("top_p", self.top_p, 0.0, 1.0, start=False)
        if self.min_p is not None:
            _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, math.inf, start=False, end=False)
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) for text in self.stop):
            raise ConfigError(f"stop is {self.stop!r}; it must be a list of strings")
        if "" in self.stop:
            raise ConfigError("stop: an empty stop string would end every text at once; leave it out")
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, least=0)


def from_mapping(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Make a config dataclass from parsed JSON or TOML; whatever is wrong with it is a ConfigError naming `where`."""
    known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - known)
    if unknown:
        raise ConfigError(f"{where}: unknown setting {unknown[0]!r} (known: {', '.join(sorted(known))})")
    missing = [field.name for field in fields(cls) if field.default is MISSING and field.name not in values]  # type: ignore[arg-type]
    if missing:
        raise ConfigError(f"{where}: setting {missing[0]!r} is missing")
    hints = get_type_hints(cls)
    try:
        return cls(**{name: _frozen(name, hints[name], value) for name, value in values.items()})
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _frozen(name: str, hint: Any, value: Any) -> Any:
    """Lists become tuples, and a table what its hint says or may be: nothing frozen holds what can change."""
    kind = next((kind for kind in (hint, *get_args(hint)) if is_dataclass(kind)), None)
    if isinstance(value, Mapping) and isinstance(kind, type):
        return from_mapping(kind, value, name)
    return tuple(value) if isinstance(value, list) else value


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name} {value!r} is unknown (choose from {', '.join(choices)})")


def _check_int(name: str, value: Any, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least {least}")


def _check_range(name: str, value: Any, low: float, high: float, *, start: bool = True, end: bool = True) -> None:
    """Check low <= value <= high; `start` and `end` say whether the borders belong to it. NaN never does."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    inside = number and (low <= value if start else low < value) and (value <= high if end else value < high)
    if not inside:
        left, right = "[" if start else "(", "]" if end else ")"
        raise ConfigError(f"{name} is {value!r}; it must be in {left}{low:g}, {high:g}{right}")
