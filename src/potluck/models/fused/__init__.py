"""Layers of small networks in few kernels of our own, where a GPU would spend its time between them."""
