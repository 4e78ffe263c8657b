"""
Weigh the house: `python -m tests.house [--step]`.

Lines as `wc -l` counts them, by room; rooms (a folder, or a loose module; each tool of the workbench is one), floors
(the longest chain of rooms that import each other), arrows (pairs of rooms with an import, lazy ones too), and arrows
in circles, which no order of floors makes go down. With `--step`, how often one step of PPO crosses between us and TRL
or transformers, in how many of our files it is, and how many functions of each library our files call.
"""

import argparse
import ast
import sys
import tempfile
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "trl_ext"
LIBRARIES = ("trl", "transformers")


def room_of(parts):
    """Return the room of a file: `("ppo", "trainer")` is in `ppo`, and a tool of the workbench is one."""
    return "/".join(parts[:2]) if parts[0] == "workbench" and len(parts) > 2 else parts[0]


def files():
    """Each file of a room, by its parts: `ppo/trainer.py` is `("ppo", "trainer")`."""
    found = {path.relative_to(PACKAGE).with_suffix("").parts: path for path in PACKAGE.rglob("*.py")}
    doors = (("__init__",), ("__main__",), ("workbench", "__init__"))  # they import nothing before it is asked for
    return {parts: path for parts, path in found.items() if parts not in doors}


def imported(parts, path):
    """Yield the parts of each module of ours that a file imports."""
    package = ("trl_ext", *parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            base += node.module.split(".") if node.module else []
            names = [[*base, alias.name] for alias in node.names]
        else:
            continue
        yield from (tuple(name[1:]) for name in names if name[0] == "trl_ext" and len(name) > 1)


def arrows():
    """Return the pairs of rooms between which something is imported."""
    rooms = {room_of(parts) for parts in files()}
    found = {(room_of(parts), room_of(name)) for parts, path in files().items() for name in imported(parts, path)}
    return {(here, there) for here, there in found if here != there and there in rooms}


def reached(pairs):
    """Return which rooms each room reaches, over any number of arrows."""
    after = {here: {there for start, there in pairs if start == here} for here, _ in pairs}
    while True:
        more = {here: there.union(*(after.get(room, set()) for room in there)) for here, there in after.items()}
        if more == after:
            return after
        after = more


def floors(pairs, after):
    """Return the length of the longest chain of rooms; rooms in one circle count each."""
    height = {}
    for room in sorted({room for pair in pairs for room in pair}, key=lambda room: len(after.get(room, ()))):
        below = [there for here, there in pairs if here == room and room not in after.get(there, ())]
        height[room] = 1 + max((height[there] for there in below), default=0)
    return max(height.values())


def crossings():
    """
    Return how often one optimizer step of PPO goes from our files to a library's or back, our files in it, and how
    often they call each library.
    """
    import trl_ext
    from tests.tiny import length_reward, prompts, tiny_config, tiny_gpt2, tiny_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        config = tiny_config(folder, max_steps=1)
        trainer = trl_ext.PPOTrainer(
            model=tiny_gpt2(),
            args=config,
            processing_class=tiny_tokenizer(),
            reward_funcs=length_reward,
            train_dataset=prompts(),
        )
        step, count, seen, last, calls = trainer.training_step, 0, set(), None, Counter()

        def watch(frame, event, _):
            nonlocal count, last
            if event not in ("call", "return"):
                return
            if event == "call" and frame.f_code.co_name not in ("__getattr__", "__getattribute__"):
                path = Path(frame.f_code.co_filename)
                if frame.f_back and Path(frame.f_back.f_code.co_filename).is_relative_to(PACKAGE):
                    calls.update({*LIBRARIES} & {*path.parts})
            frame = frame if event == "call" else frame.f_back
            path = Path(frame.f_code.co_filename) if frame else Path()
            ours = path.is_relative_to(PACKAGE)
            if not ours and not {*LIBRARIES} & {*path.parts}:
                return
            count += last is not None and ours != last
            last = ours
            if ours:
                seen.add(path)

        def watched(*args, **kwargs):
            sys.setprofile(watch)
            try:
                return step(*args, **kwargs)
            finally:
                sys.setprofile(None)

        trainer.training_step = watched
        trainer.train()
    return count, len(seen), *(calls[library] for library in LIBRARIES)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--step", action="store_true", help="count the crossings of one step, too")
    args = parser.parse_args()
    lines = Counter()
    for parts, path in files().items():
        lines[room_of(parts)] += len(path.read_text().splitlines())
    for path in PACKAGE.rglob("*.j2"):  # a page's template is as much to read as its code
        lines[room_of(path.relative_to(PACKAGE).with_suffix("").parts)] += len(path.read_text().splitlines())
    for room, count in sorted(lines.items()):
        print(f"{count:6,} {room}")
    groups = {name: sum(n for room, n in lines.items() if room.startswith(name)) for name in ("workbench", "cli")}
    pairs = arrows()
    after = reached(pairs)
    circles = [pair for pair in pairs if pair[0] in after.get(pair[1], ())]
    print(f"{sum(lines.values()):6,} lines: layer {sum(lines.values()) - sum(groups.values()):,}", end="")
    print("".join(f", {name} {count:,}" for name, count in groups.items()))
    print(f"{len(lines)} rooms, {floors(pairs, after)} floors, {len(pairs)} arrows, {len(circles)} in circles")
    if args.step:
        said = "{} crossings between us and libraries in one step of PPO, {} of our files"
        print(f"{said}, {{}} calls to TRL, {{}} to transformers".format(*crossings()))


if __name__ == "__main__":
    main()
