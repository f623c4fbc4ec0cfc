"""``python -m tests.bench --list | --all | NAME...``: a NAME may be the beginning of several."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from tests.bench import _core


def main() -> None:
    arguments = _arguments()
    if arguments.list:
        for name in _core.names():
            print(f"{name:24} {_core.load(name).title}")
        return
    root = Path(__file__).resolve().parents[2]
    os.environ.setdefault("DPFL_DATA_ROOT", str(root.parent / "shared" / "data"))
    options = _core.Options(tiny=arguments.tiny, repeats=arguments.repeats)
    print(", ".join(f"{key} {value}" for key, value in _core.machine().items()))
    found = {}
    for name in arguments.chosen:
        benchmark = _core.load(name)
        print(f"{name}: {benchmark.title}", flush=True)
        found[name] = benchmark.run(options)
        print(f"  {found[name]['text']}", flush=True)
    if arguments.json is not None:
        text = json.dumps(_core.as_json(found, options), indent=2)
        arguments.json.write_text(text + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=_core.__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--all", action="store_true", help="run every benchmark")
    parser.add_argument("--list", action="store_true", help="show them")
    parser.add_argument("--tiny", action="store_true", help="smallest sizes: checks results only")
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each side")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything found")
    arguments = parser.parse_args()
    known = _core.names()
    unknown = [n for n in arguments.names if not any(k.startswith(n) for k in known)]
    if unknown or not (arguments.names or arguments.all or arguments.list):
        parser.error(f"unknown: {unknown}; choose of {known}, or --all")
    arguments.chosen = [
        k for k in known if arguments.all or any(k.startswith(n) for n in arguments.names)
    ]
    return arguments


if __name__ == "__main__":
    main()
