"""The model card: what it tells, that its commands run, and that nobody's own README.md is lost."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import TINY, minigpt
from tiny_folder import make_folder
from variants import VARIANTS

from minigpt.checkpoint.card import CARD, MARK, is_ours, licences, remove_card, write_card
from minigpt.checkpoint.folder import load
from minigpt.config import ModelConfig
from minigpt.model.size import parameters

TEXT = "The cat sat on a mat and saw one red bird in every old tree by night while rain fell.\n" * 60
OWN = "# My model\n\nIt took me all winter.\n"
CONFIG = VARIANTS["qwen3"]
RECORD: dict[str, Any] = {
    "minigpt": "1.2.3",
    "made_by": "train",
    "data": {"sources": ["/srv/somebody/secret/a.txt", "/srv/somebody/b`*.txt"], "named": "secret/a.txt and 1 more"},
    "corpus": {"documents": 7, "train_bytes": 900_000, "held_out_bytes": 100_000},
    "plan": {
        "train": {
            "optimizer": "muon", "learning_rate": 0.02, "seed": 11, "batch_size": 8, "context": 128,
            "compute_dtype": "bfloat16",
        }
    },
    "result": {
        "steps": 400, "best_step": 390, "trained_tokens": 409_600, "seconds": 181.2, "bits_per_byte": 1.2344,
    },
    "device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that `minigpt train` made."""
    folder = tmp_path_factory.mktemp("cats")
    (folder / "cats.txt").write_text(TEXT, encoding="utf-8")
    result = minigpt("train", *TINY, "--steps", "3", folder / "cats.txt", "-o", folder / "run")
    assert result.status == 0, result.err
    return folder / "run"


def card(folder: Path, config: ModelConfig = CONFIG, record: dict[str, Any] | None = None) -> str:
    assert write_card(folder, config, RECORD if record is None else record)
    return (folder / CARD).read_text(encoding="utf-8")


def front_matter(text: str) -> dict[str, Any]:
    head = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    assert head is not None
    parsed: dict[str, Any] = yaml.safe_load(head[1])
    return parsed


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_it_tells_data_size_training_and_score(tmp_path: Path) -> None:
    text = card(tmp_path)
    assert front_matter(text) == {
        "license": "other", "license_name": "unknown", "library_name": "transformers",
        "pipeline_tag": "text-generation", "tags": ["minigpt", "qwen3"],
    }  # fmt: skip
    for told in (
        "`a.txt`, `b\ufffd*.txt`", "7 documents, 1 MB of text, 100 kB of it held out", f"{parameters(CONFIG):,}",
        "| steps | 400 (the best at 390 is kept) |", "| tokens | 409,600 |", "| time | 181 seconds on a cpu |",
        "| optimizer | muon, learning rate 0.02 |", "| seed | 11 |", "1.234 bits per byte of the held-out text",
        "minigpt generate -m .", "AutoModelForCausalLM", "--to gguf", "Do not rely on what it says",
        "with minigpt 1.2.3",
    ):  # fmt: skip
        assert told in text
    assert "somebody" not in text, "where files lie on a disk is nobody's business"


def test_a_model_of_unknown_origin_has_a_card_too(tmp_path: Path) -> None:
    text = card(tmp_path, record={})
    assert "Not recorded." in text
    assert "## Training" not in text
    assert "bits per byte" not in text


def test_a_record_that_holds_anything_is_no_trouble(tmp_path: Path) -> None:
    junk: list[Any] = [None, [], {}, "x\n# y", -1, True, [1], {"a": 1}]
    paths = [("made_by",), ("data",), ("data", "sources"), ("data", "named"), ("corpus",), ("corpus", "documents"),
             ("corpus", "train_bytes"), ("plan",), ("plan", "train"), ("plan", "train", "seed"),
             ("plan", "train", "learning_rate"), ("result",), ("result", "steps"), ("result", "bits_per_byte"),
             ("device",), ("minigpt",), ("license",), ("imported",), ("base",), ("chat",), ("request",)]  # fmt: skip
    for path in paths:
        for value in junk:
            record: dict[str, Any] = {
                **RECORD,
                **{key: dict(RECORD[key]) for key in ("data", "corpus", "plan", "result")},
            }
            record["plan"]["train"] = dict(RECORD["plan"]["train"])
            part = record
            for name in path[:-1]:
                part = part[name]
            part[path[-1]] = value
            text = card(tmp_path, record=record)
            front_matter(text)
            assert "\n# y" not in text, "what a record holds makes no heading"


def test_licence_and_origin_of_an_imported_model(tmp_path: Path) -> None:
    text = card(tmp_path, record={"imported": {"file": "smol.gguf", "name": "Smol [1]", "license": "apache-2.0"}})
    assert front_matter(text)["license"] == "apache-2.0"
    assert "imported from `smol.gguf` (Smol \\[1\\])" in text
    both = {"license": "mit AND more\n", "imported": {"license": "apache-2.0"}}
    assert licences(both) == ["mit AND more\n", "apache-2.0"]
    assert licences({"license": 3, "imported": ["license"]}) == []
    assert front_matter(card(tmp_path, record=both))["license"] == "apache-2.0", "the first that YAML takes"
    hostile = card(tmp_path, record={"license": "mit\nbase_model: evil"})
    assert front_matter(hostile)["license"] == "other"
    assert "evil" not in hostile


