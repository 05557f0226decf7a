"""The local tier where the contract doesn't look: order of system calls, every failing call, odd file systems."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tier_conformance import MIB, body, pieces_of

from ckptrt.errors import (
    AccessError,
    CorruptError,
    Error,
    ExistsError,
    NoSpaceError,
    NotFoundError,
    StorageError,
    UsageError,
)
from ckptrt.storage.tiers.fs import Fs
from ckptrt.storage.tiers.local import LocalTier

READS_ONLY = {"lstat", "stat", "fstat", "realpath", "scandir"}


class WatchedFs(Fs):
    """Logs every call that changes something, and fails or alters those that a test picks."""

    METHODS: ClassVar = [name for name in vars(Fs) if not name.startswith("_")]

    def __init__(self) -> None:
        self.log: list[tuple[str, tuple[Any, ...]]] = []
        self.fail: Callable[[int, str, tuple[Any, ...]], int] = lambda number, method, args: 0

    def __getattribute__(self, method: str) -> Any:
        real = super().__getattribute__(method)
        if method not in WatchedFs.METHODS:
            return real

        def call(*args: Any) -> Any:
            self.log.append((method, args))
            code = self.fail(len(self.log), method, args)
            if code:
                raise OSError(code, os.strerror(code))
            return real(*args)

        return call

    def methods(self) -> list[str]:
        return [method for method, _ in self.log if method not in READS_ONLY]


def failing(method: str, code: int, times: int = 1) -> WatchedFs:
    """A file system whose first calls of one method fail."""
    fs = WatchedFs()
    left = [times]

    def fail(_number: int, called: str, _args: tuple[Any, ...]) -> int:
        if called != method or not left[0]:
            return 0
        left[0] -= 1
        return code

    fs.fail = fail
    return fs


def leftovers(directory: Path) -> list[str]:
    return [str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()]


# --- order of calls


def test_a_create_is_durable_before_it_has_its_name_and_its_name_before_it_returns(tmp_path: Path) -> None:
    fs = WatchedFs()
    tier = LocalTier(str(tmp_path), fs=fs)
    tier.create("x", b"first")  # the root is known from here on
    fs.log.clear()
    tier.create("y", b"second")
    assert fs.methods() == ["open", "pwrite", "fsync", "close", "link", "unlink", "fsync_dir"]
    assert fs.log[-1] == ("fsync_dir", (str(tmp_path),))


def test_every_new_folder_is_durable_before_anything_is_put_into_it(tmp_path: Path) -> None:
    fs = WatchedFs()
    LocalTier(str(tmp_path / "a" / "b"), fs=fs).create("c/x", b"1")
    root = str(tmp_path)
    done: list[tuple[str, str]] = []  # changes of names so far, that worked
    for method, args in fs.log:
        path = args[-1] if method == "link" else args[0]
        if method in ("mkdir", "link"):
            for folder in Path(path).parents:
                if folder.is_relative_to(tmp_path / "a"):
                    assert ("mkdir", str(folder)) not in done or ("fsync_dir", str(folder.parent)) in done
        if method in ("mkdir", "fsync_dir"):
            done.append((method, str(path)))
    for made, synced in (("a", ""), ("a/b", "a"), ("a/b/c", "a/b")):
        mkdir_at = max(at for at, step in enumerate(done) if step == ("mkdir", f"{root}/{made}"))
        assert ("fsync_dir", f"{root}/{synced}".rstrip("/")) in done[mkdir_at:]


def test_a_folder_that_another_process_just_made_is_synced_too(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    fs = WatchedFs()
    LocalTier(str(tmp_path), fs=fs).create("data/x", b"1")
    before = fs.log[: [method for method, _ in fs.log].index("open")]
    assert ("fsync_dir", (str(tmp_path),)) in before


def test_deletes_are_durable(tmp_path: Path) -> None:
    fs = WatchedFs()
    tier = LocalTier(str(tmp_path), fs=fs)
    tier.create("commits/x", b"1")
    tier.create("data/s1/x", b"1")
    for call, folder in (
        (lambda: tier.delete("commits/x"), "commits"),
        (lambda: tier.delete_prefix("data/s1/"), "data"),
    ):
        fs.log.clear()
        call()
        assert fs.methods()[-1] == "fsync_dir" and fs.log[-1][1] == (str(tmp_path / folder),)


# --- direct writes


@pytest.fixture
def aligned() -> Iterator[memoryview]:
    """Twenty-four pages and a bit, at a page's start."""
    with mmap.mmap(-1, 10 * MIB) as memory:
        memory[:] = body(10 * MIB)
        view = memoryview(memory)
        yield view
        view.release()


