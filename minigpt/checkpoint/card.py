"""The model card: README.md of a model folder, for people and for the sites that show models."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minigpt.checkpoint.base import holds_adapter, section
from minigpt.checkpoint.files import write_text
from minigpt.config import ModelConfig
from minigpt.model.size import parameters
from minigpt.units import byte_size

CARD = "README.md"
MARK = (
    "<!-- Written by minigpt, which writes it anew whenever the model changes; take this line out to keep your own. -->"
)
PROMPT = "Once upon a time"
MOST_FILES = 20  # named one by one
_LICENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]{0,60}")  # an SPDX name; anything else might break the YAML

QUESTION = "What is your name?"
_MADE = {
    "train": ", trained from nothing",
    "finetune": ", tuned on conversations",
    "align": ", aligned with preferences",
    "reward": ", trained to tell better answers from worse ones by a scalar head",
}
_LICENCE_UNKNOWN = """\
{}
What the model may be used for follows from the licences of its data. Whoever publishes it should name its licence in
the first lines of this file.
"""
_NO_COUNTERPART = """\
`transformers` and llama.cpp have no counterpart of this architecture, so the model opens in minigpt alone.
"""
_LIMITS = """\
It writes what sounds like its text, whether true or not, repeats the errors and the bias of that text, and knows
nothing beyond it. Do not rely on what it says, and do not let it decide about people.
"""


def write_card(folder: Path, config: ModelConfig, record: Mapping[str, Any], *, name: str | None = None) -> bool:
    """Write the README.md of a model folder from its record, and tell whether that was done.

    One without our mark belongs to a person and is left alone. `name` is the model's, if not the folder's. What the
    record does not tell is left out. Errors: TrainingError when it cannot be written.
    """
    if not is_ours(folder / CARD):
        return False
    name = _plain(name or folder.resolve().name)
    adapter = holds_adapter(folder)
    parts = [
        _front_matter(config, record, adapter=adapter),
        f"{MARK}\n\n# {name}\n\n{_summary(config, record, adapter=adapter)}",
        _section("Data", _LICENCE_UNKNOWN.format(_data(record) or "Not recorded.\n")),
        _section("Model", _shape(config)),
        _section("Training", _training(record)),
        _section(
            "Held-out data" if "preferences" in record or "prompts" in record else "Held-out text", _score(record)
        ),
        _section("How to load it", _loading(config, record, adapter=adapter)),
        _section("Limits", _LIMITS),
    ]
    write_text(folder / CARD, "\n".join(part for part in parts if part))
    return True


def remove_card(folder: Path) -> None:
    """Remove a card that tells of an older model; one that belongs to a person stays."""
    if is_ours(folder / CARD):
        (folder / CARD).unlink(missing_ok=True)


def is_ours(path: Path) -> bool:
    """Tell whether a card may be written here: nothing is there yet, or one with our mark."""
    if not os.path.lexists(path):
        return True
    try:
        return MARK in path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False


def licences(record: Mapping[str, Any]) -> list[str]:
    """Return the licences that a record names, the model's own before that of the file it was imported from."""
    told = (part.get("license") for part in (record, section(record, "imported")))
    return [text for text in told if isinstance(text, str)]


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n{text}" if text else ""


def _front_matter(config: ModelConfig, record: Mapping[str, Any], *, adapter: bool) -> str:
    """The YAML that model sites read. Whoever publishes a model knows its licence, which follows from its data."""
    licence = next((text for text in licences(record) if _LICENCE.fullmatch(text)), "other")
    library = "minigpt" if _alone(config) else "peft" if adapter else "transformers"
    tags = "".join(f"- {tag}\n" for tag in ("minigpt", config.architecture))
    head = f"license: {licence}\n" + ("license_name: unknown\n" if licence == "other" else "")
    return f"---\n{head}library_name: {library}\npipeline_tag: text-generation\ntags:\n{tags}---\n"


def _summary(config: ModelConfig, record: Mapping[str, Any], *, adapter: bool) -> str:
    kind = "An adapter (LoRA) for a language model" if adapter else "A language model"
    made = next((told for command, told in _MADE.items() if record.get("made_by") == command), "")
    version = record.get("minigpt")
    by = f" with minigpt {_plain(version)}" if made and isinstance(version, str) else ""
    return f"{kind} of {_amount(parameters(config))} parameters ({config.architecture}){made}{by}.\n"


