"""Adapters on disk: PEFT's format in both directions, and files that are cut, hostile or of another model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_folder import make_folder
from torch import Tensor
from variants import VARIANTS

from minigpt.checkpoint import adapter as checkpoint_adapter
from minigpt.checkpoint.adapter import (
    ADAPTER_WEIGHTS,
    fingerprint,
    merge_adapter,
    save_adapter,
    save_adapter_config,
    weights_facts,
)
from minigpt.checkpoint.base import ADAPTER_CONFIG, base_folder, holds_adapter
from minigpt.checkpoint.files import read_tensors, stored_tensors, write_json, write_tensors
from minigpt.checkpoint.folder import load
from minigpt.config import LoraConfig
from minigpt.errors import MinigptError, ModelFolderError
from minigpt.model.lora import adapters, add_lora
from minigpt.model.transformer import GPT

EXPORTED = ("qwen3", "llama-untied-ungrouped", "gpt2", "gpt2-untied")
SOME = ("q_proj", "v_proj", "o_proj", "down_proj")


@torch.no_grad()
def logits(model: GPT) -> Tensor:
    found: Tensor = model(torch.arange(2, 26).view(2, 12))
    return found


def make_adapter(
    folder: Path, base: Path, targets: tuple[str, ...] | None = None, *, rank: int = 4
) -> tuple[Path, Tensor]:
    """An adapter folder as training writes it, far from zero, and the logits of the model with it."""
    lora, generator = LoraConfig(rank=rank, alpha=6.0, targets=targets), torch.Generator().manual_seed(6)
    model = load(base).model
    add_lora(model, lora, generator)
    with torch.no_grad():
        for layer in adapters(model).values():
            layer.lora_B.normal_(0.0, 0.3, generator=generator)
    folder.mkdir(parents=True)
    save_adapter_config(folder, model, lora, base)
    save_adapter(folder, model)
    return folder, logits(model)


def near(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() < 1e-4 * other.abs().max())


@pytest.fixture(scope="module", params=VARIANTS)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("base") / "model", request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("qwen") / "model")


@pytest.fixture
def adapter(tmp_path: Path, qwen: Path) -> Path:
    return make_adapter(tmp_path / "adapter", qwen)[0]


@pytest.mark.parametrize("targets", [None, SOME])
def test_a_saved_adapter_comes_back(tmp_path: Path, base: Path, targets: tuple[str, ...] | None) -> None:
    folder, expected = make_adapter(tmp_path / "adapter", base, targets)
    assert holds_adapter(folder)
    assert not holds_adapter(base)
    found = logits(load(folder).model)
    assert near(found, expected)
    assert not near(found, logits(load(base).model))


def test_an_adapter_is_as_good_as_a_model_folder(qwen: Path, adapter: Path) -> None:
    write_json(adapter / "minigpt.json", {"made_by": "finetune"})
    loaded = load(adapter, dtype=torch.bfloat16)
    assert loaded.folder == adapter
    assert loaded.record == {"made_by": "finetune"}
    assert loaded.model.lm_head.weight.dtype == torch.bfloat16
    assert not loaded.model.training
    assert loaded.tokenizer.fingerprint() == load(qwen).tokenizer.fingerprint(), "that of the base where it has none"
    merged, exact = loaded.model.state_dict(), load(adapter).model.state_dict()
    assert all(torch.equal(merged[name], weight.bfloat16()) for name, weight in exact.items()), "rounded once"


def test_the_tokenizer_beside_an_adapter_counts(qwen: Path, adapter: Path) -> None:
    tokenizer = load(qwen).tokenizer
    tokenizer.save(adapter, {"chat_template": "of the adapter"})
    config = json.loads((adapter / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert load(adapter).tokenizer._config["chat_template"] == config["chat_template"] == "of the adapter"


# In PEFT


@pytest.fixture(scope="module")
def peft() -> Any:
    """PEFT and transformers, as other programs open what is written here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return pytest.importorskip("peft")


@torch.no_grad()
def peft_logits(model: Any) -> Tensor:
    found: Tensor = model.eval()(torch.arange(2, 26).view(2, 12)).logits
    return found


