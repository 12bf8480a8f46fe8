#!/usr/bin/env python3
"""The `cubinery` command from a checkout, installed or not: `python build_kernels.py build --arch sm_110a`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))
    from cubinery.aot.cli import main

    main()
