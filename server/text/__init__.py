"""Between text and tokens: the tokenizer, the incremental detokenizer and stop strings."""
