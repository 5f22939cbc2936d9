"""``fl prove`` lets no wrong candidate through, refuses no right one, and is not fooled by what their process says."""

from __future__ import annotations

import json
import py_compile
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from candidates import LIKE_A_COMPILER, ON_ACCELERATORS, REFUSED, RIGHT, TIMED, UNSCREENED, WRONG, by_triton

from command import fl
from fl_dispatch.cli.prove import _pack
from fl_dispatch.evidence.bisect import planted
from fl_dispatch.evidence.prove import sandbox, signature
from fl_dispatch.evidence.prove.candidate import read
from fl_dispatch.evidence.prove.process import Limits, Process
from fl_dispatch.evidence.prove.timed import Timed
from fl_dispatch.evidence.prove.trial import MOST_CALLS, QUESTION_SECONDS, Proof, Trial, _calls_of
from fl_dispatch.evidence.verify import Verification
from fl_dispatch.ops import OPERATORS, Tolerance
from fresh_interpreter import fresh

PLACES = {"cpu": Limits(seconds=3.0, megabytes=1536), "cuda": Limits(seconds=15.0, megabytes=6144, compilers=True)}
"""Devices and the limits of a process there; on a GPU its first call loads libraries."""
Prove = Callable[..., Proof]

pytestmark = pytest.mark.skipif(
    bool(sandbox.why_unavailable()), reason=sandbox.why_unavailable() or "there is a sandbox"
)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def trial(request: pytest.FixtureRequest) -> Trial:
    """One for all candidates of a device, so that inputs are made once."""
    place = torch.device(request.param)
    if place.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return Trial(OPERATORS["silu_and_mul"], place, [torch.float32], PLACES[place.type])


@pytest.fixture
def prove(trial: Trial, tmp_path: Path) -> Prove:
    def proven(text: str, screened: bool = True) -> Proof:
        (tmp_path / "one.py").write_text(text)
        (candidate,) = read(tmp_path, "silu_and_mul")
        proof = Proof(candidate if screened else replace(candidate, problem=""))
        trial.verify(proof)
        return proof

    return proven


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_candidate_is_accepted(name: str, prove: Prove) -> None:
    proof = prove(RIGHT[name])
    assert (proof.verdict, proof.problems) == ("right", [])
    assert proof.verified[0].samples > 20
    assert proof.verified[0].calls > 0, "it was called again, beside other work"


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_reaches_beyond_tensors_is_refused_before_it_runs(name: str, prove: Prove) -> None:
    text, words = REFUSED[name]
    proof = prove(text)
    assert not proof.right
    assert words in proof.problem
    assert proof.verified == []


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_candidate_is_found(name: str, prove: Prove, trial: Trial) -> None:
    text, words = WRONG[name]
    words = ON_ACCELERATORS.get(name, words) if trial.limits.compilers else words
    proof = prove(text)
    assert proof.verdict == "wrong"
    assert words in "\n".join(proof.problems)


@pytest.mark.parametrize("name", UNSCREENED)
def test_the_fence_holds_what_the_reading_of_the_text_would_miss(name: str, prove: Prove, trial: Trial) -> None:
    text, words = UNSCREENED[name]
    words = words if trial.limits.compilers else words.partition("|")[0]  # a driver has files, too
    proof = prove(text, screened=False)
    assert proof.verdict == "wrong"
    assert re.search(words, "\n".join(proof.problems))


@pytest.mark.parametrize("trial", ["cpu"], indirect=True)
@pytest.mark.parametrize("name", LIKE_A_COMPILER)
def test_without_compilers_a_process_starts_no_other_and_writes_no_file(name: str, prove: Prove) -> None:
    text, words = LIKE_A_COMPILER[name]
    proof = prove(text, screened=False)
    assert proof.verdict == "wrong"
    assert words in "\n".join(proof.problems)


@pytest.mark.gpu
@pytest.mark.parametrize("trial", ["cuda"], indirect=True)
def test_a_kernel_that_leaves_a_block_unwritten_is_found(prove: Prove) -> None:
    proof = prove(by_triton("start + BLOCK <= columns"))
    assert proof.verdict == "wrong"
    assert "elements are" in "\n".join(proof.problems)


def _raced(trial: Trial, folder: Path, texts: dict[str, str], against: str) -> list[Proof]:
    """Race texts that nobody verified or read, as if they were right."""
    for name, text in texts.items():
        (folder / f"{name.replace(' ', '_')}.py").write_text(text)
    verified = Verification("silu_and_mul", "default.candidate", "float32", Tolerance(0.0, 0.0), samples=1)
    proofs = [Proof(replace(one, problem=""), verified=[verified]) for one in read(folder, "silu_and_mul")]
    replace(trial, against=[against]).race(proofs)
    return proofs


