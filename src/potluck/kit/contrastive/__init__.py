"""Contrastive losses over two, three or more representations of the same samples."""
