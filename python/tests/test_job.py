"""Starting jobs; a fake program stands in for Baton. tests/tests/python.rs uses the real one."""

import fcntl
import json

import baton
import pytest
from baton import _job

# `up` prints its arguments as its last line; nothing answers other commands.
FAKE = """
case $1 in
up)
    shift
    given=$(echo "$*" | tr -d '"')
    printf '{"type":"end","exit_code":0,"status":{"reason":"%s","outcome":null}}\\n' "$given"
    ;;
recipe) echo '{"name": "shown"}' ;;
*) echo 'error: no coordinator answers' >&2; exit 1 ;;
esac
"""


def test_up_passes_on_recipe_changes_and_flags(programs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    programs("baton", FAKE)
    changes = {"train.epochs": 3, "optimizer": {"kind": "sgd"}, "train.recompute": ["layers"], "data.resize": "fast"}
    job = baton.up("digits", set=changes, ranks=2, arguments=("--no-auto-resume",))
    assert repr(job) == f"baton.attach('{tmp_path}/runs/shown')"
    assert job.wait()["reason"] == (
        'digits --set train.epochs=3 --set optimizer={kind = "sgd"} --set train.recompute=["layers"] '
        '--set data.resize="fast" --json --run-dir runs/shown --listen 127.0.0.1:0 --ranks=2 --no-auto-resume'
    ).replace('"', "")


def test_a_job_that_does_not_start_says_why(programs, tmp_path):
    programs("baton", 'echo "note" >&2; echo "error: recipe.toml: lr is missing" >&2; exit 2')
    with pytest.raises(baton.JobError, match=r"^recipe.toml: lr is missing$") as caught:
        baton.up("recipe.toml", run_dir=tmp_path / "run")
    assert caught.value.exit_code == 2


def test_a_failed_job_raises_with_its_reason(programs, tmp_path):
    end = {
        "type": "end",
        "exit_code": 4,
        "status": {"reason": "failed", "outcome": {"kind": "failed", "reason": "NaN"}},
    }
    programs("baton", f"echo '{json.dumps(end)}'; exit 4")
    job = baton.up("recipe.toml", run_dir=tmp_path / "run")
    with pytest.raises(baton.JobError, match=r"^NaN$"):
        job.wait()


def test_a_killed_job_is_gone_and_the_report_of_an_earlier_run_is_not_its_end(programs, tmp_path):
    (tmp_path / "report.json").write_text('{"status": {"phase": "ended"}}')
    programs("baton", "exit 3")
    job = baton.up("recipe.toml", run_dir=tmp_path)
    with pytest.raises(baton.JobError, match=r"all processes .* are gone: baton.up resumes it"):
        job.wait()


def test_a_second_job_in_a_folder_is_refused(programs, tmp_path):
    programs("baton", """echo '{"phase": "training"}'""")
    (tmp_path / "coordinator.json").touch()
    with pytest.raises(baton.JobError, match=r"a job runs in .* already: baton.attach\("):
        baton.up("recipe.toml", run_dir=tmp_path)


def test_the_files_of_a_job_that_does_not_answer_yet_are_left_alone(programs, tmp_path, monkeypatch):
    programs("baton", "exit 1")
    monkeypatch.setattr(_job, "_START_SECONDS", 0.0)
    (tmp_path / "baton-up.jsonl").write_text("kept")
    with (tmp_path / "baton-up.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(baton.JobError, match=r"processes of an earlier job .* do not end: `fuser .*baton-up.lock`"):
            baton.up("recipe.toml", run_dir=tmp_path)
    assert (tmp_path / "baton-up.jsonl").read_text() == "kept"


def test_a_job_that_failed_after_its_start_says_why(programs, tmp_path):
    # The coordinator answers, and then the agent finds no libtorch.
    programs(
        "baton",
        """
if [ "$1" = up ]; then
    touch "$5/coordinator.json"
    while [ -e "$5/coordinator.json" ]; do sleep 0.02; done
    echo "error: libtorch is missing" >&2
    exit 2
fi
echo '{"phase": "gathering"}'
""",
    )
    job = baton.up("recipe.toml", run_dir=tmp_path / "run")
    (tmp_path / "run/coordinator.json").unlink()
    with pytest.raises(baton.JobError, match=r"^libtorch is missing$"):
        job.wait()


def test_waiting_has_a_limit_and_commands_are_passed_on(programs, tmp_path):
    programs("baton", f"""echo "$*" >>{tmp_path}/calls; echo '{{"phase": "training"}}'""")
    (tmp_path / "coordinator.json").touch()
    job = baton.attach(tmp_path)
    with pytest.raises(TimeoutError, match=r"still runs after 0 s"):
        job.wait(timeout=0)
    with pytest.raises(ValueError, match="timeout is nan"):
        job.wait(timeout=float("nan"))
    (tmp_path / "calls").unlink()
    job.pause("lunch")
    job.resume()
    job.checkpoint()
    assert job.profile(3, tmp_path / "slow.json")["phase"] == "training"
    job.drain("enough")
    job.stop()
    flags = f"--json --run-dir {tmp_path}"
    profile = f"profile --steps=3 --out={tmp_path}/slow.json"
    expected = ["pause --reason=lunch", "resume", "checkpoint now", profile, "drain --reason=enough", "stop"]
    assert (tmp_path / "calls").read_text().splitlines() == [f"{command} {flags}" for command in expected]


def test_a_job_is_followed_by_its_store_while_no_coordinator_answers(programs, tmp_path, monkeypatch):
    monkeypatch.setattr(_job, "_POLL_SECONDS", 0.0)
    # The second answer is missing: another coordinator takes over.
    script = f"""
echo "$*" >>{tmp_path}/calls
case $(wc -l <{tmp_path}/calls) in
1) echo '{{"name": "cats", "phase": "training", "latest": null}}' ;;
2) echo "error: it does not answer" >&2; exit 1 ;;
*) echo '{{"name": "cats", "phase": "ended", "outcome": {{"kind": "completed"}}, "reason": "done"}}' ;;
esac
"""
    programs("baton", script)
    job = baton.attach(store="s3://cats/run")
    assert repr(job) == "baton.attach(store='s3://cats/run')"
    assert job.wait()["reason"] == "done"
    assert set((tmp_path / "calls").read_text().splitlines()) == {"status --json --store s3://cats/run"}
    with pytest.raises(baton.JobError, match="its run folder is on another machine"):
        _ = job.run_dir
    programs("baton", "echo 'error: it does not answer' >&2; exit 1")
    monkeypatch.setattr(_job, "_AWAY_SECONDS", 0.0)
    with pytest.raises(baton.JobError, match="it does not answer"):
        job.wait()
    with pytest.raises(TypeError, match="a run folder, or store="):
        baton.attach()


def test_watch_ends_with_the_job_and_fails_with_the_line_of_the_error(programs, tmp_path):
    programs("baton", """echo '{"id": 1}'; [ "$4" != 7 ] || { echo "error: gone" >&2; exit 1; }""")
    job = baton.Job(tmp_path)
    assert list(job.watch()) == [{"id": 1}]
    with pytest.raises(baton.JobError, match=r"^gone$"):
        list(job.watch(after=7))


def test_values_of_a_recipe_are_written_as_toml():
    class Number(float):
        def __repr__(self):
            return "np.float64(0.5)"

    values = {True: "true", 1e-3: "0.001", Number(0.5): "0.5", 3: "3", "a b": '"a b"', (1, 2): "[1, 2]"}
    assert {value: _job._toml(value) for value in values} == values
    with pytest.raises(TypeError, match=r"None is no value of a recipe: give a number"):
        _job._toml(None)


def test_a_missing_program_is_named(no_programs, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no program baton was found: set BATON_BIN"):
        baton.attach(tmp_path)


def test_bad_arguments_are_named(tmp_path, programs):
    programs("baton", "exit 1")
    for folder in ("", None, 5):
        with pytest.raises(TypeError, match=r"is the path of a run folder|a run folder, or store="):
            baton.attach(folder)
    with pytest.raises(TypeError, match="run_dir is the path of a run folder, not ''"):
        baton.up("recipe.toml", run_dir="")
    with pytest.raises(TypeError, match="set is a list: give a dictionary"):
        baton.up("digits_cpu", set=["train.epochs=3"])
    with pytest.raises(TypeError, match=r"arguments is a text: give a list, such as \['--epochs', '3'\]"):
        baton.up("digits_cpu", arguments="--epochs 3")
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(baton.JobError, match=r"run folder .*file cannot be made: File exists; give another run_dir"):
        baton.up("digits_cpu", run_dir=file)


def test_a_job_is_found_after_its_caller_has_changed_its_folder(programs, tmp_path, monkeypatch):
    programs("baton", f"""echo "$*" >{tmp_path}/call; echo '{{"name": "cats", "phase": "training"}}'""")
    monkeypatch.chdir(tmp_path)
    job = baton.attach("cats")
    monkeypatch.chdir("/")
    assert job.status()["phase"] == "training"
    assert (tmp_path / "call").read_text().split()[-1] == str(tmp_path / "cats")
