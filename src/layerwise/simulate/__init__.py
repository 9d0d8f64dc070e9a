"""What every rank does when, and what it holds, under a plan; all of it predicted by the cost model. No torch.

timeline   every phase of a step, as arrays
step       Simulation: prediction, timeline and memory of one plan; `simulate` makes it
table      short tables for a terminal
trace      the timeline as a file for Perfetto or chrome://tracing
series     what the pictures show, as arrays
drawing    the picture for papers (matplotlib)
page       one HTML file with interactive pictures (plotly)
"""

from layerwise.simulate.step import Simulation, simulate

__all__ = ["Simulation", "simulate"]
