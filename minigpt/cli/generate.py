"""`minigpt generate`: a prompt in, text out, and nothing else on stdout."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minigpt.cli import console, models, stdin
from minigpt.cli.texts import typed
from minigpt.config import SamplingConfig
from minigpt.errors import DataError, MinigptError, UsageError
from minigpt.text.decoding import ReadCounts, decode_utf8, replace_surrogates

if TYPE_CHECKING:
    from minigpt.checkpoint.folder import LoadedModel
    from minigpt.inference.engine import Completion

SEED_BITS = 31  # of a seed that nobody gave


@dataclass(frozen=True)
class Ask:
    """One prompt to continue, with the id it came with and the seeds of its samples."""

    prompt: str
    seeds: tuple[int, ...]
    id: dict[str, Any] = field(default_factory=dict)  # under that name, or empty


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; joined to piped text, if any.", show_default=False)
    ] = None,
    model: models.ModelOption = None,
    max_new_tokens: Annotated[int, typer.Option("-n", "--max-new-tokens", help="Most tokens to add.")] = 256,
    temperature: Annotated[
        float, typer.Option("-t", "--temperature", help="0 always takes the likeliest token.")
    ] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw from the K likeliest.", show_default=False)] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest that hold this share.", show_default=False)
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Leave out what is less likely than this times the best.", show_default=False)
    ] = None,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: repeat less.")] = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be given again.", show_default=False)
    ] = None,
    num_samples: Annotated[int, typer.Option(help="Texts to write for each prompt.", min=1)] = 1,
    seed: Annotated[
        int | None, typer.Option(help="Repeat a text. [default: another each time]", min=0, show_default=False)
    ] = None,
    echo: Annotated[bool, typer.Option("--echo", help="Print the prompt before its text.")] = False,
    lines: Annotated[bool, typer.Option("--lines", help="Every line of stdin is a prompt.")] = False,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help='JSON lines in ({"id": 7, "prompt": "…"}), JSON lines out, in order.')
    ] = False,
    as_json: models.JsonOption = False,
    logprobs: Annotated[
        int | None, typer.Option(help="With JSON: log-probabilities, and those of the N best.", show_default=False)
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Texts written at once.", min=1)] = 16,
    device: models.DeviceOption = None,
    dtype: models.DTypeOption = None,
) -> None:
    """Continue a text.

    \b
      echo "Once upon a time" | minigpt generate
      minigpt generate "Once upon a time" -m runs/alice --max-new-tokens 40 --seed 1
      minigpt generate --jsonl < prompts.jsonl > answers.jsonl
    """
    if lines and jsonl:
        raise UsageError("--lines and --jsonl are two ways to read stdin; choose one")
    if prompt is not None and (lines or jsonl):
        raise UsageError("a prompt as argument does not go with --lines or --jsonl; pipe the prompts")
    if logprobs is not None and not (as_json or jsonl):
        raise UsageError("--logprobs needs --json or --jsonl")
    prompt, stop = typed(prompt), [typed(text) for text in stop or ()]
    sampling = SamplingConfig(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, stop=tuple(stop), logprobs=logprobs,
    )  # fmt: skip
    folder = models.resolve(model)
    if prompt is None and not (lines or jsonl or stdin.is_piped()):
        raise UsageError('no prompt; give one ("" for none) or pipe text: echo "Once" | minigpt generate')
    device_ = models.pick_device(device)
    from minigpt.checkpoint.folder import load

    loaded = load(folder, device=device_, dtype=models.pick_dtype(dtype, device_))
    base = secrets.randbits(SEED_BITS) if seed is None else seed
    asks = _asks(prompt, lines, jsonl, base, num_samples)
    writer = _Writer(loaded, sampling, as_json=as_json or jsonl, echo=echo)
    if lines or jsonl or num_samples > 1:
        writer.write_batches(asks, batch_size)
    else:
        writer.write_one(next(asks))


def _asks(prompt: str | None, lines: bool, jsonl: bool, seed: int, samples: int) -> Iterator[Ask]:
    """Yield the prompts with their seeds: the first text of all has the run's own seed."""
    from minigpt.inference.sampling import row_seed

    number = 0

    def seeds() -> tuple[int, ...]:
        nonlocal number
        number += samples
        return tuple(row_seed(seed, row) for row in range(number - samples, number))

    if not (lines or jsonl):
        piped = stdin.read_text("a prompt") if stdin.is_piped() else ""
        if prompt is None and not piped:
            raise DataError('stdin: no text came through the pipe; check what feeds it, or give "" for no prompt')
        texts = (piped.removesuffix("\n"), prompt or "")
        yield Ask("\n".join(text for text in texts if text), seeds())
        return
    with stdin.piped("prompts") as stream:
        for count, raw in enumerate(iter(stream.readline, b""), start=1):
            text = decode_utf8(raw, ReadCounts()).removesuffix("\n").removesuffix("\r")
            if lines:
                yield Ask(text, seeds())
            elif text.strip():
                yield _parse(text, count, seeds())


