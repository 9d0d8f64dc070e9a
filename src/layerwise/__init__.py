"""Train hybrid-attention models with a parallel layout of its own for each kind of layer."""
