"""The tools: benchmarks, the S3 server of the tests, and what the workflows run."""

import contextlib
import io
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kit.faultproxy import Drop, Fault, FaultProxy, first
from tests.kit.s3 import S3Server, run_tool, s3_client, start_server
from tools.benches import ROOT, Group, Rival, Role, figures, gpu, gpu_steps, tables
from tools.benches.turns import Measured, Taken, in_turns

ALLOCATE = "import time; block = bytearray(60_000_000); time.sleep(1); print('took 2.5')"
BURN = "import time\nwhile time.process_time() < 0.3: pass"


def rival(name: str, code: str, role: Role = Role.RIVAL) -> Rival:
    return Rival(name=name, command=[sys.executable, "-c", code], role=role)


@pytest.mark.system
def test_time_processor_time_memory_and_what_a_rival_says_are_measured() -> None:
    rivals = [
        rival("holds", ALLOCATE, Role.OURS),
        rival("burns", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BURN!r}])"),
        rival("says", "print('note so it is'); print('took 5')"),
    ]
    group = Group(name="x-y", title="things", rivals=rivals, count=100, targets={"says": 2.0})
    measured = in_turns(group, 2, lambda _: None)
    assert measured.median("holds") == 2.5  # as it says itself
    assert measured.median("holds", "peak_mb") > 60
    assert measured.median("burns", "cpu_s") > 0.3  # of its child
    assert measured.ratio("says") == 2.0
    assert list(tables.notes(measured)) == ["says: so it is"]
    assert list(tables.verdicts(measured)) == ["things: 2.00 x says, target 2 x: met"]
    assert tables.facts(tables.from_facts(tables.facts(measured))) == tables.facts(measured)


def test_a_rival_that_fails_ends_the_benchmark() -> None:
    group = Group(name="x", title="x", rivals=[rival("fails", "raise SystemExit('no data')")])
    with pytest.raises(SystemExit, match="no data"):
        in_turns(group, 1, lambda _: None)


def test_a_name_that_no_group_has_is_told_with_those_that_there_are() -> None:
    command = [sys.executable, str(ROOT / "tools/bench"), "cli", "--only", "x\n"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "bench: no group has 'x\\n' in its name: --only takes a part of one of these: cli\n"
    )


def fail(bench: gpu_steps.Bench) -> None:
    bench.figure("before", 1)
    raise RuntimeError("planted")


def hang(bench: gpu_steps.Bench) -> None:
    bench.figure("before", 2)
    subprocess.run(["sleep", "600"], check=False)


def end(_bench: gpu_steps.Bench) -> None:
    os.write(1, b"the last words\n")
    os._exit(7)


def note_process(bench: gpu_steps.Bench) -> None:
    bench.figure("process", os.getpid())


def test_a_step_for_a_gpu_that_fails_hangs_or_dies_costs_its_own_line_alone(tmp_path: Path) -> None:
    names = ("note_process", "note_process", "fail", "note_process", "hang", "note_process", "end")
    limits = {"hang": 3.0}
    plan = [gpu.Step(name, limits.get(name, 60.0), "something", __name__) for name in names]
    lines = io.StringIO()
    results = gpu.run(tmp_path, plan, small=True, lines=lines)
    assert [json.loads(line) for line in lines.getvalue().splitlines()] == [*map(vars, results)]
    assert [result.error for result in results] == [
        "",
        "",
        "RuntimeError: planted",
        "",
        "not done after 3 s",
        "",
        "its process ended with 7: the last words",
    ]
    assert [results[number].figures for number in (2, 4)] == [{"before": 1}, {"before": 2}]
    processes = [results[number].figures["process"] for number in (0, 1, 3, 5)]
    assert processes[0] == processes[1]  # so that imports are paid once
    assert len({*processes}) == 3  # and another one after each that is broken
    assert "hang (3 of 3 s) FAILED: not done after 3 s: something" in [*gpu.summary(plan, results)]


