"""Sluice beside other servers on one workload, in turns."""