def test_results_of_timed_calls_are_compared(trial: Trial, tmp_path: Path) -> None:
    texts = {name: text for name, (text, _) in TIMED.items()}
    if trial.device.type == "cuda":  # a thread's copy to the device would be its own test
        texts.pop("completes its result later")
    *wrong, right = _raced(trial, tmp_path, {**texts, "right": RIGHT["plain"]}, "reference.torch")
    assert right.problems == []
    assert right.faster is not None
    for proof in wrong:
        words = TIMED[proof.candidate.name.replace("_", " ")][1]
        assert re.search(words, proof.problem), proof.candidate.name
        assert proof.faster is None


@pytest.mark.parametrize("trial", ["cpu"], indirect=True)
def test_a_timed_question_is_longer_than_the_way_to_the_process_and_back(trial: Trial) -> None:
    process = Process("silu_and_mul", RIGHT["plain"], "", trial.device, trial.limits)
    timed = Timed("silu_and_mul", "float32", "", 1, 4096)
    try:
        calls = _calls_of(process, timed, 0, MOST_CALLS)
        process.make(timed, 0, calls)
        assert calls > 4
        assert process.time() > QUESTION_SECONDS / 4
    finally:
        process.stop()


@pytest.mark.gpu
@pytest.mark.parametrize("trial", ["cuda"], indirect=True)
def test_a_kernel_that_does_its_work_twice_is_surely_slower(trial: Trial, tmp_path: Path) -> None:
    texts = {"once": by_triton("at < columns"), "twice": by_triton("at < columns", passes=2)}
    once, twice = _raced(trial, tmp_path, texts, "default.triton")
    print([(one.candidate.name, one.faster, one.calls, one.seconds) for one in (once, twice)])
    assert once.problems == twice.problems == []
    assert once.faster is not None
    assert twice.faster is not None
    assert twice.faster[2] < 0.9
    assert twice.faster[2] < once.faster[1]


def test_one_that_declines_everything_is_not_right(prove: Prove) -> None:
    proof = prove("def silu_and_mul(x):\n    raise NotImplementedError('not today')\n")
    assert (proof.verdict, proof.right) == ("nothing to run", False)


def test_a_secret_of_the_environment_does_not_reach_it(prove: Prove, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "1")
    text = "import os\n" + RIGHT["plain"] + "assert 'SECRET_TOKEN' not in os.environ\nassert 'PATH' in os.environ\n"
    assert prove(text, screened=False).right


def test_the_inputs_of_two_runs_have_other_numbers_and_sizes(trial: Trial) -> None:
    other = replace(trial, seed=trial.seed + 1, _made={})
    drawn = [[one.label for one in each.inputs(torch.float32) if "drawn" in one.label] for each in (trial, other)]
    assert all(drawn)
    assert drawn[0] != drawn[1]


SLOW = "for _ in range(20):\n    torch.sin(x.double())"