def test_figures_are_kept_by_group_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"before\n{figures.BEGIN}\nold\n{figures.END}\nafter\n")
    for name, file in {"PAGE": page, "RECORD": "figures.json", "TABLES": "figures.md"}.items():
        monkeypatch.setattr(figures, name, tmp_path / file)
    machine = {"date": "2026-11-21", "cores": 2, "cpu": "a CPU"}
    for name, seconds in (("load-0", 2.0), ("pack-tar", 1.0), ("load-0", 4.0)):
        figures.record(timed(name, ours=1.0, theirs=seconds), ("pack", "load"), machine)
    assert list(json.loads((tmp_path / "figures.json").read_text())) == ["pack-tar", "load-0"]
    assert page.read_text().splitlines()[4:] == [
        "| title of pack-tar | 10/s | they | 10/s | 1.00 |  |",
        "| title of load-0 | 10/s | they | 2.5/s | 4.00 | 3 |",
        "",
        "Measured on",
        "",
        "- 2026-11-21, 2 cores of a CPU",
        figures.END,
        "after",
    ]
    every = (tmp_path / "figures.md").read_text()
    assert "2026-11-21, 2 cores of a CPU" in every
    assert "| they | 2.5/s | 2.5..2.5 | 4.00 | 1.0 | 50 |" in every


def timed(name: str, *, ours: float, theirs: float) -> Measured:
    rivals = [
        Rival(name="we", command=(), role=Role.OURS),
        Rival(name="they", command=()),
        Rival(name="a disk", command=(), role=Role.LIMIT),
    ]
    targets = {"they": 3.0} if name == "load-0" else {}
    group = Group(name=name, title=f"title of {name}", rivals=rivals, count=10, targets=targets)
    seconds = {"we": ours, "they": theirs, "a disk": 0.1}
    runs = {one: [Taken(seconds=s, cpu_s=1.0, peak_mb=50.0)] for one, s in seconds.items()}
    return Measured(group=group, runs=runs)


def test_the_page_and_the_tables_show_what_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = {name: getattr(figures, name).read_text() for name in ("PAGE", "TABLES")}
    for name, text in shown.items():
        monkeypatch.setattr(figures, name, tmp_path / name)
        (tmp_path / name).write_text(text)
    figures.show(json.loads(figures.RECORD.read_text()))
    assert {name: (tmp_path / name).read_text() for name in shown} == shown


MIB = 1024 * 1024


@pytest.fixture
def client(bucket: str) -> Iterator[Any]:  # noqa: ARG001
    with s3_client() as made:
        yield made


@contextlib.contextmanager
def faulty(server: S3Server, fault: Fault | None, **match: str) -> Iterator[tuple[FaultProxy, Any]]:
    """A proxy that does this to the first request, or to none, and a client that talks to it."""
    rule = first(1 if fault else 0, fault or Drop(), **match)
    with FaultProxy(server.url, rule) as proxy, s3_client(proxy.url) as client:
        yield proxy, client


def error_code(call: Any, **kwargs: Any) -> str:
    from botocore.exceptions import ClientError

    with pytest.raises(ClientError) as caught:
        call(**kwargs)
    return str(caught.value.response["Error"]["Code"])


def body(client: Any, bucket: str, key: str, **kwargs: Any) -> bytes:
    with contextlib.closing(client.get_object(Bucket=bucket, Key=key, **kwargs)["Body"]) as stream:
        return bytes(stream.read())


def keys(client: Any, bucket: str) -> list[str]:
    return [found["Key"] for found in client.list_objects_v2(Bucket=bucket).get("Contents", [])]


def upload_parts(client: Any, bucket: str, key: str, *parts: bytes) -> dict[str, Any]:
    """Upload in parts; what is left to say to complete_multipart_upload."""
    upload = client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
    target = {"Bucket": bucket, "Key": key, "UploadId": upload}
    done = []
    for number, data in enumerate(parts, 1):
        answer = client.upload_part(**target, PartNumber=number, Body=data)
        done.append({"PartNumber": number, "ETag": answer["ETag"]})
    return {**target, "MultipartUpload": {"Parts": done}}