class OneSystemCallAtATime(Fs):
    """Says which writes were direct."""

    def __init__(
        self, *, refuse_at_open: bool = False, refuse_at_write: bool = False, most_bytes: int = 1 << 40
    ) -> None:
        self.refuse_at_open = refuse_at_open
        self.refuse_at_write = refuse_at_write
        self.most_bytes = most_bytes
        self.direct = False
        self.writes: list[tuple[bool, int]] = []

    def set_direct(self, fd: int, direct: bool) -> None:
        if direct and self.refuse_at_open:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        super().set_direct(fd, direct)
        self.direct = direct

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        if self.direct and self.refuse_at_write:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        count = super().pwrite(fd, data[: self.most_bytes], offset)
        self.writes.append((self.direct, count))
        return count


def takes_direct(directory: Path) -> bool:
    try:
        os.close(os.open(directory / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    os.unlink(directory / "probe")
    return True


def test_aligned_pieces_go_to_the_disk_as_they_lie(tmp_path: Path, aligned: memoryview) -> None:
    if not takes_direct(tmp_path):
        pytest.skip("the file system of the temporary directory has no O_DIRECT")
    fs = OneSystemCallAtATime()
    size_bytes = 9 * MIB + 5000
    tier = LocalTier(str(tmp_path), fs=fs)
    tier.write("x", (aligned[at : min(at + 4 * MIB, size_bytes)] for at in range(0, size_bytes, 4 * MIB)), size_bytes)
    assert fs.writes == [(True, 4 * MIB), (True, 4 * MIB), (True, MIB + 4096), (False, 904)]
    assert tier.read("x") == aligned[:size_bytes]


@pytest.mark.parametrize(
    "fs",
    [
        OneSystemCallAtATime(refuse_at_open=True),
        OneSystemCallAtATime(refuse_at_write=True),
        OneSystemCallAtATime(most_bytes=100_000),  # short writes, not at the end of a block
        OneSystemCallAtATime(most_bytes=4096 * 7),
        OneSystemCallAtATime(refuse_at_open=True, most_bytes=77_777),
    ],
    ids=["refused at open", "refused at write", "short writes", "short writes of blocks", "short buffered writes"],
)
@pytest.mark.parametrize("shift", [0, 1])
def test_whatever_the_file_system_does_with_direct_writes_the_bytes_are_right(
    tmp_path: Path, aligned: memoryview, fs: OneSystemCallAtATime, shift: int
) -> None:
    data = aligned[shift : shift + 3 * MIB + 4097]
    tier = LocalTier(str(tmp_path), fs=fs)
    tier.write("x", (data[at : at + MIB] for at in range(0, len(data), MIB)), len(data))
    assert tier.read("x") == data


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_fallocate_will_do(tmp_path: Path, code: int) -> None:
    tier = LocalTier(str(tmp_path), fs=failing("fallocate", code))
    data = body(2 * MIB)
    tier.write("x", pieces_of(data), len(data))
    assert tier.read("x") == data


def test_space_is_reserved_before_the_first_byte_is_written(tmp_path: Path) -> None:
    fs = failing("fallocate", errno.ENOSPC)
    with pytest.raises(NoSpaceError):
        LocalTier(str(tmp_path), fs=fs).write("x", pieces_of(bytes(2 * MIB)), 2 * MIB)
    assert "pwrite" not in fs.methods()
    assert leftovers(tmp_path) == []


# --- failures


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, NoSpaceError),
        (errno.EDQUOT, NoSpaceError),
        (errno.EACCES, AccessError),
        (errno.EPERM, AccessError),
        (errno.EROFS, AccessError),
        (errno.ENOENT, NotFoundError),
        (errno.EIO, StorageError),
        (errno.EFBIG, StorageError),
    ],
)
def test_an_error_says_what_where_why_and_what_to_do(tmp_path: Path, code: int, kind: type[Error]) -> None:
    tier = LocalTier(str(tmp_path), fs=failing("pwrite", code))
    with pytest.raises(StorageError) as caught:
        tier.create("data/x", b"1")
    assert type(caught.value) is kind
    assert f"{tier.url}/data/x" in caught.value.what and os.strerror(code) in caught.value.what
    assert errno.errorcode[code] in caught.value.what
    assert caught.value.safe and caught.value.hint
    assert isinstance(caught.value.__cause__, OSError)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("method", ["pwrite", "fsync", "close", "link", "fsync_dir"])
