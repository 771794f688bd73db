"""The conventional step: every member's whole sequence, prompt and response, under automatic differentiation.

What the engine is held against, at lengths where it still fits: `autodiff` by JAX over the family's plain reference, `pytorch`
by transformers. Nothing here is written for memory or speed.
"""