def test_conditional_put_of_an_existing_key_is_refused(client: Any, bucket: str) -> None:
    new = {"Bucket": bucket, "Key": "k", "IfNoneMatch": "*"}
    client.put_object(**new, Body=b"first")
    assert error_code(client.put_object, **new, Body=b"second") == "PreconditionFailed"
    assert body(client, bucket, "k") == b"first"


def test_this_server_ignores_the_condition_on_multipart_completion(
    client: Any, bucket: str
) -> None:
    """AWS answers 412; Ceph 16 overwrites. When this fails, Ceph has learned it: celebrate."""
    client.put_object(Bucket=bucket, Key="k", Body=b"first")
    parts = upload_parts(client, bucket, "k", b"second")
    client.complete_multipart_upload(**parts, IfNoneMatch="*")
    assert body(client, bucket, "k") == b"second"


def test_stop_leaves_no_process_and_no_directory(s3_server: S3Server, tmp_path: Path) -> None:
    home = tmp_path / "server"
    server = start_server(home, ttl=60)
    try:
        again = run_tool("start", "--dir", home)
        assert server.url in again.stdout
        assert server.url != s3_server.url
        assert len(processes_of(home)) == 4
    finally:
        stopped = run_tool("stop", "--dir", home)
    assert (stopped.returncode, stopped.stderr) == (0, "")
    assert processes_of(home) == []
    assert not home.exists()
    assert len(processes_of(s3_server.home)) == 4


def test_failure_names_the_log_and_leaves_no_process(
    s3_server: S3Server,  # noqa: ARG001
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = tmp_path / "bin" / "radosgw"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho broken\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(broken.parent), prepend=os.pathsep)
    home = tmp_path / "server"
    failed = run_tool("start", "--dir", home)
    assert failed.returncode == 1
    assert str(home / "rgw.log") in failed.stderr.splitlines()[-1]
    assert (home / "rgw.log").read_text() == "broken\n"
    assert processes_of(home) == []


def processes_of(home: Path) -> list[bytes]:
    """Command lines that name the directory; a process that ended has none."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            line = Path("/proc", pid, "cmdline").read_bytes()
            if os.fsencode(home) in line.replace(b"/ceph.conf", b"").split(b"\0"):
                found.append(line)
    return found


def test_proxy_passes_everything_on(s3_server: S3Server, bucket: str) -> None:
    with faulty(s3_server, None) as (proxy, client):
        client.put_object(Bucket=bucket, Key="k", Body=b"0123456789")
        assert body(client, bucket, "k") == b"0123456789"
        assert body(client, bucket, "k", Range="bytes=2-4") == b"234"
        assert client.head_object(Bucket=bucket, Key="k")["ContentLength"] == 10
        assert keys(client, bucket) == ["k"]
        parts = upload_parts(client, bucket, "big", b"a" * 5 * MIB, b"b")
        client.complete_multipart_upload(**parts)
        client.delete_object(Bucket=bucket, Key="k")
        assert keys(client, bucket) == ["big"]
        assert proxy.requests[:2] == [("PUT", f"/{bucket}/k"), ("GET", f"/{bucket}/k")]


WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
SCRIPT = re.compile(r"(?:^|\s)((?:\.ci|tools)/[\w-]+)")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def steps(workflow: Any) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_scripts_that_are_here(path: Path) -> None:
    workflow = read(path)
    named = {name for step in steps(workflow) for name in SCRIPT.findall(step.get("run", ""))}
    assert named
    for name in named:
        assert (ROOT / name).stat().st_mode & stat.S_IXUSR, name
    assert workflow["permissions"] == {"contents": "read"}
    assert all(
        "timeout-minutes" in job or "environment" in job for job in workflow["jobs"].values()
    )


def test_quick_tests_run_on_each_python_that_the_package_names() -> None:
    named = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    matrix = read(ROOT / ".github/workflows/test.yml")["jobs"]["pythons"]["strategy"]["matrix"]
    assert matrix["python"] == named