def _data(record: Mapping[str, Any]) -> str:
    """What the model has read, by the names of files; where they lie on somebody's disk is nobody's business."""
    lines = []
    before = section(record, "base", "record")
    if before:
        lines += [f"before tuning: {line.removeprefix('- ')}" for line in _data(before).splitlines()]
    data, corpus, chat = section(record, "data"), section(record, "corpus"), section(record, "chat")
    names = _names(data.get("sources"), data.get("named"))
    if names:
        lines.append(f"files: {names}")
    if isinstance(documents := corpus.get("documents"), int):
        trained, held = (_number(corpus, key) for key in ("train_bytes", "held_out_bytes"))
        plural = "s" if documents != 1 else ""
        held_out = f"{byte_size(held)} of it held out" if held else "nothing held out"
        lines.append(f"{documents:,} document{plural}, {byte_size(trained + held)} of text, {held_out}")
    if isinstance(conversations := chat.get("conversations"), int):
        lines.append(f"{conversations:,} conversations, {_number(chat, 'held_out'):,.0f} of them held out")
    preferences = section(record, "preferences")
    if isinstance(rows := preferences.get("rows"), int):
        lines.append(f"{rows:,} preferences, {_number(preferences, 'held_out'):,.0f} of them held out")
    prompts = section(record, "prompts")
    if isinstance(rows := prompts.get("prompts"), int):
        held_out = f"{_number(prompts, 'held_out'):,.0f} of them held out"
        lines.append(f"{rows:,} prompts that the model answered itself, {held_out}")
    imported = section(record, "imported")
    if isinstance(file := imported.get("file"), str):
        original = imported.get("name")
        named = f" ({_plain(original)})" if isinstance(original, str) else ""
        lines.append(f"imported from {_code(file)}{named}; its data is told where it came from")
    return "".join(f"- {line}\n" for line in lines)


def _names(sources: Any, named: Any) -> str:
    """The names of files, without their folders."""
    if isinstance(sources, list | tuple) and sources and all(isinstance(source, str) for source in sources):
        names = [_code(os.path.basename(source) or source) for source in sources[:MOST_FILES]]
        more = len(sources) - len(names)
        return ", ".join(names) + (f" and {more:,} more" if more else "")
    if named == "stdin":
        return "text from standard input"
    return _code(named) if isinstance(named, str) else ""


def _shape(config: ModelConfig) -> str:
    rows = {
        "parameters": f"{parameters(config):,}",
        "architecture": config.architecture,
        "layers": f"{config.num_hidden_layers}",
        "width": f"{config.hidden_size}, {config.intermediate_size} in the MLP",
        "heads": f"{config.num_attention_heads} of {config.head_dim}, {config.num_key_value_heads} for keys and values",
        "vocabulary": f"{config.vocab_size:,} tokens",
        "context": f"{config.max_position_embeddings:,} tokens",
    }
    return _table(rows)


def _training(record: Mapping[str, Any]) -> str:
    """How the model was trained, as far as the record tells."""
    train, result, request = section(record, "plan", "train"), section(record, "result"), section(record, "request")
    if not train:
        return ""
    rows = {
        "steps": _told(result, "steps", "{:,}") + _told(result, "best_step", " (the best at {:,} is kept)"),
        "tokens": _told(result, "trained_tokens", "{:,}"),
        "time": _told(result, "seconds", "{:,.0f} seconds") + _told(record, "device", " on a {}"),
        "batch": _told(train, "batch_size", "{:,} rows") + _told(train, "context", " of {:,} tokens"),
        "optimizer": _told(train, "optimizer", "{}") + _told(train, "learning_rate", ", learning rate {:g}"),
        "adapter": _told(section(request, "lora"), "rank", "rank {}")
        + _told(section(request, "lora"), "alpha", ", alpha {:g}"),
        "computed in": _told(train, "compute_dtype", "{}"),
        "seed": _told(train, "seed", "{}"),
    }
    return _table(rows)


