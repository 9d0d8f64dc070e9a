"""Measuring the machine that a run will use, as a ClusterSpec preset.

kernels   attention by length and heads, and linear layers: FLOP/s
links     all-to-alls inside a node and between nodes: bytes/s and latency, fitted over several sizes
preset    the measurements as a commented YAML file
run       all of it, on ranks of its own or on those that torchrun started
"""
