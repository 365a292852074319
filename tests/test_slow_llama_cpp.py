"""What we export, in llama.cpp itself: the same ids, the same logits, the same greedy texts.

llama-cpp-python is no dependency, since it is compiled for some minutes. In an environment of its own:

    python -m venv llama
    export CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_AVX512=ON"
    llama/bin/pip install llama-cpp-python
    MINIGPT_LLAMA_CPP_PYTHON=llama/bin/python python -m pytest -m slow tests/test_slow_llama_cpp.py

GGML_NATIVE is off because the kernels for AMX, which it would choose, crash on some virtual machines with quantised
types; without AVX512 in the processor, leave that option out.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import CPU, minigpt
from tiny_folder import make_folder

from minigpt.checkpoint.folder import load

pytestmark = pytest.mark.slow

TEXT = (
    "Alice was beginning to get very tired of sitting by her sister on the bank.\n"
    "从前有一只猫，它喜欢在月光下看书。猫说：“你好！”\n"
    "The cat 😀 and the dog 🐶 sat down at 10:45; they didn't see 3,456 birds 🐦.\n"
    "“Who are you?” said the Caterpillar.\n\n\tIt wasn't very encouraging…\n"
)
PROMPTS = (
    "Alice was", "The cat", "从前有一只", "猫说：“你", "😀 and the", "it's 12345", "  two  spaces\n\n",
    "café ñ Ω 👩‍👩‍👧 <|im_end|>",
)  # fmt: skip
NEW_TOKENS = 16
PROGRAM = """
import json, sys
import llama_cpp
asked = json.load(sys.stdin)
# As ours: keys and values are kept in float32, and attention is computed plainly.
more = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32, "flash_attn": False}
model = llama_cpp.Llama(asked["model"], n_ctx=128, n_threads=1, verbose=False, logits_all=True, **more)
for prompt in asked["prompts"]:
    ids = model.tokenize(prompt.encode("utf-8"), add_bos=True, special=False)
    model.reset()
    model.eval(ids)
    logits = [float(value) for value in model.scores[len(ids) - 1]]
    new = []
    for _ in range(asked["new"]):
        new.append(int(model.scores[model.n_tokens - 1].argmax()))
        model.eval(new[-1:])
    text = model.detokenize(ids + new)[len(model.detokenize(ids)):].decode("utf-8", "replace")
    print(json.dumps({"ids": ids, "logits": logits, "new": new, "text": text}))
"""


@dataclass(frozen=True)
class Answer:
    """What llama.cpp makes of one prompt."""

    ids: list[int]
    logits: list[float]
    new: list[int]
    text: str


@pytest.fixture(scope="module")
def interpreter() -> str:
    """An interpreter that can import llama_cpp."""
    named = os.environ.get("MINIGPT_LLAMA_CPP_PYTHON")
    if named is None and importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("no llama-cpp-python; build it as this file says, and set MINIGPT_LLAMA_CPP_PYTHON")
    return named or sys.executable


def ask(interpreter: str, model: Path, prompts: tuple[str, ...]) -> list[Answer]:
    asked = json.dumps({"model": str(model), "prompts": prompts, "new": NEW_TOKENS})
    result = subprocess.run(
        [interpreter, "-c", PROGRAM], input=asked, capture_output=True, text=True, encoding="utf-8", check=False
    )
    assert result.returncode == 0, result.stderr
    return [Answer(**json.loads(line)) for line in result.stdout.splitlines()]


def exported(folder: Path, path: Path, kind: str) -> Path:
    result = minigpt("export", folder, "--to", "gguf", "--type", kind, "-o", path)
    assert result.status == 0, result.err
    return path


@pytest.fixture(scope="module", params=["qwen3", "llama", "gpt2"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a tokenizer of its own, trained by the command line until it knows its text."""
    place = tmp_path_factory.mktemp("trained")
    (place / "text.txt").write_text(TEXT * 40, encoding="utf-8")
    options: tuple[Any, ...] = (
        "--arch", request.param, "--preset", "nano", "--context", "64", "--vocab-size", "400", "--batch-size", "8",
        "--steps", "150", "--seed", "1", "--separator", r"\n\n\n",
    )  # fmt: skip
    result = minigpt("train", place / "text.txt", "-o", place / request.param, *CPU, *options)
    assert result.status == 0, result.err
    folder: Path = place / request.param
    return folder


