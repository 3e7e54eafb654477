"""Print the bits of the main job: a digest of weights, of masks and of metrics for every trial and round.

    python scripts/golden_bits.py            # runs +sweep=random_amounts in a temporary directory
    python scripts/golden_bits.py STORE      # of the sweeps in that store

Two versions of the code that print the same lines on one machine, with one release of torch, have the same results.
Keys of stages are not part of it: they may change where the bits do not.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAIN_JOB = ("-m", "orchestrator", "+sweep=random_amounts", "tracking=none", "name=golden")


def bits(store: Path) -> Iterator[str]:
    """Yield a line for each trial and round of the sweeps in `store`."""
    for manifest in sorted((store / "sweeps").glob("*.json")):
        for trial in json.loads(manifest.read_text())["plan"]["trials"]:
            for key in trial["stages"]:
                record = json.loads((store / "stages" / key / "record.json").read_text())["record"]
                yield f"{trial['name']:<44} round {record['round']}  {_digests(record)}"


def _digests(record: dict[str, Any]) -> str:
    metrics = [record["before"], record["after"], [[point["step"], point["metrics"]] for point in record["curve"]]]
    text = json.dumps(metrics, sort_keys=True)
    return " ".join(
        f"{name} {digest[:12] or '-':<12}"
        for name, digest in (
            ("weights", record["weights_digest"]),
            ("masks", record["mask_digest"]),
            ("metrics", hashlib.sha256(text.encode()).hexdigest()),
        )
    ).rstrip()


def main() -> None:
    """Print the bits of a store, or of the main job run now."""
    if len(sys.argv) > 1:
        print(*bits(Path(sys.argv[1])), sep="\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, *MAIN_JOB], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        print(*bits(Path(folder) / "store"), sep="\n")


if __name__ == "__main__":
    main()
