"""A bundle for one arch, a second configuration beside it, and a kernel that both require."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_driver import write_bundle

from cubinery.runtime.ops.paged_decode.config import MmaConfig

CONFIG = MmaConfig(head_dim=128, page_size=16, kv_format="fp8")
KEY = CONFIG.key("sm_90a")
OTHER = MmaConfig(head_dim=128, page_size=64, kv_format="bf16")
OTHER_KEY = OTHER.key("sm_90a")
PART_KEY = CONFIG.requires()[0].key("sm_90a")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """The folder of a bundle with two decode kernels and the one that both require."""
    return write_bundle(tmp_path / "kernels", "sm_90a", [CONFIG, OTHER, *CONFIG.requires()])
