"""A stat logger: it appends the number of tokens of each step to a file."""

import os
from pathlib import Path

from vllm.v1.metrics.loggers import StatLoggerBase


class FileStatLogger(StatLoggerBase):
    def __init__(self, vllm_config, engine_index=0):
        self.path = Path(os.environ["STAT_LOGGER_FILE"])

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        if iteration_stats is not None:
            with self.path.open("a") as file:
                file.write(f"{iteration_stats.num_generation_tokens}\n")

    def log_engine_initialized(self):
        pass
