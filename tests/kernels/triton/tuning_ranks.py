"""Cases of several processes that choose configurations: each has a cache of its own, as on nodes without a common disk."""

import os
import tempfile
import time

import processes
import torch.distributed as dist
from processes import case
from tuned import CONFIGS, decide, never

from opkit import config
from opkit.errors import KernelError
from opkit.kernels.tuning import tuning


class Timer:
    """Measures another configuration as the fastest in each process."""

    def __init__(self, error=None):
        self.calls, self.error = 0, error

    def __call__(self, each):
        self.calls += 1
        time.sleep(0.02)
        if self.error is not None:
            raise self.error
        return 0.1 if each is CONFIGS[dist.get_rank()] else 1.0


def gathered(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def own_cache():
    os.environ["OPKIT_CACHE_DIR"] = tempfile.mkdtemp()
    config.get.cache_clear()
    tuning.forget()


@case
def one_measures(mesh):
    own_cache()
    timer = Timer()
    choice = decide(timer)
    assert len(set(gathered(choice.config.key))) == 1
    assert sorted(gathered(timer.calls)) == [0, 3]
    assert sorted(gathered(choice.source)) == ["rank", "tuned"]
    tuning.forget()
    assert decide(never).config is choice.config
    tuning.forget()
    assert decide(never, capturing=True).config is choice.config


@case
def records_that_differ(mesh):
    """Each process has a result of its own from before the job."""
    own_cache()
    store, tuning.ranks._store = tuning.ranks._store, lambda: None
    own = decide(Timer(), bucket="bf16 | d=1")
    tuning.ranks._store = store
    tuning.forget()
    assert own.config is CONFIGS[dist.get_rank()]
    assert len(set(gathered(decide(never, bucket="bf16 | d=1").config.key))) == 1


@case
def a_process_that_never_asks(mesh):
    own_cache()
    if dist.get_rank() == 1:
        assert decide(Timer(), bucket="bf16 | d=2").source == "tuned"
    dist.barrier()


@case
def the_one_that_measures_fails(mesh):
    own_cache()
    failed = ""
    if dist.get_rank() == 0:
        try:
            decide(Timer(ValueError("no luck")), bucket="bf16 | d=4")
        except KernelError as error:
            failed = str(error)
        assert "no luck" in failed
    dist.barrier()
    if dist.get_rank() == 1:
        assert decide(Timer(), bucket="bf16 | d=4").source == "tuned"


if __name__ == "__main__":
    processes.main()
