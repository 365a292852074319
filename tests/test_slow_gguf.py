"""A real model out of a GGUF file: SmolLM2-135M-Instruct against reference figures, and the memory that it takes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from commands import error_of, minigpt

from minigpt.checkpoint.folder import LoadedModel, load
from minigpt.checkpoint.gguf import read_gguf

pytestmark = pytest.mark.slow

PROMPTS = ("The capital of France is", "Once upon a time")


@pytest.fixture(scope="module")
def reference(shared: Path) -> dict[str, Any]:
    text = (shared / "models" / "reference.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)["smollm2-135m-instruct"]
    return found


@pytest.fixture(scope="module")
def loaded(smollm2: Path) -> LoadedModel:
    return load(smollm2, dtype=torch.float32)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_ids_logits_and_greedy_texts_are_those_of_the_reference(
    prompt: str, loaded: LoadedModel, reference: dict[str, Any]
) -> None:
    expected = reference[prompt]
    ids = loaded.tokenizer.encode_prompt(prompt)
    assert ids == expected["ids"]
    with torch.no_grad():
        best = loaded.model(torch.tensor([ids]))[0, -1].topk(5)
    assert best.indices.tolist() == [id for id, _ in expected["top5"]]
    assert best.values.tolist() == pytest.approx([value for _, value in expected["top5"]], abs=2e-3)
    length = len(expected["greedy_ids"])
    result = minigpt(
        "generate", prompt, "-m", loaded.folder, "-t", "0", "-n", str(length), "--json", "--logprobs", "0",
    )  # fmt: skip
    (found,) = result.objects
    assert [token["id"] for token in found["tokens"]] == expected["greedy_ids"]
    assert found["text"] == expected["text"]


def test_a_prompt_through_a_pipe_is_continued(smollm2: Path) -> None:
    result = minigpt("generate", "-m", smollm2, "--temperature", "0", "-n", "8", stdin=b"The capital of France is\n")
    assert result.status == 0
    assert result.out.startswith(" Paris")


def test_what_the_file_says_of_the_tokenizer_is_kept(loaded: LoadedModel) -> None:
    tokenizer = loaded.tokenizer
    assert [tokenizer.special_id(name) for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [0, 1, 2]
    assert tokenizer.end_ids == (2, 0)
    assert tokenizer.bos_id is None
    assert tokenizer.pad_id == 2
    assert tokenizer.chat_template is not None
    assert "You are a helpful AI assistant named SmolLM" in tokenizer.chat_template
    for text in ("I have 1,234 apples; don't you?", "猫 😀 e\u0301\n\n\t x"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_value_is_what_the_package_makes_of_the_file(smollm2_gguf: Path, loaded: LoadedModel) -> None:
    """Read by the package, and turned by the reshaping with which the makers of such files put the rows in order."""
    import gguf

    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2_gguf).tensors}
    weights = loaded.model.state_dict()
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "ffn_down": "mlp.down_proj"}
    for layer, (theirs, ours) in ((layer, pair) for layer in (0, 29) for pair in names.items()):
        tensor = stored[f"blk.{layer}.{theirs}.weight"]
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if theirs != "ffn_down":
            heads = {"attn_q": 9, "attn_k": 3}[theirs]
            values = values.reshape(heads, 32, 2, 576).swapaxes(1, 2).reshape(values.shape)
        assert torch.equal(weights[f"model.layers.{layer}.{ours}.weight"], values)


def test_importing_takes_the_memory_of_the_model_and_of_one_tensor(smollm2_gguf: Path, tmp_path: Path) -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("only Linux says how much memory is anonymous")
    code = (
        "import sys, torch, gguf, tokenizers\n"
        "from minigpt.cli.app import run\n"
        "from minigpt.checkpoint import folder, gguf\n"
        "torch.ones(1000, 1000) @ torch.ones(1000, 1000)\n"
        "print(flush=True)\n"
        "sys.stdin.buffer.raw.read(1)\n"
        "sys.exit(run(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", code, "import", str(smollm2_gguf), "-o", str(tmp_path / "in")]
    with (
        open(tmp_path / "errors", "wb") as errors,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        before = anonymous(child.pid)
        child.stdin.write(b"\n")
        child.stdin.flush()
        peak = before
        while child.poll() is None:
            peak = max(peak, anonymous(child.pid))
            threading.Event().wait(0.02)
    assert child.returncode == 0, (tmp_path / "errors").read_text(encoding="utf-8")
    model = (tmp_path / "in" / "model.safetensors").stat().st_size
    largest = 49152 * 576 * 4
    print(f"a model of {model / 1e6:,.0f} MB: {(peak - before) / 1e6:,.0f} MB of memory")
    assert peak - before < model + largest + 60e6, "60 MB are for tokens and merges"


def anonymous(pid: int) -> int:
    """Memory of a process that no file is behind, in bytes."""
    try:
        status = Path(f"/proc/{psutil.Process(pid).pid}/status").read_text(encoding="utf-8")
    except (OSError, psutil.NoSuchProcess):
        return 0
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return 1024 * int(fields.get("RssAnon", "0 kB").split()[0])


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0"])
def test_it_goes_out_and_comes_in_again(kind: str, smollm2: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "smollm2.gguf"
    result = minigpt("export", smollm2, "--type", kind, "-o", path, "--json")
    assert result.status == 0, result.err
    assert (result.objects[0]["largest_difference"] == 0.0) == (kind == "f32")
    assert result.objects[0]["same_best"] > 0.95
    read = read_gguf(path)
    assert read.config == loaded.model.config
    ids = read.tokenizer.encode_prompt(PROMPTS[0])
    assert ids == loaded.tokenizer.encode_prompt(PROMPTS[0])
    with torch.no_grad():
        best = int(read.build(torch.float32)(torch.tensor([ids]))[0, -1].argmax())
    assert read.tokenizer.decode([best]) == " Paris"


def test_cut_short_it_is_refused(smollm2_gguf: Path, tmp_path: Path) -> None:
    with open(smollm2_gguf, "rb") as file:
        for number, size in enumerate((100, 1_000_000, 50_000_000)):
            file.seek(0)
            path = tmp_path / f"cut-{number}.gguf"
            path.write_bytes(file.read(size))
            assert "cut short" in error_of(minigpt("import", path, "-o", tmp_path / "in"))
    assert not (tmp_path / "in").exists()
