"""Numbers that every decode kernel uses."""

from __future__ import annotations

import math

LOG2E = math.log2(math.e)
NEG_INF = -math.inf
TINY = 2.0**-126
"""The smallest normal fp32."""
