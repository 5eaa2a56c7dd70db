"""What POST /v1/completions does between its body and its answer."""
