"""`minigpt export`: what other programs get, that it is read back and compared, and every refusal.

What rounding costs, as root mean square over the spread of the logits, on the models that the bounds were set by:

                              f16      bf16     q8_0    q4_0
    stories260k               0.0003   0.0027   0.007   0.10
    SmolLM2-135M-Instruct     0.0009   0.0055   0.027   0.38
    random weights, at most   0.0015   0.012    0.039   0.47    (two layers, 32 wide)
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import contents, error_of, minigpt
from test_checkpoint_adapter import make_adapter
from tiny_folder import make_folder

from minigpt.checkpoint import gguf as gguf_module
from minigpt.checkpoint.folder import load
from minigpt.checkpoint.gguf import read_gguf
from minigpt.checkpoint.gguf_weights import interleave
from minigpt.cli import export
from minigpt.evaluation.agreement import compare
from minigpt.model.transformer import GPT
from minigpt.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    record = {"license": "mit", "result": {"bits_per_byte": 2.5}}
    place = make_folder(tmp_path_factory.mktemp("models") / "tiny", "qwen3", record)
    (place / "README.md").write_text("A card.\n", encoding="utf-8")
    (place / "metrics.jsonl").write_text("{}\n", encoding="utf-8")
    return place


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    return load(folder, dtype=torch.float32).model(torch.arange(16)[None])[0]


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "q4_0"])
def test_every_type_is_written_read_back_and_compared(folder: Path, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.gguf"
    result = minigpt("export", folder, "--to", "gguf", "--type", kind, "-o", path, "--json")
    assert result.status == 0, result.err
    (found,) = result.objects
    with torch.no_grad():
        ids = load(folder).tokenizer.encode_prompt(export.CHECKED_TEXT)[:16]
        ours = load(folder).model(torch.tensor([ids]))[0]
        theirs = read_gguf(path).build(torch.float32)(torch.tensor([ids]))[0]
    assert found == {
        "format": "gguf", "path": str(path), "type": kind, "bytes": path.stat().st_size, "positions": 16,
        "largest_difference": pytest.approx(float((theirs - ours).abs().max())),
        "spread": pytest.approx(float(ours.std())),
        "error": pytest.approx(float((theirs - ours).square().mean().sqrt() / ours.std())),
        "same_best": pytest.approx(float((theirs.argmax(-1) == ours.argmax(-1)).float().mean())),
    }  # fmt: skip
    assert (found["largest_difference"] == 0.0) == (kind == "f32")
    assert found["error"] <= export.BOUNDS[kind]
    lines = {line.split()[0]: line for line in result.err.splitlines()}
    assert f"{path}: {kind}," in lines["export"]
    assert f"difference of a logit is {found['largest_difference']:.3g}" in lines["check"]
    assert f"llama-completion -m {path}" in lines["next"]
    assert ("note:" in lines) == (kind in ("q8_0", "q4_0")), "48 wide rows fit no blocks of 32"
    assert not list(tmp_path.glob(".*"))


def test_by_default_a_float16_file_beside_the_model(folder: Path, tmp_path: Path) -> None:
    place = make_folder(tmp_path / "tiny", "qwen3")
    result = minigpt("export", "-m", place)
    assert (result.status, result.out) == (0, "")
    read = read_gguf(place / "tiny-f16.gguf")
    assert read.type_counts() == {"F16": 15, "F32": 9}
    assert read.file.metadata["general.name"] == "tiny"
    (tmp_path / "there").mkdir()
    assert minigpt("export", folder, "-o", tmp_path / "there", "--type", "f32").status == 0
    assert read_gguf(tmp_path / "there" / "tiny-f32.gguf").file.metadata["general.license"] == "mit"


@pytest.mark.parametrize("name", ["llama", "llama-long-rope", "qwen2", "gpt2", "qwen3-untied"])
def test_every_architecture_goes_out_and_comes_in(name: str, tmp_path: Path) -> None:
    place = make_folder(tmp_path / "tiny", name)
    assert minigpt("export", place, "--type", "f32", "-o", tmp_path / "x.gguf").status == 0
    assert minigpt("import", tmp_path / "x.gguf", "-o", tmp_path / "back").status == 0
    torch.testing.assert_close(logits(tmp_path / "back"), logits(place), rtol=0, atol=1e-4)


def test_a_clean_folder_for_transformers(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "out"
    result = minigpt("export", folder, "--to", "transformers", "-o", place, "--json")
    assert result.status == 0, result.err
    assert set(contents(place)) == {
        "README.md", "config.json", "generation_config.json", "minigpt.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert {name: data for name, data in contents(folder).items() if name != "metrics.jsonl"} == contents(place)
    (found,) = result.objects
    assert (found["format"], found["type"], found["largest_difference"]) == ("transformers", "float32", 0.0)
    assert found["bytes"] == (place / "model.safetensors").stat().st_size


def test_in_parts_and_narrower(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "out"
    options = ("--dtype", "bfloat16", "--max-shard-size", "20KB")
    result = minigpt("export", folder, "--to", "transformers", *options, "-o", place)
    assert result.status == 0, result.err
    shards = sorted(path.name for path in place.glob("*.safetensors"))
    assert len(shards) > 1
    assert (place / "model.safetensors.index.json").is_file()
    config = json.loads((place / "config.json").read_text(encoding="utf-8"))
    assert config["dtype"] == "bfloat16"
    loaded = load(place)
    assert loaded.model.lm_head.weight.dtype == torch.bfloat16
    theirs, ours = loaded.model.state_dict(), load(folder).model.state_dict()
    assert all(torch.equal(weight, ours[name].to(torch.bfloat16)) for name, weight in theirs.items())
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    with torch.no_grad():
        found = model(torch.arange(16)[None]).logits[0]
    torch.testing.assert_close(found, logits(place), rtol=0, atol=1e-4)
    again = minigpt("export", place, "--to", "transformers", "-o", tmp_path / "whole")
    assert again.status == 0, again.err
    assert load(tmp_path / "whole").model.lm_head.weight.dtype == torch.bfloat16, "the stored type stays"


def test_what_is_there_is_not_replaced_unless_told_so(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"old")
    message = error_of(minigpt("export", folder, "-o", path))
    assert "x.gguf exists already" in message
    assert "--overwrite" in message
    assert path.read_bytes() == b"old"
    assert minigpt("export", folder, "-o", path, "--overwrite").status == 0
    assert path.read_bytes()[:4] == b"GGUF"
    taken = make_folder(tmp_path / "taken", "llama")
    before = contents(taken)
    arguments = ("export", folder, "--to", "transformers", "-o", taken)
    assert "holds config.json already" in error_of(minigpt(*arguments))
    assert contents(taken) == before
    assert minigpt(*arguments, "--overwrite").status == 0
    assert load(taken).model.config.architecture == "qwen3"


def _negated(model: GPT) -> None:
    model.model.layers[0].mlp.up_proj.weight.mul_(-1.0)


def _two_places_exchanged(model: GPT) -> None:
    """What a wrong name for a matrix does, where it costs least: 0.88 of the logits' spread in four bits."""
    mlp = model.model.layers[0].mlp
    mlp.gate_proj.weight, mlp.up_proj.weight = mlp.up_proj.weight, mlp.gate_proj.weight


