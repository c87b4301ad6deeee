"""Pictures of runs, one family per file, as matplotlib figures that the caller owns; pyplot is never used.

`style` has what all of them share, and `files` writes them as PNG, SVG and PDF. What a picture needs is handed to
it: nothing here opens a run.
"""
