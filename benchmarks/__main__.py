"""`python -m benchmarks`: measure a bundle on this machine's GPU."""

import sys

from benchmarks.cli import main

if __name__ == "__main__":
    sys.exit(main())