def _rows_in_the_other_order(model: GPT) -> None:
    for layer in model.model.layers:
        for matrix, heads in ((layer.self_attn.q_proj, 4), (layer.self_attn.k_proj, 2)):
            matrix.weight.copy_(interleave(matrix.weight.clone(), heads))


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "q4_0"])
@pytest.mark.parametrize("damage", [_negated, _two_places_exchanged, _rows_in_the_other_order])
def test_a_bad_export_goes_away_and_the_old_one_stays(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, damage: Callable[[GPT], None]
) -> None:
    """As if the file had been damaged on its way to the disk."""
    path = tmp_path / "x.gguf"
    path.write_bytes(b"old")
    build = gguf_module.GGUFModel.build

    def damaged(self: gguf_module.GGUFModel, *arguments: object) -> GPT:
        model = build(self, *arguments)  # type: ignore[arg-type]
        with torch.no_grad():
            damage(model)
        return model

    monkeypatch.setattr(gguf_module.GGUFModel, "build", damaged)
    message = error_of(minigpt("export", folder, "--type", kind, "-o", path, "--overwrite"))
    assert "its logits differ by" in message
    assert "it was removed" in message
    assert contents(tmp_path) == {"x.gguf": b"old"}


def test_a_bad_folder_goes_away_and_the_old_one_stays(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(export.BOUNDS, "bfloat16", 1e-9)
    arguments = ("export", folder, "--to", "transformers", "--dtype", "bfloat16", "-o")
    assert "its logits differ by" in error_of(minigpt(*arguments, tmp_path / "new"))
    assert not (tmp_path / "new").exists()
    taken = make_folder(tmp_path / "taken", "llama")
    before = contents(taken)
    error_of(minigpt(*arguments, taken, "--overwrite"))
    assert contents(taken) == before
    assert not list(tmp_path.glob(".*"))


def test_a_tokenizer_that_comes_back_otherwise_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = Tokenizer.encode_prompt
    seen: list[str] = []

    def other(self: Tokenizer, text: str) -> list[int]:
        seen.append(text)
        return encode(self, text) + ([0] if seen.count(text) > 1 and "猫" in text else [])

    monkeypatch.setattr(Tokenizer, "encode_prompt", other)
    message = error_of(minigpt("export", folder, "-o", tmp_path / "x.gguf"))
    assert "the tokenizer came back with other ids" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", ["gguf", "transformers"])
def test_the_first_transformer_has_no_counterpart(tmp_path: Path, to: str) -> None:
    place = make_folder(tmp_path / "old", "transformer-2017")
    message = error_of(minigpt("export", place, "--to", to, "-o", tmp_path / "x"))
    assert "no counterpart of transformer-2017" in message
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("options", "words", "status"),
    [
        (("--to", "onnx"), "onnx", 2),
        (("--type", "q2_k"), "q2_k", 2),
        (("--dtype", "bfloat16"), "--dtype and --max-shard-size need --to transformers", 2),
        (("--to", "transformers", "--type", "f16", "-o", "x"), "--type is for GGUF", 2),
        (("--to", "transformers"), "-o tiny-hf", 2),
        (("--to", "transformers", "-o", "x", "--max-shard-size", "big"), "--max-shard-size big: no size", 2),
        (("--to", "transformers", "-o", "x", "--max-shard-size", "0GB"), "--max-shard-size 0GB: no size", 2),
        (("-m", "elsewhere"), "give one of them", 2),
    ],
)
def test_options_that_do_not_go_together(folder: Path, options: tuple[str, ...], words: str, status: int) -> None:
    assert words in error_of(minigpt("export", folder, *options), status)


