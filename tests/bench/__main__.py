"""``python -m tests.bench --list | --all | NAME... | --baseline PRODUCT``.

Prints each result and, unless ``--tiny``, all of them as one table at the end. ``--all`` also
writes ``bench.json`` here, if ``--json`` names no other file. A NAME may be the beginning of
several. Rows that another product is the baseline of run only with ``--baseline``, which installs
nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from tests.bench import _core, _table


def main() -> int:
    """Runs what was chosen; 1 if a product asked for by name is not installed."""
    arguments = _arguments()
    if arguments.list:
        for name in _core.names():
            product = _core.load(name).product
            needs = f" (--baseline {product.name})" if product else ""
            print(f"{name:28} {_core.load(name).title}{needs}")
        return 0
    root = Path(__file__).resolve().parents[2]
    os.environ.setdefault("DPFL_DATA_ROOT", str(root.parent / "shared" / "data"))
    options = _core.Options(tiny=arguments.tiny, repeats=arguments.repeats)
    print(", ".join(f"{key} {value}" for key, value in _core.machine().items()))
    found = {}
    absent = set()
    for name in arguments.chosen:
        benchmark = _core.load(name)
        if benchmark.product and benchmark.product.missing:
            print(benchmark.product.missing, file=sys.stderr)
            absent.add(benchmark.product.name)
            continue
        print(f"{name}: {benchmark.title}", flush=True)
        found[name] = _core.run(name, options)
        print(f"  {found[name]['text']}", flush=True)
        if arguments.readme:  # at once: a later row may fail
            report = _core.as_json({name: found[name]}, options)
            _table.write(_table.merged(_table.read(), json.loads(json.dumps(report))))
    report = json.loads(json.dumps(_core.as_json(found, options)))
    if found and not options.tiny:
        print(f"\n{_table.to_markdown(report)}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if arguments.readme and not found:
        _table.write(_table.read())
    return 1 if absent & set(arguments.baseline) else 0


def _arguments() -> argparse.Namespace:
    products = [product.name for product in _core.PRODUCTS]
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=_core.__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--all", action="store_true", help="run all that need no other product")
    parser.add_argument(
        "--baseline",
        action="append",
        default=[],
        choices=[*products, "all"],
        help="run the slow ones against this product; may be given again",
    )
    parser.add_argument("--list", action="store_true", help="show them")
    parser.add_argument("--tiny", action="store_true", help="smallest sizes: checks results only")
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each side")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write everything found (--all: bench.json)"
    )
    parser.add_argument(
        "--readme",
        action="store_true",
        help="keep what was found in docs/speed_table.json and write the README's table",
    )
    arguments = parser.parse_args()
    if arguments.tiny and arguments.readme:
        parser.error("--tiny: its times mean nothing; leave out --readme")
    product_of = {name: _core.load(name).product for name in _core.names()}
    known = [name for name, product in product_of.items() if product is None]
    unknown = [n for n in arguments.names if not any(k.startswith(n) for k in known)]
    anything = arguments.names or arguments.all or arguments.baseline
    if unknown or not (anything or arguments.list or arguments.readme):
        parser.error(f"unknown: {unknown}; choose of {known}, --all, or --baseline {products}")
    if arguments.all and arguments.json is None:
        arguments.json = Path("bench.json")
    arguments.chosen = [
        k for k in known if arguments.all or any(k.startswith(n) for n in arguments.names)
    ] + [
        name
        for name, product in product_of.items()
        if product and {product.name, "all"} & set(arguments.baseline)
    ]
    return arguments


if __name__ == "__main__":
    sys.exit(main())
