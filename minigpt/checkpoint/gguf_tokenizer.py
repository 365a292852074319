"""A tokenizer in the metadata of a GGUF file, in both directions.

GGUF knows byte-level BPE (`gpt2`: tokens, merges, and a name for the pattern that cuts the text first) and
SentencePiece's BPE (`llama`: tokens with scores, `▁` for a space, and a token for each byte). There the merges are
implied: two tokens make a third, and of all pairs the one whose token has the best score goes first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gguf.constants import TokenType
from tokenizers import Tokenizer as Backend

from minigpt.checkpoint.gguf_file import GGUFFile
from minigpt.checkpoint.gguf_patterns import PRE_TOKENIZERS, PreTokenizer, known_as, pre_tokenizer_json
from minigpt.errors import ModelFolderError
from minigpt.text.tokenizer import IM_END, Tokenizer
from minigpt.text.tokenizer_json import SPACE, components, is_byte_level

# Tokens that end a turn in the models of Meta; llama.cpp finds them by their names too.
_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>")
_SPECIAL = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.UNUSED)
_NO_SCORE = -1e9  # of what no merge makes
_LONGEST = 1024  # characters of a token whose every cut is looked at
_KEY = "tokenizer.ggml."


def tokenizer_from_gguf(file: GGUFFile, vocab_size: int, context: int) -> Tokenizer:
    """Read the tokenizer with its special tokens and chat template; what cannot be done alike is a ModelFolderError."""
    return _Reader(file, vocab_size).tokenizer(context)


class _Reader:
    """The tokenizer's part of the metadata, checked."""

    def __init__(self, file: GGUFFile, vocab_size: int) -> None:
        self.path, self.metadata = file.path, file.metadata
        self.tokens: list[str] = self._list("tokens", str)
        self.types: list[int] = self._list("token_type", int, [TokenType.NORMAL] * len(self.tokens))
        if len(self.tokens) != vocab_size or len(self.types) != vocab_size:
            raise ModelFolderError(
                f"{self.path} has {len(self.tokens):,} tokens of {len(self.types):,} types, but the embedding has "
                f"{vocab_size:,} rows"
            )
        # Converters fill the vocabulary up to the size of the embedding.
        while self.tokens and self.types[-1] == TokenType.UNUSED:
            del self.tokens[-1], self.types[-1]
        self.ids = {token: id for id, token in enumerate(self.tokens)}
        if len(self.ids) < len(self.tokens):
            twice = next(token for id, token in enumerate(self.tokens) if self.ids[token] != id)
            raise ModelFolderError(f"{self.path}: the token {twice!r} is in its vocabulary twice")

    def tokenizer(self, context: int) -> Tokenizer:
        kind = self.metadata.get(f"{_KEY}model")
        if kind not in ("gpt2", "llama"):
            raise ModelFolderError(f"{self.path}: tokenizer model {kind!r} is not supported (supported: gpt2, llama)")
        sentencepiece = kind == "llama"
        pre = PreTokenizer((), add_bos=True) if sentencepiece else self._pre_tokenizer()
        config = self._config(pre, context, sentencepiece)
        source = self._sentencepiece() if sentencepiece else self._byte_level(pre)
        if config["add_bos_token"]:
            source["post_processor"] = _begin_with(config["bos_token"], self.ids[config["bos_token"]])
        ends = [self._id("eot_token_id"), self._id("eom_token_id"), *map(self.ids.get, _TURN_ENDS)]
        try:
            return Tokenizer(Backend.from_str(json.dumps(source)), config, [id for id in ends if id is not None])
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # that is a Rust panic
                raise
            reason = (str(error) or type(error).__name__).splitlines()[0][:200]
            raise ModelFolderError(f"{self.path}: its tokenizer cannot be used ({reason})") from error

    def _list(self, key: str, kind: type, default: list[Any] | None = None) -> list[Any]:
        value = self.metadata.get(f"{_KEY}{key}", default)
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise ModelFolderError(f"{self.path}: {_KEY}{key} is {'no list' if value else 'missing'}; it is needed")
        return value

    def _id(self, key: str, default: int | None = None) -> int | None:
        value = self.metadata.get(f"{_KEY}{key}", default)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < len(self.tokens):
            raise ModelFolderError(f"{self.path}: {_KEY}{key} is {str(value)[:40]}, no token of the vocabulary")
        return value

    def _flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(f"{_KEY}{key}", default)
        if not isinstance(value, bool):
            raise ModelFolderError(f"{self.path}: {_KEY}{key} is {str(value)[:40]}; it must be true or false")
        return value

    def _pre_tokenizer(self) -> PreTokenizer:
        name = self.metadata.get(f"{_KEY}pre")
        if not isinstance(name, str) or name not in PRE_TOKENIZERS:
            raise ModelFolderError(
                f"{self.path}: pre-tokenizer {name!r} is not supported (supported: {', '.join(PRE_TOKENIZERS)})"
            )
        return PRE_TOKENIZERS[name]

    def _config(self, pre: PreTokenizer, context: int, sentencepiece: bool) -> dict[str, Any]:
        """Return tokenizer_config.json; where the file is silent, llama.cpp's defaults hold."""
        bos, eos, unk = (1, 2, 0) if sentencepiece else (None, None, None)
        names = {
            "bos_token": self._id("bos_token_id", bos),
            "eos_token": self._id("eos_token_id", eos),
            "unk_token": self._id("unknown_token_id", unk),
            "pad_token": self._id("padding_token_id"),
        }
        config: dict[str, Any] = {name: self.tokens[id] for name, id in names.items() if id is not None}
        config["add_bos_token"] = self._flag("add_bos_token", pre.add_bos) and "bos_token" in config
        config["model_max_length"] = context
        template = self.metadata.get("tokenizer.chat_template")
        return config | ({"chat_template": template} if isinstance(template, str) else {})

    def _added(self) -> list[dict[str, Any]]:
        """The tokens that text is cut at before anything else, or that no text makes."""
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": id, "content": token, **plain, "special": kind in _SPECIAL}
            for id, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (*_SPECIAL, TokenType.USER_DEFINED)
        ]

    def _json(self, model: dict[str, Any], **more: Any) -> dict[str, Any]:
        empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
        bpe = {"type": "BPE", "dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
        return {
            "version": "1.0",
            **empty,
            "added_tokens": self._added(),
            **more,
            "model": bpe | {"vocab": self.ids, **model},
        }

    def _byte_level(self, pre: PreTokenizer) -> dict[str, Any]:
        merges = [_cut(merge) for merge in self._list("merges", str)]
        return self._json(
            {
                "unk_token": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": pre.ignore_merges,
                "merges": merges,
            },
            pre_tokenizer=pre_tokenizer_json(pre),
            decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        )

    def _sentencepiece(self) -> dict[str, Any]:
        scores = self._list("scores", float)
        if len(scores) < len(self.tokens):
            raise ModelFolderError(f"{self.path}: {len(scores):,} scores for {len(self.tokens):,} tokens")
        words = {
            token: float(score)
            for token, kind, score in zip(self.tokens, self.types, scores, strict=False)
            if kind == TokenType.NORMAL
        }
        if (longest := max(map(len, words), default=0)) > _LONGEST:
            raise ModelFolderError(f"{self.path}: a token of {longest:,} characters is not possible; copy it again")
        unk = self._id("unknown_token_id", 0)
        prefix = self._flag("add_space_prefix", True)
        spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        back = [
            {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
        return self._json(
            {
                "unk_token": None if unk is None else self.tokens[unk],
                "fuse_unk": True,
                "byte_fallback": TokenType.BYTE in self.types,
                "ignore_merges": False,
                "merges": implied_merges(words),
            },
            normalizer={
                "type": "Sequence",
                "normalizers": ([{"type": "Prepend", "prepend": SPACE}] if prefix else []) + [spaces],
            },
            decoder={"type": "Sequence", "decoders": back + (strip if prefix else [])},
        )


def _cut(merge: str) -> list[str]:
    """Cut `a b` at its space; where there is none, the tokenizer will complain of an unknown token."""
    place = merge.find(" ", 1)
    return [merge, ""] if place < 0 else [merge[:place], merge[place + 1 :]]


def implied_merges(scores: Mapping[str, float]) -> list[list[str]]:
    """Return every pair of tokens that makes a token: the best score first, of equals that with the longest left part.

    It is the order of the converters of `transformers`, so that a tokenizer comes out the same by either way.
    """
    pairs = [
        (score, word[:cut], word[cut:])
        for word, score in scores.items()
        for cut in range(1, len(word))
        if word[:cut] in scores and word[cut:] in scores
    ]
    pairs.sort(key=lambda pair: (-pair[0], -len(pair[1]), -len(pair[2])))
    return [[left, right] for _, left, right in pairs]


def _begin_with(token: str, id: int) -> dict[str, Any]:
    """Return the post-processor that puts a token before a text, for programs that read tokenizer.json alone."""
    begin = {"SpecialToken": {"id": token, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [begin, text],
        "pair": [begin, text, {"SpecialToken": {"id": token, "type_id": 1}}, second],
        "special_tokens": {token: {"id": token, "ids": [id], "tokens": [token]}},
    }


def tokenizer_to_gguf(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """Return the metadata that holds a tokenizer; ids up to `vocab_size` that it has not are filled with unused tokens.

    Errors: ModelFolderError for a tokenizer that llama.cpp would not do alike.
    """
    source = tokenizer.source
    model = source["model"]
    if model.get("type") != "BPE":
        raise ModelFolderError(f"the tokenizer is of type {model.get('type')}; GGUF can hold BPE alone")
    byte_level = is_byte_level(source)
    tokens, types = _vocabulary(source, vocab_size, byte_level)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    values: dict[str, Any] = {"model": "gpt2" if byte_level else "llama"}
    if byte_level:
        values |= {"pre": known_as(source), "tokens": tokens, "token_type": types, "merges": merges}
    else:
        scores = _scores(tokens, model["merges"])
        values |= {"pre": "default", "tokens": tokens, "scores": scores, "token_type": types}
        values["add_space_prefix"] = _puts_space_first(source)
    ids = {token: id for id, token in enumerate(tokens)}
    named = {name: ids[token] for name, token in tokenizer.named_tokens.items() if token in ids}
    special = {
        "bos_token_id": named.get("bos_token"),
        "unknown_token_id": named.get("unk_token"),
        "padding_token_id": named.get("pad_token"),
        **_ends(tokenizer),
    }
    values |= {key: id for key, id in special.items() if id is not None}
    values["add_bos_token"] = tokenizer.bos_id is not None
    found = {f"{_KEY}{key}": value for key, value in values.items()}
    return found | ({"tokenizer.chat_template": tokenizer.chat_template} if tokenizer.chat_template else {})


def _ends(tokenizer: Tokenizer) -> dict[str, int | None]:
    """Put the ids that end a generation where there are three places; what ends a text by its name needs none."""
    first, turn_end = tokenizer.end_ids[0], tokenizer.special_id(IM_END)
    others = [id for id in tokenizer.end_ids[1:] if id not in (turn_end, tokenizer.end_of_text_id)]
    if turn_end in tokenizer.end_ids[1:]:
        others.insert(0, turn_end)
    second, third, *_ = [*others, None, None]
    return {"eos_token_id": first, "eot_token_id": second, "eom_token_id": third}


def _vocabulary(source: dict[str, Any], vocab_size: int, byte_level: bool) -> tuple[list[str], list[int]]:
    """Return the tokens by id and what kind each is."""
    tokens = [f"[PAD{id}]" for id in range(vocab_size)]
    types: list[int] = [TokenType.UNUSED] * vocab_size
    unknown = source["model"].get("unk_token")
    for token, id in source["model"]["vocab"].items():
        byte = not byte_level and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        tokens[id], types[id] = token, TokenType.BYTE if byte else TokenType.NORMAL
    for added in source["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    if unknown in source["model"]["vocab"]:
        types[source["model"]["vocab"][unknown]] = TokenType.UNKNOWN
    return [str(token) for token in tokens], [int(kind) for kind in types]


def _scores(tokens: list[str], merges: Sequence[Any]) -> list[float]:
    """Give each token the rank of the first merge that makes it, so that the earliest is the best."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        left, right = _cut(pair) if isinstance(pair, str) else pair
        ranks.setdefault(left + right, rank)
    return [-float(ranks[token]) if token in ranks else _NO_SCORE for token in tokens]


def _puts_space_first(source: dict[str, Any]) -> bool:
    prepends = any(part.get("type") == "Prepend" for part in components(source.get("normalizer")))
    schemes = [part.get("prepend_scheme") for part in components(source.get("pre_tokenizer"))]
    return prepends or any(scheme in ("always", "first") for scheme in schemes)
