"""Between text and tokens: tokenizer, detokenizer, stop strings, chat templates, grammars, and the parts of a reply."""
