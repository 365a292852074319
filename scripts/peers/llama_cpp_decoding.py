"""llama.cpp through llama-cpp-python's bindings of its C functions, with none of the package's own Python in the loop.

Its settings are the library's own, but for the threads and the number of texts: so the cache is in float16.
"""

from __future__ import annotations

import time

import llama_cpp
import numpy as np
from protocol import Measure, serve

PROMPT = 512  # tokens a pass at most
QUIET = llama_cpp.llama_log_callback(lambda level, text, data: None)  # held here: C keeps no reference to it


def make_context(model: object, threads: int, rows: int, tokens: int) -> object:
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = rows * tokens, max(PROMPT, rows), PROMPT
    params.n_seq_max, params.n_threads, params.n_threads_batch = rows, threads, threads
    context = llama_cpp.llama_init_from_model(model, params)
    assert context, "llama.cpp made no context"
    return context


def fill(batch: object, tokens: list[list[int]], start: int) -> None:
    """Put the same number of tokens of each row into a batch; logits are wanted for the last of each."""
    at = 0
    for row, ids in enumerate(tokens):
        for place, token in enumerate(ids):
            batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.seq_id[at][0] = token, start + place, 1, row
            batch.logits[at] = place == len(ids) - 1
            at += 1
    batch.n_tokens = at


def load(threads: int, file: str) -> dict[str, Measure]:
    llama_cpp.llama_backend_init()
    llama_cpp.llama_log_set(QUIET, None)
    model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
    assert model, f"llama.cpp did not load {file}"
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def best(context: object, place: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(context, place)
        return int(np.ctypeslib.as_array(logits, shape=(vocabulary,)).argmax())

    def run(prompts: list[list[int]], new: int) -> float:
        """Read the prompts and write `new` tokens of each (0: read alone); return the seconds without the set-up."""
        rows, length = len(prompts), len(prompts[0])
        context = make_context(model, threads, rows, -(-(length + new) // 256) * 256)
        batch = llama_cpp.llama_batch_init(max(PROMPT, rows * length), 0, 1)
        started = time.perf_counter()
        ends = [(row + 1) * length - 1 for row in range(rows)]
        tokens, start = prompts, 0
        for _ in range(max(1, new)):
            fill(batch, tokens, start)
            status = llama_cpp.llama_decode(context, batch)
            assert status == 0, f"llama_decode returned {status}"
            start += len(tokens[0])
            tokens, ends = [[best(context, place)] for place in ends], list(range(rows))
        taken = time.perf_counter() - started
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)
        return taken

    def decode(prompt: list[int], rows: int, new: int) -> float:
        return rows * new / run([prompt] * rows, new)

    decode([10] * 8, 1, 4)
    return {"decode": decode, "prefill": lambda prompt: len(prompt) / run([prompt], 0)}


if __name__ == "__main__":
    serve(load)
