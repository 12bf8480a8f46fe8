"""Cubinery: ahead-of-time compiled attention kernels, launched by key with no compiler present."""

__version__ = "0.1.0"
