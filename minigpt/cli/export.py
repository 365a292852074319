"""`minigpt export`: a model folder in, a file or a folder for other programs out, read back and compared."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from minigpt.cli import console, models, outputs
from minigpt.config import DTypeName, GGUFType
from minigpt.errors import ConfigError, ModelFolderError, UsageError
from minigpt.units import byte_size

if TYPE_CHECKING:
    from minigpt.checkpoint.folder import LoadedModel
    from minigpt.evaluation.agreement import Agreement
    from minigpt.model.transformer import GPT
    from minigpt.text.tokenizer import Tokenizer

Format = Literal["gguf", "transformers"]
PROGRAMS = {"gguf": "llama.cpp", "transformers": "transformers"}
# Half the size of float32, eight times finer than bfloat16, and read by every program that reads GGUF.
DEFAULT_TYPE: GGUFType = "f16"
# How far logits may lie apart: the root mean square of the differences over the spread of the logits. Rounding costs a
# small part of it (tests/test_cli_export.py has figures); a matrix in the wrong order or place makes it about 1.4.
BOUNDS = {
    "f32": 1e-4, "f16": 0.01, "bf16": 0.05, "q8_0": 0.1, "q4_0": 0.7,
    "float32": 1e-4, "float16": 0.01, "bfloat16": 0.05,
}  # fmt: skip
CHECKED_TOKENS = 128
CHECKED_TEXT = (
    "The capital of France is Paris. In 1998, it wasn't 12,345 people who'd said “hello”; they\n\n"
    "\tsat down, e.g. at https://example.org/?q=1 …  and ate 3 apples!\n"
    "def f(x):\n    return x ** 2  # squares\n"
    "从前有一只猫，它喜欢在月光下看书。 Это небольшой текст. L'été à la plage 🏖️😀👩‍👩‍👧 <|endoftext|> </s>\n"
)
SIZES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


@dataclass(frozen=True)
class Written:
    """What was written: its size, how near it comes to the model, and how many matrices did not fit the type."""

    bytes: int
    agreement: Agreement
    kept_in_f16: int = 0


def export(
    folder: models.ModelArgument = None,
    model: models.ModelOption = None,
    to: Annotated[Format, typer.Option(help="gguf (llama.cpp and what is built on it) or transformers.")] = "gguf",
    type_: Annotated[
        GGUFType | None,
        typer.Option("--type", help="Of GGUF: f32, f16, bf16, q8_0 or q4_0. [default: f16]", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            help="File or folder to write. [default for GGUF: MODEL/<model>-<type>.gguf]",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        DTypeName | None,
        typer.Option(
            help="For transformers: float32, bfloat16 or float16. [default: the stored type]", show_default=False
        ),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(help="For transformers: cut the weights into files of 500MB, 2GB, …", show_default=False),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="An adapter and its base model as one model folder, for any use.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
    as_json: models.JsonOption = False,
) -> None:
    """Write a model for other programs, read it back, and compare.

    \b
      minigpt export runs/alice
      minigpt export -m runs/alice --to gguf --type q8_0 -o alice.gguf
      minigpt export -m runs/alice --to transformers --dtype bfloat16 -o alice-hf
    """
    model = models.named_once(folder, model)
    if (to == "transformers" or merge) and type_ is not None:
        raise UsageError(f"--type is for GGUF; with {'--merge' if merge else '--to transformers'} it is --dtype")
    if to == "gguf" and not merge and (dtype is not None or max_shard_size is not None):
        raise UsageError("--dtype and --max-shard-size need --to transformers; for GGUF it is --type")
    shard_bytes = None if max_shard_size is None else _bytes(max_shard_size)
    source = models.resolve(model)
    if merge:
        to = "transformers"
        _check_adapter(source)
    place = _gguf_place(source, out, type_ or DEFAULT_TYPE) if to == "gguf" else _folder_place(source, out)
    outputs.check_free(place, overwrite=overwrite)
    loaded = _load(source, None if merge else to)
    if to == "gguf":
        kind: str = type_ or DEFAULT_TYPE
        written = _write_gguf(loaded, place, type_ or DEFAULT_TYPE)
    else:
        kind = dtype or _stored_type(loaded)
        written = _write_folder(loaded, place, kind, shard_bytes)
    _report(to, place, kind, written)
    if as_json:
        found = {"format": to, "path": str(place), "type": kind, "bytes": written.bytes}
        found |= {"largest_difference": written.agreement.largest, **asdict(written.agreement)}
        del found["largest"]
        console.write(json.dumps(found, ensure_ascii=False) + "\n")


def _bytes(text: str) -> int:
    """Read 2GB, 500 MB, 1GiB or a number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?|)B?", text.strip().upper())
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"--max-shard-size {text}: no size; write it as 500MB, 2GB or 1GiB")
    return max(1, int(float(match[1]) * SIZES[match[2]]))


def _gguf_place(source: Path, out: Path | None, kind: str) -> Path:
    """The file named, or one that is named after the model, in the folder that is named or in the model's own."""
    if out is not None and not out.is_dir():
        return out
    return (out or source) / f"{source.resolve().name}-{kind}.gguf"


def _folder_place(source: Path, out: Path | None) -> Path:
    if out is None:
        raise UsageError(f"--to transformers needs a folder to write: -o {source.resolve().name}-hf")
    if out.exists() and out.resolve() == source.resolve():
        raise UsageError(f"{out} is the model itself, which transformers opens as it is; write elsewhere with -o")
    return out


def _check_adapter(source: Path) -> None:
    from minigpt.checkpoint.base import holds_adapter

    if not holds_adapter(source):
        raise ConfigError(f"{source} is no adapter that could be merged; leave --merge out")


