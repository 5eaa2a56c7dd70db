"""What every way to make the KV cache smaller gains, and what it costs: memory, speed and quality, side by side."""
