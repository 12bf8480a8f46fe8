"""What a launch of the planning kernel looks like; see `abi`."""

from __future__ import annotations

from cubinery.runtime.manifest import KernelRecord, pack_params
from cubinery.runtime.ops.paged_decode.plan_config import PlanConfig


def plan_record(config: PlanConfig) -> KernelRecord:
    """The launch record of the planning kernel."""
    params = pack_params(
        ("seq_lens", "pointer"),  # int32 or int64 (num_seqs,)
        ("work", "pointer"),  # int32 (num_work, 8): see SplitPlan.device_work
        ("lengths", "pointer"),  # int32 (num_seqs,)
        ("seq_len_bytes", "i32"),  # 4 or 8
        ("num_seqs", "i32"),
        ("num_work", "i32"),
        ("max_length", "i32"),
        ("is_thor", "i32"),  # 1: policy `thor`, 0: `balanced`
        ("ctas", "i32"),  # of a work item: num_kv_heads * q_tiles
        ("sm_count", "i32"),
        ("ctas_per_sm", "i32"),
        ("lone_tile_cost", "i32"),  # of the configuration that decodes, as is the next
        ("item_cost", "i32"),
        ("max_splits", "i32"),
        ("force_splits", "i32"),
        ("min_chunk_tiles", "i32"),
        ("window_span", "i32"),  # keys before its last one that any token of a sequence sees; 2^31 - 1: all
    )
    return KernelRecord(
        role="plan",
        symbol="cubinery_paged_decode_plan_0",
        block=(PlanConfig.THREADS, 1, 1),
        grid=(1, 1, 1),
        params=params,
        dynamic_smem=config.smem_bytes,
        carveout=100,  # as the decode has it, so that an SM need not change between the two
    )
