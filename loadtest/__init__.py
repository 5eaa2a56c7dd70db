"""Checks and loads that are run by hand or on other machines; `python -m loadtest.NAME --help` explains each."""
