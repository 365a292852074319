"""From files of prompts to what a policy is asked, in training and held out; what was found is told to a reporter."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minigpt.alignment.rollouts import Ask
from minigpt.errors import DataError
from minigpt.text.chat import ChatTemplate, chat_template
from minigpt.text.conversations import split_conversations
from minigpt.text.preferences import PreferenceCounts, Prompt, load_prompts
from minigpt.text.tokenizer import Tokenizer
from minigpt.training.chat_data import ChatRequest
from minigpt.training.runs import Reporter


@dataclass(frozen=True, kw_only=True)
class PromptData:
    """What is asked in training and held out; `facts` go into the record, their `digest` tells whether the same prompts
    are read again.
    """

    template: ChatTemplate
    train: list[Ask]
    held_out: list[Ask]
    facts: dict[str, Any]

    @property
    def longest(self) -> int:
        """The tokens of the longest prompt."""
        return max(len(ask.ids) for ask in (*self.train, *self.held_out))


def read_prompt_data(
    request: ChatRequest, tokenizer: Tokenizer, context: int, max_new_tokens: int, report: Reporter
) -> PromptData:
    """Read, split and encode prompts; those that leave no room for an answer in the context are left out and counted.

    Errors: DataError for bad rows, by file and line, and where no prompt is left.
    """
    template = chat_template(tokenizer, request.template)
    counts = PreferenceCounts()
    prompts = load_prompts(request.sources, request.options(), counts)
    split = split_conversations(prompts, request.val_fraction)
    room = context - max_new_tokens
    train, held_out = (_encoded(part, template, room) for part in (split.train, split.held_out))
    if not train:
        raise DataError(
            f"{request.named}: no prompt leaves room for {max_new_tokens:,} tokens of an answer in a context of "
            f"{context:,}; give a smaller --max-new-tokens, or shorter prompts"
        )
    left_out = len(prompts) - len(train) - len(held_out)
    parts = [request.named, f"{len(prompts):,} prompts", *counts.notes()]
    parts += [f"{left_out:,} too long, left out"] if left_out else []
    parts.append(f"{len(held_out):,} held out" if held_out else "none held out")
    report.fact("data", ", ".join(parts))
    if counts.first_skipped is not None:
        report.warning(f"{counts.first_skipped} (the first of {counts.skipped.total():,} bad rows skipped)")
    facts = {"digest": _digest(prompts), "prompts": len(prompts), "held_out": len(held_out)}
    return PromptData(template=template, train=train, held_out=held_out, facts=facts)


def _encoded(prompts: Sequence[Prompt], template: ChatTemplate, room: int) -> list[Ask]:
    asks = (Ask(prompt, template.encode(prompt.messages)) for prompt in prompts)
    return [ask for ask in asks if len(ask.ids) <= room]


def _digest(prompts: Sequence[Prompt]) -> str:
    """Tell one set of prompts, and what rewards read beside them, from another."""
    digest = hashlib.sha256()
    for prompt in prompts:
        turns = [(message.role, message.content) for message in prompt.messages]
        digest.update(json.dumps([turns, prompt.row], default=str).encode("utf-8"))
    return digest.hexdigest()
