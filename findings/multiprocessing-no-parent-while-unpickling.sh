#!/usr/bin/env bash
# A spawned process of multiprocessing knows no parent while it unpickles what it shall run, and knows it afterwards.
#
# Packages: psutil 7.2.2, Python 3.11
# Behaviour: multiprocessing.parent_process() is set when the process begins to run its target. Before that, the target
#  and its arguments are unpickled, which imports their modules, and there it is None, as in a process that nobody
#  started. sys.orig_argv has --multiprocessing-fork all the time, and psutil knows the parent. A forked process
#  unpickles nothing.
# Why it matters: vLLM and SGLang spawn their engines, and unpickling imports the host, which asks platform plugins at
#  once. A plugin that asks parent_process() takes an engine for the user's program: it says everything twice, or ends
#  the engine in the way that is meant for a command.
# Seen 2026-11-28:
#                      parent_process()  orig_argv  psutil
#   spawn, unpickling  None              marked     the parent
#   spawn, running     the parent        marked     the parent
#   fork, running      the parent        plain      the parent
set -euo pipefail
said=$(sed -n 's/^#   //p' "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q --disable-pip-version-check psutil==7.2.2
cat > see.py <<'PYTHON'
import multiprocessing
import os
import sys

import psutil


def show(when):
    parent = multiprocessing.parent_process()
    known = "None" if parent is None else "the parent" if parent.pid == os.getppid() else "another process"
    marked = "marked" if "--multiprocessing-fork" in sys.orig_argv else "plain"
    truth = "the parent" if psutil.Process().parent().pid == os.getppid() else "another process"
    print(f"{when:19}{known:18}{marked:11}{truth}", flush=True)


def unpickled():
    show("spawn, unpickling")


class Argument:
    def __reduce__(self):
        return unpickled, ()


if __name__ == "__main__":
    print(" " * 19 + "parent_process()  orig_argv  psutil", flush=True)
    for method, argument in ("spawn", Argument()), ("fork", None):
        child = multiprocessing.get_context(method).Process(target=show, args=(f"{method}, running",))
        child.argument = argument
        child.start()
        child.join()
PYTHON
venv/bin/python see.py 2> warnings | tee seen || { cat warnings; exit 1; }
diff <(echo "$said") seen
