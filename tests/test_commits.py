"""`.ci/commits` reads the messages of the commits that main lacks."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GOOD = "Do one thing\n\nIt did two, since both were easy. test_one_thing."

pytestmark = pytest.mark.skipif(
    os.name != "posix" or not shutil.which("git"), reason="needs git and a POSIX shell"
)


def git(folder: Path, *words: str) -> None:
    identity = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    # git as it is without settings, such as hooks, and not the repository in which these tests are committed
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= identity | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    subprocess.run(["git", *words], cwd=folder, env=environment, check=True, capture_output=True)


def commit(folder: Path, *messages: str) -> None:
    for message in messages:
        git(folder, "commit", "--quiet", "--allow-empty", "--message", message)


def check(folder: Path) -> tuple[int, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run([folder / ".ci/commits"], env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a branch, whose main has two commits with wrong messages."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/commits", folder / ".ci")
    git(folder, "add", ".")
    commit(folder, "no body", "x" * 73)
    git(folder, "checkout", "--quiet", "-b", "topic")
    return folder


@pytest.mark.parametrize(
    "messages, wrong",
    [
        ([GOOD, "x" * 72 + "\n\nbody"], []),
        ([GOOD, "x" * 73 + "\n\nbody"], ["has a subject of 73 characters, more than 72;"]),
        (["Do one thing", GOOD], ["Do one thing has no body;"]),
        (["x" * 80, "y"], ["has a subject of 80 characters, more than 72 and no body;", "y has no body;"]),
    ],
)
def test_messages_of_new_commits(messages: list[str], wrong: list[str], repository: Path) -> None:
    commit(repository, *messages)
    status, said = check(repository)
    assert status == bool(wrong) and len(said.splitlines()) == len(wrong)
    assert all(part in said for part in wrong), said


def test_the_branch_of_a_remote_comes_before_the_local_one(repository: Path) -> None:
    commit(repository, "no body here")
    git(repository, "update-ref", "refs/remotes/origin/main", "HEAD")
    assert check(repository) == (0, "")
    git(repository, "update-ref", "refs/remotes/upstream/main", "main")
    assert check(repository)[0] == 1


def test_merges_need_no_body(repository: Path) -> None:
    git(repository, "checkout", "--quiet", "-b", "other")
    commit(repository, GOOD)
    git(repository, "checkout", "--quiet", "topic")
    commit(repository, GOOD)
    git(repository, "merge", "--quiet", "--no-ff", "--message", "Merge other", "other")
    assert check(repository) == (0, "")


def test_nothing_is_checked_where_new_commits_cannot_be_told(repository: Path, tmp_path: Path) -> None:
    commit(repository, "no body here")
    git(tmp_path, "clone", "--quiet", "--depth=1", repository.as_uri(), "shallow")
    assert check(tmp_path / "shallow") == (0, "")
    git(repository, "branch", "--move", "main", "another")
    assert check(repository) == (0, ""), "no main"
    shutil.rmtree(repository / ".git")
    git(tmp_path, "init", "--quiet")
    assert check(repository) == (0, ""), "inside another repository"
