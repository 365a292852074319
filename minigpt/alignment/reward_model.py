"""A reward model: a decoder with a scalar head, which is read at the last token of an answer.

Its folder is a model folder with the head beside the weights. The head begins at zero, so that a first step finds all
answers equally good. It has no bias, which no comparison could tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from minigpt.alignment.pairs import Messages, fit_answers
from minigpt.checkpoint.base import REWARD_HEAD
from minigpt.checkpoint.files import read_tensors, write_tensors
from minigpt.checkpoint.folder import LoadedModel, load
from minigpt.errors import DataError, ModelFolderError
from minigpt.model.loss import IGNORED
from minigpt.model.transformer import GPT
from minigpt.text.chat import chat_template
from minigpt.text.fitting import FitCounts
from minigpt.training.chat_data import pad_id

HEAD = "reward_head"
SCORED_TOKENS = 8192  # a forward pass


def add_reward_head(model: GPT) -> None:
    """Put a head of zeros on a model, trained with it."""
    head = nn.Linear(model.config.hidden_size, 1, bias=False, device=model.lm_head.weight.device)
    nn.init.zeros_(head.weight)
    model.add_module(HEAD, head)


def rewards_at_the_end(model: GPT, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the reward of each side (B, 2) of tokens (B, 2, T), read where its one target is; float32."""
    hidden = model.model(tokens.flatten(0, 1))  # (2B, T, C)
    last = (targets.flatten(0, 1) != IGNORED).int().argmax(-1)
    at_end = hidden[torch.arange(len(last), device=last.device), last]
    head = model.get_submodule(HEAD)
    with torch.autocast(hidden.device.type, enabled=False):
        rewards: Tensor = head(at_end.float()).squeeze(-1)
    return rewards.view(-1, 2)


def saving_head(save: Callable[[Path, GPT], None]) -> Callable[[Path, GPT], None]:
    """Return what saves a model as `save` does, and its head in a file beside it."""

    def saved(folder: Path, model: GPT) -> None:
        head = model.get_submodule(HEAD)
        delattr(model, HEAD)
        try:
            save(folder, model)
        finally:
            model.add_module(HEAD, head)
        write_tensors(folder / REWARD_HEAD, {"weight": head.get_parameter("weight").detach()}, {})

    return saved


class RewardModel:
    """Tell what answers are worth to the preferences it was trained on; only differences mean anything."""

    def __init__(self, loaded: LoadedModel, head: Tensor) -> None:
        self.model, self.folder = loaded.model, loaded.folder
        add_reward_head(self.model)
        with torch.no_grad():
            self.model.get_submodule(HEAD).get_parameter("weight").copy_(head)
        self.template = chat_template(loaded.tokenizer)
        self.pad_id = pad_id(loaded.tokenizer)

    @torch.no_grad()
    def score(self, conversations: Sequence[Messages]) -> list[float]:
        """Return the reward of each conversation, which ends with the answer that is judged; longest ones are cut.

        One that does not end with an answer is a DataError.
        """
        ids = [self._ids(messages) for messages in conversations]
        order = sorted(range(len(ids)), key=lambda place: len(ids[place]))
        rewards = [0.0] * len(ids)
        start = 0
        while start < len(order):
            stop = start + 1
            while stop < len(order) and (stop + 1 - start) * len(ids[order[stop]]) <= SCORED_TOKENS:
                stop += 1
            part = order[start:stop]
            for place, reward in zip(part, self._scored([ids[place] for place in part]), strict=True):
                rewards[place] = reward
            start = stop
        return rewards

    def _ids(self, messages: Messages) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        if not messages or messages[-1].role != "assistant":
            raise DataError("a conversation to score ends with no answer; give the assistant's last")
        context = self.model.config.max_position_embeddings - 1
        fitted = fit_answers(messages[:-1], [messages[-1:]], self.template, context, FitCounts())
        if fitted is None:
            raise DataError(f"no answer is left of a conversation in a context of {context + 1:,} tokens; shorten it")
        return fitted[0].ids

    def _scored(self, rows: Sequence[np.ndarray[tuple[int], np.dtype[np.int32]]]) -> list[float]:
        device = self.model.lm_head.weight.device
        tokens = torch.full((len(rows), max(map(len, rows))), self.pad_id, dtype=torch.long)
        for row, ids in enumerate(rows):
            tokens[row, : len(ids)] = torch.from_numpy(ids)
        hidden = self.model.model(tokens.to(device))
        last = torch.tensor([len(ids) - 1 for ids in rows], device=device)
        at_end = hidden[torch.arange(len(rows), device=device), last].float()
        found: list[float] = self.model.get_submodule(HEAD)(at_end).squeeze(-1).tolist()
        return found


def load_reward_model(folder: Path, device: torch.device | str = "cpu") -> RewardModel:
    """Open the folder of a reward model, in float32; another kind of folder is a ModelFolderError."""
    loaded = load(folder, device=device, dtype=torch.float32)
    path = folder / REWARD_HEAD
    if not path.is_file():
        raise ModelFolderError(f"{folder} is no reward model (no {REWARD_HEAD} in it); train one with minigpt reward")
    head = read_tensors(path)[0].get("weight")
    shape = (1, loaded.model.config.hidden_size)
    if head is None or head.shape != shape:
        raise ModelFolderError(f"{path} holds no head of {shape[1]} weights; train the reward model again")
    return RewardModel(loaded, head)
