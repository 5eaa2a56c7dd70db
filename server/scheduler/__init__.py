"""Who runs next: requests, admission, the step plan and preemption. Imports no torch."""
