"""A recommender with bags of embeddings, and policies of reinforcement learning. They need no package."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from opkit.bench.architecture import Architecture, Inputs, Size, Task, images


def _layers(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    pairs = itertools.pairwise(widths)
    parts = [part for a, b in pairs for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*parts[:-1])


class Recommender(nn.Module):
    """DLRM (Naumov et al., 2019): bags of embeddings, and products of all pairs of features."""

    def __init__(self, tables: int, rows: int, width: int, dense: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = _layers(dense, 2 * width, width)
        self.top = _layers(width + tables * (tables + 1) // 2, 2 * width, 1)
        self.pairs: Tensor
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, offset=-1), persistent=False)

    def forward(self, dense: Tensor, indices: Tensor) -> Tensor:
        """Return the probability of a click; ``dense`` is ``(batch, features)``, ``indices`` ``(tables, batch, bag)``."""
        first = self.bottom(dense)
        features = torch.stack([first, *(table(bag) for table, bag in zip(self.tables, indices, strict=True))], 1)
        products = features @ features.transpose(1, 2)
        return torch.sigmoid(self.top(torch.cat([first, products[:, self.pairs[0], self.pairs[1]]], 1)))


def _dlrm(size: Size) -> Task:
    tables, rows, width, dense, bag = (3, 50, 16, 8, 4) if size == "tiny" else (26, 100000, 128, 13, 20)

    def inputs(batch: int) -> dict[str, Tensor]:
        return {"dense": torch.randn(batch, dense), "indices": torch.randint(0, rows, (tables, batch, bag))}

    return Task(Recommender(tables, rows, width, dense), inputs, 2 if size == "tiny" else 2048)


class ActorCritic(nn.Module):
    """The mean and the deviation of a continuous action, and the value of a state."""

    def __init__(self, observations: int, actions: int, width: int) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(observations, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.mean = nn.Linear(width, actions)
        self.log_deviation = nn.Parameter(torch.zeros(actions))
        self.critic = nn.Sequential(nn.Linear(observations, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, states: Tensor, actions: Tensor) -> dict[str, Tensor]:
        """Return the log-probability of actions, the values of states, and the entropy."""
        policy = torch.distributions.Normal(
            self.mean(self.actor(states)), self.log_deviation.exp(), validate_args=False
        )
        return {
            "log_probability": policy.log_prob(actions).sum(-1),
            "value": self.critic(states).squeeze(-1),
            "entropy": policy.entropy().sum(-1),
        }


def _actor_critic(size: Size) -> Task:
    observations, actions, width = (8, 3, 32) if size == "tiny" else (376, 17, 512)

    def inputs(batch: int) -> dict[str, Tensor]:
        return {"states": torch.randn(batch, observations), "actions": torch.randn(batch, actions)}

    return Task(ActorCritic(observations, actions, width), inputs, 2 if size == "tiny" else 4096)


class DQN(nn.Module):
    """The convolutional network of Mnih et al., 2015, with a dueling head (Wang et al., 2016)."""

    def __init__(self, actions: int, widths: tuple[int, int, int]) -> None:
        super().__init__()
        a, b, hidden = widths
        self.features = nn.Sequential(
            *(nn.Conv2d(4, a, 8, 4), nn.ReLU(), nn.Conv2d(a, b, 4, 2), nn.ReLU(), nn.Conv2d(b, b, 3, 1), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(49 * b, hidden), nn.ReLU()),
        )
        self.value, self.advantage = nn.Linear(hidden, 1), nn.Linear(hidden, actions)

    def forward(self, x: Tensor) -> Tensor:
        """Return the value of each action, for ``(batch, 4, 84, 84)``: four frames."""
        hidden = self.features(x)
        advantage = self.advantage(hidden)
        return self.value(hidden) + advantage - advantage.mean(1, keepdim=True)


def _dqn(size: Size) -> Task:
    module = DQN(6, (8, 8, 32) if size == "tiny" else (32, 64, 512))
    inputs: Inputs = images(84, channels=4)
    return Task(module, inputs, 2 if size == "tiny" else 256)


_BUILDERS = {"dlrm": _dlrm, "actor_critic": _actor_critic, "dqn": _dqn}
ARCHITECTURES = [Architecture(name, "decisions", build) for name, build in _BUILDERS.items()]
