"""One architecture and one backend, measured in this process: ``python -m opkit.bench.measurement REQUEST RESULT LOCK``.

The first two are paths of JSON files, the third one of a file that is locked during timings. The result is written at the start
of each stage, so that a process that ends early leaves what it has measured, and when everything is measured or failed.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from opkit.bench import accuracy, compilation, timing
from opkit.bench.architecture import Inputs, Size, Task
from opkit.bench.zoo.table import architectures

T = TypeVar("T")

SEED = 20
STEPS = 10
LEARNING_RATE = 1e-2
SCALE_MARGIN = 4.0
"""Between the largest scale of the loss with which the first step has finite gradients in float16, and the one that is used."""
PERTURBED_RUNS = 4
"""Of eager mode in training: where a ReLU's argument is as small as rounding, each run has other gradients."""
OTHER_INPUTS = 4
"""With which inference and training are judged again if their errors with the first are too large."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What to measure.

    Attributes:
        model: an architecture's name.
        backend: of torch.compile, or "eager".
        size, device: of the model.
        dtype: "float32", or that of autocast; with "float16" a GradScaler scales the loss.
        threads: those of torch; None for its own number.
    """

    model: str
    backend: str
    size: Size = "tiny"
    device: str = "cpu"
    dtype: str = "float32"
    threads: int | None = None


def measure(
    request: Request, save: Callable[[dict[str, Any]], None] = lambda record: None, lock: Path | None = None
) -> dict[str, Any]:
    """Return a record of the measurements; what fails is in it as "error", with what was measured before.

    ``save`` is called with the record at the start of each stage. Of the processes with the same ``lock``, one at a time
    measures run times and memory.
    """
    record: dict[str, Any] = {**dataclasses.asdict(request), "status": "failed", "stage": "build"}
    try:
        if request.threads is not None:
            torch.set_num_threads(request.threads)
        torch.manual_seed(SEED)
        task = architectures()[request.model].build(request.size)
        subject = _Subject(task, request, record, save, lock)
        subject.inference()
        subject.training()
        wrong = accuracy.wrong_results(record["errors"], record["eager_errors"])
        record["status"] = "wrong" if wrong else "passed"
        record["wrong"] = wrong
        del record["stage"]
    except Exception as error:  # any model may fail in any way, and the others must still be measured
        record["error"] = f"{type(error).__name__}: {str(error).strip()[:1000]}"
        record["traceback"] = traceback.format_exc()[-3000:]
    return record


