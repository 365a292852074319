"""What is compiled: the same numbers as PyTorch's, and the same bits for a row wherever it stands."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minigpt import compiler
from minigpt.model import native


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def compiled() -> None:
    if native.library() is None:
        pytest.skip("no C compiler here")


def product_with(weight: torch.Tensor) -> native.Product:
    found = native.matrix("float32", weight)
    assert found is not None
    return native.product(found)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("outs", "ins"), [(4, 16), (100, 96), (64, 1024)])
def test_a_product_and_each_of_its_rows_alone(outs: int, ins: int) -> None:
    weight = random(outs, ins)
    product = product_with(weight)
    for rows in range(1, 12):
        x = random(rows, ins, seed=rows)
        found = product(x)
        torch.testing.assert_close(found.double(), x.double() @ weight.double().t(), rtol=1e-5, atol=1e-4)
        assert all(torch.equal(product(x[row : row + 1])[0], found[row]) for row in range(rows))


@pytest.mark.usefixtures("compiled")
def test_what_is_multiplied_need_not_lie_in_a_row() -> None:
    weight, x = random(8, 32), random(32, 3, seed=1).t()
    torch.testing.assert_close(product_with(weight)(x), x @ weight.t(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("outs", "ins"), [(6, 32), (8, 40)])
def test_shapes_that_it_has_no_code_for(outs: int, ins: int) -> None:
    assert native.matrix("float32", random(outs, ins)) is None


@pytest.mark.usefixtures("compiled")
def test_it_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.library.cache_clear()
    try:
        assert native.library() is not None
        assert [path.suffix for path in (tmp_path / "minigpt").iterdir()] == [".so"]
        monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
        native.library.cache_clear()
        assert native.library() is not None
    finally:
        native.library.cache_clear()


@pytest.mark.usefixtures("compiled")
def test_where_it_cannot_be_kept_it_is_compiled_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "minigpt").write_text("a file, where a folder should be", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.library.cache_clear()
    try:
        assert native.library() is not None
    finally:
        native.library.cache_clear()