def test_the_fastest_of_the_right_ones_is_first_and_wrong_ones_have_no_time(tmp_path: Path) -> None:
    from candidates import after

    for name, text in {
        "fast": RIGHT["plain"],
        "slow": after(SLOW),
        "wrong": WRONG["hides NaN"][0],
        "swift": after(SLOW),
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    out = tmp_path / "proven.json"
    chosen = ("--dtype", "float32", "--against", "reference.torch", "--out", str(out))
    done = fl("prove", str(tmp_path), *chosen)
    assert done.returncode == 0, done.stderr
    data = json.loads(out.read_text())
    first, *_, last = data["candidates"]
    assert (first["candidate"], last["candidate"], last["verdict"]) == ("fast", "wrong", "wrong")
    assert last["times_as_fast"] is None
    shares = {one["candidate"]: one["times_as_fast"] for one in data["candidates"][:3]}
    assert shares["fast"][0] > 1.5 * shares["slow"][0]
    assert shares["fast"][1] <= 1.05, "the same arithmetic as the reference's is not surely faster"
    assert set(data["there_us"]) == {"reference.torch"}
    assert data["commit"]
    assert data["command"]


def test_a_folder_without_a_right_one_is_exit_status_1_and_no_package(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(WRONG["another dtype"][0])
    done = fl("prove", str(tmp_path), "--dtype", "float32", "--package", "acme", "--path", str(tmp_path / "acme"))
    assert done.returncode == 1
    assert "none is right" in done.stdout
    assert not (tmp_path / "acme").exists()


def test_the_package_holds_the_text_that_was_proven_and_a_change_ends_the_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one.py").write_text(RIGHT["plain"])
    (candidate,) = read(tmp_path)
    machine = {"device": "a chip", "date": "2026-11-29", "versions": {}}
    evidence = {"operator": "silu_and_mul", "said": "twice as fast", "machine": machine}
    _pack("acme", tmp_path / "acme", Proof(candidate), "cpu", evidence)
    module = tmp_path / "acme/acme_fl"
    assert (module / "kernels.py").read_text() == RIGHT["plain"]
    backend = (module / "backend.py").read_text()
    assert backend.count("staticmethod(kernels.") == 1
    assert "silu_and_mul = staticmethod(kernels.silu_and_mul)" in backend
    assert 'device_types=("cpu",)' in backend
    assert signature.check("acme", module).problem == ""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "acme"))
    _install(tmp_path / "acme")
    done = fl("doctor", cold=True)
    assert "proven acme" in done.stdout
    (module / "kernels.py").write_text(RIGHT["plain"] + "\n")
    done = fl("doctor", cold=True)
    assert "kernels.py changed after the proof" in done.stderr
    (module / "kernels.py").write_text(RIGHT["plain"])
    for added in ("kernels.abi3.so", "kernels/__init__.py"):  # Python would import it instead
        (module / added).parent.mkdir(exist_ok=True)
        (module / added).touch()
        assert f"{added} changed after the proof" in signature.check("acme", module).problem
        (module / added).unlink()
    (module / "kernels").rmdir()
    (module / "kernels").symlink_to(tmp_path)
    assert "kernels changed after the proof" in signature.check("acme", module).problem
    (module / "kernels").unlink()
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    cache = Path(str(py_compile.compile(str(module / "kernels.py"), invalidation_mode=unchecked)))
    assert f"{cache.name} changed after the proof" in signature.check("acme", module).problem
    py_compile.compile(str(module / "kernels.py"), invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP)
    assert signature.check("acme", module).problem == ""
    data = json.loads((module / "evidence.json").read_text())
    (module / "evidence.json").write_text(json.dumps({**data, "said": "ten times as fast"}))
    assert "was changed after it was written" in signature.check("acme", module).problem
    (module / "evidence.json").unlink()
    assert "cannot be read" in signature.check("acme", module).problem


NORM = """
import torch

def rms_norm(x, residual=None, weight=None, epsilon=1e-6):
    total = x.float() if residual is None else x.float() + residual.float()
    y = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + epsilon)
    y = (y if weight is None else y * weight.float()).to(x.dtype)
    return y if residual is None else (y, total.to(x.dtype))
"""


def test_the_command_packs_the_right_one_that_is_faster_and_doctor_and_verify_accept_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, package = tmp_path / "files", tmp_path / "acme"
    files.mkdir()
    (files / "one.py").write_text(NORM)
    (files / "faster.py").write_text(NORM.replace("total * torch", "total + 0 * torch"))
    chosen = ("--dtype", "float32", "--against", "vendor.planted.ten_times")
    packed = ("--package", "acme", "--path", str(package))
    done = fl("prove", str(files), *chosen, *packed, VLLM_FL_PLUGIN_MODULES=planted.__name__)
    assert done.returncode == 0, done.stdout + done.stderr
    evidence = json.loads((package / "acme_fl/evidence.json").read_text())
    assert (evidence["candidate"], evidence["verdict"]) == ("one", "right")
    assert evidence["times_as_fast"][1] > 1
    assert {"machine", "commit", "command", "there_us"} <= evidence.keys()
    monkeypatch.setenv("PYTHONPATH", str(package))
    _install(package)
    assert "proven acme" in fl("doctor", cold=True).stdout
    proven = ("--impl", "vendor.acme", "--dtype", "float32", "--quick")
    verified = fl("verify", *proven, "--json", cold=True)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert [(one["op_name"], one["verdict"]) for one in json.loads(verified.stdout)["results"]] == [
        ("rms_norm", "right")
    ]


def _install(folder: Path) -> None:
    """The metadata that an installer leaves beside a package."""
    metadata = folder / "acme_fl-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-fl\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[vllm_fl.plugin]\nacme = acme_fl.backend:register_builtins\n"
        "[fl_dispatch.api]\nacme = fl_dispatch.api:V1\n[fl_dispatch.evidence]\nacme = acme_fl\n"
    )


THREADS = """
import queue, socket, threading
from fl_dispatch.evidence.prove import sandbox

asked, answered = queue.Queue(), queue.Queue()

def work():
    asked.get()
    try:
        answered.put(socket.socket())
    except PermissionError:
        answered.put("refused")

threading.Thread(target=work, daemon=True).start()
sandbox.enter(True)
asked.put(None)
print(answered.get())
"""


def test_threads_that_a_driver_started_before_the_sandbox_are_inside_too() -> None:
    assert fresh(THREADS, cold=True).strip() == "refused"