def test_a_failed_file_is_condemned_and_never_synced_again(tmp_path: Path, method: str) -> None:
    LocalTier(str(tmp_path)).create("data/first", b"")
    fs = failing(method, errno.EIO)
    tier = LocalTier(str(tmp_path), fs=fs)
    if method == "fsync_dir":
        tier._durable_dirs.add(str(tmp_path / "data"))  # so that it is the new name's own sync that fails
    with pytest.raises(StorageError, match="EIO"):
        tier.create("data/x", b"1")
    assert fs.methods().count("fsync") <= 1 and fs.methods().count("pwrite") <= 1
    assert leftovers(tmp_path) == ["data/first"]
    tier.create("data/x", b"again")
    assert tier.read("data/x") == b"again"


def error_of(call: Callable[[], None]) -> Error | None:
    try:
        call()
    except Error as error:
        return error
    return None


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("sticky", [False, True])
def test_whichever_call_fails_no_object_is_there_and_the_next_attempt_works(
    tmp_path: Path, code: int, sticky: bool
) -> None:
    """The N-th call fails, once or from then on, for every N until none does."""
    for number in range(1, 200):
        root = tmp_path / str(number)
        fs = WatchedFs()
        tier = LocalTier(str(root), fs=fs)
        fs.fail = lambda at, _method, _args, number=number: code if at == number or (sticky and at > number) else 0
        data = body(MIB + 5)
        errors = [
            error_of(partial(tier.create, "commits/x", b"record")),
            error_of(partial(tier.write, "data/s1/x", pieces_of(data), len(data))),
        ]
        failed = any(error is not None for error in errors)
        assert all(isinstance(error, StorageError) and tier.url in error.what for error in errors if error)
        reached = len(fs.log) >= number
        fs.fail = lambda _at, _method, _args: 0
        if not failed and not reached:
            assert number > 20, "the loop saw too few calls to mean anything"
            return
        assert_whole_or_absent(tier, root)
    pytest.fail("the writes never got through")


def assert_whole_or_absent(tier: LocalTier, root: Path) -> None:
    for name, data in (("commits/x", b"record"), ("data/s1/x", body(MIB + 5))):
        found = tier.read_many([name])
        assert found in ({}, {name: data})
        if not found:
            tier.write(name, pieces_of(data), len(data))
            assert tier.read(name) == data
    assert [entry.name for entry in tier.list("data/s1/")] == ["data/s1/x"]
    tier.delete_prefix("data/")
    tier.delete_prefix("commits/")
    assert leftovers(root) == [], "delete_prefix must take the temporary files with it"