def test_a_tuned_model_tells_of_both_and_chats(tmp_path: Path) -> None:
    record = {
        "made_by": "finetune", "data": {"sources": ["/x/chats.jsonl"]}, "base": {"folder": "/x/run", "record": RECORD},
        "chat": {"conversations": 1200, "held_out": 120}, "request": {"lora": {"rank": 8, "alpha": 16.0}},
        "plan": RECORD["plan"], "result": {"bits_per_byte": 0.9},
    }  # fmt: skip
    text = card(tmp_path, record=record)
    for told in (
        "before tuning: files: `a.txt`", "`chats.jsonl`", "1,200 conversations, 120 of them held out",
        "rank 8, alpha 16", "0.900 bits per byte of the held-out answers", "minigpt chat -m .", "apply_chat_template",
    ):  # fmt: skip
        assert told in text
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    adapter = card(tmp_path, record=record)
    assert "AutoPeftModelForCausalLM" in adapter
    assert front_matter(adapter)["library_name"] == "peft"
    for shown in (text, adapter):
        (python,) = blocks(shown, "python")
        compile(python, "card", "exec")


def test_transformer_2017_has_no_counterpart(tmp_path: Path) -> None:
    text = card(tmp_path, VARIANTS["transformer-2017"])
    assert "`transformers` and llama.cpp have no counterpart" in text
    assert "import AutoModel" not in text
    assert "gguf" not in text
    assert front_matter(text)["library_name"] == "minigpt"


def test_a_card_that_somebody_wrote_is_never_touched(tmp_path: Path) -> None:
    path = tmp_path / CARD
    for own in (OWN.encode(), b"\xff\xfe\x00", b""):
        path.write_bytes(own)
        assert not write_card(tmp_path, CONFIG, RECORD)
        remove_card(tmp_path)
        assert path.read_bytes() == own
    path.unlink()
    path.mkdir()
    assert not write_card(tmp_path, CONFIG, RECORD)
    path.rmdir()
    ours = card(tmp_path)
    assert MARK in ours
    assert card(tmp_path, record={}) != ours, "ours is written anew"
    path.write_text(ours.replace(MARK, ""), encoding="utf-8")
    assert not is_ours(path), "the line taken out makes it a person's own"
    path.unlink()
    os.symlink(tmp_path / "elsewhere.md", path)
    assert not write_card(tmp_path, CONFIG, RECORD)
    assert not (tmp_path / "elsewhere.md").exists()


def test_training_writes_it_and_keeps_what_is_not_its_own(trained: Path, tmp_path: Path) -> None:
    text = (trained / CARD).read_text(encoding="utf-8")
    loaded = load(trained)
    bits = loaded.record["result"]["bits_per_byte"]
    for told in ("# run", "`cats.txt`", "1 document", "| steps | 3", "| seed | 7 |", f"{bits:.3f} bits per byte"):
        assert told in text
    assert f"| parameters | {loaded.model.num_parameters():,} |" in text
    (tmp_path / "cats.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "run").mkdir()
    for before, after in ((OWN, OWN), (text.replace("# run", "# old"), None)):
        (tmp_path / "run" / CARD).write_text(before, encoding="utf-8")
        result = minigpt("train", *TINY, "--steps", "1", tmp_path / "cats.txt", "-o", tmp_path / "run", "--overwrite")
        assert result.status == 0, result.err
        found = (tmp_path / "run" / CARD).read_text(encoding="utf-8")
        assert found == after if after else "# run" in found and "| steps | 1" in found


def test_its_commands_run_in_the_folder(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained)
    text = Path(CARD).read_text(encoding="utf-8")
    first, export = blocks(text, "sh")
    said, command = first.strip().split(" | ")
    assert said.startswith('echo "')
    program, *arguments = shlex.split(command)
    assert program == "minigpt"
    result = minigpt(*arguments, "--device", "cpu", stdin=f"{shlex.split(said)[1]}\n".encode())
    assert result.status == 0, result.err
    program, *arguments = shlex.split(export.splitlines()[0])
    result = minigpt(*arguments)
    assert result.status == 0, result.err
    assert Path("model.gguf").read_bytes().startswith(b"GGUF")
    Path("model.gguf").unlink()


def test_its_program_runs_in_the_folder(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(trained)
    (program,) = blocks(Path(CARD).read_text(encoding="utf-8"), "python")
    exec(compile(program, CARD, "exec"), {})
    assert capsys.readouterr().out.startswith("Once upon a time")


def test_an_export_has_one_too(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", record=RECORD)
    assert minigpt("export", folder, "--to", "transformers", "-o", tmp_path / "out").status == 0
    text = (tmp_path / "out" / CARD).read_text(encoding="utf-8")
    assert "# out" in text
    assert "1.234 bits per byte" in text
    for place in ("out", "model"):  # in the place that is written to, or brought along from the model
        (tmp_path / place / CARD).write_text(OWN, encoding="utf-8")
        result = minigpt("export", folder, "--to", "transformers", "-o", tmp_path / "out", "--overwrite")
        assert result.status == 0, result.err
        assert (tmp_path / "out" / CARD).read_text(encoding="utf-8") == OWN
        (tmp_path / "out" / CARD).unlink()
