"""Byte-level BPE: train, load, save, encode, decode.

The vocabulary begins with the four control tokens and the 256 bytes, so every text comes back exactly. Control tokens
are never made from a user's text, only by the chat template and at document ends. Tokenizers of other models are
loaded too: byte-level ones (GPT-2, Llama 3, Qwen) and those in SentencePiece's alphabet (Llama 2), where ``▁`` stands
for a space and ``<0x0A>`` for a byte.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from minigpt.errors import ConfigError, DataError, ModelFolderError
from minigpt.text.decoding import replace_surrogates, replacing, writing
from minigpt.text.pieces import END_OF_TEXT, cut
from minigpt.text.streaming import StreamDecoder
from minigpt.text.tokenizer_json import (
    SPACE,
    byte_alphabet,
    is_byte_level,
    prefix_only_once,
    read_json,
    read_text,
    without_prefix,
)
from minigpt.text.words import word_encoder

__all__ = ["CHATML", "END_OF_TEXT", "IM_END", "IM_START", "PAD", "PATTERN", "SPECIAL_TOKENS", "Tokenizer"]

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
PAD = "<|pad|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END, PAD)

# The chat template (Jinja) of every model trained here.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Qwen2's pattern, under a name that other inference programs know.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
# Far above every vocabulary in use; a hostile file must not make us reserve gigabytes.
MAX_VOCAB_SIZE = 1 << 21

# Names of the token between documents, in the order in which they are looked for.
_END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Text to ids and back; ``train`` makes one from text, ``load`` opens one from a model folder.

    ``vocab_size`` is the highest id + 1; ``end_of_text_id`` ends a document; ``end_ids`` end a generation; ``bos_id``
    is put before a prompt by models that were trained so, else it is None; ``pad_id`` is None where there is none.
    ``prefix_only_once`` says that a space is put before the first text alone, not again after each control token.
    """

    vocab_size: int
    end_of_text_id: int
    pad_id: int | None
    end_ids: tuple[int, ...]
    bos_id: int | None
    prefix_only_once: bool

    def __init__(self, backend: Backend, config: dict[str, Any], end_ids: Sequence[int] = ()) -> None:
        """Take a ``tokenizers`` tokenizer, its tokenizer_config.json, and more ids that end a generation.

        Errors: ValueError for a tokenizer of another kind, or one without a token that ends a text.
        """
        # A file may ask for cut or padded texts; a corpus needs neither.
        backend.no_truncation()
        backend.no_padding()
        # Control tokens in ordinary text are ordinary text. The flag is not kept in tokenizer.json.
        backend.encode_special_tokens = True
        self._backend = backend
        self._config = config
        self.vocab_size = max(backend.get_vocab().values(), default=-1) + 1
        if not 0 < self.vocab_size <= MAX_VOCAB_SIZE:
            raise ValueError(f"{self.vocab_size:,} ids, where 1 to {MAX_VOCAB_SIZE:,} are possible")
        source = json.loads(backend.to_str())
        self._byte_level, self.prefix_only_once = is_byte_level(source), prefix_only_once(source)
        self._words = word_encoder(backend, source)
        self.pad_id = self._named("pad_token")
        self.bos_id = self._find_bos()
        eos_id = self._named("eos_token")
        named = [id for id in (eos_id, *end_ids) if id is not None and 0 <= id < self.vocab_size]
        known = [id for name in _END_NAMES if (id := self.special_id(name)) is not None]
        if not known + named:
            raise ValueError("no token that ends a text; name one as eos_token in tokenizer_config.json")
        self.end_of_text_id = (known + named)[0]
        chat_end = self.special_id(IM_END)
        self.end_ids = tuple(dict.fromkeys([*(named or known[:1]), self.end_of_text_id, *_given(chat_end)]))

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (self._backend.to_str(), self._config, self.end_ids)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Learn merges from texts; ``vocab_size`` comes out smaller where the texts hold too few pairs that repeat.

        The same texts give the same tokenizer, however they are cut at safe places.
        Errors: ConfigError for a size that cannot hold the bytes and control tokens; DataError when there is no text.
        """
        if not MIN_VOCAB_SIZE <= vocab_size <= MAX_VOCAB_SIZE:
            raise ConfigError(
                f"vocab_size: {vocab_size:,} is outside {MIN_VOCAB_SIZE} (256 bytes and {len(SPECIAL_TOKENS)} control "
                f"tokens) to {MAX_VOCAB_SIZE:,}; choose one between"
            )
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,  # a pair seen once says nothing
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        characters = 0

        def ordinary_text() -> Iterator[str]:
            nonlocal characters
            for part in _without_control_tokens(texts):
                characters += len(part)
                yield part

        backend.train_from_iterator(ordinary_text(), trainer)
        if not characters:
            raise DataError("tokenizer: no text to learn from; give files that hold text")
        config = {"eos_token": END_OF_TEXT, "bos_token": END_OF_TEXT, "pad_token": PAD, "add_bos_token": False}
        return cls(backend, config | {"chat_template": CHATML})

    @classmethod
    def load(cls, folder_or_file: Path) -> Tokenizer:
        """Open ``tokenizer.json`` with the names and ids of special tokens in the JSON files beside it.

        Errors: ModelFolderError that names the file which is missing, damaged or of a kind that is not supported.
        """
        path = folder_or_file / "tokenizer.json" if folder_or_file.is_dir() else folder_or_file
        if not path.is_file():
            raise ModelFolderError(f"{path}: no such file; give a model folder, or a tokenizer.json")
        source = read_json(path)
        config = read_json(path.with_name("tokenizer_config.json"), missing_ok=True)
        if (template := path.with_name("chat_template.jinja")).is_file():
            config["chat_template"] = read_text(template)
        end_ids: list[int] = []
        for name in ("generation_config.json", "config.json"):
            ids = read_json(path.with_name(name), missing_ok=True).get("eos_token_id")
            end_ids += [id for id in (ids if isinstance(ids, list) else [ids]) if type(id) is int]
        try:
            return cls(Backend.from_str(json.dumps(source)), config, end_ids)
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # that is a Rust panic
                raise
            reason = (str(error) or type(error).__name__).splitlines()[0][:200]
            raise ModelFolderError(f"{path}: not a tokenizer that can be used ({reason}); copy it again") from error

    def save(self, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write tokenizer.json and tokenizer_config.json, which ``transformers`` opens too.

        ``extra`` goes into tokenizer_config.json (``model_max_length``). Errors: DataError when the files cannot be
        written; each is then the old one, whole.
        """
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        config["eos_token"] = self._backend.id_to_token(self.end_ids[0])
        # Names of code to run do not leave with the tokenizer.
        config |= {key: value for key, value in self._config.items() if key != "auto_map"}
        config |= {"clean_up_tokenization_spaces": False, **(extra or {})}
        texts = {"tokenizer.json": self._backend.to_str(pretty=True), "tokenizer_config.json": _dump(config)}
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with replacing(folder / name) as file:
                file.write(f"{text}\n".encode())

    def encode(self, text: str, *, continuing: bool = False) -> list[int]:
        """Return the ids of ordinary text, without anything before or after it.

        A control token's name in the text is text like any other. Lone surrogates become U+FFFD. ``continuing`` text
        goes on from an earlier one: tokenizers that put a space before every text put none here.
        """
        backend = self._continuing_backend if continuing else self._backend
        ids: list[int] = backend.encode(replace_surrogates(text), add_special_tokens=False).ids
        return ids

    def control_tokens(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Yield start, end and id of each control token in text that a chat template wrote."""
        pattern, ids = self._control_pattern
        for match in pattern.finditer(text):
            yield *match.span(), ids[(match.lastindex or 0) - 1]

    def is_special(self, id: int) -> bool:
        """Tell whether an id is that of a control token."""
        return id in self._special_ids.values()

    def with_chat(self, template: str, end_ids: Sequence[int]) -> Tokenizer:
        """Return the same tokenizer with another chat template, and with more ids that end a generation."""
        return Tokenizer(self._backend, self._config | {"chat_template": template}, [*self.end_ids, *end_ids])

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids a model is to continue: those of the text, after the begin token where the model has one.

        An empty prompt is the begin token, or the end-of-text token that stood before every document in training.
        """
        ids = self.encode(text)
        if self.bos_id is not None:
            return [self.bos_id, *ids]
        return ids or [self.end_of_text_id]

    def encode_batch(self, texts: Sequence[str], continues: Sequence[bool] | None = None) -> list[list[int]]:
        """Return the ids of several ordinary texts.

        ``continues`` marks texts that go on from an earlier one, so that no space is put before them by tokenizers
        which put one before every text.
        """
        return [ids.tolist() for ids in self.encode_arrays(texts, continues)]

    def encode_arrays(self, texts: Sequence[str], continues: Sequence[bool] | None = None) -> list[NDArray[np.uint32]]:
        """Return what ``encode_batch`` does as arrays, (T,) for each text; with them large texts take far less time."""
        mended = [replace_surrogates(text) for text in texts]
        flags = [False] * len(mended) if continues is None else [bool(goes_on) for goes_on in continues]
        result = [np.empty(0, dtype=np.uint32)] * len(mended)
        others = []
        for place, text in enumerate(mended):
            if self._words is not None and self._words.suits(text):
                result[place] = self._words.encode(text)
            else:
                others.append(place)
        for flag in dict.fromkeys(flags[place] for place in others):
            backend = self._continuing_backend if flag else self._backend
            places = [place for place in others if flags[place] is flag]
            encodings = backend.encode_batch_fast([mended[place] for place in places], add_special_tokens=False)
            for place, encoding in zip(places, encodings, strict=True):
                result[place] = np.array(encoding.ids, dtype=np.uint32)
        return result

    def decode(self, ids: Sequence[int], *, continuing: bool = False) -> str:
        """Return the text of ids, without control tokens; bytes that are no UTF-8 come out as U+FFFD.

        Tokenizers that put a space before every text have it taken off again, unless the ids go on from others.
        """
        decoder = StreamDecoder(self, continuing=continuing)
        return decoder.push_all(ids) + decoder.flush()

    def token_bytes(self, id: int) -> bytes:
        """Return the exact bytes of a token: none for a control token or an id that is not in the vocabulary."""
        return self._token_bytes[id] if 0 <= id < len(self._token_bytes) else b""

    def byte_lengths(self) -> NDArray[np.int64]:
        """Return the number of bytes of every token, (V,), for counting bits per byte."""
        return np.array([len(token) for token in self._token_bytes], dtype=np.int64)

    def special_id(self, name: str) -> int | None:
        """Return the id of a control token such as ``<|im_start|>``, or None where the tokenizer has no such one."""
        return self._special_ids.get(name)

    def special_name(self, id: int) -> str | None:
        """Return the name of a control token, or None for any other id."""
        return next((name for name, special in self._special_ids.items() if special == id), None)

    @property
    def source(self) -> dict[str, Any]:
        """What tokenizer.json holds."""
        source: dict[str, Any] = json.loads(self._backend.to_str())
        return source

    def fingerprint(self) -> str:
        """Return the SHA-256 of tokenizer.json in a canonical form: the same for the same ids."""
        canonical = json.dumps(self.source, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode("utf-8")).hexdigest()

    @property
    def chat_template(self) -> str | None:
        """The Jinja source that came with the model; of several, the one named ``default``."""
        source = self._config.get("chat_template")
        if isinstance(source, list):
            source = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        if isinstance(source, dict):
            source = source.get("default")
        return source if isinstance(source, str) else None

    @property
    def named_tokens(self) -> dict[str, str]:
        """Special tokens under the names that chat templates use: ``bos_token``, ``eos_token`` and so on."""
        names = (f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
        return {name: token for name in names if (token := self._name_of(name)) is not None}

    @cached_property
    def strips_leading_space(self) -> bool:
        """Whether decoding takes off the one space that encoding puts before a text."""
        if self._byte_level:
            return False
        for token, id in self._backend.get_vocab().items():
            if token.startswith(SPACE) and len(token) > 1 and token[1] != SPACE and token not in self._special_ids:
                return not self._backend.decode([id]).startswith(" ")
        return False

    @cached_property
    def _special_ids(self) -> dict[str, int]:
        added = self._backend.get_added_tokens_decoder()
        return {token.content: id for id, token in added.items() if token.special}

    @cached_property
    def _control_pattern(self) -> tuple[re.Pattern[str], list[int]]:
        """A pattern with one group for each added token, the longest first, and their ids in that order.

        Some tokens swallow the blanks beside them.
        """
        added = self._backend.get_added_tokens_decoder()
        ids = sorted((id for id, token in added.items() if token.content), key=lambda id: -len(added[id].content))
        patterns = []
        for id in ids:
            before, after = r"\s*" * added[id].lstrip, r"\s*" * added[id].rstrip
            patterns.append(f"{before}({re.escape(added[id].content)}){after}")
        return re.compile("|".join(patterns) or "(?!)"), ids

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        table = [b""] * self.vocab_size
        added = self._backend.get_added_tokens_decoder()
        alphabet = byte_alphabet()
        for token, id in self._backend.get_vocab().items():
            if id in added:
                table[id] = b"" if added[id].special else added[id].content.encode("utf-8")
            elif self._byte_level and all(character in alphabet for character in token):
                table[id] = bytes(alphabet[character] for character in token)
            elif not self._byte_level and (match := _BYTE_TOKEN.fullmatch(token)):
                table[id] = bytes([int(match[1], 16)])
            else:
                table[id] = (token if self._byte_level else token.replace(SPACE, " ")).encode("utf-8")
        return table

    @cached_property
    def _continuing_backend(self) -> Backend:
        """The same tokenizer without the space that some put before every text."""
        source = json.loads(self._backend.to_str())
        changed = without_prefix(source)
        if changed == source:
            return self._backend
        backend = Backend.from_str(json.dumps(changed))
        backend.encode_special_tokens = True
        return backend

    def _named(self, key: str) -> int | None:
        """Return the id of a token that tokenizer_config.json names."""
        name = self._name_of(key)
        id = None if name is None else self._backend.token_to_id(name)
        return None if id is None else int(id)

    def _name_of(self, key: str) -> str | None:
        """Return a name from tokenizer_config.json, given there as a string or as an object with its content."""
        name = self._config.get(key)
        if isinstance(name, dict):
            name = name.get("content")
        return name if isinstance(name, str) else None

    def _find_bos(self) -> int | None:
        if self._config.get("add_bos_token") is not None:
            return self._named("bos_token") if self._config["add_bos_token"] else None
        plain: list[int] = self._backend.encode("a", add_special_tokens=False).ids
        full: list[int] = self._backend.encode("a", add_special_tokens=True).ids
        return full[0] if len(full) > len(plain) and full[1 : 1 + len(plain)] == plain else None


def _unpacked(source: str, config: dict[str, Any], end_ids: Sequence[int]) -> Tokenizer:
    """Make a tokenizer of what was sent from another process."""
    return Tokenizer(Backend.from_str(source), config, end_ids)


def _given(id: int | None) -> list[int]:
    return [] if id is None else [id]


def _without_control_tokens(texts: Iterable[str]) -> Iterator[str]:
    """Yield the text around control tokens in pieces, so that a separator in the corpus is not learned as words."""
    control = re.compile("|".join(re.escape(token) for token in SPECIAL_TOKENS))
    for text in texts:
        for part in control.split(replace_surrogates(text)):
            yield from cut([part])


def _dump(config: Mapping[str, Any]) -> str:
    return json.dumps(config, indent=2, ensure_ascii=False)