def test_a_link_whose_answer_was_lost_is_still_ours(tmp_path: Path) -> None:
    class Lossy(Fs):
        def link(self, source: str, target: str) -> None:
            super().link(source, target)
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))

    tier = LocalTier(str(tmp_path), fs=Lossy())
    tier.create("x", b"1")
    assert tier.read("x") == b"1"
    with pytest.raises(ExistsError):
        tier.create("x", b"1")


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_system_without_hard_links_is_named_as_the_reason(tmp_path: Path, code: int) -> None:
    with pytest.raises(StorageError, match="no hard links"):
        LocalTier(str(tmp_path), fs=failing("link", code)).create("x", b"1")
    assert leftovers(tmp_path) == []


def test_a_file_system_whose_folders_cannot_be_synced_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = LocalTier(str(tmp_path), fs=failing("fsync_dir", errno.EINVAL, times=99))
    tier.create("a/x", b"1")
    tier.create("a/y", b"1")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert tier.url in caplog.text


def test_a_file_cut_short_while_it_is_read_is_corrupt(tmp_path: Path) -> None:
    class Shrinking(Fs):
        def pread_into(self, fd: int, out: memoryview, offset: int) -> int:
            return super().pread_into(fd, out[: max(0, 6 - offset)], offset)

    LocalTier(str(tmp_path)).create("x", b"0123456789")
    tier = LocalTier(str(tmp_path), fs=Shrinking())
    with pytest.raises(CorruptError, match="ends at offset 6"):
        tier.read("x")
    with pytest.raises(CorruptError, match="ends at offset 6"):
        tier.read_into("x", 2, memoryview(bytearray(5)))
    assert tier.read("x", 0, 6) == b"012345"


# --- what lies in the directory


def test_temporary_files_are_never_listed_and_go_with_their_folder(tmp_path: Path) -> None:
    tier = LocalTier(str(tmp_path))
    tier.create("data/s1/x", b"1")
    (tmp_path / "data" / "s1" / ".tmp-0123").write_bytes(b"left by a crash")
    (tmp_path / ".tmp-0123").write_bytes(b"left by a crash")
    assert [entry.name for entry in tier.list("")] == ["data/"]
    assert [entry.name for entry in tier.list("data/s1/")] == ["data/s1/x"]
    with pytest.raises(UsageError):
        tier.read("data/s1/.tmp-0123")
    tier.delete_prefix("data/s1/")
    assert not (tmp_path / "data" / "s1").exists()


def test_the_root_is_made_by_the_first_write_only(tmp_path: Path) -> None:
    tier = LocalTier(str(tmp_path / "a" / "b"))
    assert tier.list("") == [] and tier.read_many(["x"]) == {}
    tier.delete("x")
    tier.delete_prefix("x/")
    assert not (tmp_path / "a").exists()
    tier.create("x", b"1")
    assert (tmp_path / "a" / "b" / "x").read_bytes() == b"1"


def test_a_root_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    tier = LocalTier(str(tmp_path / "file"))
    with pytest.raises(StorageError, match="ENOTDIR"):
        tier.create("x", b"1")
    assert tier.list("") == []


def test_a_folder_removed_by_somebody_else_is_made_again(tmp_path: Path) -> None:
    tier = LocalTier(str(tmp_path / "run"))
    tier.create("data/s1/x", b"1")
    LocalTier(str(tmp_path / "run")).delete_prefix("data/")
    fs = WatchedFs()
    tier._fs = fs
    tier.create("data/s1/x", b"2")
    assert tier.read("data/s1/x") == b"2"
    synced = [args[0] for method, args in fs.log if method == "fsync_dir"]
    assert {str(tmp_path / "run"), str(tmp_path / "run" / "data")} <= set(synced)


def test_other_kinds_of_files_are_no_objects(tmp_path: Path) -> None:
    tier = LocalTier(str(tmp_path))
    tier.create("x", b"1")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "same").symlink_to("x")
    os.mkfifo(tmp_path / "fifo")
    assert [entry.name for entry in tier.list("")] == ["same", "x"]
    with pytest.raises(NotFoundError):
        tier.read("dangling")
    with pytest.raises(ExistsError):
        tier.create("dangling", b"1")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("look", ["read", "size"])
