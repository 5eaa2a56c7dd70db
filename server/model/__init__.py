"""What computes: loading, the attention hook and its backends, the runner and the sampler."""
