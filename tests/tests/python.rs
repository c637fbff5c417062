//! Jobs by the Python package.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "tests may panic")]

use std::{
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::Output,
};

use baton_tests::{Cluster, binary, in_time};

/// Ends a job that nobody else does, as that of a test that has failed.
struct Stop(PathBuf);

impl Drop for Stop {
    fn drop(&mut self) {
        let mut stop = std::process::Command::new(binary("baton"));
        let _ = stop.arg("stop").arg("--run-dir").arg(&self.0).output();
    }
}

async fn python(cluster: &Cluster, what: &str) -> Output {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut python = tokio::process::Command::new("python3");
    python.arg(root.join("tests/python/job.py")).arg(what);
    python.arg(cluster.recipe()).arg(cluster.run_dir());
    python
        .env("PYTHONPATH", root.join("python"))
        .env("BATON_BIN", binary("baton").parent().unwrap());
    in_time(what, python.output()).await.unwrap()
}

#[tokio::test]
async fn a_job_goes_on_without_the_kernel_that_started_it_and_another_one_attaches() {
    let cluster = Cluster::new();
    let _stop = Stop(cluster.run_dir());
    let started = python(&cluster, "start").await;
    assert_eq!(started.status.signal(), Some(9), "{started:?}");
    assert_eq!(String::from_utf8(started.stdout).unwrap(), "training from fresh weights\n");

    let attached = python(&cluster, "attach").await;
    assert!(attached.status.success(), "{attached:?}");
    let run_dir = cluster.run_dir().display().to_string();
    assert_eq!(
        String::from_utf8(attached.stdout).unwrap(),
        format!(
            "a job runs in {run_dir} already: baton.attach('{run_dir}') returns it\n\
             lunch\n\
             drained (enough); the same command continues\n"
        )
    );
}

#[test]
fn baton_reads_a_data_set_that_python_copied_from_one_of_its_own() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let folder = tempfile::tempdir().unwrap();
    let [digits, copy] =
        [root.join("assets/digits/digits-val.beton"), folder.path().join("copy.beton")];
    let path = std::env::join_paths([root.join("python"), root.join(".tools/python")]).unwrap();
    let python = std::process::Command::new("python3")
        .arg(root.join("tests/python/data.py"))
        .args([&digits, &copy])
        .env("PYTHONPATH", path)
        .output()
        .unwrap();
    assert_eq!(String::from_utf8(python.stdout).unwrap(), "360\n", "{:?}", python.stderr);

    let baton = |command: &str, file: &Path| {
        let output = std::process::Command::new(binary("baton"))
            .args(["data", command, "--json"])
            .arg(file)
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()
    };
    assert_eq!(baton("verify", &copy)["faults"], serde_json::json!([]));
    let [original, copied] = [&digits, &copy].map(|file| baton("inspect", file));
    println!("{original} {copied}");
    assert_eq!(copied["samples"], original["samples"]);
    for field in 0..2 {
        assert_eq!(copied["fields"][field], original["fields"][field]);
    }
    assert_eq!(copied["fields"][2]["name"], "mean");
}