class _Subject:
    """A model in eager mode, in float64, and compiled."""

    def __init__(
        self,
        task: Task,
        request: Request,
        record: dict[str, Any],
        save: Callable[[dict[str, Any]], None],
        lock: Path | None,
    ) -> None:
        self.task, self.request, self.record, self.save, self.lock = task, request, record, save, lock
        self.device, self.backend = request.device, request.backend
        self.exact, self.exact_dtype = copy.deepcopy(task.module).double(), torch.float64
        self.module = task.module.float().to(self.device)
        self.fallbacks = compilation.Fallbacks()
        self.scale = 2.0**16  # of the loss, with float16
        record |= {
            "parameters": sum(each.numel() for each in self.module.parameters()),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "reference": "float64",
            "errors": {},
            "eager_errors": {},
            "breaks": [],
        }
        if self.backend != "eager":
            compilation.import_compiler(self.backend)

    # ---- inference ---------------------------------------------------------------------------------------------------

    def inference(self) -> None:
        """Compile, call with five batch sizes, compile again, and time it."""
        self.module.eval()
        self.exact.eval()
        self._stage("inference in eager mode")
        inputs, eager, exact = self._in_eager_mode()
        depends_on_data = accuracy.shapes(exact) != accuracy.shapes(eager)
        judged = self.request.dtype == "float32" or not depends_on_data
        if not judged:  # rounding decides which results there are
            self.record["reference"] += ", in training alone: sizes of results depend on data"
        elif depends_on_data:
            self.record["reference"] = "eager mode: sizes depend on data, and are others in float64"
            exact = eager
        if judged:
            self.record["eager_errors"]["forward"] = accuracy.worst_of_calls(eager, exact)
        self._stage("inference")
        compiled = self._compiled()
        with self.fallbacks.recorded():
            first, cold = timing.timed(lambda: self._results(compiled, inputs[0]), self.device)
        captured = compilation.captured_graphs()
        found = [first, *(self._results(compiled, each) for each in inputs[1:])]
        if judged:
            self.record["errors"]["forward"] = accuracy.worst_of_calls(found, exact)
        self.record["recompiles"] = compilation.captured_graphs() - captured
        self.record["graphs"] = captured
        self._add_compilation()
        del found, eager, exact, first
        if accuracy.wrong_results(self.record["errors"], self.record["eager_errors"]):
            self._stage("inference with other inputs")
            self._judge_typical_results(compiled)
        again = self._compiled()
        _, warm = timing.timed(lambda: self._results(again, inputs[0]), self.device)
        self._measure("inference", cold, warm, *(lambda m=m: self._call(m, inputs[0]) for m in (self.module, again)))

    def _judge_typical_results(self, compiled: Callable[..., Any]) -> None:
        """Replace the error of inference by the median with these inputs and others, and that of eager mode, too.

        Two boxes of a detector can overlap by just less than its limit in the compiled model, and by just more in eager
        mode, but not with most inputs.
        """
        found, eager = [dict(self.record["errors"])], [dict(self.record["eager_errors"])]
        for other in range(1, OTHER_INPUTS + 1):
            inputs, of_eager, exact = self._in_eager_mode(other)
            if accuracy.shapes(exact) != accuracy.shapes(of_eager):
                exact = of_eager
            eager.append({"forward": accuracy.worst_of_calls(of_eager, exact)})
            found.append(
                {"forward": accuracy.worst_of_calls([self._results(compiled, each) for each in inputs], exact)}
            )
        self.record["inference_inputs"] = len(found)
        self.record["errors"] = accuracy.medians(found)
        self.record["eager_errors"] = accuracy.medians(eager)

    def _in_eager_mode(self, other: int = 0) -> tuple[list[dict[str, Any]], list[list[Tensor]], list[list[Tensor]]]:
        """Return inputs of all batch sizes, with the results of eager mode and of the exact copy."""
        inputs = [self._inputs(self.task.inputs, batch, other) for batch in self.task.batches]
        eager = [self._results(self.module, each) for each in inputs]
        exact = self._in_float64(lambda: [self._results(self.exact, self._as_exact(each)) for each in inputs], eager)
        return inputs, eager, exact

    def _in_float64(self, run: Callable[[], T], eager: T) -> T:
        """Return what the exact copy gives. If some operator has no float64, the copy is in float32 where the model runs under
        autocast; else the results of eager mode are the exact ones.

        The copy, and what is kept of it, are on the CPU before and after, as models fill the memory of a GPU.
        """
        if self.record["reference"].startswith("eager mode"):
            return eager
        try:
            self.exact.to(self.device)
            return run()
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError, ValueError) as error:
            if self.exact_dtype != torch.float64:
                raise
            reason = f"float64 raised {type(error).__name__}: {str(error)[:200]}"
        finally:
            self.exact.zero_grad()
            self.exact.to("cpu")
        if self.request.dtype == "float32":
            self.record["reference"] = f"eager mode: {reason}"
            return eager
        self.record["reference"] = f"float32: {reason}"
        self.exact, self.exact_dtype = self.exact.float(), torch.float32
        return self._in_float64(run, eager)

    def _as_exact(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        wide = self.exact_dtype
        return pytree.tree_map_only(
            Tensor, lambda each: each.to(wide) if each.is_floating_point() else each, dict(inputs)
        )

    # ---- training ----------------------------------------------------------------------------------------------------

    def training(self) -> None:
        """Compile, take the steps of an optimizer, compile again, and time a step."""
        self._stage("training in eager mode")
        inputs = self._training_inputs()
        state = copy.deepcopy(self.module.state_dict())
        if self.request.dtype == "float16":
            self.scale = self.record["scale"] = self._largest_scale(inputs) / SCALE_MARGIN
        exact, eager_errors = self._eager_training(inputs, state)
        self._stage("training")
        compiled = self._compiled()
        with self.fallbacks.recorded():
            found = self._train(compiled, self.module, inputs)
        self._add_compilation()
        errors, cold = found.errors(exact), found.first_seconds
        del found, exact
        self.record["errors"] |= errors
        self.record["eager_errors"] |= eager_errors
        if accuracy.wrong_results(errors, eager_errors):
            self._stage("training with other inputs")
            self._judge_typical_errors(compiled, state)
        self.module.load_state_dict(state)
        self.module.zero_grad()
        again, scaler = self._compiled(), self._scaler(self.module)
        _, warm = timing.timed(lambda: self._step(again, self.module, inputs, scaler), self.device)
        steps = (lambda m=m: self._step(m, self.module, inputs, scaler) for m in (self.module, again))
        self._measure("training", cold, warm, *steps)

    def _training_inputs(self, other: int = 0) -> dict[str, Any]:
        return self._inputs(self.task.training_inputs or self.task.inputs, self.task.batch, other)

    def _eager_training(
        self, inputs: Mapping[str, Any], state: Mapping[str, Tensor]
    ) -> tuple[accuracy.Training, dict[str, float]]:
        """Return training in float64, and the largest errors of eager mode's runs, from this state, which the module has then."""
        self.module.load_state_dict(state)
        self.exact.load_state_dict(state)
        eager = self._train(self.module, self.module, inputs)
        exact = self._in_float64(lambda: self._train(self.exact, self.exact, self._as_exact(inputs)), eager)
        runs = [eager.errors(exact)]
        for run in range(PERTURBED_RUNS):
            torch.manual_seed(SEED + 1 + run)  # training leaves the generator in the same state each time
            self.module.load_state_dict({name: _perturbed(each) for name, each in state.items()})
            runs.append(self._train(self.module, self.module, inputs).errors(exact))
        self.module.load_state_dict(state)
        return exact, {name: max(run[name] for run in runs) for name in runs[0]}

    def _judge_typical_errors(self, compiled: Callable[..., Any], state: Mapping[str, Tensor]) -> None:
        """Replace errors in training by their medians with these inputs and others, and those of eager mode, too.

        A ReLU whose argument is nearly 0 can change its sign in the compiled model and in none of eager mode's runs, but
        not with most inputs.
        """
        found, eager = [dict(self.record["errors"])], [dict(self.record["eager_errors"])]
        for other in range(1, OTHER_INPUTS + 1):
            inputs = self._training_inputs(other)
            exact, of_eager = self._eager_training(inputs, state)
            eager.append(eager[0] | of_eager)
            found.append(found[0] | self._train(compiled, self.module, inputs).errors(exact))
        self.record["training_inputs"] = len(found)
        self.record["errors"] = accuracy.medians(found)
        self.record["eager_errors"] = accuracy.medians(eager)

    def _largest_scale(self, inputs: Mapping[str, Any]) -> float:
        """Return the scale at which a GradScaler skips no more steps of eager mode, from the state that the module has."""
        self.module.train()
        scaler, optimizer = self._scaler(self.module), torch.optim.SGD(self.module.parameters(), lr=0.0)
        while (scale := scaler.get_scale()) > 1.0:
            self._step(self.module, self.module, inputs, scaler)
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() == scale:
                break
        return scale

    def _train(self, call: Callable[..., Any], module: nn.Module, inputs: Mapping[str, Any]) -> accuracy.Training:
        module.train()
        before = {name: each.detach().clone() for name, each in _floats(module)}
        optimizer, scaler = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE), self._scaler(module)
        losses: list[Tensor] = []
        gradients: list[Tensor | None] = []
        first_seconds = 0.0
        for step in range(STEPS):
            loss, seconds = timing.timed(lambda: self._step(call, module, inputs, scaler), self.device)
            scaler.unscale_(optimizer)
            losses.append(loss.clone())
            if step == 0:
                first_seconds = seconds
                gradients = [None if p.grad is None else self._kept(p.grad, module) for p in module.parameters()]
            scaler.step(optimizer)
            scaler.update()
        changes = [self._kept(each.detach() - before[name], module) for name, each in _floats(module)]
        return accuracy.Training(losses, gradients, changes, first_seconds)

    def _step(
        self, call: Callable[..., Any], module: nn.Module, inputs: Mapping[str, Any], scaler: torch.amp.GradScaler
    ) -> Tensor:
        module.zero_grad()
        torch.manual_seed(SEED)
        with self._autocast(module):
            loss = accuracy.loss_of(call(**inputs))
        scaler.scale(loss).backward()
        return loss.detach()

    def _scaler(self, module: nn.Module) -> torch.amp.GradScaler:
        """Return a scaler of the loss as people have with float16; else one that does nothing."""
        enabled = self.request.dtype == "float16" and module is not self.exact
        return torch.amp.GradScaler(torch.device(self.device).type, init_scale=self.scale, enabled=enabled)

    # ---- both --------------------------------------------------------------------------------------------------------

    def _stage(self, name: str) -> None:
        if torch.device(self.device).type == "cuda":
            torch.cuda.empty_cache()  # other processes need it
        self.record["stage"] = name
        self.save(self.record)

    def _compiled(self) -> Callable[..., Any]:
        return self.module if self.backend == "eager" else compilation.compiled(self.module, self.backend)

    def _inputs(self, make: Inputs, batch: int, other: int = 0) -> dict[str, Any]:
        torch.manual_seed(SEED + batch + 1000 * other)
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(self.device), make(batch))

    def _autocast(self, module: Any) -> contextlib.AbstractContextManager[Any]:
        if self.request.dtype == "float32" or module is self.exact:
            return contextlib.nullcontext()
        return torch.autocast(torch.device(self.device).type, getattr(torch, self.request.dtype))

    def _call(self, call: Callable[..., Any], inputs: Mapping[str, Any]) -> Any:
        with torch.no_grad(), self._autocast(call):
            return call(**inputs)

    def _results(self, call: Callable[..., Any], inputs: Mapping[str, Any]) -> list[Tensor]:
        torch.manual_seed(SEED)
        return [self._kept(each, call) for each in accuracy.floating_leaves(self._call(call, inputs))]

    def _kept(self, tensor: Tensor, call: Callable[..., Any]) -> Tensor:
        return tensor.to("cpu" if call is self.exact else tensor.device, copy=True)

    def _add_compilation(self) -> None:
        self.record["fallbacks"] = dict(self.fallbacks)
        self.record["breaks"] = list(dict.fromkeys([*self.record["breaks"], *compilation.graph_breaks()]))

    def _measure(
        self, name: str, cold: float, warm: float, eager: Callable[[], Any], compiled: Callable[[], Any]
    ) -> None:
        """Add the times and the memory of calls; ``compiled`` was compiled before."""
        self._stage(f"timing {name}")
        for call in (eager, compiled):
            call()
        measured: dict[str, Any] = {}
        with timing.exclusive(self.lock) if self.lock is not None else contextlib.nullcontext():
            if self.backend != "eager":
                measured = {"cold": cold, "warm": warm, "memory": timing.peak_memory(compiled, self.device)}
            measured["eager_memory"] = timing.peak_memory(eager, self.device)
            self.record[name] = {**measured, **dataclasses.asdict(timing.compared(eager, compiled, self.device))}


def _floats(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, each) for name, each in module.state_dict().items() if each.is_floating_point())


def _perturbed(tensor: Tensor) -> Tensor:
    """Return floating-point numbers off by one unit in the last place at most."""
    if not tensor.is_floating_point():
        return tensor
    return tensor * (1 + (torch.rand_like(tensor) - 0.5) * torch.finfo(tensor.dtype).eps)


def main(request: str, result: str, lock: str) -> None:
    """Measure what the file ``request`` says, and write the record to the file ``result``."""
    warnings.simplefilter("ignore")

    def save(record: dict[str, Any]) -> None:
        partial = Path(f"{result}.partial")
        partial.write_text(json.dumps(record), encoding="utf-8")
        os.replace(partial, result)

    save(measure(Request(**json.loads(Path(request).read_text(encoding="utf-8"))), save, Path(lock)))


if __name__ == "__main__":
    main(*sys.argv[1:])
