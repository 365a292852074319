"""`minigpt generate`: a prompt in, text out, and nothing else on stdout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minigpt.cli import console, models, sampling
from minigpt.cli.prompts import Ask, Source, batches
from minigpt.cli.texts import typed
from minigpt.config import SamplingConfig
from minigpt.errors import UsageError

if TYPE_CHECKING:
    from minigpt.checkpoint.folder import LoadedModel
    from minigpt.inference.engine import Completion
    from minigpt.text.chat import ChatTemplate


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; joined to piped text, if any.", show_default=False)
    ] = None,
    model: models.ModelOption = None,
    max_new_tokens: Annotated[int, typer.Option("-n", "--max-new-tokens", help="Most tokens to add.")] = 256,
    temperature: sampling.TemperatureOption = None,
    top_k: sampling.TopKOption = None,
    top_p: sampling.TopPOption = None,
    min_p: sampling.MinPOption = None,
    repetition_penalty: sampling.PenaltyOption = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End before this text; may be given again.", show_default=False),
    ] = None,
    num_samples: Annotated[int, typer.Option(help="Texts to write for each prompt.", min=1)] = 1,
    seed: sampling.SeedOption = None,
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
    chat: Annotated[
        bool, typer.Option("--chat", help="Answer the prompt, for a model that was tuned for chat.")
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="With --chat: what the model is told first.", show_default=False)
    ] = None,
    messages: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help='Answer a conversation in JSON: [{"role": "user", "content": "…"}]; - for stdin.',
            show_default=False,
        ),
    ] = None,
    template: models.TemplateOption = None,
    quantize: models.QuantizeOption = None,
    speculate: models.SpeculateOption = False,
    device: models.DeviceOption = None,
    dtype: models.DTypeOption = None,
) -> None:
    """Continue a text, or answer as an assistant.

    \b
      echo "Once upon a time" | minigpt generate
      minigpt generate "Once upon a time" -m runs/alice --max-new-tokens 40 --seed 1
      minigpt generate --jsonl < prompts.jsonl > answers.jsonl
      minigpt generate --chat "Name three colours." -m runs/alice-chat
    """
    chat = chat or messages is not None
    source = Source(prompt, lines, jsonl, messages, chat, system)
    source.check()
    if logprobs is not None and not (as_json or jsonl):
        raise UsageError("--logprobs needs --json or --jsonl")
    if template is not None and not chat:
        raise UsageError("--template is for a chat; add --chat")
    if echo and chat:
        raise UsageError("--echo repeats the beginning of a text, and an answer has none; leave it out")
    asked = sampling.Sampling(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, stop=tuple(typed(text) for text in stop or ()), logprobs=logprobs,
    )  # fmt: skip
    folder = models.resolve(model)
    device_ = models.pick_device(device)
    from minigpt.checkpoint.folder import load
    from minigpt.model.decoding import prepare

    loaded = load(folder, device=device_, dtype=models.pick_dtype(dtype, device_))
    prepare(loaded.model, quantize)
    chosen = models.pick_template(loaded, template) if chat else None
    writer = _Writer(
        loaded, asked.settle(loaded.generation), chosen, as_json=as_json or jsonl, echo=echo, speculate=speculate
    )
    asks = source.asks(sampling.pick_seed(seed), num_samples)
    if lines or jsonl or num_samples > 1:
        writer.write_batches(asks, batch_size)
    else:
        writer.write_one(next(asks))


class _Writer:
    """Run prompts through the engine and put what comes out on stdout."""

    def __init__(
        self,
        loaded: LoadedModel,
        sampling: SamplingConfig,
        template: ChatTemplate | None,
        *,
        as_json: bool,
        echo: bool,
        speculate: bool,
    ) -> None:
        self.loaded = loaded if template is None else replace(loaded, tokenizer=template.tokenizer)
        self.sampling, self.template, self.as_json, self.echo = sampling, template, as_json, echo
        self.speculate, self.noted = speculate, False
        self.context = loaded.model.config.max_position_embeddings

    def write_one(self, ask: Ask) -> None:
        """Stream one text as it is made, or print it as one JSON object."""
        from minigpt.inference.engine import stream

        if self.as_json:
            self.write_batches(iter([ask]), 1)
            return
        console.write(ask.prompt if self.echo else "")
        ids = self._encode(ask)
        text, new_tokens = "", 0
        events = stream(
            self.loaded.model, self.loaded.tokenizer, [ids], self.sampling, list(ask.seeds), speculate=self.speculate
        )
        for event in events:
            new_tokens += 1
            new = event.text if text or self.template is None else event.text.lstrip()
            console.write(new)
            text = new or text
        console.write("" if text.endswith("\n") else "\n")
        self._note_length(len(ids) + new_tokens)  # not in the middle of a line, where a terminal shows both

    def write_batches(self, asks: Iterator[Ask], batch_size: int) -> None:
        """Print every text of every prompt, in order, several rows at a time."""
        from minigpt.inference.engine import collect, stream

        for batch in batches(asks, batch_size):
            prompts = [self._encode(ask) for ask, _ in batch]
            seeds = [seed for _, seed in batch]
            model, tokenizer = self.loaded.model, self.loaded.tokenizer
            events = stream(model, tokenizer, prompts, self.sampling, seeds, speculate=self.speculate)
            for (ask, seed), ids, done in zip(batch, prompts, collect(events, len(batch)), strict=True):
                self._note_length(len(ids) + len(done.tokens))
                self._print(ask, seed, len(ids), done)

    def _print(self, ask: Ask, seed: int, prompt_tokens: int, done: Completion) -> None:
        text = (ask.prompt if self.echo else "") + (done.text if self.template is None else done.text.lstrip())
        if not self.as_json:
            console.write(text + "\n")
            return
        record: dict[str, Any] = ask.record | {
            "text": text,
            "finish_reason": done.finish_reason,
            "prompt_tokens": prompt_tokens,
            "new_tokens": len(done.tokens),
            "seed": seed,
        }
        if self.speculate:
            record["guessed_tokens"] = sum(event.guessed for event in done.tokens)
        if self.sampling.logprobs is not None:
            record["tokens"] = [self._token(event.token_id, event.logprob, event.top) for event in done.tokens]
        console.write(json.dumps(record, ensure_ascii=False) + "\n")

    def _token(self, id: int, logprob: float | None, top: tuple[tuple[int, float], ...]) -> dict[str, Any]:
        """Spell a token for JSON; half a character is shown as U+FFFD."""

        def text(token: int) -> str:
            return self.loaded.tokenizer.token_bytes(token).decode("utf-8", errors="replace")

        best = [{"id": token, "text": text(token), "logprob": value} for token, value in top]
        return {"id": id, "text": text(id), "logprob": logprob, "top": best}

    def _encode(self, ask: Ask) -> list[int]:
        """Turn a prompt into ids; say so when it is longer than the context."""
        if self.template is not None:
            return self._encode_chat(ask, self.template)
        ids = self.loaded.tokenizer.encode_prompt(ask.prompt)
        if len(ids) > self.context:
            self._note(f"a prompt has {len(ids):,} tokens, more than the context of {self.context:,}; its end is kept")
        return ids

    def _encode_chat(self, ask: Ask, template: ChatTemplate) -> list[int]:
        """Turn a conversation into ids; where it is longer than the context, its oldest turns go, and it is said."""
        from minigpt.inference.chat import Said, fit, room_for_answer

        limit = self.context - room_for_answer(self.context, self.sampling.max_new_tokens)
        fitted = fit([Said(message) for message in ask.messages], template, limit)
        if fitted.left_out or fitted.cut:
            self._note(f"a conversation is past the context of {self.context:,} tokens; its oldest part is left out")
        return fitted.ids

    def _note_length(self, tokens: int) -> None:
        """Say so when a text has outgrown the context."""
        if tokens > self.context and self.loaded.model.config.traits.positions != "learned":
            self._note(f"the text is past the context of {self.context:,} tokens; what lies further back is forgotten")

    def _note(self, text: str) -> None:
        if not self.noted:
            self.noted = True
            console.note(f"note: {text}")
