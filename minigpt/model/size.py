"""How large a model is and what it costs: parameters, FLOPs and bytes, by arithmetic alone.

Letters as in `transformer.py`: C hidden, H heads, K key/value heads, D head width, V vocabulary, L layers; I is the
width of the MLP, T the context, N the tokens of one micro-batch.
"""

from __future__ import annotations

from minigpt import compiler
from minigpt.config import DTypeName, ModelConfig, OptimizerName

DTYPE_BYTES: dict[DTypeName, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
# How many logits the loss holds at a time (`loss.chunk_rows`), and the bytes each takes while two chunks meet: the old
# one's probabilities and slope, the new one's logits and log-probabilities.
LOGITS_AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 26}
LOGIT_BYTES = 16
MUON_BYTES = 16  # a weight of a matrix: its update, its step, and two numbers between which the iteration goes
HEAP = 1.1  # what a CPU's heap takes for what comes and goes in a step: blocks, and the holes between them (measured)


def parameters(config: ModelConfig) -> int:
    """Count the parameters, a tied weight once: what `GPT.num_parameters` counts."""
    traits, C, L = config.traits, config.hidden_size, config.num_hidden_layers
    norm = 2 if traits.norm == "layer" else 1  # a gain, and a shift for LayerNorm
    queries, keys = _attention_widths(config)
    block = _block_matrices(config) + 2 * norm * C
    if traits.bias != "none":
        block += queries + 2 * keys
    if traits.bias == "all":
        block += C + _mlp_inputs(config) * config.intermediate_size + C
    if traits.qk_norm:
        block += 2 * norm * config.head_dim
    last_norm = norm * C if traits.norm_first else 0
    output = 0 if config.tie_word_embeddings else config.vocab_size * C
    return embedding_parameters(config) + L * block + last_norm + output


def embedding_parameters(config: ModelConfig) -> int:
    """Count the parameters that are looked up: the token embedding, and learned positions where there are some."""
    learned = config.max_position_embeddings if config.traits.positions == "learned" else 0
    return (config.vocab_size + learned) * config.hidden_size


def flops_per_token(config: ModelConfig, context: int, *, training: bool) -> int:
    """Return the floating-point operations a token costs on average in a window of `context` tokens.

    2 (L W + V C) + 4 L H D S: a multiplication and an addition for each of the W weights of a block's matrices and
    of the output layer, and for each of the S keys that a query sees, once in q k^T and once in the weighted sum of
    values. S is (T + 1) / 2 on average under the causal mask, and never above the model's window. Training costs
    three times that: the backward pass has two products for each one forward (Kaplan et al. 2020, section 2.1).
    Norms, activations and softmax are not counted.
    """
    L, window = config.num_hidden_layers, min(context, config.window)
    seen = window * (window + 1) // 2 + (context - window) * window  # (query, key) pairs in a window
    products = L * _block_matrices(config) + config.vocab_size * config.hidden_size
    attention = 4 * L * _attention_widths(config)[0] * seen // context
    return (3 if training else 1) * (2 * products + attention)