@torch.no_grad()
def ours(folder: Path, prompt: str) -> tuple[list[int], torch.Tensor, list[int]]:
    """Ids, the logits after them, and the greedy ids that follow."""
    loaded = load(folder, dtype=torch.float32)
    ids = loaded.tokenizer.encode_prompt(prompt)
    logits = loaded.model(torch.tensor([ids]))[0, -1]
    new: list[int] = []
    for _ in range(NEW_TOKENS):
        new.append(int(loaded.model(torch.tensor([ids + new]))[0, -1].argmax()))
    return ids, logits, new


def assert_near(answer: Answer, logits: torch.Tensor) -> None:
    """llama.cpp sums in another order, and looks GPT-2's activation up in a table of float16."""
    torch.testing.assert_close(torch.tensor(answer.logits), logits, rtol=0, atol=1e-2)


def test_a_model_of_ours_says_the_same_there(trained: Path, interpreter: str, tmp_path: Path) -> None:
    answers = ask(interpreter, exported(trained, tmp_path / "model.gguf", "f32"), PROMPTS)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids, logits, new = ours(trained, prompt)
        assert answer.ids == ids, prompt
        assert_near(answer, logits)
        assert answer.new == new, prompt


@pytest.mark.parametrize("name", ["qwen2", "llama-long-rope", "llama-untied-ungrouped", "qwen3-wide-heads", "mistral"])
def test_what_else_can_be_written_computes_the_same_there(name: str, interpreter: str, tmp_path: Path) -> None:
    """Biases, scaled rotary positions, heads wider than the model: random weights, up to as far as the context."""
    folder = make_folder(tmp_path / "model", name)
    if name == "mistral":  # its window would be lost
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(config | {"sliding_window": None}), encoding="utf-8")
    prompts = ("A", "Alice was", "the bank, and of having nothing")
    answers = ask(interpreter, exported(folder, tmp_path / "model.gguf", "f32"), prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids, logits, _ = ours(folder, prompt)
        assert answer.ids == ids
        assert len(ids) <= 16
        assert_near(answer, logits)


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q4_0"])
def test_every_type_opens_there(trained: Path, interpreter: str, tmp_path: Path, kind: str) -> None:
    answers = ask(interpreter, exported(trained, tmp_path / "model.gguf", kind), PROMPTS)
    best = 0
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids, logits, _ = ours(trained, prompt)
        assert answer.ids == ids
        best += int(torch.tensor(answer.logits).argmax()) == int(logits.argmax())
    assert best >= (len(PROMPTS) - 2 if kind == "q4_0" else len(PROMPTS) - 1)


def test_a_tokenizer_with_scores_is_the_same_there(shared: Path, interpreter: str, tmp_path: Path) -> None:
    folder = shared / "models" / "stories260k"
    answers = ask(interpreter, exported(folder, tmp_path / "model.gguf", "f32"), PROMPTS)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids, logits, new = ours(folder, prompt)
        assert answer.ids == ids
        assert_near(answer, logits)
        assert answer.new == new


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_smollm2_answers_there_after_the_way_through_here(
    smollm2: Path, interpreter: str, tmp_path: Path, kind: str
) -> None:
    prompts = ("The capital of France is", "Once upon a time", "猫 😀 I don't have 1,234")
    answers = ask(interpreter, exported(smollm2, tmp_path / "model.gguf", kind), prompts)
    tokenizer = load(smollm2).tokenizer
    assert [answer.ids for answer in answers] == [tokenizer.encode_prompt(prompt) for prompt in prompts]
    assert answers[0].text.startswith(" Paris")