def test_a_fifo_in_a_runs_folder_blocks_no_reader(tmp_path: Path, look: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    script = (
        "import sys; from ckptrt.storage.tiers.local import LocalTier\n"
        "getattr(LocalTier(sys.argv[1]), sys.argv[2])('fifo')"
    )
    command = [sys.executable, "-c", script, str(tmp_path), look]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "NotFoundError" in ended.stderr and "fifo" in ended.stderr


# --- links out of the root


@pytest.fixture
def linked(tmp_path: Path) -> tuple[LocalTier, Path]:
    """A run whose folder `out` is a symbolic link to a folder beside the run."""
    outside = tmp_path / "outside"
    (outside / "deep").mkdir(parents=True)
    (outside / "deep" / "kept").write_bytes(b"1")
    (outside / "kept").write_bytes(b"1")
    tier = LocalTier(str(tmp_path / "run"))
    tier.create("data/s1/x", b"1")
    (tmp_path / "run" / "out").symlink_to(outside)
    (tmp_path / "run" / "data" / "s1" / "out").symlink_to(outside)
    return tier, outside


def test_deletes_never_follow_a_link_out_of_the_root(linked: tuple[LocalTier, Path]) -> None:
    tier, outside = linked
    for call in (lambda: tier.delete("out/kept"), lambda: tier.delete_prefix("out/deep/")):
        with pytest.raises(AccessError, match="symbolic link"):
            call()
    tier.delete_prefix("data/s1/")
    tier.delete_prefix("out/")
    assert sorted(leftovers(outside)) == ["deep/kept", "kept"]
    assert tier.list("data/") == []
    assert [entry.name for entry in tier.list("")] == ["data/"]


def test_a_link_within_the_root_may_be_followed(linked: tuple[LocalTier, Path]) -> None:
    tier, _ = linked
    (Path(tier.root) / "here").symlink_to("data/s1")
    tier.delete("here/x")
    with pytest.raises(NotFoundError):
        tier.read("data/s1/x")


def test_a_root_that_is_a_link_itself_is_the_root(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    tier = LocalTier(str(tmp_path / "link"))
    tier.create("data/x", b"1")
    tier.delete_prefix("data/")
    tier.create("x", b"1")
    tier.delete("x")
    assert list((tmp_path / "real").iterdir()) == []


# --- real file systems in trouble


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"this machine lets nobody mount a tmpfs: {mounted.stderr.decode().strip()}")
    yield path
    unmounted = subprocess.run(["umount", str(path)], check=False, capture_output=True)
    if unmounted.returncode:
        subprocess.run(["umount", "-l", str(path)], check=True)
        pytest.fail(f"a file there was left open: {unmounted.stderr.decode().strip()}")


@pytest.mark.parametrize(
    "fs", [Fs(), failing("fallocate", errno.EOPNOTSUPP, times=99)], ids=["reserved", "not reserved"]
)
def test_a_full_disk_loses_nothing_and_works_again_when_there_is_space(small_disk: Path, fs: Fs) -> None:
    tier = LocalTier(str(small_disk / "run"), fs=fs)
    first = body(2 * MIB)
    tier.write("data/first", pieces_of(first), len(first))
    with pytest.raises(NoSpaceError) as caught:
        tier.write("data/second", pieces_of(body(3 * MIB)), 3 * MIB)
    assert f"{tier.url}/data/second" in caught.value.what and "No space left" in caught.value.what
    assert "prune" in caught.value.hint
    assert leftovers(small_disk) == ["run/data/first"]
    assert tier.read("data/first") == first
    tier.delete("data/first")
    tier.write("data/second", pieces_of(body(3 * MIB)), 3 * MIB)
    assert tier.read("data/second") == body(3 * MIB)


def test_a_read_only_file_system_is_read_and_refuses_the_rest(small_disk: Path) -> None:
    tier = LocalTier(str(small_disk / "run"))
    tier.create("data/x", b"1")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for call in (
        lambda: tier.create("data/y", b"1"),
        lambda: LocalTier(str(small_disk / "run")).create("data/y", b"1"),
        lambda: LocalTier(str(small_disk / "new")).create("y", b"1"),
        lambda: tier.delete("data/x"),
        lambda: tier.delete_prefix("data/"),
    ):
        with pytest.raises(AccessError, match="EROFS"):
            call()
    assert tier.read("data/x") == b"1"


def test_a_directory_without_the_right_to_write_is_an_access_error(tmp_path: Path) -> None:
    tier = LocalTier(str(tmp_path / "run"))
    tmp_path.chmod(0o500)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may write everywhere, so be nobody for a moment
    try:
        with pytest.raises(AccessError, match="EACCES"):
            tier.create("x", b"1")
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o700)


