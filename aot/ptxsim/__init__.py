"""A functional simulator of PTX, to check kernels on machines without the chip that they are for.

It interprets PTX text that our own build emitted, in order to check code that will run on NVIDIA GPUs. It is
no back end for other hardware, and says nothing about speed.
"""