def training_bytes(
    config: ModelConfig,
    micro_batch: int,
    context: int,
    compute_dtype: DTypeName = "float32",
    optimizer: OptimizerName = "adamw",
    *,
    device: str = "cpu",
    adapter: int | None = None,
    packed: bool = False,
    shards: int = 1,
) -> int:
    """Estimate the most bytes that a step's tensors take at once, without what Python and PyTorch take by themselves.

    Weights and gradients are float32; AdamW keeps two more numbers a parameter, Muon one for each matrix in a block.
    To that comes what one micro-batch keeps for the backward pass, and the larger of what the loss and the topmost
    MLP's backward pass work with; or what Muon works with afterwards, if that is more. Dropout is not counted. GPUs
    keep a little less: their RMSNorm is one kernel. A CPU with a C compiler keeps much less (`fused.c`). On a CPU the
    heap's holes are counted too.

    With an `adapter` of so many parameters these alone have gradients and states. Rows that hold several documents
    (`packed`) keep a mask each in every layer on a CPU that has no compiler. Of a model that is cut over `shards`
    processes each holds its part of weights, gradients and states, and in full for a while the embeddings and two
    blocks, with their gradients.
    """
    total, tokens, element = parameters(config), micro_batch * context, DTYPE_BYTES[compute_dtype]
    matrices = config.num_hidden_layers * _block_matrices(config)
    states = 12 * (total if adapter is None else adapter)  # gradients, and what the optimizer keeps
    states -= 4 * matrices if optimizer == "muon" and adapter is None else 0
    copies = element * matrices if element < 4 else 0  # what autocast makes of the matrices, kept until the step's end
    whole = fused(config, compute_dtype, device)
    kept = activation_bytes(config, tokens, compute_dtype, device)
    kept += 0 if whole else mask_bytes(config, context, compute_dtype)
    kept += 4 * tokens * config.hidden_size  # the last hidden states
    if packed and device == "cpu" and not whole:
        kept += config.num_hidden_layers * tokens * context * element
    wide = (1 + _mlp_inputs(config)) * element * tokens * config.intermediate_size
    output = 8 if adapter is None else element  # bytes a weight: its gradient twice, or a copy of it alone
    if adapter is None:
        wide += 4 * config.vocab_size * config.hidden_size  # the output's gradient, which the loss has found already
    held = 4 * total + states
    if shards > 1:
        held = held // shards + 8 * (total - matrices) + 16 * _block_matrices(config)
    logit = element if _compiled(device, compute_dtype) else LOGIT_BYTES  # `fused.c` works in place
    loss = _loss_bytes(config, tokens, element, device, output, logit)
    passing = copies + kept + max(loss, wide)
    if optimizer == "muon" and adapter is None:
        passing = max(passing, MUON_BYTES * matrices // shards)
    return held + (int(HEAP * passing) if device == "cpu" else passing)


def fused(config: ModelConfig, compute_dtype: DTypeName, device: str) -> bool:
    """Whether attention as a whole is that of `attention.c`."""
    multiple = 16 if config.traits.positions == "rotary" else 8
    return _compiled(device, compute_dtype) and config.head_dim % multiple == 0


def _compiled(device: str, compute_dtype: DTypeName) -> bool:
    return device == "cpu" and compute_dtype != "float16" and compiler.found() is not None


def activation_bytes(
    config: ModelConfig, tokens: int, compute_dtype: DTypeName = "float32", device: str = "cpu"
) -> int:
    """Return the bytes of hidden states that `tokens` tokens keep for the backward pass, the loss not included."""
    traits, element, C = config.traits, DTYPE_BYTES[compute_dtype], config.hidden_size
    H, K = config.num_attention_heads, config.num_key_value_heads
    queries, keys = _attention_widths(config)
    whole, one_call = fused(config, compute_dtype, device), _compiled(device, compute_dtype)
    # Matrices that share an input share what is kept of it, but autocast makes a copy for each of what is float32.
    shared = element == 4 or (one_call and traits.norm_first)
    shared_inputs = 2 * C if shared else (3 + _mlp_inputs(config)) * C
    # Queries, keys, values and the result; rotary queries are laid out anew, so that the result is copied once more.
    attended = queries + 2 * keys + queries + (queries if traits.positions == "rotary" and not whole else 0)
    mlp = {"swiglu": 3 if one_call else 4, "gelu": 2, "relu": 1}[traits.mlp] * config.intermediate_size
    block = element * (shared_inputs + attended + mlp) + 4 * H  # and the softmax's divisor
    block += 2 * _norm_bytes(config, C, 1, one_call)
    if traits.qk_norm and not whole:
        quick = one_call and element == 4 and config.head_dim % 8 == 0
        block += _norm_bytes(config, queries, H, quick) + _norm_bytes(config, keys, K, quick)
    last = _norm_bytes(config, C, 1, one_call) if traits.norm_first else 0
    return tokens * (config.num_hidden_layers * block + last)


def mask_bytes(config: ModelConfig, context: int, compute_dtype: DTypeName = "float32") -> int:
    """Return the bytes of masks that a forward pass keeps where the window is narrower than the text, one a layer."""
    masked = config.num_hidden_layers if context > config.window else 0
    return masked * context * context * DTYPE_BYTES[compute_dtype]


def cache_bytes(config: ModelConfig, batch: int, length: int, dtype_bytes: int = 4) -> int:
    """Return the bytes of a key/value cache: keys and values (L, B, K, S, D), as `cache.KVCache` allocates them."""
    return 2 * config.num_hidden_layers * batch * length * _attention_widths(config)[1] * dtype_bytes


def _attention_widths(config: ModelConfig) -> tuple[int, int]:
    """The widths of all queries (H D) and of all keys (K D)."""
    return config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim


def _mlp_inputs(config: ModelConfig) -> int:
    """How many matrices widen the MLP's input: SwiGLU has a gate beside the other."""
    return 2 if config.traits.mlp == "swiglu" else 1


def _block_matrices(config: ModelConfig) -> int:
    """The weights of one block's matrices: queries and output, keys and values, MLP."""
    queries, keys = _attention_widths(config)
    return config.hidden_size * (2 * queries + 2 * keys + (_mlp_inputs(config) + 1) * config.intermediate_size)


def _norm_bytes(config: ModelConfig, width: int, vectors: int, one_call: bool = False) -> int:
    """What a norm keeps of `width` numbers in `vectors` vectors, always in float32.

    RMSNorm keeps input, one factor a vector, and where it is not `one_call` the result before the gain; LayerNorm
    input, mean and deviation.
    """
    if config.traits.norm == "rms":
        return (4 if one_call else 8) * width + 4 * vectors
    return 4 * width + 8 * vectors


def _loss_bytes(config: ModelConfig, tokens: int, element: int, device: str, output: int, logit: int) -> int:
    """What the loss has at hand when it is done: hidden states' gradient, `output` bytes for each weight of the output
    layer, `logit` for each of a chunk of logits.
    """
    logits = min(tokens * config.vocab_size, LOGITS_AT_ONCE.get(device, LOGITS_AT_ONCE["cuda"]))
    weights = output * config.vocab_size * config.hidden_size
    return element * tokens * config.hidden_size + weights + logit * logits