def opened(base: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("targets", [None, SOME, ("k_proj",)])
@pytest.mark.parametrize("variant", EXPORTED)
def test_peft_opens_an_adapter_with_the_same_logits(
    tmp_path: Path, peft: Any, variant: str, targets: tuple[str, ...] | None
) -> None:
    base = make_folder(tmp_path / "base", variant)
    folder, expected = make_adapter(tmp_path / "adapter", base, targets)
    model = peft.PeftModel.from_pretrained(opened(base), folder)
    assert near(peft_logits(model), expected)
    trained = {name for name in model.state_dict() if "lora_" in name}
    assert len(trained) == len(read_tensors(folder / ADAPTER_WEIGHTS)[0])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("more", [{}, {"use_rslora": True}, {"layers_to_transform": [1]}])
@pytest.mark.parametrize("variant", EXPORTED)
def test_an_adapter_made_by_peft_opens_here(tmp_path: Path, peft: Any, variant: str, more: dict[str, Any]) -> None:
    base = make_folder(tmp_path / "base", variant)
    gpt2 = variant.startswith("gpt2")
    targets = ["c_attn", "mlp.c_proj"] if gpt2 else ["q_proj", "k_proj", "down_proj"]
    patterns = {"rank_pattern": {targets[0]: 2}, "alpha_pattern": {targets[1]: 5}}
    config = peft.LoraConfig(
        r=3, lora_alpha=7, target_modules=targets, fan_in_fan_out=gpt2, init_lora_weights=False, **patterns, **more
    )
    torch.manual_seed(3)
    model = peft.get_peft_model(opened(base), config)
    model.save_pretrained(tmp_path / "adapter")
    raw = json.loads((tmp_path / "adapter" / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    write_json(tmp_path / "adapter" / ADAPTER_CONFIG, raw | {"base_model_name_or_path": str(base)})
    found = logits(load(tmp_path / "adapter").model)
    assert near(found, peft_logits(model))
    assert not near(found, logits(load(base).model))


# Where the base is


def test_the_base_is_found_again_where_both_were_moved(tmp_path: Path, qwen: Path) -> None:
    shutil.copytree(qwen, tmp_path / "one" / "model")
    make_adapter(tmp_path / "one" / "adapter", tmp_path / "one" / "model")
    (tmp_path / "one").rename(tmp_path / "two")
    assert base_folder(tmp_path / "two" / "adapter") == tmp_path / "two" / "model"
    load(tmp_path / "two" / "adapter")


def edit(folder: Path, **values: Any) -> None:
    path = folder / ADAPTER_CONFIG
    raw = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(raw | values), encoding="utf-8")


@pytest.mark.parametrize("name", ["gone", "someone/some-model", "x" * 5000])
def test_a_base_that_is_not_here_is_one_line(adapter: Path, name: str) -> None:
    edit(adapter, base_model_name_or_path=name)
    with pytest.raises(ModelFolderError) as raised:
        load(adapter)
    assert str(raised.value) == (
        f"{adapter / ADAPTER_CONFIG}: its base model {name} is not here; put the model there, or write its folder into "
        "base_model_name_or_path"
    )


@pytest.mark.parametrize("name", [None, 3, "", "a\0b"])
def test_an_adapter_that_names_no_base_is_one_line(adapter: Path, name: Any) -> None:
    edit(adapter, base_model_name_or_path=name)
    with pytest.raises(ModelFolderError, match=r"names no base model; write its folder into base_model_name_or_path$"):
        load(adapter)


def test_an_adapter_of_an_adapter_is_refused(adapter: Path) -> None:
    edit(adapter, base_model_name_or_path=str(adapter))
    with pytest.raises(ModelFolderError, match=r"its base model .* is an adapter itself; "):
        load(adapter)


def test_a_base_that_was_trained_again_is_refused(tmp_path: Path, qwen: Path) -> None:
    base = shutil.copytree(qwen, tmp_path / "base")
    folder, _ = make_adapter(tmp_path / "adapter", base)
    write_json(folder / "minigpt.json", {"base": {"fingerprint": fingerprint(base)}})
    load(folder)
    stored, metadata = read_tensors(base / "model.safetensors")
    stored["model.norm.weight"] = stored["model.norm.weight"] + 1e-3
    write_tensors(base / "model.safetensors", stored, metadata)
    with pytest.raises(ModelFolderError) as raised:
        load(folder)
    assert str(raised.value) == (
        f"{folder}: its base model {base} has other weights than the adapter was trained on; "
        "put the old ones back, or train the adapter again"
    )


def test_a_base_is_read_a_second_time_only_where_its_files_look_other(
    tmp_path: Path, qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = shutil.copytree(qwen, tmp_path / "base")
    folder, _ = make_adapter(tmp_path / "adapter", base)
    write_json(folder / "minigpt.json", {"base": weights_facts(base)})
    read: list[Path] = []

    def counting(base: Path) -> str:
        read.append(base)
        return fingerprint(base)

    monkeypatch.setattr(checkpoint_adapter, "fingerprint", counting)
    load(folder)
    assert read == []
    os.utime(base / "model.safetensors", ns=(1, 1))
    load(folder)
    assert read == [base], "the same weights in a file that was written anew"
    stored, metadata = read_tensors(base / "model.safetensors")
    stored["model.norm.weight"] = stored["model.norm.weight"] + 1e-3
    write_tensors(base / "model.safetensors", stored, metadata)
    with pytest.raises(ModelFolderError, match="has other weights than the adapter was trained on"):
        load(folder)


# Files that are no adapter


def tensors_edit(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        stored = {name: tensor.clone() for name, tensor in read_tensors(folder / ADAPTER_WEIGHTS)[0].items()}
        change(stored)
        write_tensors(folder / ADAPTER_WEIGHTS, stored, {})

    return apply


FIRST = "base_model.model.model.layers.0.self_attn.q_proj"
HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (lambda f: (f / ADAPTER_WEIGHTS).unlink(), f"{ADAPTER_WEIGHTS}: no such file"),
    "cut": (
        lambda f: (f / ADAPTER_WEIGHTS).write_bytes((f / ADAPTER_WEIGHTS).read_bytes()[:-40]), "is cut short (header",
    ),
    "header": (lambda f: (f / ADAPTER_WEIGHTS).write_bytes(b"\xff" * 100), "is no safetensors file, or cut short"),
    "empty": (
        lambda f: (f / ADAPTER_WEIGHTS).write_bytes((2).to_bytes(8, "little") + b"{}"), "holds no adapter",
    ),
    "broken json": (lambda f: (f / ADAPTER_CONFIG).write_text("{"), "no valid JSON"),
    "a list": (lambda f: (f / ADAPTER_CONFIG).write_text("[]"), "holds no JSON object"),
    "one half": (tensors_edit(lambda t: t.pop(f"{FIRST}.lora_B.weight")), f"has no weight '{FIRST}.lora_B.weight'"),
    "other half": (tensors_edit(lambda t: t.pop(f"{FIRST}.lora_A.weight")), f"has no weight '{FIRST}.lora_A.weight'"),
    "a pair gone": (
        tensors_edit(lambda t: [t.pop(f"{FIRST}.lora_{letter}.weight") for letter in "AB"]),
        f"has no weight '{FIRST}.lora_A.weight'",
    ),
    "too deep": (
        tensors_edit(lambda t: t.update({FIRST.replace("0", "7") + ".lora_A.weight": torch.ones(4, 32)})),
        "with no place in the base model",
    ),
    "an embedding": (
        tensors_edit(lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 9)})),
        "with no place in the base model",
    ),
    "no prefix": (tensors_edit(lambda t: t.update({"lm_head.weight": torch.ones(4)})), "with no place in the base"),
    "shape of A": (
        tensors_edit(lambda t: t.update({f"{FIRST}.lora_A.weight": torch.ones(4, 31)})),
        f"{FIRST}.lora_A.weight is [4, 31], but the base model asks for [4, 32]",
    ),
    "shape of B": (
        tensors_edit(lambda t: t.update({f"{FIRST}.lora_B.weight": torch.ones(33, 4)})),
        f"{FIRST}.lora_B.weight is [33, 4], but the base model asks for [32, 4]",
    ),
    "a scalar": (tensors_edit(lambda t: t.update({f"{FIRST}.lora_A.weight": torch.ones(())})), "lora_A.weight is [], "),
    "integers": (
        tensors_edit(lambda t: t.update({f"{FIRST}.lora_A.weight": torch.ones(4, 32, dtype=torch.int8)})),
        "has type torch.int8; supported are the floating-point types",
    ),
    "another rank": (
        tensors_edit(
            lambda t: t.update(
                {f"{FIRST}.lora_A.weight": torch.ones(2, 32), f"{FIRST}.lora_B.weight": torch.ones(32, 2)}
            )
        ),
        "the adapter of model.layers.0.self_attn.q_proj has rank 2, not 4",
    ),
    "r": (lambda f: edit(f, r="4"), "r is '4'; it must be a number above 0"),
    "r is huge": (lambda f: edit(f, r=10**400), "it must be a number above 0"),
    "alpha": (lambda f: edit(f, lora_alpha=None), "lora_alpha is None; it must be a number above 0"),
    "alpha is NaN": (lambda f: edit(f, lora_alpha=float("nan")), "lora_alpha is nan; it must be a number above 0"),
    "pattern": (lambda f: edit(f, rank_pattern={"(a+)+$": 3}), "rank_pattern is not supported as it is"),
    "pattern of a kind": (lambda f: edit(f, alpha_pattern=[1]), "alpha_pattern is not supported as it is"),
    "fewer targets": (lambda f: edit(f, target_modules=["k_proj"]), "which adapter_config.json does not name"),
    "more targets": (lambda f: edit(f, target_modules=["q_proj", 3, "lm_head"]), "which adapter_config.json does not"),
    "another method": (lambda f: edit(f, peft_type="IA3"), "peft_type 'IA3' is not supported (supported: LORA)"),
    "dora": (lambda f: edit(f, use_dora=True), "use_dora is True; that kind of adapter is not supported"),
    "bias": (lambda f: edit(f, bias="all"), "bias is 'all'; that kind of adapter is not supported"),
    "saved modules": (lambda f: edit(f, modules_to_save=["lm_head"]), "modules_to_save is ['lm_head']; that kind"),
    "pissa": (lambda f: edit(f, init_lora_weights="pissa"), "init_lora_weights is 'pissa'; that kind of adapter"),
    "of the future": (lambda f: edit(f, use_magic={"a": 1}), "use_magic is {'a': 1}; that kind of adapter is not"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_damaged_or_foreign_adapter_is_one_line(adapter: Path, case: str) -> None:
    damage, expected = HOSTILE[case]
    damage(adapter)
    with pytest.raises(MinigptError) as raised:
        load(adapter)
    message = str(raised.value)
    assert expected in message
    assert message.startswith(str(adapter))
    assert "\n" not in message


def test_an_adapter_of_a_larger_model_is_refused(tmp_path: Path, qwen: Path) -> None:
    large = make_folder(tmp_path / "large", "qwen3-wide-heads")
    folder, _ = make_adapter(tmp_path / "adapter", large)
    edit(folder, base_model_name_or_path=str(qwen))
    with pytest.raises(ModelFolderError, match=r"lora_B.weight is \[24, 4\], but the base model asks for \[16, 4\]$"):
        load(folder)


def test_merging_refuses_before_anything_is_changed(adapter: Path, qwen: Path) -> None:
    tensors_edit(lambda t: t.pop("base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"))(adapter)
    model = load(qwen).model
    before = logits(model)
    with pytest.raises(ModelFolderError):
        merge_adapter(adapter, model)
    assert torch.equal(logits(model), before)


def test_a_merged_model_is_saved_as_any_other(tmp_path: Path, adapter: Path, qwen: Path) -> None:
    from minigpt.checkpoint.folder import save_description, save_weights

    loaded = load(adapter)
    save_description(tmp_path / "whole", loaded.model.config, loaded.tokenizer, {})
    save_weights(tmp_path / "whole", loaded.model)
    assert torch.equal(logits(load(tmp_path / "whole").model), logits(loaded.model))
    assert loaded.model.config == replace(load(qwen).model.config)


def test_adapter_files_of_no_known_base_folder(tmp_path: Path) -> None:
    (tmp_path / ADAPTER_CONFIG).write_text("{}", encoding="utf-8")
    with pytest.raises(ModelFolderError, match="names no base model"):
        load(tmp_path)


def test_the_base_is_known_by_the_files_that_are_read(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "base")
    single = fingerprint(folder)
    (folder / "model-00007-of-00009.safetensors").write_bytes(b"a stray one that nothing reads")
    assert fingerprint(folder) == single
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    names = stored_tensors(folder / "weights.safetensors")
    write_json(folder / "model.safetensors.index.json", {"weight_map": dict.fromkeys(names, "weights.safetensors")})
    assert fingerprint(folder) == single
    model = load(folder).model
    with torch.no_grad():
        model.model.embed_tokens.weight += 1
    write_tensors(folder / "weights.safetensors", {name: model.state_dict()[name] for name in names}, {})
    assert fingerprint(folder) != single