# --- what other processes left


def test_a_name_that_is_taken_is_durable_when_the_error_says_so(tmp_path: Path) -> None:
    """Its writer may have been killed before it could sync it, and who gets the error builds on what is there."""
    LocalTier(str(tmp_path)).create("commits/x", b"1")
    fs = WatchedFs()
    with pytest.raises(ExistsError):
        LocalTier(str(tmp_path), fs=fs).create("commits/x", b"1")
    assert {(str(tmp_path / "commits"),), (str(tmp_path),)} <= {
        args for method, args in fs.log if method == "fsync_dir"
    }


def test_a_folder_between_two_that_are_known_is_synced_too(tmp_path: Path) -> None:
    """A process that made a folder and died leaves it to the next one, which puts another folder into it."""
    (tmp_path / "run" / "data").mkdir(parents=True)
    fs = WatchedFs()
    LocalTier(str(tmp_path / "run"), fs=fs).create("data/s1/x", b"1")
    before = fs.log[: [method for method, _ in fs.log].index("open")]
    for folder in (tmp_path, tmp_path / "run", tmp_path / "run" / "data"):
        assert ("fsync_dir", (str(folder),)) in before


def test_folders_above_that_are_not_ours_to_open_do_not_stop_a_write(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    LocalTier(str(tmp_path), fs=failing("fsync_dir", errno.EACCES)).create("data/x", b"1")


def test_settle_syncs_a_folder_and_its_name(tmp_path: Path) -> None:
    LocalTier(str(tmp_path)).create("commits/x", b"1")
    fs = WatchedFs()
    LocalTier(str(tmp_path), fs=fs).settle("commits/")
    assert fs.methods()[:2] == ["fsync_dir", "fsync_dir"]
    assert [args[0] for method, args in fs.log if method == "fsync_dir"][:2] == [
        str(tmp_path / "commits"),
        str(tmp_path),
    ]


def test_sweep_removes_old_unfinished_files_and_nothing_else(tmp_path: Path) -> None:
    tier = LocalTier(str(tmp_path))
    tier.create("data/s1/x", b"1")
    for folder in ("", "data/s1/"):
        for name, when_s in (("old", 1000), ("young", 3000)):
            path = tmp_path / folder / f".tmp-{name}"
            path.write_bytes(b"12345")
            os.utime(path, (when_s, when_s))
    (tmp_path / ".tmp-folder").mkdir()
    os.utime(tmp_path / ".tmp-folder", (0, 0))
    assert [(e.name, e.size_bytes) for e in tier.sweep("data/s1/", 2000, dry_run=True)] == [("data/s1/.tmp-old", 5)]
    assert (tmp_path / "data/s1/.tmp-old").exists()
    assert [e.name for e in tier.sweep("data/s1/", 2000)] == ["data/s1/.tmp-old"]
    assert sorted(leftovers(tmp_path)) == [".tmp-old", ".tmp-young", "data/s1/.tmp-young", "data/s1/x"]
    assert [e.name for e in tier.sweep("", 2000)] == [".tmp-old"]
    assert tier.sweep("none/", 2000) == []
