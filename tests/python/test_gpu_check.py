"""`bench/gpu-check` on the stand-in for a GPU: a failure affects only its own group, and earlier results are kept."""

import json
import os
import pathlib
import subprocess
import sysconfig

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
RELEASE = pathlib.Path(os.environ["TIDEMILL_BIN"]).parent


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """The stand-in under the names of the driver's and CUDA's libraries."""
    # Its place depends on whether Cargo builds or tests.
    places = [RELEASE / folder / "libtidemill_gpu_standin.so" for folder in [".", "deps"]]
    library = max((place for place in places if place.exists()), key=lambda place: place.stat().st_mtime)
    folder = tmp_path_factory.mktemp("libraries")
    for name in ["libcuda.so.1", "libcublasLt.so.13", "libnvrtc.so.13"]:
        (folder / name).symlink_to(library.resolve())
    return folder


@pytest.fixture
def check(libraries, tmp_path):
    """Runs groups on a simulated device; returns the status, how each group ended, and the names of the results."""

    def run(groups, device="arch=90", seconds=120, libraries=libraries):
        nvrtc = pathlib.Path(sysconfig.get_paths()["purelib"]) / "nvidia/cu13/lib"
        env = os.environ | {
            "TIDEMILL_BIN": str(RELEASE),
            "TIDEMILL_GPU_STANDIN": device,
            "CUDA_LIBRARIES": str(libraries),
            "LD_LIBRARY_PATH": str(nvrtc),
            "GROUPS_ONLY": groups,
            "SECONDS_MAX": str(seconds),
        }
        out = tmp_path / "out"
        done = subprocess.run([ROOT / "bench/gpu-check", out], env=env, capture_output=True, text=True, timeout=300)
        files = sorted(path.name for path in out.iterdir())
        assert files == ["logs.tar.xz", "results.jsonl", "summary.txt"], done.stdout + done.stderr
        summary = dict(line.split(": ", 1) for line in (out / "summary.txt").read_text().splitlines())
        results = [json.loads(line)["name"] for line in (out / "results.jsonl").read_text().splitlines()]
        return done.returncode, summary, results, done.stdout

    return run


def test_a_device_that_works_passes(check):
    status, summary, results, printed = check("tiny")
    assert status == 0 and summary["tiny"].startswith("ok")
    assert {"check attention_prefill", "check multiply fp8", "check sample"} <= set(results)
    assert "ok attention_prefill head_dim 128" in printed


def test_a_device_that_fails_ends_its_group_and_keeps_what_was_found(check, tmp_path):
    status, summary, results, printed = check("rows blocks", f"arch=90,fail_launch=30,fail_once={tmp_path}/failed")
    assert status == 1
    assert "FAILED with status 1" in summary["rows"] and summary["blocks"].startswith("ok"), summary
    assert "check embedding" in results and "check fetch and publish" in results
    assert "the device cannot be used any more" in printed


def test_memory_that_is_used_up_fails_its_own_case(check):
    status, summary, results, printed = check("sampling", "arch=90,memory=60")
    assert status == 1 and "FAILED" in summary["sampling"]
    assert "FAILED sample 128256 tokens: the device's memory is used up" in printed
    assert "ok sample 32003 tokens" in printed and "ok penalized logits 32003 tokens" in printed, "the cases before and after"


def test_a_group_that_takes_too_long_is_ended_and_the_next_is_not_begun(check):
    status, summary, results, _ = check("attention blocks", seconds=8)
    assert status == 1
    assert "time limit" in summary["attention"] and "not begun" in summary["blocks"], summary
    assert "check attention_decode" in results, "what ended before is kept"


def test_a_machine_without_a_gpu_is_told_so(check, tmp_path_factory):
    status, summary, results, _ = check("tiny rows", libraries=tmp_path_factory.mktemp("none"))
    assert status == 3 and summary == {"tiny": summary["tiny"]} and "no GPU" in summary["tiny"] and not results
