"""CPU torch tensors as device memory: what torch allocates while an operator runs becomes accessible to kernels.

    with watching(driver):
        driver.register_tensors(q=q, k=k_cache, v=v_cache, block_table=table)
        o, lse = plan.run(q, k_cache, v_cache, table)

Inside, every tensor that a torch operation makes or touches is registered with the driver. What `torch.empty`
and its kin give counts as uninitialised until an operation writes it; any other memory of the process stays out of
bounds. torch is imported when `watching` is called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from cubinery.aot.ptxsim.driver import SimDriver

_EMPTY = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided")


@contextlib.contextmanager
def watching(driver: SimDriver) -> Iterator[None]:
    """Register the CPU tensors of every torch operation of this thread with `driver`."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            name = func._schema.name
            empty = name in _EMPTY
            if func._schema.is_mutable:
                for leaf in tree_leaves((args, kwargs)):
                    _register(driver, leaf, torch, initialised=True)
            for leaf in tree_leaves(result):
                _register(driver, leaf, torch, initialised=not empty)
            return result

    with Watch():  # type: ignore[no-untyped-call]
        yield


def _register(driver: SimDriver, leaf: Any, torch: Any, *, initialised: bool) -> None:
    """Register a tensor's storage, or count an empty one as written once something has been."""
    if not isinstance(leaf, torch.Tensor) or leaf.device.type != "cpu":
        return
    storage = leaf.untyped_storage()
    address, size = storage.data_ptr(), storage.nbytes()
    if not size:
        return
    found = driver.memory.find(address)
    if found is not None and (found.base, found.size) == (address, size):
        if initialised:
            found.initialise()
        elif found.block.written is None:  # freed since, and allocated again at the same place
            driver.register_host(address, size, initialised=False, name="torch tensor")
        return
    driver.register_host(address, size, initialised=initialised, name="torch tensor")
