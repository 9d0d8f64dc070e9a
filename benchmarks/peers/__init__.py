"""Planners of other systems on our lengths under our cost model; `python -m benchmarks.peers --help`."""
