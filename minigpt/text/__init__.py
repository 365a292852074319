"""Text in, ids out: sources, the tokenizer, and the corpus of token shards. Nothing here needs torch."""
