"""Where the cache lives: the size formula, blocks, prefix hashes and the tensors themselves."""
