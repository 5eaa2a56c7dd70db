"""Proof of the dashboards: real servers, a real Prometheus, and a load whose own count every panel is held against."""
