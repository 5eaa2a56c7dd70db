"""One file a family of routes."""
