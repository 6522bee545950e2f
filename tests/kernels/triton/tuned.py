"""A kernel with three configurations, and a stand-in for their measurement, for tests of tuning."""

from opkit.kernels.tuning import tuning
from opkit.kernels.tuning.configs import Config
from opkit.kernels.tuning.record_format import Identity

RMS = Identity("demo::rms_norm", "_fwd", "abc")
CONFIGS = [Config({"BLOCK": block}, {"num_warps": 4}) for block in (64, 128, 256)]
TIMES = {64: 0.5, 128: 0.25, 256: 0.75}
BEST = CONFIGS[1]
DEVICE, BUCKET = "NVIDIA H200", "bf16 | d=1024"


class Timer:
    """A stand-in for a measurement, which counts and may fail."""

    def __init__(self, **failures):
        self.failures = {int(name[1:]): error for name, error in failures.items()}
        self.calls = []

    def __call__(self, each):
        block = each.constexprs["BLOCK"]
        self.calls.append(block)
        if block in self.failures:
            raise self.failures[block]
        return TIMES.get(block, 1.0)


def decide(measure, identity=RMS, configs=CONFIGS, bucket=BUCKET, capturing=False, folders=(), load=None):
    return tuning.decide(identity, configs, DEVICE, bucket, measure, capturing, folders, load)


def never(each):
    raise AssertionError(f"{each.label} was measured")
