"""Text, token by token: all that is between a prompt and what is shown of the answer. Pure, but for the tokenizer."""
