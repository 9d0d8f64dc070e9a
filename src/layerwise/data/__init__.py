"""From the data that people have to the tokens that a rank computes with.

sources/              rows: out of files and folders, Hugging Face datasets, iterables
documents             rows become tokens, by tokenizer and chat template; ids checks them
store, cache          tokens in flat arrays, in memory or on disk
corpus, stream        samples with known lengths, or as they come; limits and report say what is left out
sampler, window       which samples each step holds
loader, step_samples  a step is planned, and this rank's tokens are cut out of it
"""
