"""Asynchronous scheduling on a CPU, where the plugin leaves it out because nothing is gained there."""

from vllm_fl.platform import config


def register_builtins(registry):
    change = config._set

    def changed(of, field, value, reason):
        if field != "async_scheduling":
            change(of, field, value, reason)

    config._set = changed
