"""`minigpt info`: how large a model is, what it costs, and how it was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from minigpt.checkpoint.base import section
from minigpt.cli import console, models
from minigpt.config import ArchitectureName, DTypeName, ModelConfig, OptimizerName, PresetName, TrainConfig
from minigpt.config import preset_config as spelled_out
from minigpt.errors import ModelFolderError, UsageError
from minigpt.units import byte_size

MICRO_BATCHES = (1, 8, 32)
CACHE_TOKENS = 1000
VOCAB_SIZE = 4096  # of a preset, where none is given


def info(
    folder: models.ModelArgument = None,
    model: models.ModelOption = None,
    preset: Annotated[
        PresetName | None, typer.Option(help="A size by name, instead of a model.", show_default=False)
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Of a preset. [default: 4096]", show_default=False)] = None,
    arch: Annotated[
        ArchitectureName | None, typer.Option(help="Of a preset. [default: qwen3]", show_default=False)
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens a window. [default: the model's]", min=1, show_default=False)
    ] = None,
    as_json: models.JsonOption = False,
) -> None:
    """Tell a model's size, cost and origin, or those of a preset.

    \b
      minigpt info runs/alice
      minigpt info --preset small --vocab-size 8192
      minigpt info --preset base --context 2048 --json
    """
    model = models.named_once(folder, model)
    if preset is not None and model:
        raise UsageError(f"--preset {preset} and a model ({model}); choose one")
    if preset is None and (vocab_size is not None or arch is not None):
        raise UsageError("--vocab-size and --arch describe a preset; name it with --preset, or leave them out")
    if preset is not None:
        size = VOCAB_SIZE if vocab_size is None else vocab_size
        record: dict[str, Any] = {}
        config = spelled_out(preset, vocab_size=size, architecture=arch or "qwen3", context=context)
        name = f"preset {preset}"
    else:
        where = models.resolve(model)
        name, (config, record) = str(where), _read(where)
    found = {"model": name} | _sizes(config, record, context or config.max_position_embeddings) | _origin(record)
    if "trained_tokens" in found:
        found["tokens_per_parameter"] = found["trained_tokens"] / found["parameters"]
    console.write(json.dumps(found, ensure_ascii=False) + "\n" if as_json else _lines(found))


def _read(folder: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """Read what describes a model; its weights stay on the disk."""
    from minigpt.checkpoint.files import read_json
    from minigpt.checkpoint.folder import holds_model, read_config

    record = folder / "minigpt.json"
    if not holds_model(folder):
        what = "holds no model" if folder.is_dir() else "no such model folder"
        raise ModelFolderError(f"{folder}: {what}; name a model folder, or a size with --preset")
    return read_config(folder), read_json(record) if record.is_file() else {}


def _sizes(config: ModelConfig, record: dict[str, Any], context: int) -> dict[str, Any]:
    """Everything that follows from the shape."""
    from minigpt.model import size

    compute, optimizer = _training_types(record)
    total = size.parameters(config)
    return {
        "architecture": config.architecture,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_attention_heads,
        "key_value_heads": config.num_key_value_heads,
        "vocab_size": config.vocab_size,
        "context": context,
        "parameters": total,
        "embedding_parameters": size.embedding_parameters(config),
        "weight_bytes": 4 * total,
        "flops_per_token": {
            "train": size.flops_per_token(config, context, training=True),
            "generate": size.flops_per_token(config, context, training=False),
        },
        "training_bytes": {
            str(rows): size.training_bytes(config, rows, context, compute, optimizer) for rows in MICRO_BATCHES
        },
        "training_types": {"compute_dtype": compute, "optimizer": optimizer},
        "cache_bytes_per_1000_tokens": size.cache_bytes(config, 1, CACHE_TOKENS),
    }


def _training_types(record: dict[str, Any]) -> tuple[DTypeName, OptimizerName]:
    """What the model was trained with, or what a plan has that says nothing."""
    train = section(record, "plan", "train")
    compute: DTypeName = TrainConfig.compute_dtype
    optimizer: OptimizerName = TrainConfig.optimizer
    if train.get("compute_dtype") in get_args(DTypeName) and train.get("optimizer") in get_args(OptimizerName):
        compute, optimizer = train["compute_dtype"], train["optimizer"]
    return compute, optimizer


def _origin(record: dict[str, Any]) -> dict[str, Any]:
    """What the record tells of the training, as far as it does."""
    corpus, result = section(record, "corpus"), section(record, "result")
    told = {
        "data": section(record, "data").get("named"),
        "corpus_tokens": corpus.get("train_tokens"),
        "trained_tokens": result.get("trained_tokens"),
        "bits_per_byte": result.get("bits_per_byte"),
        "held_out_accuracy": result.get("held_out_accuracy"),
        "best_step": result.get("best_step"),
    }
    kinds = {"data": str}
    return {name: value for name, value in told.items() if isinstance(value, kinds.get(name, (int, float)))}


def _lines(found: dict[str, Any]) -> str:
    """The facts as labelled lines."""
    amount = console.amount
    share = found["embedding_parameters"] / found["parameters"]
    flops, training, types = found["flops_per_token"], found["training_bytes"], found["training_types"]
    rows = {
        "model": f"{found['model']}: {found['architecture']}, {found['layers']} layers x {found['hidden_size']}, "
        f"{found['heads']} heads ({found['key_value_heads']} for keys and values)",
        "parameters": f"{found['parameters']:,}, of which embedding {found['embedding_parameters']:,} ({share:.0%})",
        "tokens": f"vocabulary {found['vocab_size']:,}, context {found['context']:,}",
        "compute": f"{amount(flops['train'])} FLOPs a token to train, {amount(flops['generate'])} to generate",
        "training": ", ".join(f"{byte_size(count)} at micro-batch {rows}" for rows, count in training.items())
        + f" ({types['compute_dtype']}, {types['optimizer']})",
        "weights": f"{byte_size(found['weight_bytes'])} in float32",
        "cache": f"{byte_size(found['cache_bytes_per_1000_tokens'])} per 1,000 tokens in float32",
    }
    if "data" in found:
        corpus = f", {amount(found['corpus_tokens'])} tokens" if "corpus_tokens" in found else ""
        rows["data"] = found["data"] + corpus
    if "trained_tokens" in found:
        ratio = found["tokens_per_parameter"]
        rows["trained"] = f"on {amount(found['trained_tokens'])} tokens, {ratio:.3g} for each parameter"
    if "bits_per_byte" in found:
        rows["held-out"] = f"{found['bits_per_byte']:.3f} bits/byte"
    elif "held_out_accuracy" in found:
        rows["held-out"] = f"{found['held_out_accuracy']:.1%} of preferences the right way round"
    return "".join(f"{label:<{console.LABEL_WIDTH}}{text}\n" for label, text in rows.items())
