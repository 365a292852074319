"""`minigpt chat`: a conversation in the terminal, or a script of questions through a pipe."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minigpt.cli import console, models, sampling
from minigpt.cli.keyboard import Keyboard
from minigpt.cli.prompts import read_json
from minigpt.cli.signals import INTERRUPTED, Stopped
from minigpt.cli.texts import typed, visible
from minigpt.config import SamplingConfig
from minigpt.errors import ConfigError, DataError, MinigptError
from minigpt.text.decoding import replacing

if TYPE_CHECKING:
    from minigpt.inference.chat import Chat, Forgotten
    from minigpt.inference.engine import TokenEvent

SETTINGS = tuple(field.name for field in fields(SamplingConfig) if field.name != "logprobs")


def chat(
    model: models.ModelOption = None,
    system: Annotated[
        str | None, typer.Option(help="What the model is told before the conversation.", show_default=False)
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("-n", "--max-new-tokens", help="Most tokens of an answer.")] = 512,
    temperature: sampling.TemperatureOption = None,
    top_k: sampling.TopKOption = None,
    top_p: sampling.TopPOption = None,
    min_p: sampling.MinPOption = None,
    repetition_penalty: sampling.PenaltyOption = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End an answer before this text; may be given again.", show_default=False),
    ] = None,
    seed: sampling.SeedOption = None,
    context: Annotated[
        int | None, typer.Option(help="Most tokens to keep in mind. [default: the model's]", min=2, show_default=False)
    ] = None,
    template: models.TemplateOption = None,
    quantize: models.QuantizeOption = None,
    speculate: models.SpeculateOption = False,
    device: models.DeviceOption = None,
    dtype: models.DTypeOption = None,
) -> None:
    """Talk with a model. /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.

    \b
      minigpt chat -m runs/alice-chat
      minigpt chat --system "You answer in one sentence." --temperature 0.5
      minigpt chat < questions.txt > answers.txt

    A pipe is a script: every line is a question or a command, and stdout has the answers.
    """
    asked = sampling.Sampling(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, stop=tuple(typed(text) for text in stop or ()),
    )  # fmt: skip
    folder = models.resolve(model)
    device_ = models.pick_device(device)
    from minigpt.checkpoint.folder import load
    from minigpt.inference.chat import Chat
    from minigpt.model.decoding import prepare

    loaded = load(folder, device=device_, dtype=models.pick_dtype(dtype, device_))
    prepare(loaded.model, quantize)
    chosen = models.pick_template(loaded, template)
    conversation = Chat(loaded.model, chosen, typed(system), context, speculate=speculate)
    keyboard = Keyboard()
    if keyboard.interactive:
        console.note(f"{folder}; /help lists the commands, Ctrl-D leaves")
    _Session(conversation, asked.settle(loaded.generation), sampling.pick_seed(seed), keyboard).run()


class _Session:
    """Questions and commands in, answers on stdout, all else on stderr.

    A mistake ends a script; a person is told of it and goes on.
    """

    def __init__(self, chat: Chat, settings: SamplingConfig, seed: int, keyboard: Keyboard) -> None:
        self.chat, self.settings, self.seed, self.keyboard = chat, settings, seed, keyboard
        self.answers = 0  # so far: each draws from its own stream
        self.own_files: set[Path] = set()  # that were saved or loaded here, and may be written again
        self.commands: dict[str, tuple[Callable[[str], None], str]] = {
            "/system": (self._system, "TEXT   what the model is told first; alone: show it"),
            "/reset": (self._reset, "forget the conversation, keep the system message"),
            "/retry": (self._retry, "answer the last question again"),
            "/undo": (self._undo, "take back the last question and its answer"),
            "/save": (self._save, "FILE   write the conversation as JSON"),
            "/load": (self._load, "FILE   go on from a conversation in JSON"),
            "/set": (self._set, "NAME=VALUE   change a setting; alone: show them"),
            "/help": (self._help, "show this"),
            "/quit": (self._quit, "leave, as Ctrl-D does"),
        }
        self.left = False

    def run(self) -> None:
        """Go on until the end of input, /quit, or a second Ctrl-C with nothing between."""
        interrupted = False
        while not self.left:
            try:
                text = self.keyboard.message()
                interrupted = False
                self._take(text)
            except EOFError:
                if self.keyboard.interactive:
                    console.note("")  # leave the line of the prompt
                return
            except Stopped as stop:
                if interrupted or stop.exit_status != INTERRUPTED or not self.keyboard.interactive:
                    raise
                interrupted = True
                console.note("")
                console.note("Ctrl-C again leaves, and so do Ctrl-D and /quit")
            except MinigptError as error:
                if not self.keyboard.interactive:
                    raise
                console.error(str(error))

    def _take(self, text: str) -> None:
        """Run a command, or ask a question; one that begins with a slash is typed with two."""
        first = text.lstrip()
        if first.startswith("/") and not first.startswith("//"):
            name, *rest = first.split(maxsplit=1)
            if name not in self.commands:
                near = difflib.get_close_matches(name, self.commands, n=1)
                hint = f" (did you mean {near[0]}?)" if near else "; begin a question with // for a slash"
                raise DataError(f"{name}: no such command{hint}; /help lists them")
            self.commands[name][0]("".join(rest).strip())
        elif text.strip():
            question = first[1:] if first.startswith("//") else text
            self._answer(self.chat.ask(question.strip(), self.settings, self._next_seed()))

    def _next_seed(self) -> int:
        from minigpt.inference.sampling import row_seed

        self.answers += 1
        return row_seed(self.seed, self.answers - 1)

    def _answer(self, events: Iterator[Forgotten | TokenEvent]) -> None:
        """Show an answer as it comes. Ctrl-C stops it; what was said so far stays said."""
        from minigpt.inference.engine import TokenEvent

        shown, tokens, reason = "", 0, None
        try:
            for event in events:
                if isinstance(event, TokenEvent):
                    text = event.text if shown else event.text.lstrip()
                    console.write(text)
                    shown, tokens, reason = text or shown, tokens + 1, event.finish_reason
                else:
                    self._say_forgotten(event)
        except Stopped as stop:
            events.close()  # type: ignore[attr-defined]  # a generator
            if stop.exit_status != INTERRUPTED or not self.keyboard.interactive:
                raise
            reason = "interrupt"
        console.write("" if shown.endswith("\n") else "\n")
        if reason == "interrupt" and not tokens:
            console.note("note: stopped before the answer began; the conversation is as it was")
        elif reason == "interrupt":
            console.note("note: stopped; what was said stays in the conversation, and /undo takes it back")
        elif reason == "length" and tokens < self.settings.max_new_tokens:
            console.note(f"note: the context of {self.chat.context:,} tokens is full; the answer ends here")
        elif reason == "length":
            console.note(f"note: cut after {tokens:,} tokens; /set max_new_tokens={2 * tokens} allows more")

    def _say_forgotten(self, event: Forgotten) -> None:
        gone = []
        if event.turns:
            gone.append("the oldest turn is" if event.turns == 1 else f"the {event.turns} oldest turns are")
        if event.tokens:
            gone.append(f"the first {event.tokens:,} tokens of the question are")
        console.note(
            f"note: past the context of {self.chat.context:,} tokens; {' and '.join(gone)} left out from now on"
        )

    def _system(self, text: str) -> None:
        if text:
            self.chat.system = text
        console.note(f"system: {self.chat.system}" if self.chat.system else "no system message")

    def _reset(self, _: str) -> None:
        self.chat.reset()
        console.note("a new conversation")

    def _retry(self, _: str) -> None:
        self._answer(self.chat.retry(self.settings, self._next_seed()))

    def _undo(self, _: str) -> None:
        if not self.chat.undo():
            raise DataError("nothing was asked yet; there is nothing to take back")
        questions = [message.content for message in self.chat.messages if message.role == "user"]
        console.note(f"back at: {visible(questions[-1])[:60]}" if questions else "back at the beginning")

    def _save(self, name: str) -> None:
        path = _path(name, "/save")
        if not self.chat.messages:
            raise DataError("nothing was said yet; there is nothing to save")
        if os.path.lexists(path) and path not in self.own_files:  # other than Path.exists, for names of all kinds
            raise DataError(f"{path} is there already; save under another name")
        plain = [{"role": message.role, "content": message.content} for message in self.chat.messages]
        with replacing(path) as file:
            file.write(f"{json.dumps({'messages': plain}, ensure_ascii=False)}\n".encode())
        self.own_files.add(path)
        console.note(f"saved {_messages(len(plain))} in {path}")

    def _load(self, name: str) -> None:
        from minigpt.text.instructions import parse_messages

        path = _path(name, "/load")
        messages = parse_messages(read_json(str(path)), str(path))
        self.chat.load(messages)
        self.own_files.add(path)
        waiting = (
            "" if messages[-1].role in ("assistant", "system") else "; the last has no answer yet, /retry gives one"
        )
        console.note(f"loaded {_messages(len(messages))} from {path}{waiting}")

    def _set(self, text: str) -> None:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not text:
            for name in SETTINGS:
                console.note(f"{name}={_shown(getattr(self.settings, name))}")
            console.note(f"seed={self.seed}")
        elif not equals or name not in (*SETTINGS, "seed"):
            raise ConfigError(f"/set {text}: write NAME=VALUE, where NAME is one of {', '.join(SETTINGS)}, seed")
        elif name == "seed":
            seed = _parsed(name, value)
            if not isinstance(seed, int) or seed < 0:
                raise ConfigError(f"seed is {value.strip()[:40]}; it must be a whole number of at least 0")
            self.seed, self.answers = seed, 0
        else:
            self.settings = replace(self.settings, **{name: _parsed(name, value)})

    def _help(self, _: str) -> None:
        for name, (_command, text) in self.commands.items():
            console.note(f"{name:<9}{text}")
        console.note('A line that ends with \\ goes on, and so does everything between """ and """.')
        console.note("Ctrl-C stops an answer; Ctrl-D, /quit, or Ctrl-C twice leaves.")

    def _quit(self, _: str) -> None:
        self.left = True


def _path(name: str, command: str) -> Path:
    if not name:
        raise DataError(f"{command}: no file named; write {command} talk.json")
    path = Path(name.replace("\0", "\ufffd"))
    with suppress(RuntimeError):  # a ~ that stands for nobody's home is a name like any other
        return path.expanduser()
    return path


def _messages(count: int) -> str:
    return f"{count:,} message{'s' if count != 1 else ''}"


def _shown(value: Any) -> str:
    return "none" if value in (None, ()) else " ".join(value) if isinstance(value, tuple) else str(value)


def _parsed(name: str, text: str) -> Any:
    """Read the value of a setting: a number, or none; what is wrong with it is found where it is used."""
    if name == "stop":
        return () if text == "none" else (text,)
    if text.strip() == "none":
        return None
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text
