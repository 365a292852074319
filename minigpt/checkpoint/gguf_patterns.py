"""How byte-level tokenizers cut a text before they merge: the names that llama.cpp has for it, and the patterns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minigpt.errors import ModelFolderError
from minigpt.text.tokenizer import PATTERN as QWEN2
from minigpt.text.tokenizer_json import components

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGIT = r"\p{N}"


@dataclass(frozen=True)
class PreTokenizer:
    """Patterns, each of which cuts the pieces of the one before it into its matches and what lies between them.

    With `ignore_merges` a piece that is a token is one, whether merges lead to it or not. `add_bos` is what llama.cpp
    does where the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


# Of several names for the same, the first is written.
PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer((GPT2,)),
    "qwen2": PreTokenizer((QWEN2,)),
    "deepseek-r1-qwen": PreTokenizer((QWEN2,)),
    "stablelm2": PreTokenizer((QWEN2,)),
    "llama-bpe": PreTokenizer((LLAMA3,), ignore_merges=True, add_bos=True),
    "llama3": PreTokenizer((LLAMA3,), ignore_merges=True, add_bos=True),
    "llama-v3": PreTokenizer((LLAMA3,), ignore_merges=True, add_bos=True),
    "smaug-bpe": PreTokenizer((LLAMA3,)),
    "dbrx": PreTokenizer((LLAMA3,)),
    "smollm": PreTokenizer((DIGIT, GPT2)),
    "starcoder": PreTokenizer((DIGIT, GPT2)),
    "refact": PreTokenizer((DIGIT, GPT2)),
    "command-r": PreTokenizer((DIGIT, GPT2)),
    "codeshell": PreTokenizer((DIGIT, GPT2)),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}


def pre_tokenizer_json(pre: PreTokenizer) -> dict[str, Any]:
    """Return the pre-tokenizer as tokenizer.json has it, in the words that the makers of these models chose."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    steps: list[dict[str, Any]] = []
    for pattern in pre.patterns:
        if pattern == DIGIT:
            steps.append({"type": "Digits", "individual_digits": True})
        else:
            steps.append({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False})
    if pre.patterns[-1] == GPT2:
        steps[-1] = byte_level | {"use_regex": True}  # the pattern is built in
    else:
        steps.append(byte_level)
    return steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps}


def known_as(source: dict[str, Any]) -> str:
    """Return the name for what a tokenizer.json does before merging; a ModelFolderError where there is none."""
    for part in components(source.get("normalizer")):
        # Text that is typed is in this form nearly always; llama.cpp takes it as it comes.
        if part.get("type") not in ("NFC", "Sequence"):
            raise ModelFolderError(f"the tokenizer changes text first ({part.get('type')}); GGUF has no name for that")
    patterns = tuple(_patterns(source))
    wanted = PreTokenizer(patterns, ignore_merges=bool(source["model"].get("ignore_merges")))
    for name, pre in PRE_TOKENIZERS.items():
        if (pre.patterns, pre.ignore_merges) == (wanted.patterns, wanted.ignore_merges):
            return name
    raise ModelFolderError(
        f"the tokenizer cuts text by {' then '.join(patterns) or 'no pattern'}; llama.cpp has no name for that"
    )


def _patterns(source: dict[str, Any]) -> list[str]:
    """Spell every step out as a pattern whose matches are cut out."""
    found = []
    for part in components(source.get("pre_tokenizer")):
        kind, pattern = part.get("type"), part.get("pattern")
        if kind == "Split" and isinstance(pattern, dict) and part.get("behavior") == "Isolated" and not part["invert"]:
            found.append(str(pattern.get("Regex")))
        elif kind == "Digits" and part.get("individual_digits"):
            found.append(DIGIT)
        elif kind == "ByteLevel" and not part.get("add_prefix_space"):
            found += [GPT2] if part.get("use_regex", True) else []
        elif kind != "Sequence":
            found.append(f"{kind}(…)")
    return found