def test_an_adapter_goes_into_a_file_with_its_base_model(folder: Path, tmp_path: Path) -> None:
    place, expected = make_adapter(tmp_path / "adapter", folder)
    path = tmp_path / "whole.gguf"
    assert minigpt("export", place, "--type", "f32", "-o", path).status == 0
    with torch.no_grad():
        found = read_gguf(path).build(torch.float32)(torch.arange(2, 26).view(2, 12))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_model_is_not_written_over_itself(folder: Path) -> None:
    message = error_of(minigpt("export", folder, "--to", "transformers", "-o", folder, "--overwrite"), 2)
    assert "is the model itself" in message


def test_no_model_is_one_line(tmp_path: Path) -> None:
    assert "no such model folder" in error_of(minigpt("export", tmp_path / "none", "-o", tmp_path / "x.gguf"))
    (tmp_path / "empty").mkdir()
    assert "holds no model" in error_of(minigpt("export", tmp_path / "empty"))
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.parametrize(
    ("text", "count"), [("2GB", 2 * 10**9), ("500 mb", 5 * 10**8), ("1GiB", 2**30), ("1.5K", 1500), ("77", 77)]
)
def test_sizes(text: str, count: int) -> None:
    assert export._bytes(text) == count


def test_logits_are_compared_as_worked_out_by_hand() -> None:
    one = torch.tensor([[1.0, 3.0], [2.0, 0.0]])
    other = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
    found = compare(one, other)
    assert (found.positions, found.largest, found.same_best) == (2, 2.0, 0.5)
    assert found.spread == pytest.approx((5 / 3) ** 0.5)
    assert found.error == pytest.approx((6 / 4) ** 0.5 / (5 / 3) ** 0.5)
    assert compare(one, torch.full((2, 2), torch.nan)).error == torch.inf
    assert compare(one, one).error == 0.0
