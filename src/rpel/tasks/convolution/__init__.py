"""Convolutional networks of the paper's plain form: `engine` (the Engine), `windows` (one pass over the images) and
`instructions` (its inner loops as vector instructions)."""

from rpel.tasks.convolution.engine import ConvolutionEngine

__all__ = ["ConvolutionEngine"]
