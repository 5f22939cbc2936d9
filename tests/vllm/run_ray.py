"""``run_engine`` on a Ray of its own, with two places for workers: ``python run_ray.py job.json result.json``.

Ray places workers by accelerators; a machine without any is told how many it shall pretend to have.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ray
import run_engine

if __name__ == "__main__":
    folder = str(Path(sys.argv[2]).parent)
    ray.init(num_cpus=2, num_gpus=2, include_dashboard=False, object_store_memory=100 << 20, _temp_dir=folder)
    Path(sys.argv[2]).write_text(json.dumps(run_engine.main(json.loads(Path(sys.argv[1]).read_text()))))
    ray.shutdown()
