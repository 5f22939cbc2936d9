"""A trainer's part in the worker: methods that reach the model and the cache of a live engine."""

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from fl_dispatch import successors

stopped = []


def note_stop():
    """Do as a debugger: see where the program stands."""
    stopped.append((os.getpid(), sys._getframe(1).f_code.co_name))


class TrainerExtension:
    def trainer_load(self, folder: str) -> int:
        """Load another checkpoint's weights into the running model; how many tensors the model took."""
        return len(self.model_runner.model.load_weights(load_file(Path(folder, "model.safetensors")).items()))

    def stop_here(self):
        """A breakpoint, as somebody sets one to look into the worker; where the debugger was last."""
        breakpoint()
        return stopped[-1]

    def fill_cache_with_nan(self) -> int:
        """Poison every block of the KV cache; how many layers have one."""
        caches = self.model_runner.kv_caches
        for cache in caches:
            assert isinstance(cache, torch.Tensor)
            cache.fill_(float("nan"))
        return len(caches)

    def record_step(self) -> list[str]:
        """Record a step of one token; the names of the weights in the order that is known then."""
        with successors.recorded():
            self.model_runner._dummy_run(1)
        names = {id(parameter): name for name, parameter in self.model_runner.model.named_parameters()}
        nexts = {name: successors.after(parameter) for name, parameter in self.model_runner.model.named_parameters()}
        order = {name: names[id(found)] for name, found in nexts.items() if found is not None}
        (first,) = set(order) - set(order.values())
        found = [first]
        while found[-1] in order:
            found.append(order[found[-1]])
        return found

    def set_latent_scales(self, scales: list[float]) -> None:
        """Give each layer of latent attention a scale of its cache, as a checkpoint of another host's might."""
        layers = [module for module in self.model_runner.model.modules() if hasattr(module, "kv_b_proj")]
        layers = [module for module in layers if hasattr(module, "_k_scale_float")]
        for layer, scale in zip(layers, scales, strict=True):
            layer._k_scale_float = scale
            layer._k_scale.fill_(scale)
