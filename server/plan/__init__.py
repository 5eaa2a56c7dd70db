"""`sluice plan`: what a model's cache takes and how much of it fits, from a config.json alone."""

from server.plan.command import main

__all__ = ["main"]
