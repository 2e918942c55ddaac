"""gc: what of a hub cache goes, and that nothing else does."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from mlxlite import cli
from mlxlite.models import gc

OLD_S = time.time() - 30 * 86_400


class Cache:
    """A hub cache under construction; everything in it is old unless `touch` says otherwise."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, name: str = "org/a") -> Path:
        return self.root / ("models--" + name.replace("/", "--"))

    def add(self, commit: str, files: dict[str, str], name: str = "org/a") -> Path:
        """files: name in the snapshot -> blob."""
        repository = self.folder(name)
        snapshot = repository / "snapshots" / commit
        (repository / "blobs").mkdir(parents=True, exist_ok=True)
        for file, blob in files.items():
            (repository / "blobs" / blob).write_bytes(blob.encode() * 100)
            link = snapshot / file
            link.parent.mkdir(parents=True, exist_ok=True)
            depth = len(link.relative_to(repository).parts) - 1
            link.symlink_to("../" * depth + f"blobs/{blob}")
        return snapshot

    def ref(self, commit: str, ref: str = "main", name: str = "org/a") -> None:
        path = self.folder(name) / "refs" / ref
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(commit)

    def age(self) -> None:
        for where, folders, files in os.walk(self.root):
            for each in (*folders, *files):
                os.utime(Path(where, each), (OLD_S, OLD_S), follow_symlinks=False)

    def names(self) -> set[str]:
        return {path.name for path in self.root.rglob("*")}


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    made = Cache(tmp_path / "hub")
    made.add("new", {"model.safetensors": "b1", "config.json": "shared", "sub/x.json": "b3"})
    made.add("old", {"model.safetensors": "b0", "config.json": "shared"})
    made.ref("new")
    (made.folder() / "blobs" / "dead").write_bytes(b"x" * 50)
    (made.folder() / "blobs" / "part.incomplete").write_bytes(b"x" * 70)
    made.age()
    return made


def test_superseded_snapshots_and_dead_blobs(cache: Cache) -> None:
    before = cache.names()
    (found,) = gc.plan(cache.root, [])
    assert found.repository == "org/a" and found.skipped == ()
    assert [path.name for path in found.snapshots] == ["old"]
    assert {path.name for path in found.blobs} == {"b0", "dead", "part.incomplete"}
    assert found.n_bytes == 200 + 50 + 70
    assert cache.names() == before, "a plan only looks"
    (done,) = gc.execute(cache.root, [])
    assert (len(done.snapshots), len(done.blobs), done.n_bytes) == (1, 3, 320)
    assert before - cache.names() == {"old", "b0", "dead", "part.incomplete"}
    new = cache.folder() / "snapshots" / "new"
    assert (new / "model.safetensors").read_bytes() == b"b1" * 100
    assert (new / "sub" / "x.json").read_bytes() == b"b3" * 100
    assert gc.plan(cache.root, []) == [] == gc.execute(cache.root, [])


def test_what_is_used_young_or_named_stays(cache: Cache) -> None:
    old = cache.folder() / "snapshots" / "old"
    (found,) = gc.plan(cache.root, [old])  # served
    assert found.snapshots == () and "b0" not in {path.name for path in found.blobs}
    assert gc.plan(cache.root, [cache.folder()]) == []  # being fetched
    cache.ref("old", "refs/pr/1".removeprefix("refs/"))
    (found,) = gc.plan(cache.root, [])
    assert found.snapshots == ()
    (cache.folder() / "refs" / "pr" / "1").unlink()
    os.utime(old)
    (found,) = gc.plan(cache.root, [])
    assert found.snapshots == () and "b0" not in {path.name for path in found.blobs}
    day_ago_s = time.time() - 86_400
    os.utime(old, (OLD_S, OLD_S))
    for blob, keeps in (("part.incomplete", True), ("dead", False)):  # one can still be resumed
        path = cache.folder() / "blobs" / blob
        os.utime(path, (day_ago_s, day_ago_s))
        (found,) = gc.plan(cache.root, [])
        assert (path not in found.blobs) is keeps


def test_files_of_its_own_keep_a_snapshot(cache: Cache) -> None:
    old = cache.folder() / "snapshots" / "old"
    (old / "notes.txt").write_text("mine")
    cache.age()
    (found,) = gc.execute(cache.root, [])
    assert found.snapshots == () and (old / "model.safetensors").read_bytes() == b"b0" * 100
    (found,) = gc.plan(cache.root, [])
    assert [path.name for path in found.skipped] == ["old"]


def test_without_refs_the_newest_counts(cache: Cache) -> None:
    (cache.folder() / "refs" / "main").unlink()
    new = cache.folder() / "snapshots" / "new"
    os.utime(new, (OLD_S + 5, OLD_S + 5))
    (found,) = gc.plan(cache.root, [])
    assert [path.name for path in found.snapshots] == ["old"]


def test_links_are_never_followed(cache: Cache, tmp_path: Path) -> None:
    """A cache that somebody arranged cannot have anything deleted that lies elsewhere."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").write_text("x")
    (cache.folder() / "snapshots" / "away").symlink_to(outside)
    (cache.folder() / "blobs" / "link").symlink_to(outside / "keep")
    (cache.root / "models--org--linked").symlink_to(outside)
    (cache.root / "datasets--org--x").mkdir()
    (cache.root / "models--org--empty").mkdir()
    (cache.root / "models--org--file").write_text("")
    cache.age()
    gc.execute(cache.root, [])
    assert (outside / "keep").read_text() == "x"
    assert (cache.root / "datasets--org--x").is_dir()
    assert gc.plan(tmp_path / "nowhere", []) == []


def test_what_cannot_be_deleted(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blobs stay too, so nothing is broken by half."""

    def refuse(path: Path) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(gc.shutil, "rmtree", refuse)
    assert gc.execute(cache.root, []) == []
    assert {"old", "b0", "dead"} <= cache.names()


def test_the_verb(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(cache.root))
    before = cache.names()
    assert cli.main(["gc"]) == 0 and cache.names() == before
    shown = capsys.readouterr().out
    assert "org/a: 1 superseded snapshots, 3 dead blobs" in shown
    assert "0.0 MB could be freed: mlxlite gc --yes" in shown
    assert cli.main(["gc", "--yes"]) == 0 and cache.names() < before
    assert "freed 0.0 MB" in capsys.readouterr().out
    assert cli.main(["gc"]) == 0
    assert capsys.readouterr().out == "nothing to delete\n"
    assert cli.main(["gc", "--no"]) == 2
