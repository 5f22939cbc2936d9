#!/usr/bin/env bash
# A program that ends its child processes ends Python's tracker of resources with them, and prints a traceback when it ends.
#
# Packages: psutil 7.2.2, Python 3.11
# Behaviour: psutil's children() include the process that multiprocessing started to clean up named semaphores. Once it
#  is gone, the first name that Python gives back starts another tracker, which never heard of that name, prints a
#  KeyError and goes on. A semaphore that is kept alive to the end does it after the program's last line; without the
#  kill nothing is printed. The exit status is 0 both times.
# Why it matters: SGLang's Engine.shutdown() ends all children in this way, and again when the interpreter ends. Each
#  program with an engine and a lock of multiprocessing, such as a progress bar's, seems to fail after its results.
# Seen 2026-11-28:
#   children are left  0 tracebacks, status 0
#   children are ended 1 tracebacks, status 0: KeyError in resource_tracker.py
set -euo pipefail
said=$(sed -n 's/^#   //p' "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q --disable-pip-version-check psutil==7.2.2
cat > see.py <<'PYTHON'
import multiprocessing
import subprocess
import sys

PROGRAM = """
import multiprocessing, psutil, sys
lock = multiprocessing.get_context("spawn").Lock()
if sys.argv[1] == "ended":
    for child in psutil.Process().children(recursive=True):
        child.kill()
        child.wait()
print("the last line", file=sys.stderr)
"""
for how in "left", "ended":
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], stderr=subprocess.PIPE, text=True)
    after = done.stderr.partition("the last line\n")[2]
    error = ": KeyError in resource_tracker.py" if "KeyError" in after and "resource_tracker.py" in after else ""
    print(f"children are {how:6}{after.count('Traceback')} tracebacks, status {done.returncode}{error}")
PYTHON
venv/bin/python see.py 2> warnings | tee seen || { cat warnings; exit 1; }
diff <(echo "$said") seen