def _load(source: Path, to: Format | None) -> LoadedModel:
    """Open the model; `to` None is a folder for minigpt, which knows every architecture."""
    from minigpt.checkpoint.folder import load

    loaded = load(source)
    if to is not None and loaded.model.config.architecture == "transformer-2017":
        raise ConfigError(f"{source}: {PROGRAMS[to]} has no counterpart of transformer-2017; train another --arch")
    return loaded


def _stored_type(loaded: LoadedModel) -> str:
    name = str(loaded.model.lm_head.weight.dtype).removeprefix("torch.")
    return name if name in BOUNDS else "float32"


def _write_gguf(loaded: LoadedModel, place: Path, kind: GGUFType) -> Written:
    import torch

    from minigpt.checkpoint.gguf import read_gguf, write_gguf
    from minigpt.evaluation.agreement import logits_of

    ids = _checked_ids(loaded)
    expected = logits_of(loaded.model.float(), ids)
    with outputs.staged_file(place) as stage, console.progress() as progress:

        def show(share: float) -> None:
            progress.show(f"export     {share:.0%}", share)

        kept = write_gguf(
            stage, loaded.model, loaded.tokenizer, kind, about=_about(loaded), generation=loaded.generation,
            progress=show,
        )  # fmt: skip
        loaded.model.to("meta")  # its memory is the second one's
        read = read_gguf(stage)
        _check_tokenizer(loaded.tokenizer, read.tokenizer, place)
        agreement = _check_logits(expected, read.build(torch.float32), ids, kind, place)
        return Written(stage.stat().st_size, agreement, len(kept))


def _write_folder(loaded: LoadedModel, place: Path, kind: str, shard_bytes: int | None) -> Written:
    import torch

    from minigpt.checkpoint.card import CARD, write_card
    from minigpt.checkpoint.folder import load, save_description, save_weights
    from minigpt.evaluation.agreement import logits_of

    ids = _checked_ids(loaded)
    expected = logits_of(loaded.model.float(), ids)
    with outputs.staged_folder(place) as stage:
        save_description(stage, loaded.model.config, loaded.tokenizer, loaded.record, loaded.generation)
        save_weights(stage, loaded.model, getattr(torch, kind), shard_bytes)
        if (card := loaded.folder / CARD).is_file():
            shutil.copyfile(card, stage / CARD)
        write_card(stage, loaded.model.config, loaded.record, name=place.resolve().name)
        loaded.model.to("meta")  # its memory is the second one's
        read = load(stage, dtype=torch.float32)
        _check_tokenizer(loaded.tokenizer, read.tokenizer, place)
        agreement = _check_logits(expected, read.model, ids, kind, place)
        return Written(sum(file.stat().st_size for file in stage.glob("*.safetensors")), agreement)


def _about(loaded: LoadedModel) -> dict[str, str]:
    """What a GGUF file says of the model."""
    from minigpt.checkpoint.card import licences

    licence = next(iter(licences(loaded.record)), None)
    return {"name": loaded.folder.resolve().name} | ({} if licence is None else {"license": licence})


def _checked_ids(loaded: LoadedModel) -> list[int]:
    """A text of many kinds, again and again up to as many tokens as are compared."""
    ids = loaded.tokenizer.encode_prompt(CHECKED_TEXT)
    wanted = min(CHECKED_TOKENS, loaded.model.config.max_position_embeddings)
    return (ids * (1 + wanted // len(ids)))[:wanted]


def _check_tokenizer(ours: Tokenizer, theirs: Tokenizer, place: Path) -> None:
    for text in ("", *CHECKED_TEXT.splitlines(keepends=True), CHECKED_TEXT):
        if ours.encode_prompt(text) != theirs.encode_prompt(text):
            raise ModelFolderError(
                f"{place}: the tokenizer came back with other ids for {text[:40]!r}; it was removed, since this "
                "tokenizer cannot be written so"
            )
    if lost := sorted(set(ours.end_ids) - set(theirs.end_ids)):
        raise ModelFolderError(f"{place}: token {lost[0]} ends a text here, but not when read back; it was removed")


def _check_logits(expected: Any, model: GPT, ids: list[int], kind: str, place: Path) -> Agreement:
    from minigpt.evaluation.agreement import compare, logits_of

    agreement = compare(expected, logits_of(model, ids))
    if not agreement.error <= BOUNDS[kind]:
        raise ModelFolderError(
            f"{place}: read back, its logits differ by {agreement.error:.2g} of their spread, where {kind} may cost "
            f"{BOUNDS[kind]:g}; it was removed; try a wider type"
        )
    return agreement


def _report(to: Format, place: Path, kind: str, written: Written) -> None:
    if written.kept_in_f16:
        console.note(f"note: {written.kept_in_f16} matrices stay f16: their rows are no multiple of 32 wide")
    agreement = written.agreement
    console.fact("export", f"{place}: {kind}, {byte_size(written.bytes)}")
    console.fact(
        "check",
        f"read back: the same ids; the largest difference of a logit is {agreement.largest:.3g}, where their standard "
        f"deviation is {agreement.spread:.3g}; the same best token at {agreement.same_best:.0%} of "
        f"{agreement.positions} positions",
    )
    quoted = shlex.quote(str(place))
    command = f'llama-completion -m {quoted} -no-cnv -p "Once upon a time" -n 100'
    if to == "transformers":
        command = f'echo "Once upon a time" | minigpt generate -m {quoted}'
    console.fact("next", command, wrapped=False)
