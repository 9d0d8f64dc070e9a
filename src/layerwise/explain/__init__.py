"""Why a sample sits where it sits, and what its other places would cost.

sample     the explanation, and how it is printed
elsewhere  a plan with one sample moved
"""
