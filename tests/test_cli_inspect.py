"""`minigpt inspect`: tables, JSON and pictures of attention."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from commands import error_of, minigpt
from tiny_folder import make_folder

from minigpt.checkpoint.folder import load
from minigpt.cli.inspect import measure
from minigpt.evaluation.attention import attention_weights

TEXT = "Alice had <been>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


def test_json_has_the_weights_of_every_head(folder: Path) -> None:
    loaded = load(folder)
    ids = loaded.tokenizer.encode(TEXT)
    weights = attention_weights(loaded.model, ids)
    (found,) = minigpt("inspect", TEXT, "-m", folder, "--device", "cpu", "--json").objects
    assert [token["id"] for token in found["tokens"]] == ids
    assert "".join(token["text"] for token in found["tokens"]) == TEXT
    assert [(entry["layer"], entry["head"]) for entry in found["heads"]] == [(i, j) for i in (0, 1) for j in range(4)]
    for entry in found["heads"]:
        torch.testing.assert_close(
            torch.tensor(entry["weights"]), weights[entry["layer"], entry["head"]], atol=1e-6, rtol=0
        )
    (one,) = minigpt("inspect", TEXT, "-m", folder, "--layer", 1, "--head", 2, "--json").objects
    assert one["heads"] == [found["heads"][6]]


def test_numbers_of_a_head_by_hand() -> None:
    weights = torch.tensor([[[[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0, 1, 0, 0], [0.25, 0.25, 0.25, 0.25]]]])
    found = measure(weights, 0, 0)
    assert found.mean_distance == pytest.approx((0 + 0.5 + 1 + 1.5) / 4)
    assert found.entropy_bits == pytest.approx((0 + 1 + 0 + 2) / 4)
    assert (found.favourite, found.share) == (0, pytest.approx(1.75 / 4))


def test_a_terminal_gets_a_summary_and_one_head(folder: Path) -> None:
    result = minigpt("inspect", TEXT, "-m", folder, "--device", "cpu", "--layer", 0, "--head", 3)
    assert result.err == ""
    summary, table = result.out.split("\n\n")
    assert len(summary.splitlines()) == 1 + 2 * 4
    lines = table.splitlines()
    assert lines[0].startswith("layer 0 head 3")
    loaded = load(folder)
    ids = loaded.tokenizer.encode(TEXT)
    weights = attention_weights(loaded.model, ids)[0, 3]
    assert len(lines) == 1 + len(ids)
    for place, line in enumerate(lines[1:]):
        expected = "".join(" ░▒▓█"[round(math.sqrt(weight) * 4)] * 2 for weight in weights[place, : place + 1].tolist())
        assert line[18:] == expected.rstrip()
    default = minigpt("inspect", TEXT, "-m", folder, "--device", "cpu")
    assert "layer 1 head 0" in default.out


def test_piped_text_joins_and_odd_characters_do_no_harm(folder: Path) -> None:
    (found,) = minigpt("inspect", "b\x1b[2J", "-m", folder, "--json", stdin=b"a\n").objects
    assert "".join(token["text"] for token in found["tokens"]) == "a\nb\x1b[2J"
    shown = minigpt("inspect", "b\x1b[2J猫", "-m", folder, stdin=b"a\n")
    assert "\x1b" not in shown.out
    assert "<E7>" in shown.out or "猫" in shown.out


def test_a_picture_is_written(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "new" / "attention.svg"
    result = minigpt("inspect", TEXT, "-m", folder, "--svg", path, "--json")
    assert result.objects
    assert result.err == f"wrote {path}\n"
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    assert len(root.findall("{http://www.w3.org/2000/svg}g")) == 8


def test_an_empty_prompt_is_its_first_token(folder: Path) -> None:
    (found,) = minigpt("inspect", "", "-m", folder, "--json").objects
    assert found["tokens"] == [{"id": 0, "text": "<0>"}]
    assert found["heads"][0]["weights"] == [[1.0]]


def test_what_is_wrong_is_said(folder: Path, tmp_path: Path) -> None:
    assert "no text" in error_of(minigpt("inspect", "-m", folder), 2)
    assert "--layer 2: the model has 2; choose 0 to 1" in error_of(minigpt("inspect", "a", "-m", folder, "--layer", 2))
    assert "--head -1" in error_of(minigpt("inspect", "a", "-m", folder, "--head", -1))
    gpt2 = make_folder(tmp_path / "gpt2", "gpt2")
    assert "more than the model's context of 16" in error_of(minigpt("inspect", TEXT * 9, "-m", gpt2))
    assert "cannot write" in error_of(minigpt("inspect", "a", "-m", folder, "--svg", "/proc/nothing/a.svg"))
