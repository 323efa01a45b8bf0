"""Hand-written convolutions for the paper's networks, reached through the table of engines only.

`convolution` computes C-R-M networks (loops in `windows`), `blocks` chains of C-R-B(-M(-D)), with 3 × 3
convolutions by Winograd's algorithm (`winograd`). The field `native` of a run switches them off.
"""
