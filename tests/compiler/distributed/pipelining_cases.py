"""Pipelines of two processes against the whole model in one, which ``test_pipelining`` starts."""

import copy

import processes
import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.nn import functional as F

import opkit
from opkit.compiler import backend
from opkit.masks import Causal

WIDTH, MICROBATCHES = 8, 3


@opkit.custom_op("pipelining::rms_norm")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.query, self.key, self.value, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x):
        h = rms_norm(x, self.norm, 1e-6)
        heads = [of(h).unflatten(-1, (2, -1)).transpose(1, 2) for of in (self.query, self.key, self.value)]
        x = x + opkit.attention(*heads, mask=Causal()).transpose(1, 2).flatten(2)
        return x + self.down(F.gelu(self.up(x)))


class BrokenStage(Stage):
    """A stage of two graphs."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = super().forward(x)
        torch._dynamo.graph_break()
        return x + self.out(x).sin()


def whole(model, x, targets):
    """The losses of the microbatches; the parameters of the model get the gradients of their mean."""
    parts = zip(x.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True)
    losses = torch.stack([F.mse_loss(model(part), target) for part, target in parts])
    losses.mean().backward()
    return losses.detach()


def step(schedule, model, mine, x, targets):
    """The losses of one step, in the process with the last stage; parameters of the stages ``mine`` get new gradients."""
    losses = []
    model.zero_grad()
    last = {"target": targets, "losses": losses} if len(model) - 1 in mine else {}
    schedule.step(*[x] * (0 in mine), **last)
    return [loss.detach() for loss in losses]


def check(schedule, numbers, compiles, make=Stage):
    """Compare two steps with those of one process; ``numbers`` are the stages of each process."""
    rank = torch.distributed.get_rank()
    mine = numbers[rank]
    model = nn.Sequential(*[make() for _ in range(sum(map(len, numbers)))])
    alone = copy.deepcopy(model)
    if compiles:
        for number in mine:
            model[number].compile(backend="opkit", options={"strict": True})
    stages = [pipelining.PipelineStage(model[n], n, len(model), torch.device("cpu")) for n in mine]
    run = schedule(stages if len(mine) > 1 else stages[0], MICROBATCHES, loss_fn=F.mse_loss)
    for _ in range(2):
        x, targets = torch.randn(2, 2 * MICROBATCHES, 5, WIDTH)
        alone.zero_grad()
        expected = whole(alone, x, targets)
        losses = step(run, model, mine, x, targets)
        torch.testing.assert_close(losses, [*expected] if len(model) - 1 in mine else [])
        for number in mine:
            found, wanted = ([p.grad for p in each[number].parameters()] for each in (model, alone))
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def compiled(schedule, numbers, make=Stage):
    found = []
    token = backend.observer.set(found.append)
    check(schedule, numbers, True, make)
    backend.observer.reset(token)
    assert found
    assert not any(graph.reason for graph in found), [graph.reason for graph in found]


ONE, LOOP, V = [[0], [1]], [[0, 2], [1, 3]], [[0, 3], [1, 2]]
SCHEDULES = {
    "gpipe": (pipelining.ScheduleGPipe, ONE),
    "one_forward_one_backward": (pipelining.Schedule1F1B, ONE),
    "interleaved": (pipelining.ScheduleInterleaved1F1B, LOOP),
    "zero_bubble": (pipelining.ScheduleInterleavedZeroBubble, LOOP),
    "v_zero_bubble": (pipelining.ScheduleZBVZeroBubble, V),
}
for name, (schedule, numbers) in SCHEDULES.items():
    processes.CASES[f"{name}_eager"] = lambda mesh, of=(schedule, numbers): check(*of, compiles=False)
    processes.CASES[f"{name}_compiled"] = lambda mesh, of=(schedule, numbers): compiled(*of)
processes.CASES["zero_bubble_broken"] = lambda mesh: compiled(*SCHEDULES["zero_bubble"], BrokenStage)


if __name__ == "__main__":
    processes.main()
