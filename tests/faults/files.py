"""Damage to what is on disk: every file and folder of a checkpoint, in many ways."""

from __future__ import annotations

import json
import os
import shutil

from faults.runs import copy_of_stopped_run, saved_steps, settle

from bilevax._run.checkpoint_files import sealed


def flip_bits(rng, path, other):
    content = bytearray(path.read_bytes())
    for place in rng.integers(0, 8 * len(content), rng.integers(1, 4)) if content else []:
        content[place // 8] ^= 1 << (place % 8)
    path.write_bytes(content)


def cut(rng, path, other):
    content = path.read_bytes()
    path.write_bytes(content[: rng.integers(0, max(1, len(content)))])


def overwrite(rng, path, other):
    content = bytearray(path.read_bytes())
    first = int(rng.integers(0, len(content) + 1))
    length = int(rng.integers(1, 65))
    content[first : first + length] = bytes(length) if rng.random() < 0.5 else rng.bytes(length)
    path.write_bytes(content)


def lengthen(rng, path, other):
    path.write_bytes(path.read_bytes() + rng.bytes(rng.integers(1, 100)))


def remove(rng, path, other):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def replace_by_folder(rng, path, other):
    remove(rng, path, other)
    path.mkdir()


def replace_by_pipe(rng, path, other):
    remove(rng, path, other)
    os.mkfifo(path)


def replace_by_loop(rng, path, other):
    remove(rng, path, other)
    path.symlink_to(path.name)


def replace_by_device(rng, path, other):
    remove(rng, path, other)
    path.symlink_to("/dev/zero")


def replace_by_text(rng, path, other):
    remove(rng, path, other)
    path.write_text("not what was here")


def exchange(rng, path, other):
    """With the one of another checkpoint."""
    if other.exists() and path.exists():
        aside = path.with_name(f"{path.name}.aside")
        path.rename(aside)
        other.rename(path)
        aside.rename(other)


def replace_by_other(rng, path, other):
    if other.exists():
        remove(rng, path, other)
        shutil.copytree(other, path) if other.is_dir() else shutil.copy(other, path)


REFUSED = [replace_by_pipe, replace_by_device]  # they are no accidents
TO_FILES = [flip_bits, flip_bits, flip_bits, cut, overwrite, lengthen, remove, exchange, replace_by_other]
TO_FILES += [replace_by_folder, replace_by_pipe, replace_by_loop, replace_by_device]
TO_FOLDERS = [remove, replace_by_folder, replace_by_text, replace_by_pipe, replace_by_loop]
TO_FOLDERS += [exchange, replace_by_other]


def _of_checkpoints(folder, files):
    """What there is to damage, whatever a checkpoint consists of; the lock file too."""
    found = [folder / ".lock"] if files else []
    for step in saved_steps(folder):
        top = folder / f"step_{step}"
        found += [path for path in [top, *sorted(top.rglob("*"))] if path.is_file() == files]
    return found


def _elsewhere(rng, folder, path):
    """The same thing in another checkpoint."""
    top, *below = path.relative_to(folder).parts
    others = [f"step_{step}" for step in saved_steps(folder) if f"step_{step}" != top]
    return folder.joinpath(str(rng.choice(others or [top])), *below)


def _damage(rng, number, files, ways):
    with copy_of_stopped_run() as folder:
        targets = _of_checkpoints(folder, files)
        path, way = targets[number % len(targets)], ways[rng.integers(len(ways))]
        if path.name == ".lock":
            remove(rng, path, path) if rng.random() < 0.5 else replace_by_loop(rng, path, path)
            return settle(folder)
        below = path.relative_to(folder).parts[1:]
        way(rng, path, _elsewhere(rng, folder, path))
        everywhere = rng.random() < 0.2
        if everywhere:  # then there may be no good one left
            for step in saved_steps(folder):
                same = folder.joinpath(f"step_{step}", *below)
                if same != path and same.exists():
                    way(rng, same, _elsewhere(rng, folder, same))
        return settle(folder, may_refuse=everywhere or way in REFUSED)


def damaged_file(rng, number):
    """Flipped bits, cuts, other contents; a file that is gone or something else."""
    return _damage(rng, number, True, TO_FILES)


def damaged_folder(rng, number):
    """A folder that is gone, empty, another one's, or something else."""
    return _damage(rng, number, False, TO_FOLDERS)


HOSTILE = [
    "", "null", "[]", "{", '"', "\x00", "[" * 100_000, '{"a":' * 50_000, "9" * 6_000, "1e999", "NaN",
    '{"checksum": null}', '{"checksum": {}}', '{"format": 6, "format": 6}', "[" + "0," * 100_000 + "0]",
]  # fmt: skip
VALUES = [
    None,
    True,
    -1,
    2**70,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x" * 10_000,
    [],
    {},
    [[[]]],
    {"": None},
]


def _change_a_value(rng, tree):
    """Replaces a random value within a JSON tree."""
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        key = keys[rng.integers(len(keys))]
        inside = tree[key]
        if isinstance(inside, (dict, list)) and inside and rng.random() < 0.8:
            tree = inside
            continue
        if rng.random() < 0.2:
            del tree[key]
        else:
            tree[key] = VALUES[rng.integers(len(VALUES))]
        return


def hostile_json(rng, number):
    """Nested, huge, missing or wrong values in every file of JSON, and metadata with a forged checksum."""
    with copy_of_stopped_run() as folder:
        found = []
        for path in _of_checkpoints(folder, True):
            try:
                found.append((path, json.loads(path.read_text())))
            except ValueError:
                continue
        found = [(path, tree) for path, tree in found if isinstance(tree, dict)]
        path, tree = found[number % len(found)]
        forged = "checksum" in tree and rng.random() < 0.7
        if forged:
            del tree["checksum"]
            part = tree["notes"] if rng.random() < 0.7 else tree
            _change_a_value(rng, part)
            path.write_text(json.dumps(sealed(tree)))
        elif rng.random() < 0.5:
            _change_a_value(rng, tree)
            path.write_text(json.dumps(tree))
        else:
            path.write_text(HOSTILE[rng.integers(len(HOSTILE))])
        # A forged checksum vouches for anything: another run's name, or other measurements.
        return settle(folder, may_refuse=forged, history=not forged)