def _score(record: Mapping[str, Any]) -> str:
    result = section(record, "result")
    bits, accuracy = result.get("bits_per_byte"), result.get("held_out_accuracy")
    if isinstance(accuracy, int | float):
        told = "the held-out pairs" if record.get("made_by") == "reward" else "the held-out preferences"
        return f"{accuracy:.1%} of {told} are told the right way round; the model was not trained on them.\n"
    if isinstance(won := result.get("win_rate"), int | float):
        return f"{won:.1%} of held-out prompts won against the model it began with, ties counted half.\n"
    if not isinstance(bits, int | float):
        return ""
    what = "the held-out answers" if record.get("made_by") == "finetune" else "the held-out text"
    return f"{bits:.3f} bits per byte of {what}, which the model was not trained on.\n"


def _loading(config: ModelConfig, record: Mapping[str, Any], *, adapter: bool) -> str:
    """How to open the model in three tools, as commands to paste."""
    if record.get("made_by") == "reward":
        return "With minigpt, in this folder:\n\n```sh\nminigpt score -m . < answers.jsonl\n```\n"
    chat = record.get("made_by") not in (None, "train")
    command = "minigpt chat -m ." if chat else f'echo "{PROMPT}" | minigpt generate -m .'
    here = f"With minigpt, in this folder:\n\n```sh\n{command}\n```\n"
    if _alone(config):
        return f"{here}\n{_NO_COUNTERPART}"
    library = "peft" if adapter else "transformers"
    python = f"With `{library}`:\n\n```python\n{_python(chat=chat, adapter=adapter)}```\n"
    run = "llama-cli -m model.gguf"
    if not chat:
        run = f'llama-completion -m model.gguf -no-cnv -p "{PROMPT}" -n 100'
    file = "minigpt export . --to gguf -o model.gguf"
    return f"{here}\n{python}\nWith llama.cpp, by way of a GGUF file:\n\n```sh\n{file}\n{run}\n```\n"


def _python(*, chat: bool, adapter: bool) -> str:
    """A program that loads the model and lets it write; PEFT finds an adapter's base model by itself."""
    imports, kind = "from transformers import AutoModelForCausalLM, AutoTokenizer\n", "AutoModelForCausalLM"
    if adapter:
        kind = "AutoPeftModelForCausalLM"
        imports = f"from peft import {kind}\nfrom transformers import AutoTokenizer\n"
    inputs = f'inputs = tokenizer("{PROMPT}", return_tensors="pt")\n'
    if chat:
        inputs = (
            f'messages = [{{"role": "user", "content": "{QUESTION}"}}]\n'
            'options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}\n'
            "inputs = tokenizer.apply_chat_template(messages, **options)\n"
        )
    return (
        f'{imports}\nmodel = {kind}.from_pretrained(".")\ntokenizer = AutoTokenizer.from_pretrained(".")\n{inputs}'
        "output = model.generate(**inputs, max_new_tokens=40, do_sample=True, temperature=0.8)\n"
        "print(tokenizer.decode(output[0], skip_special_tokens=True))\n"
    )


def _alone(config: ModelConfig) -> bool:
    """Tell whether no other program knows the architecture."""
    return config.architecture == "transformer-2017"


def _table(rows: Mapping[str, str]) -> str:
    return "| | |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in rows.items() if value)


def _told(part: Mapping[str, Any], name: str, form: str) -> str:
    """Write a number or a word of the record in a form; nothing where it is missing or of another kind."""
    value = part.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return ""
    try:
        return form.format(_plain(value) if isinstance(value, str) else value)
    except ValueError:
        return ""


def _number(part: Mapping[str, Any], name: str) -> float:
    value = part.get(name)
    return value if isinstance(value, int | float) else 0


def _amount(count: float) -> str:
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.3g}{unit}"
    return f"{count:.0f}"


def _plain(text: str) -> str:
    """Text on one line that Markdown takes as it is."""
    line = " ".join("".join(sign if sign.isprintable() else "\ufffd" for sign in " ".join(text.split())).split())
    return re.sub(r"([\\`*_<>\[\]|#])", r"\\\1", line)


def _code(text: str) -> str:
    """A name as code; whatever would end it, or break the line, is replaced."""
    return "`" + "".join(sign if sign.isprintable() and sign != "`" else "\ufffd" for sign in text) + "`"
