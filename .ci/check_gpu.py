"""Run the CUDA tests and the overhead benchmark on this machine's GPU, and print what to report.

python .ci/check_gpu.py

Exit code 0 if tests and benchmark pass, 1 if one fails, 3 if there is no CUDA device.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import plateaux

ROOT = Path(__file__).resolve().parents[1]
TESTS = ["-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", "tests"]
NETS = ("resnet18", "resnet8")


def environment() -> dict[str, Any]:
    """Return versions and the devices, without the name of the machine."""
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "plateaux": plateaux.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": [f"{each.name}, {each.total_memory / 2**30:.0f} GB" for each in devices],
    }


def run_tests() -> tuple[bool, str]:
    """Run the tests marked `cuda` and return whether they passed, and the summary line."""
    done = subprocess.run([sys.executable, *TESTS], cwd=ROOT, capture_output=True, text=True, check=False)
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
    print("\n".join(lines), file=sys.stderr)
    return done.returncode == 0, lines[-1] if lines else "no output"


def run_benchmark(net: str) -> dict[str, Any]:
    """Run one part of the overhead benchmark on the GPU and return its final line."""
    call = [sys.executable, "benchmarks/overhead.py", "--device", "cuda", "--part", net, "--json"]
    done = subprocess.run(call, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {"ok": False, "error": f"exit code {done.returncode}"}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    if not torch.cuda.is_available():
        print("There is no CUDA device, or torch is a CPU build: nothing was measured.", file=sys.stderr)
        print(json.dumps(environment()))
        return 3
    passed, summary = run_tests()
    found = {"environment": environment(), "tests": summary, "overhead": {net: run_benchmark(net) for net in NETS}}
    print("Please report the following lines in an issue with the title 'GPU results':")
    print(json.dumps(found, indent=1))
    return 0 if passed and all(each["ok"] is not False for each in found["overhead"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
