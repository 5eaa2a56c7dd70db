"""Chat: the body, the prompt that the model's template makes of it, and the parts of the reply."""