def _parse(line: str, number: int, seeds: tuple[int, ...]) -> Ask:
    """Read one JSON line; what is wrong with it is a DataError with its number."""
    where = f"stdin:{number}"
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: no valid JSON ({error})") from error
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        found = ", ".join(map(repr, record)) if isinstance(record, dict) else type(record).__name__
        raise DataError(f'{where}: no text in a field "prompt" (found: {found})')
    return Ask(replace_surrogates(record["prompt"]), seeds, {"id": record["id"]} if "id" in record else {})


def _batches(asks: Iterator[Ask], size: int) -> Iterator[list[tuple[Ask, int]]]:
    """Group prompts and seeds; where one cannot be read, those before it come first, then the error."""
    batch: list[tuple[Ask, int]] = []
    failure: MinigptError | None = None
    try:
        for row in ((ask, seed) for ask in asks for seed in ask.seeds):
            batch.append(row)
            if len(batch) == size:
                yield batch
                batch = []
    except MinigptError as error:
        failure = error
    if batch:
        yield batch
    if failure is not None:
        raise failure


class _Writer:
    """Run prompts through the engine and put what comes out on stdout."""

    def __init__(self, loaded: LoadedModel, sampling: SamplingConfig, *, as_json: bool, echo: bool) -> None:
        self.loaded, self.sampling, self.as_json, self.echo = loaded, sampling, as_json, echo
        self.noted = False
        self.context = loaded.model.config.max_position_embeddings

    def write_one(self, ask: Ask) -> None:
        """Stream one text as it is made, or print it as one JSON object."""
        from minigpt.inference.engine import stream

        if self.as_json:
            self.write_batches(iter([ask]), 1)
            return
        console.write(ask.prompt if self.echo else "")
        ids = self._encode(ask.prompt)
        text = ""
        events = stream(self.loaded.model, self.loaded.tokenizer, [ids], self.sampling, ask.seeds)
        for count, event in enumerate(events, start=len(ids) + 1):
            self._note_length(count)
            console.write(event.text)
            text = event.text or text
        console.write("" if text.endswith("\n") else "\n")

    def write_batches(self, asks: Iterator[Ask], batch_size: int) -> None:
        """Print every text of every prompt, in order, several rows at a time."""
        from minigpt.inference.engine import collect, stream

        for batch in _batches(asks, batch_size):
            prompts = [self._encode(ask.prompt) for ask, _ in batch]
            seeds = [seed for _, seed in batch]
            events = stream(self.loaded.model, self.loaded.tokenizer, prompts, self.sampling, seeds)
            for (ask, seed), ids, done in zip(batch, prompts, collect(events, len(batch)), strict=True):
                self._note_length(len(ids) + len(done.tokens))
                self._print(ask, seed, len(ids), done)

    def _print(self, ask: Ask, seed: int, prompt_tokens: int, done: Completion) -> None:
        text = (ask.prompt if self.echo else "") + done.text
        if not self.as_json:
            console.write(text + "\n")
            return
        record: dict[str, Any] = ask.id | {
            "prompt": ask.prompt,
            "text": text,
            "finish_reason": done.finish_reason,
            "prompt_tokens": prompt_tokens,
            "new_tokens": len(done.tokens),
            "seed": seed,
        }
        if self.sampling.logprobs is not None:
            record["tokens"] = [self._token(event.token_id, event.logprob, event.top) for event in done.tokens]
        console.write(json.dumps(record, ensure_ascii=False) + "\n")

    def _token(self, id: int, logprob: float | None, top: tuple[tuple[int, float], ...]) -> dict[str, Any]:
        """Spell a token for JSON; half a character is shown as U+FFFD."""

        def text(token: int) -> str:
            return self.loaded.tokenizer.token_bytes(token).decode("utf-8", errors="replace")

        best = [{"id": token, "text": text(token), "logprob": value} for token, value in top]
        return {"id": id, "text": text(id), "logprob": logprob, "top": best}

    def _encode(self, prompt: str) -> list[int]:
        """Turn a prompt into ids; say so when it is longer than the context."""
        ids = self.loaded.tokenizer.encode_prompt(prompt)
        if len(ids) > self.context:
            self._note(f"a prompt has {len(ids):,} tokens, more than the context of {self.context:,}; its end is kept")
        return ids

    def _note_length(self, tokens: int) -> None:
        """Say so when a text has outgrown the context."""
        if tokens > self.context and self.loaded.model.config.traits.positions != "learned":
            self._note(f"the text is past the context of {self.context:,} tokens; what lies further back is forgotten")

    def _note(self, text: str) -> None:
        if not self.noted:
            self.noted = True
            console.note(f"note: {text}")
