"""Text in and out, in the front: tokenizer, chat template, incremental detokenizer, stop strings."""
